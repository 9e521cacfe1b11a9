// All steps of a recurrent layer, forward, in one launch, for cells whose step has means over the units: staged_forward.cu
// where one block computes the cell of a whole sequence, so that no mean leaves it.
//
// A cluster of CLUSTER blocks owns `share` sequences, at most ROWS = 8 x TILES, and all weights.  Block `rank` multiplies
// with those of the units from rank x SLICE on, for all sequences of the cluster, and computes the cell for all units of
// every CLUSTER-th sequence, SEATS of them.  The sequences of a step are TILES sub-tiles, which take turns: one is multiplied
// while what concerns another travels and is computed.  A step of one is
//
//   multiplying warps   wait for the states of its sequences | product | send each sequence's results to its block
//   a sequence's warps  wait for its results | stage 0 | means | stage 1 | ... | send its new state to all blocks
//
// Multiplying warp (octet, split) has 8 units and a part of the products' depth; a row of an operand is one gate of one
// unit, so that a thread has all gates of a unit.  A thread of the cell has two neighbouring units.
//
//   registers  weights and sums of the product; of a sequence's warps the states, the means, the next step's input
//   shared     states of all sequences, results of this block's sequences, sums of each warp, barriers, more weights
//   global     as in staged_forward.cu
//
// What is exchanged lies in shared memory once: who sends at step t + 1 has waited for something that was sent after all
// of step t, of the same sub-tile, was read.
//   - Results are read, the new state is made of them and sent.  A warp that multiplies at the next step has waited for the
//     states of all its sequences, whole ones: every thread of theirs has read its results, and its warp's sums of others.
//   - States are read, the product is made of them and sent.  Who sends a sequence's next state has waited for the results
//     of all warps that multiply.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int ROWS = 8 * TILES, SEATS = (ROWS + CLUSTER - 1) / CLUSTER, OCTETS = SLICE / 8;
constexpr int MULTIPLYING = OCTETS * SPLITS, WARPS = MULTIPLYING + SEATS * WHOLE, THREADS = 32 * WARPS;
constexpr int STRIPS = (RECURRENT + 1) / 2, OPERANDS = STRIPS * DEPTHS, STREAMED = OPERANDS - RESIDENT;
typedef Operands<OPERANDS, STREAMED> Weights;
constexpr int WORDS = SPLITS * DEPTHS * 8;  // depth of the product, padded
constexpr int CHAINS = STRIPS < 4 && DEPTHS > 1 ? 2 : 1;  // of products that wait for each other
constexpr int STATE_WORDS = ROWS * WORDS, WEIGHT_WORDS = MULTIPLYING * STREAMED * 128;
constexpr int QUADS = (RECURRENT + 3) / 4;  // 16 bytes of a unit's results
constexpr int PAIRS = (UNITS + 1) / 2, RESULT_WORDS = SPLITS * 2 * PAIRS * QUADS * 4;  // of a sequence
constexpr int CHUNKS = (UNITS + 7) / 8;                                                // 16 bytes of a sequence's states
constexpr int SCALES = HALVES ? ROWS : 0;  // of initial states
#if HALVES
constexpr float SCALE = STATE_SCALE;  // of the others
#else
constexpr float SCALE = 1.f;
#endif
static_assert(4 * (WEIGHT_WORDS + STATE_WORDS + SEATS * (RESULT_WORDS + 2 * MEAN_WORDS) + SCALES) + 8 * (TILES + SEATS) ==
                  SHARED,
              "tiling and kernel disagree");
static_assert(CLUSTER > 1 && ROUNDS == 0 && LEAVES == RECURRENT && !OPTIONS, "such steps have means alone");
static_assert(ELEMENT_BYTES == 2 || HALVES, "an operand's word is two units");
static_assert(WHOLE * 64 >= UNITS && SEATS < 16, "a thread has two units");

