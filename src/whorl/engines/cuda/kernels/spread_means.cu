// Means where blocks exchange through L2 (exchange.cu): the first of the threads of a block that share a sequence gives
// what they make of the block's units, and each of them takes what some blocks have given.  With COLLECTED one warp of one
// block takes what all have given of a sequence, and gives the means to all: with many blocks two such rounds take less
// than what each would read in one.  A number gives its last bit away for the phase, which changes each time that its place
// is written anew: at every second step, when all have read what it was, since who writes then has read what all made of
// the step between.
//
//   words  [direction, step % 2, sequence, MEAN_WORDS]: for each stage the numbers of each block, then with COLLECTED what
//          is made of them

constexpr int MEMBERS = (UNITS + SLICE - 1) / SLICE;  // blocks with units
// Cycles between giving and looking, of what all give and of what is made of them: a look that comes too early costs the
// time of another.  LSTM with layer norm of r and c in bfloat16 on an H200, a step forward with 0, 100, 200, 300 and 450: 1,024
// units at batch 32 5.06, 4.20, 4.07, 4.11 and 4.23 us, 512 at 128 4.01, 3.79, 3.74, 3.85 and 4.03; with COLLECTED, and three
// times as many for what is made, 1,500 at 20 6.75, 6.29, 6.41, 6.71 and 7.05, backward 5.63, 5.64, 5.67, 5.74 and 5.85.
// A thread's second sequence would wait for the first one's pause: 7.38 us without and 7.45 with 100, 1,024 at 128.
constexpr unsigned PAUSE = COLLECTED ? 100 : 8 * TILES * LANES <= 32 * WARPS ? 200 : 0, PAUSE_FOUND = 300;
constexpr int MOST_NUMBERS = 4 * MOST(PACKS);
static_assert(REDUCTIONS == 0 || ((LANES & (LANES - 1)) == 0 && LANES >= 4 && LANES <= 32), "the threads of a warp have whole sequences");
static_assert(!COLLECTED || SUBS * 8 * TILES <= MEMBERS, "a block collects those of one sequence");

// Words of a block's numbers of a sequence after a stage, and those before a stage.
__device__ constexpr int words_of(int stage) { return numbers(stage) > 2 ? 4 * packs(stage) : numbers(stage) > 0 ? 2 : 0; }
__device__ constexpr int words_before(int stage) {
  int words = 0;
  for (int i = 0; i < stage; ++i) words += (words_of(i) * (MEMBERS + COLLECTED) + 3) / 4 * 4;
  return words;
}
constexpr int MEAN_WORDS = words_before(STAGES);

// A thread takes the numbers of `beside` blocks at a time, 16 bytes or more, of every `readers`-th such; the threads of a
// sequence beyond these take the same.
__device__ constexpr int beside(int stage) { return words_of(stage) == 2 ? 2 : 1; }
__device__ constexpr int readers(int stage) {
  int count = 1;
  while (count < (COLLECTED ? 32 : LANES) && count * beside(stage) < MEMBERS) count *= 2;
  return count;
}
__device__ constexpr int turns(int stage) {
  return (MEMBERS + readers(stage) * beside(stage) - 1) / (readers(stage) * beside(stage));
}
// of a thread at most, after any stage; or the blocks whose numbers it then has
__device__ constexpr int most_turns(bool of_blocks) {
  int most = 1;
  for (int i = 0; i < STAGES; ++i) {
    const int its = turns(i) * (of_blocks ? beside(i) : 1);
    most = numbers(i) > 0 && its > most ? its : most;
  }
  return most;
}

// Numbers of one block or of two, or what was made of all blocks'.
struct Numbers {
  unsigned word[MOST_NUMBERS];

  __device__ __forceinline__ void look_at(int words, const unsigned* at) {
    if (words == 2) {
      const uint2 two = look_pair(at);
      word[0] = two.x, word[1] = two.y;
      return;
    }
#pragma unroll
    for (int i = 0; i < MOST_NUMBERS; i += 4)
      if (i < words) {
        const uint4 four = look(at + i);
        word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
      }
  }
  __device__ __forceinline__ void fill(unsigned value) {
#pragma unroll
    for (int i = 0; i < MOST_NUMBERS; ++i) word[i] = value;
  }
  __device__ __forceinline__ bool is_missing(int words, unsigned phase) const {
    int other = 0;
#pragma unroll
    for (int i = 0; i < MOST_NUMBERS; ++i)
      if (i < words) other |= word[i] ^ phase;
    keep(other);  // else the compiler tests each word
    return other & 1;
  }
  __device__ __forceinline__ float number(int i) const { return __uint_as_float(word[i] & ~1u); }
};

