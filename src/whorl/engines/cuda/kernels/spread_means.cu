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
constexpr int MOST_NUMBERS = 4 * MOST(PACKS);
static_assert((LANES & (LANES - 1)) == 0 && LANES >= 4 && LANES <= 32, "the threads of a warp have whole sequences");
static_assert(ROUNDS == 0 && LEAVES == LINKS && LINKS == RECURRENT, "means alone are between the stages of what is spread");
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
__device__ constexpr int most_turns(bool of_blocks) {  // or blocks
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
    unsigned other = 0;
#pragma unroll
    for (int i = 0; i < MOST_NUMBERS; ++i)
      if (i < words) other |= word[i] ^ phase;
    return other & 1u;
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

// The means of one sequence after a stage, of what threads side by side take.
__device__ __forceinline__ void take(
    int stage, const unsigned* from, unsigned phase, bool wanted, int lane, float (&m)[MOST(MEANS)]) {
  constexpr int MOST_TURNS = most_turns(false), EACH = most_turns(true);
  const int words = words_of(stage) * beside(stage);
  if constexpr (MOST_TURNS > 1) keep(lane);  // else what each source counts is made before the loop over time, and kept, or spilled
  Numbers taken[MOST_TURNS];
  const auto member = [&](int turn) { return (lane % readers(stage) + turn * readers(stage)) * beside(stage); };
  const auto look_at = [&](int turn) {
    taken[turn].look_at(words, from + member(turn) * words_of(stage));
    if (MEMBERS % beside(stage) != 0 && member(turn) + 1 == MEMBERS) taken[turn].word[2] = taken[turn].word[3] = phase;
  };
#pragma unroll
  for (int turn = 0; turn < MOST_TURNS; ++turn) {
    taken[turn].fill(phase);
    if (turn < turns(stage) && wanted && member(turn) < MEMBERS) look_at(turn);
  }
  for (;;) {  // all threads of a warp leave together
    bool all = true;
#pragma unroll
    for (int turn = 0; turn < MOST_TURNS; ++turn)
      if (turn < turns(stage) && taken[turn].is_missing(words, phase)) look_at(turn), all = false;
    if (__all_sync(0xffffffffu, all)) break;
  }
  int count[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int turn = i / beside(stage);
    count[i] = wanted && turn < turns(stage) ? units_of(member(turn) + i % beside(stage)) : 0;
  }
  const auto value = [&](int i, int at) {
    const int turn = i / beside(stage);
    return turn < turns(stage) ? taken[turn].number(i % beside(stage) * 2 + at) : 0.f;
  };
  const auto first = [&](int at) { return __shfl_sync(0xffffffffu, value(0, at), lane / readers(stage) * readers(stage)); };
  merge(stage, readers(stage), count, value, first, m);
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
  if constexpr (!COLLECTED) {
    take(stage, from + words_before(stage), phase, wanted, lane, m);
    return;
  }
  unsigned* const made = from + words_before(stage) + MEMBERS * words_of(stage);
  const unsigned mine = __ballot_sync(0xffffffffu, wanted && row == rank);
  if (mine != 0) {  // this warp has the sequence that the block collects
    const int ahead = (__ffs(mine) - 1 - lane / LANES * LANES) / LANES;
    float all[MOST(MEANS)], data[MOST_NUMBERS] = {};
    take(stage, from + ahead * MEAN_WORDS + words_before(stage), phase, true, lane, all);
    int at = 0;
#pragma unroll
    for (int i = 0; i < REDUCTIONS; ++i)
      if (reduction_stage(i) == stage) {
        data[at++] = all[reduction_place(i)];
        if (reduction_moments(i)) data[at++] = all[reduction_place(i) + 1];
      }
    if (lane == 0) give(stage, data, made + ahead * MEAN_WORDS, phase);
    __syncwarp();
  }
  Numbers found;
  found.fill(phase);
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