// The block of a row, seat row / CLUSTER, of a sub-tile with 8 rows: of every other one from the last block on, so that few
// blocks have several where not all rows are there.
__device__ __forceinline__ int rank_of(int row) {
  return CLUSTER <= 8 && row / 8 % 2 ? CLUSTER - 1 - row % CLUSTER : row % CLUSTER;
}
__device__ __forceinline__ int row_at(int seat, int rank) {
  const int row = seat * CLUSTER;
  return row + (CLUSTER <= 8 && row / 8 % 2 ? CLUSTER - 1 - rank : rank);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;  // [warp, strip and depth, lane]
  unsigned* const states = memory + WEIGHT_WORDS;
  float4* const results = (float4*)(states + STATE_WORDS);  // [seat, split, 4 gates, odd or even unit, pair of units]
  float* const slots = (float*)(results + SEATS * RESULT_WORDS / 4);  // [seat, round, stage, warp, number]
  float* const scales = slots + 2 * SEATS * MEAN_WORDS;
  const unsigned base = shared_address(memory), barriers = shared_address(scales + SCALES);

  const int warp = own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const bool multiplies = warp < MULTIPLYING;
  const int octet = warp / SPLITS, split = warp % SPLITS;
  const int batch = (int)a.batch, clusters = gridDim.x / CLUSTER, share = (batch + clusters - 1) / clusters;
  const int first_place = blockIdx.x / CLUSTER * share, lines = max(0, min(share, batch - first_place)), time = (int)a.time;
  const Weight* const weights = a.weights[direction];
  // A sequence's row of the product is 8 x its sub-tile and its place there; of all sub-tiles but the last as many are there.
  const int each = (lines + TILES - 1) / TILES, used = TILES == 1 || lines == 0 ? 1 : (lines + each - 1) / each;
  const auto lines_of = [&](int sub) { return TILES == 1 ? lines : min(each, lines - sub * each); };
  const auto row_of = [&](int line) { return TILES == 1 ? line : line / each * 8 + line % each; };
  const int own_unit = rank * SLICE + octet * 8 + lane / 4;  // of a thread that multiplies

  uint4 resident[MOST(RESIDENT)];
  float unscale[RECURRENT];
#pragma unroll
  for (int g = 0; g < RECURRENT; ++g) unscale[g] = 1.f;
#if HALVES
#pragma unroll
  for (int g = 0; g < RECURRENT; ++g)
    if (multiplies && own_unit < UNITS) unscale[g] = scales_behind(weights)[g * UNITS + own_unit];
#endif
  const int first_column = split * DEPTHS * 8 * WORD_ELEMENTS;
  const auto weights_of = [&](int s, int m) {  // rows 0 to 7 of an operand are one gate, 8 to 15 the next
    const int unit = rank * SLICE + octet * 8 + m / 2, gate = 2 * s + m % 2;
    const bool there = unit < UNITS && gate < RECURRENT;
    return WeightRow{weights + ((long long)gate * UNITS + unit) * WEIGHT_PITCH + first_column, there ? UNITS - first_column : 0};
  };
  if (multiplies)
    bring_rows<Weights, STRIPS, DEPTHS, STREAMED, MULTIPLYING, 4 * WEIGHT_WORDS>(
        memory, warp, lane, [](int s, int depth) { return depth * STRIPS + s; }, weights_of,
        [&](int i, uint4 words) { resident[i] = words; },
        [&](int i, uint4 words) { streamed[(warp * STREAMED + i) * 32 + lane] = words; });
  else
    __syncthreads();  // as it does

  for (int i = threadIdx.x; i < STATE_WORDS; i += THREADS) states[i] = 0;
  __syncthreads();
  bring_initial<WARPS>(a, direction, batch, first_place, lines, warp, lane, states, scales, row_of,
                       [](int row, int word) { return word_of(row, word); });
  // What comes for a step: of a sub-tile's sequences all states; of one all results.
  const unsigned resulting = SPLITS * UNITS * QUADS * 16;
  const auto arriving = [&](int sub) { return (unsigned)(lines_of(sub) * CHUNKS * 16); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < TILES + SEATS; ++i) start_barrier(barriers + 8 * i, 1);
    barriers_started();
    for (int sub = 0; sub < used; ++sub) expect(barriers + 8 * sub, arriving(sub));
    for (int seat = 0; seat < SEATS; ++seat) expect(barriers + 8 * (TILES + seat), resulting);
  }
  cluster_barrier();

  if (multiplies) {
    const unsigned all_columns = shared_address(states + word_of(lane % 8, split * DEPTHS * 8 + lane / 8 * 4));
    const bool there = own_unit < UNITS;
    const unsigned results_at = shared_address(results) - base + ((split * QUADS * 2 + own_unit % 2) * PAIRS + own_unit / 2) * 16;
    unsigned targets[2][2];  // the blocks of the sequences whose results the thread has, of a sub-tile and the next
#pragma unroll
    for (int next = 0; next < 2; ++next)
#pragma unroll
      for (int e = 0; e < 2; ++e) targets[next][e] = at_rank(base, rank_of(next * 8 + lane % 4 * 2 + e));
    // Warps without units send nothing, so nobody waits for them: they must not wait, the barrier's phases could pass them by.
    const int steps = lines > 0 && (int)rank * SLICE + octet * 8 < UNITS ? time : 0;
    for (int t = 0, sub = 0; t < steps;) {
      if (t > 0) {
        wait(barriers + 8 * sub, (t - 1) % 2);
        if (threadIdx.x == 0) expect(barriers + 8 * sub, arriving(sub));
      }
      const unsigned columns = all_columns + sub * 256;
      float sums[CHAINS][STRIPS][4] = {};
#pragma unroll
      for (int d = 0; d < DEPTHS; d += 2) {
        const unsigned at = columns + d * TILES * 256;
        const uint4 b = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (d + half < DEPTHS)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
              const int i = (d + half) * STRIPS + s;
              const Left weight = left_of(Weights::streamed(i) ? streamed[(warp * STREAMED + Weights::before(i)) * 32 + lane]
                                                               : resident[Weights::resident(i)]);
                multiply(sums[half % CHAINS][s], weight, right_of(half ? b.z : b.x, half ? b.w : b.y));
            }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int place = lane % 4 * 2 + e, row = sub * 8 + place, seat = row / CLUSTER;
        float own[QUADS * 4] = {};
        float its = 1.f / SCALE;
        if (HALVES && t == 0 && a.initial[0] != nullptr) its = scales[row];
#pragma unroll
        for (int g = 0; g < RECURRENT; ++g) {
          own[g] = sums[0][g / 2][e + g % 2 * 2];
          if constexpr (CHAINS > 1) own[g] += sums[CHAINS - 1][g / 2][e + g % 2 * 2];
          if constexpr (HALVES) own[g] = own[g] * unscale[g] * its;  // weights' first: states of any size overflow nothing
        }
        if (there && place < lines_of(sub)) {
          const unsigned target = TILES > 1 && sub % 2 ? targets[1][e] : targets[0][e];
#pragma unroll
          for (int q = 0; q < QUADS; ++q)
            send(target + results_at + (seat * RESULT_WORDS / 4 + q * 2 * PAIRS) * 16, target + barriers - base + 8 * (TILES + seat),
                 {__float_as_uint(own[q * 4]), __float_as_uint(own[q * 4 + 1]), __float_as_uint(own[q * 4 + 2]),
                  __float_as_uint(own[q * 4 + 3])});
        }
      }
      if (TILES == 1 || ++sub == used) sub = 0, ++t;
    }
  } else if (const int own_row = row_at((warp - MULTIPLYING) / WHOLE, rank), its_sub = own_row / 8;
             its_sub < used && own_row % 8 < lines_of(its_sub)) {  // the same for all warps of a sequence
    const int seat = (warp - MULTIPLYING) / WHOLE, part = (warp - MULTIPLYING) % WHOLE, line = its_sub * each + own_row % 8;
    const int pair = part * 32 + lane, unit = pair * 2, sequence = first_place + line, width = gridDim.y * UNITS;
    const unsigned its_states = barriers + 8 * its_sub, its_results = barriers + 8 * (TILES + seat);
    const bool all = UNITS == 64 * WHOLE, first = all || unit < UNITS, second = all || unit + 1 < UNITS, reverse = direction == 1;
    const long long row_step = reverse ? -(long long)batch : batch;
    const long long begin = (reverse && time > 0 ? (long long)(time - 1) * batch : 0) + sequence;
    const long long start = ((long long)direction * batch + sequence) * UNITS + unit;
    float bias[MOST(LINKS)][2], x_bias[GATES][2], vectors[2][MOST(VECTORS)], state[STATES][2];
    const auto values_of = [&](const Element* at, float (&to)[2]) {
      to[0] = at != nullptr && first ? wide(at[unit]) : 0.f, to[1] = at != nullptr && second ? wide(at[unit + 1]) : 0.f;
    };
    const auto after = [](const Element* at, int units) { return at == nullptr ? at : at + units; };
#pragma unroll
    for (int l = 0; l < LINKS; ++l) values_of(after(a.bias[direction], link_gate(l) * UNITS), bias[l]);
#pragma unroll
    for (int g = 0; g < GATES; ++g) {  // x's own goes with r's where the cell uses nothing but x + r
      values_of(after(a.x_bias[direction], g * UNITS), x_bias[g]);
      if (sum_of(g) >= 0)
#pragma unroll
        for (int u = 0; u < 2; ++u) bias[sum_of(g) >= 0 ? sum_of(g) : 0][u] += x_bias[g][u];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float its[2];
      values_of(a.vectors[direction][v], its);
      vectors[0][v] = its[0], vectors[1][v] = its[1];
    }
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      const bool given = a.initial[s] != nullptr;
      const float2 value = wide_pair(load_pair(a.initial[s] + start, given && first, given && second));
      state[s][0] = value.x, state[s][1] = value.y;
    }
    Gate* gates_at = a.gates[direction] + begin * GATES * UNITS + unit;
    Element* y_at = a.y + begin * width + direction * UNITS + unit;
    Gate* apart_at = a.apart[direction] + begin * APART * UNITS + unit;
    float* states_at = a.states[direction] + begin * UNITS + unit;
    float* levels_at = a.levels[direction] + begin * MEANS;
    const long long state_stride = a.time * batch * UNITS;
    GatePair x[GATES];