__device__ __forceinline__ void give(int stage, const float (&data)[MOST_NUMBERS], unsigned* to, unsigned phase) {
#pragma unroll
  for (int i = 0; i < MOST_NUMBERS; i += 2) {
    const auto word = [&](int which) { return (__float_as_uint(data[i + which]) & ~1u) | phase; };
    if (i < words_of(stage)) put_pair(to + i, word(0), word(1));
  }
}

constexpr int MOST_TURNS = most_turns(false);
// the block whose numbers a thread takes, or the first of two
__device__ __forceinline__ int member(int stage, int lane, int turn) {
  return (lane % readers(stage) + turn * readers(stage)) * beside(stage);
}

// How many units each source of a thread has; with COLLECTED it is found out while their numbers travel.
constexpr int EACH = most_turns(true);
__device__ __forceinline__ void count_units(int stage, bool wanted, int lane, float (&units)[EACH]) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int turn = i / beside(stage);
    units[i] = wanted && turn < turns(stage) ? amount(units_of(member(stage, lane, turn) + i % beside(stage)), 1) : 0.f;
    if constexpr (COLLECTED) keep(units[i]);
  }
}

// What all blocks have given of one sequence after a stage, by threads side by side, and how many units each has.
__device__ __forceinline__ void take(
    int stage, const unsigned* from, unsigned phase, bool wanted, int lane, Numbers (&taken)[MOST_TURNS], float (&units)[EACH]) {
  const int words = words_of(stage) * beside(stage);
  if (PAUSE > 0) pause(ticks(), PAUSE);
  const auto look_at = [&](int turn) {
    const int first = member(stage, lane, turn);
    taken[turn].look_at(words, from + first * words_of(stage));
    if (MEMBERS % beside(stage) != 0 && first + 1 == MEMBERS) taken[turn].word[2] = taken[turn].word[3] = phase;
  };
#pragma unroll
  for (int turn = 0; turn < MOST_TURNS; ++turn) {
    taken[turn].fill(phase);
    if (turn < turns(stage) && wanted && member(stage, lane, turn) < MEMBERS) look_at(turn);
  }
  count_units(stage, wanted, lane, units);
  for (;;) {  // all threads of a warp leave together
    bool all = true;
#pragma unroll
    for (int turn = 0; turn < MOST_TURNS; ++turn)
      if (turn < turns(stage) && taken[turn].is_missing(words, phase)) look_at(turn), all = false;
    if (__all_sync(0xffffffffu, all)) break;
  }
}

// The means of what threads have taken.
__device__ __forceinline__ void merge_taken(
    int stage, const Numbers (&taken)[MOST_TURNS], const float (&units)[EACH], int lane, float (&m)[MOST(MEANS)]) {
  const auto value = [&](int i, int at) {
    const int turn = i / beside(stage);
    return turn < turns(stage) ? taken[turn].number(i % beside(stage) * 2 + at) : 0.f;
  };
  const auto first = [&](int at) { return __shfl_sync(0xffffffffu, value(0, at), lane / readers(stage) * readers(stage)); };
  merge<EACH>(stage, readers(stage), lane, [&](int i, int count) { return units[i] * count; }, value, first, m);
}

// Whether sums alone are made after a stage, as many as one word for each of some threads of a sequence, and of those that
// take what all blocks have given: then the threads share them out, of 8 sums 7 shuffles of a thread in place of 24.
__device__ constexpr bool shared_out(int stage) {
  const int words = words_of(stage);
  bool sums = words == MOST_NUMBERS && words <= LANES && (words & (words - 1)) == 0;
  sums = sums && (!COLLECTED || words <= readers(stage));  // fewer would add what two of them have taken twice
  for (int i = 0; i < REDUCTIONS; ++i) sums = sums && !(reduction_stage(i) == stage && reduction_moments(i));
  return sums;
}
// Over so many threads side by side: each number to one of the first of them, or to others COUNT lanes on.
template <int COUNT>
__device__ __forceinline__ float share_out(float (&number)[COUNT], int threads, int lane) {
#pragma unroll
  for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const bool upper = lane & half;
      const float kept = upper ? number[i + half] : number[i], other = upper ? number[i] : number[i + half];
      number[i] = kept + __shfl_xor_sync(0xffffffffu, other, half);
    }
