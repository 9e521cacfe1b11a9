// All steps of a recurrent layer that one cluster cannot hold, forward, in one launch, for cells whose step has means over the
// units: spread_forward.cu where one block computes the cell of a whole sequence, so that no mean leaves it.
//
// BLOCKS blocks own ROWS sequences together, no more than there are blocks.  Block `rank` multiplies with the weights of the
// units from rank x SLICE on, for all these sequences, and computes the cell of all units of sequence `rank`.  A step is
//
//   take the states of all sequences out of L2 | product | put the results of each sequence into L2
//   of a block with a sequence: take its results of all blocks | stage 0 | means | stage 1 | ... | put its new state into L2
//
// So blocks exchange twice in a step, where one that computes the cell of its own units has an exchange for the states and
// one for each mean (exchange.cu says how; of results, in float32, the last bit is the phase).
//
// Warp (group, split) owns SHARE strips and a part of the product's depth; a strip is two gates of 8 units, of which a thread
// has one of some sequences.  A thread of the cell has two neighbouring units.
//
//   registers  weights, sums of the products, the states and the bias of the thread's units, what is on its way
//   shared     the states of all sequences, sums of each warp that means are made of, more weights
//   global     as in spread_forward.cu, and the results
//
// Who puts results of step t + 2 where those of step t were has taken the states after step t + 1 of all sequences: their
// blocks had taken the results of step t + 1, and so of t, before.  And who writes states to shared memory has taken one that
// was made of results of all warps of its own block, which had read the states before: but for a warp without strips, which
// multiplies what nobody asks for, and may still do so when others write.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for all others that own the same sequences, so the launch must be cooperative.

// @generated

constexpr int SPLITS = WARPS / GROUPS;
constexpr int COUPLES = (RECURRENT + 1) / 2;  // of gates
constexpr int STRIPS = SLICE / 8 * COUPLES, SHARE = (STRIPS + GROUPS - 1) / GROUPS;
constexpr int WORDS = SPLITS * DEPTHS * 8;  // depth of the product, padded
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT, WEIGHT_WORDS = WARPS * STREAMED * 128, STATE_WORDS = WORDS / 4 * STRIDE;
typedef Operands<SHARE * DEPTHS, STREAMED> Weights;
constexpr int CHAINS = SHARE * TILES < 4 && DEPTHS > 1 ? 2 : 1;  // of products that wait for each other
constexpr int CHUNKS = (UNITS + 7) / 8, PITCH = CHUNKS * 4;  // of a sequence's states in the ring: 16 bytes, words
constexpr int ACROSS = BLOCKS * SLICE;                       // units of a row of results
constexpr int RESULT_PITCH = SPLITS * COUPLES * ACROSS * 2;  // words of a sequence's results: [split, couple, unit, gate]
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
static_assert(4 * (WEIGHT_WORDS + STATE_WORDS + 2 * MEAN_WORDS) == SHARED, "tiling and kernel disagree");
static_assert(GROUPS % 4 == 0 && WARPS % GROUPS == 0, "four warps have one depth");
static_assert(ROUNDS == 0 && LEAVES == RECURRENT && REDUCTIONS > 0 && !OPTIONS && !CARRIED, "such steps have means alone");
static_assert(ROWS <= BLOCKS && WHOLE == WARPS && 64 * WARPS >= UNITS, "a block has the cell of one sequence");
static_assert(SLICE % 8 == 0 && WORDS * 2 >= UNITS && ACROSS >= UNITS, "the tile does not cover the layer");

typedef Arrival<ROWS, CHUNKS, (UNITS + 1) / 2, PITCH, WARPS, word_at(WARPS, 0), word_at(0, 128), 1, false, PITCH, 0> States;

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  unsigned* const states = memory + WEIGHT_WORDS;       // behind weights of four warps: [warps, strip and depth]
  float* const slots = (float*)(states + STATE_WORDS);  // [round, stage, warp, number]

  const int warp = own_warp(), lane = threadIdx.x % 32, group = warp % GROUPS, split = warp / GROUPS;
#if SIDED
  const unsigned place = own_place(a.places, memory);
  if (place == NO_PLACE) return;
#else
  const unsigned place = blockIdx.x;