#pragma unroll
    for (int g = 0; g < GATES; ++g) x[g] = load_gates(gates_at + g * UNITS, first && time > 0, second && time > 0);

    // What a warp sends a block at once lies in a row: 128 bytes, each thread's word, or of few warps two words, of every
    // other block.  Forward with 320 units took 189 us with 16 bytes, 184 with 8 and 155 with 4, with 256 119, 115 and
    // 113; with 128 101, 99 and 104, 168 108, 104 and 110 (100 steps, bfloat16, H100).
    constexpr int WORDS = WHOLE > 3 ? 1 : 2;
    const unsigned states_to = shared_address(states + word_of(own_row, pair / WORDS * WORDS)) - base;
    const float4* const own_results = results + seat * RESULT_WORDS / 4 + pair;
    float* const own_slots = slots + seat * 2 * MEAN_WORDS;
    float start_of[MOST(REDUCTIONS)] = {};

    for (int t = 0; t < time; ++t) {
      float given[2][GATES], r[2][MOST(LINKS)], after[2][STATES], m[MOST(MEANS)];
      Values values[2];
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const float2 value = wide_gates(x[g]);
        given[0][g] = sum_of(g) >= 0 ? value.x : value.x + x_bias[g][0];
        given[1][g] = sum_of(g) >= 0 ? value.y : value.y + x_bias[g][1];
      }
      wait(its_results, t % 2);
      if (part == 0 && lane == 0) expect(its_results, resulting);
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
          float4 sum = {};