#pragma unroll
  for (int away = COUNT; away < 32; away *= 2)
    if (away < threads) number[0] += __shfl_xor_sync(0xffffffffu, number[0], away);
  return number[0];
}

// The sums of a block's units of one sequence, of a thread's values of its two units: a thread gives its own.
__device__ __forceinline__ void give_sums(
    int stage, const float (&to)[2][MOST(VALUES)], bool first, bool second, unsigned* words, int rank, unsigned phase, bool there,
    int lane) {
  float sum[MOST_NUMBERS] = {};
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
#pragma unroll
    for (int k = 0; k < VALUES; ++k)
      if (k >= reduction_first(i) && k < reduction_first(i) + reduction_count(i))
        sum[at] += (first ? to[0][k] : 0.f) + (second ? to[1][k] : 0.f);
    ++at;
  }
  const float mine = share_out(sum, LANES, lane);
  const int which = lane % LANES;
  if (there && which < words_of(stage))
    put(words + words_before(stage) + rank * words_of(stage) + which, (__float_as_uint(mine) & ~1u) | phase);
}

// `to`, `from`: the words of this sequence
__device__ __forceinline__ void give_means(int stage, const float (&data)[MOST_NUMBERS], unsigned* to, int rank, unsigned phase) {
  give(stage, data, to + words_before(stage) + rank * words_of(stage), phase);
}

// The means of one sequence after a stage.  `row`: its place among those of the blocks; `wanted`: it is there, and the
// block has units.
__device__ __forceinline__ void take_means(
    int stage, unsigned* from, unsigned phase, bool wanted, int row, int rank, int lane, float (&m)[MOST(MEANS)]) {
  __syncwarp();  // one thread of a sequence may have given: apart, each shuffle would take the warp hundreds of cycles
  // else what each source counts is made before the loop over time, and kept, or spilled
  if constexpr (MOST_TURNS > 1) keep(lane);
  if constexpr (!COLLECTED) {
    Numbers taken[MOST_TURNS];
    float units[EACH];
    take(stage, from + words_before(stage), phase, wanted, lane, taken, units);
    merge_taken(stage, taken, units, lane, m);
    return;
  }
  unsigned* const made = from + words_before(stage) + MEMBERS * words_of(stage);
  const unsigned mine = __ballot_sync(0xffffffffu, wanted && row == rank);
  if (mine != 0) {  // this warp has the sequence that the block collects
    const int ahead = (__ffs(mine) - 1 - lane / LANES * LANES) / LANES;
    unsigned* const to = made + ahead * MEAN_WORDS;
    Numbers taken[MOST_TURNS];
    float units[EACH];
    take(stage, from + ahead * MEAN_WORDS + words_before(stage), phase, true, lane, taken, units);
    float data[MOST_NUMBERS] = {};
    int at = 0;
    if (shared_out(stage)) {
#pragma unroll
      for (int i = 0; i < REDUCTIONS; ++i) {
        if (reduction_stage(i) != stage) continue;
#pragma unroll
        for (int turn = 0; turn < MOST_TURNS; ++turn) data[at] += taken[turn].number(at);
        data[at++] *= 1.f / (float)(UNITS * reduction_count(i));
      }
      const float own = share_out(data, readers(stage), lane);
      if (lane < words_of(stage)) put(to + lane, (__float_as_uint(own) & ~1u) | phase);
    } else {
      float all[MOST(MEANS)];
      merge_taken(stage, taken, units, lane, all);
#pragma unroll
      for (int i = 0; i < REDUCTIONS; ++i)
        if (reduction_stage(i) == stage) {
          data[at++] = all[reduction_place(i)];
          if (reduction_moments(i)) data[at++] = all[reduction_place(i) + 1];
        }
      if (lane == 0) give(stage, data, to, phase);
    }
    __syncwarp();
  }
  Numbers found;
  found.fill(phase);
  pause(ticks(), PAUSE_FOUND);
  if (wanted) found.look_at(words_of(stage), made);
  for (;;) {
    const bool all = !found.is_missing(words_of(stage), phase);
    if (!all) found.look_at(words_of(stage), made);
    if (__all_sync(0xffffffffu, all)) break;
  }
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i)
    if (reduction_stage(i) == stage) {
      m[reduction_place(i)] = found.number(at++);
      if (reduction_moments(i)) m[reduction_place(i) + 1] = found.number(at++);
    }
}