#endif
  const int rank = place % BLOCKS, direction = (int)a.first_direction + blockIdx.y, time = (int)a.time;
  const int batch = (int)a.batch, row0 = (int)a.first_row + place / BLOCKS * ROWS, lines = min(ROWS, batch - row0);
  const Weight* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
  const int first_column = split * DEPTHS * 16;
  const auto weights_of = [&](int s, int m) {  // rows 0 to 7 of an operand are one gate, 8 to 15 the next
    const int strip = group * SHARE + s, own = strip / COUPLES * 8 + m / 2, unit = rank * SLICE + own;
    const int gate = strip % COUPLES * 2 + m % 2;
    const bool there = own < SLICE && unit < UNITS && gate < RECURRENT;
    return WeightRow{weights + ((long long)gate * UNITS + unit) * WEIGHT_PITCH + first_column, there ? UNITS - first_column : 0};
  };
  bring_rows<Weights, SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS>(
      memory, warp, lane, [](int s, int depth) { return depth * SHARE + s; }, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) { put_square<512>(memory + (warp / 4 * STREAMED + i) * 512 + warp % 4 * 64, lane, words); });

  for (int i = threadIdx.x; i < STATE_WORDS; i += THREADS) states[i] = 0;
  __syncthreads();
  if (a.initial[0] != nullptr)
    for (int i = threadIdx.x; i < lines * PITCH; i += THREADS) {
      const int line = i / PITCH, column = i % PITCH * 2;
      const auto value = [&](int unit) {
        return unit < UNITS ? a.initial[0][((long long)direction * batch + row0 + line) * UNITS + unit] : Element{};
      };
      states[word_at(line, i % PITCH)] = joined(value(column), value(column + 1));
    }
  show_products();  // weights, and states
  __syncthreads();

  const bool owns = rank < lines, reverse = direction == 1;  // the sequence that it has the cell of
  const int unit = threadIdx.x * 2, sequence = row0 + (owns ? rank : 0);
  const bool first = owns && unit < UNITS, second = owns && unit + 1 < UNITS;
  const long long row_step = reverse ? -(long long)batch : batch, width = a.directions * UNITS;
  const long long begin = (reverse ? (long long)(time - 1) * batch : 0) + sequence;
  const long long start = ((long long)direction * batch + sequence) * UNITS + unit, state_stride = a.time * batch * UNITS;
  float2 bias[MOST(LINKS)], x_bias[GATES], vectors[MOST(VECTORS)];
  float state[STATES][2];
  const auto values_of = [&](const Element* at, int row) {
    const bool given = at != nullptr;
    at += row * UNITS + unit;  // one by one: they need not begin at 4 bytes
    return float2{given && first ? wide(at[0]) : 0.f, given && second ? wide(at[1]) : 0.f};
  };
#pragma unroll
  for (int l = 0; l < LINKS; ++l) bias[l] = values_of(a.bias[direction], link_gate(l));