#pragma unroll
          for (int s = 0; s < SPLITS; ++s)
            if (u == 0 ? first : second) {
              const float4 value = own_results[((s * QUADS + q) * 2 + u) * PAIRS];
              sum = s == 0 ? value : float4{sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
            }
          const float of[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
          for (int l = 0; l < LINKS; ++l)
            if (link_gate(l) / 4 == q) r[u][l] = of[link_gate(l) % 4] + bias[l][u];
        }
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        float to[2][MOST(VALUES)], operand[2][1];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          float before[STATES];
#pragma unroll
          for (int s = 0; s < STATES; ++s) before[s] = state[s][u];
          run_stage(stage, given[u], r[u], before, vectors[u], nullptr, m, values[u], to[u], operand[u], after[u]);
        }
        if (packs(stage) > 0)
          find_means(stage, to, first, second, part, lane, own_slots, start_of, m, [&] {
            if constexpr (WHOLE > 1)
              named_barrier(1 + seat, 32 * WHOLE);
            else
              __syncwarp();
          });
      }
#pragma unroll
      for (int s = 0; s < STATES; ++s) state[s][0] = after[0][s], state[s][1] = after[1][s];

      if (t + 1 < time) {
        const unsigned own = operand_pair(first ? SCALE * state[0][0] : 0.f, second ? SCALE * state[0][1] : 0.f);
        const unsigned other = WORDS > 1 ? __shfl_xor_sync(0xffffffffu, own, 1) : 0;
#pragma unroll
        for (int p = 0; p < CLUSTER; p += WORDS) {
          const unsigned peer = at_rank(base, p + lane % WORDS);
          if (pair / 4 < CHUNKS) {
            if constexpr (WORDS > 1)
              send_pair(peer + states_to, peer + its_states - base, lane % 2 ? uint2{other, own} : uint2{own, other});
            else
              send_word(peer + states_to, peer + its_states - base, own);
          }
        }
      }
      __syncwarp();  // else the compiler asks for the next step's input before it sends
      // what nobody waits for
      if (t + 1 < time)
#pragma unroll
        for (int g = 0; g < GATES; ++g) x[g] = load_gates(gates_at + (row_step * GATES + g) * UNITS, first, second);
      store_step(y_at, gates_at, apart_at, states_at, levels_at, state_stride, given, r, after, m, unit, first, second);
      if (t + 1 == time)
#pragma unroll
        for (int s = 0; s < STATES; ++s) store_pair(a.finals[s] + start, after[0][s], after[1][s], first, second);
      gates_at += row_step * GATES * UNITS, y_at += row_step * width, apart_at += row_step * APART * UNITS;
      states_at += row_step * UNITS, levels_at += row_step * MEANS;
    }
  }
  cluster_barrier();  // a block that has ended must not be sent to
}