#pragma unroll
  for (int g = 0; g < GATES; ++g) {  // x's own goes with r's where the cell uses nothing but x + r
    x_bias[g] = values_of(a.x_bias[direction], g);
    if (sum_of(g) >= 0) {
      float2& its = bias[sum_of(g) >= 0 ? sum_of(g) : 0];
      its = {its.x + x_bias[g].x, its.y + x_bias[g].y};
    }
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) vectors[v] = values_of(a.vectors[direction][v], 0);
#pragma unroll
  for (int s = 0; s < STATES; ++s) {
    const float2 value = initial_pair(a, s, start, first, second);
    state[s][0] = value.x, state[s][1] = value.y;
  }
  Gate* gates_at = a.gates[direction] + begin * GATES * UNITS + unit;
  Element* y_at = a.y + begin * width + direction * UNITS + unit;
  Gate* apart_at = a.apart[direction] + begin * APART * UNITS + unit;
  float* states_at = a.states[direction] + begin * UNITS + unit;
  float* levels_at = a.levels[direction] + begin * MEANS;
  GatePair x[GATES], next[GATES];
  const Gate* next_at = gates_at;  // of the step that is read
  const long long ahead = AHEAD * row_step * GATES * UNITS;
  const auto read = [&](int t, GatePair(&into)[GATES]) {
#pragma unroll
    for (int g = 0; g < GATES; ++g) into[g] = load_gates(next_at + g * UNITS, first && t < time, second && t < time);
    if (owns && t + AHEAD < time) prefetch_row<GATES * UNITS * sizeof(Gate)>(next_at - unit + ahead, 0, warp, lane);
    next_at += row_step * GATES * UNITS;
  };
  keep(next_at), keep(gates_at), keep(y_at), keep(apart_at), keep(states_at);
  read(0, x);

  // the ring of states, and results of two steps
  const long long buffer = (long long)batch * PITCH, plane = (long long)batch * RESULT_PITCH;
  unsigned* const ring = a.ring + direction * RING * buffer + (long long)row0 * PITCH;
  unsigned* const results = a.ring + a.directions * RING * buffer + direction * 2 * plane + (long long)row0 * RESULT_PITCH;
  const unsigned* first_seen = ring + (long long)warp * PITCH + lane * 4;
  unsigned* sent = ring + (long long)rank * PITCH + threadIdx.x;
  const unsigned* taken_from = results + (long long)rank * RESULT_PITCH + unit * 2;
  unsigned* put_to = results + (long long)(lane % 4 * 2) * RESULT_PITCH + (split * COUPLES * ACROSS + rank * SLICE + lane / 4) * 2;
  keep(first_seen), keep(sent), keep(taken_from), keep(put_to);
  const bool comes_round = time > RING;
  const int left = lines - warp;  // rows from this warp's on
  const unsigned* seen = first_seen;
  States arrival;
  float start_of[MOST(REDUCTIONS)] = {};
  long long sent_at = 0;

  for (int t = 0; t < time; ++t) {
    if (t > 0) arrival.settle(states + word_at(warp, lane * 4), seen, left, lane, 0, 0, AsItIs{});
    show_products();
    __syncthreads();
    float sums[CHAINS][SHARE][TILES][4];
    multiply_sequences<Weights, SHARE, DEPTHS, STREAMED, CHAINS>(
        sums, resident, memory, states, split * DEPTHS * 8, warp, [&] { read(t + 1, next); });
    const unsigned phase = t / 2 % 2;
    put_sums<RESULT_PITCH>(sums, lines, lane, phase, [&](int s) {
      const int strip = group * SHARE + s, own = strip / COUPLES * 8;
      const bool there = (STRIPS % GROUPS == 0 || strip < STRIPS) && (UNITS == ACROSS || rank * SLICE + own + lane / 4 < UNITS);
      return there ? put_to + t % 2 * plane + (strip % COUPLES * ACROSS + own) * 2 : nullptr;
    });
    if (owns) {
      float given[2][GATES], r[2][MOST(LINKS)], after[2][STATES], m[MOST(MEANS)];
      Values values[2];
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const float2 value = wide_gates(x[g]);
        given[0][g] = sum_of(g) >= 0 ? value.x : value.x + x_bias[g].x;
        given[1][g] = sum_of(g) >= 0 ? value.y : value.y + x_bias[g].y;
      }
      {
        uint4 taken[SPLITS * COUPLES];
        const unsigned* const from = taken_from + t % 2 * plane;
        pause(ticks(), LULL);
        const auto look_at = [&](int i) { return look(from + i * ACROSS * 2); };
#pragma unroll
        for (int i = 0; i < SPLITS * COUPLES; ++i) {
          taken[i] = {phase, phase, phase, phase};
          if (first) taken[i] = look_at(i);
        }
        const auto missing = [&](const uint4& words) {
          return (((words.x ^ phase) | (words.y ^ phase)) | (second ? (words.z ^ phase) | (words.w ^ phase) : 0)) & 1u;
        };
        for (;;) {  // all threads of a warp leave together
          bool all = true;
#pragma unroll
          for (int i = 0; i < SPLITS * COUPLES; ++i)
            if (missing(taken[i])) taken[i] = look_at(i), all = false;
          if (__all_sync(0xffffffffu, all)) break;
        }
#pragma unroll
        for (int l = 0; l < LINKS; ++l) {
          const int gate = link_gate(l);
          r[0][l] = bias[l].x, r[1][l] = bias[l].y;
#pragma unroll
          for (int s = 0; s < SPLITS; ++s) {
            const uint4 words = taken[s * COUPLES + gate / 2];
            r[0][l] += __uint_as_float((gate % 2 ? words.y : words.x) & ~1u);
            r[1][l] += __uint_as_float((gate % 2 ? words.w : words.z) & ~1u);
          }
        }
      }
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        float to[2][MOST(VALUES)], operand[2][1];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          float before[STATES], v[MOST(VECTORS)];
#pragma unroll
          for (int s = 0; s < STATES; ++s) before[s] = state[s][u];
#pragma unroll
          for (int i = 0; i < VECTORS; ++i) v[i] = half_of(vectors[i], u);
          run_stage(stage, given[u], r[u], before, v, nullptr, m, values[u], to[u], operand[u], after[u]);
        }
        if (packs(stage) > 0) find_means(stage, to, first, second, warp, lane, slots, start_of, m, [] { __syncthreads(); });
      }
#pragma unroll
      for (int s = 0; s < STATES; ++s) state[s][0] = after[0][s], state[s][1] = after[1][s];
      if (t + 1 < time && first) give(sent + sent_at, 0, state[0][0], second ? state[0][1] : 0.f, 0);
      // what nobody waits for
#pragma unroll
      for (int g = 0; g < GATES; ++g) x[g] = next[g];
      store_step(y_at, gates_at, apart_at, states_at, levels_at, state_stride, given, r, after, m, unit, first, second);
      if (t + 1 == time)
#pragma unroll
        for (int s = 0; s < STATES; ++s) leave_pair(a, s, start, after[0][s], after[1][s], first, second);
      if (comes_round && first) put(sent + sent_at + freed(t) * buffer, NOTHING);  // everyone has read it
    }
    seen = first_seen + sent_at;
    if (t + 1 < time) arrival.look_at(seen, left, lane, 0);
    if (comes_round && t % PERIOD == 0) fence();
    sent_at = (t + 1) % RING == 0 ? 0 : sent_at + buffer;
    gates_at += row_step * GATES * UNITS, y_at += row_step * width, apart_at += row_step * APART * UNITS;
    states_at += row_step * UNITS, levels_at += row_step * MEANS;
  }
}
