// All steps of a recurrent layer, forward, in one launch, for cells whose step has means over the units: staged_forward.cu
// where a warp computes the cell of one sequence, for the 32 units of its block, and other warps multiply.
//
// A cluster of CLUSTER blocks owns `share` sequences, at most LINES, each block the units from 32 x rank on and weights of
// these.  They are TILES sub-tiles, of up to 8 sequences: one is multiplied while another's means and states travel.  A step
// of one is
//
//   multiplying warps       wait for the states of its sequences | product | results to shared memory
//   the warp of a sequence  wait for these | stage 0 | exchange for means | stage 1 | ... | send its new states to all blocks
//
// Multiplying warp (octet, split) has 8 units and a part of the products' depth; a row of an operand is one gate of one
// unit, so that a thread has all gates of a unit.
//
//   registers  weights and sums of the product; of a sequence's warp the states, the means, the next step's input
//   shared     states of all sequences, results of this block's units, what means are made of from all blocks, biases and
//              vectors, barriers, more weights
//   global     as in staged_forward.cu
//
// What is exchanged lies in shared memory once, each sub-tile's by itself.  The warp of a sequence that has the means of step
// t knows that in each block the sequence's warp has passed its wait for results of step t, so that all warps that multiply
// there have read the states of step t: it may send those of step t + 1.  Who has these, of all sequences of the sub-tile,
// knows that their warps have read the results of step t in its own block, and that a sequence's warp in any block has read
// what its means of step t are made of: so results, and what means are made of, may be written again.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int SEATS = (LINES + TILES - 1) / TILES;  // sequences of a sub-tile
constexpr int MULTIPLYING = 4 * SPLITS, THREADS = 32 * WARPS;
constexpr int BLOCKS = (UNITS + 31) / 32, STRIPS = (RECURRENT + 1) / 2;
constexpr int OPERANDS = STRIPS * DEPTHS, STREAMED = OPERANDS - RESIDENT;
typedef Operands<OPERANDS, STREAMED> Weights;
constexpr int CHAINS = STRIPS < 4 ? 2 : 1;  // of products that wait for each other
constexpr int QUADS = (RECURRENT + 3) / 4;  // 16 bytes of a unit's results
constexpr int WEIGHT_WORDS = MULTIPLYING * STREAMED * 128, STATE_WORDS = SPLITS * DEPTHS * TILES * 64;
constexpr int ACROSS = 33;  // units of a row of results: who writes and who reads 16 bytes of each meets others in no bank
constexpr int RESULT_WORDS = TILES * SPLITS * QUADS * SEATS * ACROSS * 4;
constexpr int CONSTANT_WORDS = 32 * (LINKS + GATES + VECTORS);  // what no step changes of the block's units
constexpr int BESIDE = LINES | 1;  // sequences of a source: an odd number puts those of several sources into different banks
constexpr int SCALES = HALVES ? 8 * TILES : 0;  // of initial states
#if HALVES
constexpr float SCALE = STATE_SCALE;  // of the others
#else
constexpr float SCALE = 1.f;
#endif
// Where all are whole groups of four warps, those of cells leave registers to those that multiply, of what a thread has at
// first.
constexpr bool TRADED = WARPS % 4 == 0 && WARPS > 8;
constexpr int ALIKE = 65536 / THREADS / 8 * 8;
constexpr int LEFT = WARPS <= 12 ? 104 : WARPS > 16 ? 80 : SPLITS > 1 ? 88 : 96;
constexpr int OTHERS = (ALIKE * WARPS - LEFT * (WARPS - MULTIPLYING)) / MULTIPLYING / 8 * 8, MORE = OTHERS < 240 ? OTHERS : 240;
static_assert(4 * (WEIGHT_WORDS + STATE_WORDS + RESULT_WORDS + MEAN_WORDS + CONSTANT_WORDS + SCALES) + 8 * (TILES + STAGES * LINES) ==
                  SHARED,
              "tiling and kernel disagree");
static_assert(!TRADED || (LEFT <= ALIKE && MORE >= ALIKE && LEFT * (WARPS - MULTIPLYING) + MORE * MULTIPLYING <= ALIKE * WARPS),
              "who takes registers would wait for ever");
static_assert(SLICE == 32 && CLUSTER > 1 && BLOCKS <= CLUSTER && SEATS <= 8, "a thread has a unit of one sequence");
static_assert(WARPS >= MULTIPLYING + LINES && DEPTHS % 2 == 0, "a product takes the 32 units of a block at once");
static_assert(ROUNDS == 0 && LEAVES == RECURRENT && REDUCTIONS > 0 && !OPTIONS, "such steps have means alone");
static_assert(ELEMENT_BYTES == 2 || HALVES, "an operand's word is two units");

__device__ constexpr int pack_words(int stage) { return numbers(stage) <= 2 ? 2 : 4; }
// of a sequence and a source
__device__ __forceinline__ int slot_of(int stage, int source, int line) {
  return mean_offset(stage) + (source * BESIDE + line) * packs(stage) * pack_words(stage);
}

// Where a word of a sequence's states lies: [32 units, sub-tile, sequence, 4 times 16 bytes], so that what a block sends of a
// sequence is 64 bytes in a row; the 16 bytes of 8 sequences that a tensor core reads together are in 32 different banks.
__device__ __forceinline__ constexpr int state_at(int row, int word) {
  return ((word / 16 * TILES + row / 8) * 8 + row % 8) * 16 + (word / 4 % 4 ^ row % 8 / 2) * 4 + word % 4;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;  // [warp, strip and depth, lane]
  unsigned* const states = memory + WEIGHT_WORDS;
  float4* const results = (float4*)(states + STATE_WORDS);  // [sub-tile, split, 4 gates, sequence, unit]
  float* const slots = (float*)results + RESULT_WORDS;      // [stage, source, sequence, number]
  float* const constants = slots + MEAN_WORDS;              // [bias, bias of x, vector; unit of the block]
  float* const scales = constants + CONSTANT_WORDS;
  const unsigned base = shared_address(memory), barriers = shared_address(scales + SCALES);  // [sub-tile], [stage, sequence]

  const int warp = own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int octet = warp / SPLITS, split = warp % SPLITS;
  const int batch = (int)a.batch, clusters = gridDim.x / CLUSTER, share = (batch + clusters - 1) / clusters;
  const int first_place = blockIdx.x / CLUSTER * share, lines = max(0, min(share, batch - first_place));
  const int time = rank < BLOCKS && lines > 0 ? (int)a.time : 0;  // a block without units has nothing to wait for
  const Weight* const weights = a.weights[direction];
  // of all sub-tiles but the last as many sequences are there
  const int each = (lines + TILES - 1) / TILES;
  const auto lines_of = [&](int sub) { return TILES == 1 ? lines : max(0, min(each, lines - sub * each)); };

  const auto row_of = [&](int line) { return TILES == 1 ? line : line / each * 8 + line % each; };
  // What comes for a step: of a sub-tile's sequences all states, of a sequence what means are made of.
  const auto arriving = [&](int sub) { return (unsigned)(lines_of(sub) * BLOCKS * 64); };
  const auto summing = [&](int stage) { return (unsigned)(BLOCKS * packs(stage) * pack_words(stage) * 4); };
  const auto barrier_of = [&](int stage, int line) { return barriers + 8 * (TILES + stage * LINES + line); };
  // threads that a sub-tile's results pass from and to
  const auto together = [&](int sub) { return 32 * (MULTIPLYING + lines_of(sub)); };
  // Biases, then vectors; x's own bias goes with r's where the cell uses nothing but x + r.
  const auto constant_of = [&](int which, int unit) {
    const auto value = [&](const Element* at, int row) { return at != nullptr && unit < UNITS ? wide(at[row * UNITS + unit]) : 0.f; };
    if (which >= LINKS + GATES) return value(a.vectors[direction][which - LINKS - GATES], 0);
    float its = which < LINKS ? value(a.bias[direction], link_gate(which)) : 0.f;
#pragma unroll 1
    for (int g = 0; g < GATES; ++g)
      if (which == LINKS + g || which == sum_of(g)) its += value(a.x_bias[direction], g);
    return its;
  };
  // Zero and initial states, barriers; then all blocks are there.  Warps that multiply say it in their own branch, like the
  // others, since until the branches end they have other registers.
  const auto begin = [&] {
    for (int i = threadIdx.x; i < STATE_WORDS; i += THREADS) states[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < CONSTANT_WORDS; i += THREADS) constants[i] = constant_of(i / 32, (int)rank * 32 + i % 32);
    __syncthreads();
    bring_initial<WARPS>(a, direction, batch, first_place, lines, warp, lane, states, scales, row_of,
                         [](int row, int word) { return state_at(row, word); });
    if (threadIdx.x == 0) {
      for (int i = 0; i < TILES + STAGES * LINES; ++i) start_barrier(barriers + 8 * i, 1);
      barriers_started();
      for (int sub = 0; sub < TILES; ++sub) expect(barriers + 8 * sub, arriving(sub));
      for (int stage = 0; stage < STAGES; ++stage)
        for (int line = 0; line < LINES; ++line) expect(barrier_of(stage, line), summing(stage));
    }
    cluster_barrier();
  };

  if (warp < MULTIPLYING) {
    if constexpr (TRADED) take_more_registers<MORE>();
    uint4 resident[MOST(RESIDENT)];
    float unscale[RECURRENT];
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g) unscale[g] = 1.f;
#if HALVES
    const int own_unit = rank * 32 + octet * 8 + lane / 4;
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g)
      if (own_unit < UNITS) unscale[g] = scales_behind(weights)[g * UNITS + own_unit];
#endif
    const int first_column = split * DEPTHS * 8 * WORD_ELEMENTS;
    const auto weights_of = [&](int s, int m) {  // rows 0 to 7 of an operand are one gate, 8 to 15 the next
      const int unit = rank * 32 + octet * 8 + m / 2, gate = 2 * s + m % 2;
      const bool there = unit < UNITS && gate < RECURRENT;
      return WeightRow{weights + ((long long)gate * UNITS + unit) * WEIGHT_PITCH + first_column, there ? UNITS - first_column : 0};
    };
    bring_rows<Weights, STRIPS, DEPTHS, STREAMED, MULTIPLYING, 4 * WEIGHT_WORDS>(
        memory, warp, lane, [](int s, int depth) { return depth * STRIPS + s; }, weights_of,
        [&](int i, uint4 words) { resident[i] = words; },
        [&](int i, uint4 words) { streamed[(warp * STREAMED + i) * 32 + lane] = words; });
    begin();
    const unsigned all_columns = shared_address(states + state_at(lane % 8, split * DEPTHS * 8 + lane / 8 * 4));
    const int used = TILES == 1 || lines == 0 ? 1 : (lines + each - 1) / each;
    float4* const own_results = results + split * QUADS * SEATS * ACROSS + octet * 8 + lane / 4;
    for (int t = 0, sub = 0; t < time;) {
      if (t > 0) {
        wait(barriers + 8 * sub, (t - 1) % 2);
        if (threadIdx.x == 0) expect(barriers + 8 * sub, arriving(sub));
      }
      const unsigned columns = all_columns + sub * 512;
      float sums[CHAINS][STRIPS][4] = {};
#pragma unroll
      for (int d = 0; d < DEPTHS; d += 2) {
        const uint4 b = load_columns(columns + d * TILES * 256);
#pragma unroll
        for (int half = 0; half < 2; ++half)
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
        const int place = lane % 4 * 2 + e;
        float own[QUADS * 4] = {};
        float its = 1.f / SCALE;
        if (HALVES && t == 0 && a.initial[0] != nullptr) its = scales[sub * 8 + place];
#pragma unroll
        for (int g = 0; g < RECURRENT; ++g) {
          own[g] = sums[0][g / 2][e + g % 2 * 2];
          if constexpr (CHAINS > 1) own[g] += sums[CHAINS - 1][g / 2][e + g % 2 * 2];
          if constexpr (HALVES) own[g] = own[g] * unscale[g] * its;  // weights' first: states of any size overflow nothing
        }
        if (place < lines_of(sub))
#pragma unroll
          for (int q = 0; q < QUADS; ++q)
            own_results[((sub * SPLITS * QUADS + q) * SEATS + place) * ACROSS] = {own[q * 4], own[q * 4 + 1], own[q * 4 + 2],
                                                                                 own[q * 4 + 3]};
      }
      __syncwarp();
      arrive_at_barrier(1 + sub, together(sub));
      if (TILES == 1 || ++sub == used) sub = 0, ++t;
    }
  } else {
    if constexpr (TRADED) take_fewer_registers<LEFT>();
    __syncthreads();  // as `bring_rows` does
    begin();
    const int line = warp - MULTIPLYING;
    if (line < lines && rank < BLOCKS) {
      const int unit = (int)rank * 32 + lane, sequence = first_place + line, width = gridDim.y * UNITS;
      const int sub = TILES == 1 ? 0 : line / each, place = line - sub * each;
      const bool there = UNITS % 32 == 0 || unit < UNITS, reverse = direction == 1;
      const long long row_step = reverse ? -(long long)batch : batch, state_stride = a.time * batch * UNITS;
      long long row = (reverse && time > 0 ? (long long)(time - 1) * batch : 0) + sequence;  // of [time, batch], at the step
      const long long start = ((long long)direction * batch + sequence) * UNITS + unit;
      const auto gate_at = [&](long long row, int g) { return a.gates[direction] + (row * GATES + g) * UNITS + unit; };
      Gate x[GATES];
      float state[STATES];
      const auto load = [&](long long row, bool reads) {
#pragma unroll
        for (int g = 0; g < GATES; ++g) x[g] = reads ? *gate_at(row, g) : Gate{};
      };
      load(row, there && time > 0);
#pragma unroll
      for (int s = 0; s < STATES; ++s) state[s] = a.initial[s] != nullptr && there ? wide(a.initial[s][start]) : 0.f;
      const unsigned mean_peer = at_rank(base, lane < CLUSTER ? lane : 0);  // to which a thread sends of a mean
      const unsigned states_to = shared_address(states + state_at(sub * 8 + place, (int)rank * 16 + lane % 16)) - base;
      const float4* const own_results = results + (sub * SPLITS * QUADS * SEATS + place) * ACROSS + lane;
      const float *const own_bias = constants + lane, *const own_x_bias = own_bias + LINKS * 32, *const own_vectors = own_x_bias + GATES * 32;

      for (int t = 0; t < time; ++t) {
        float given[GATES], r[MOST(LINKS)], after[STATES], m[MOST(MEANS)];
        Values values;
#pragma unroll
        for (int g = 0; g < GATES; ++g) given[g] = wide_gate(x[g]) + (sum_of(g) >= 0 ? 0.f : own_x_bias[g * 32]);
        named_barrier(1 + sub, together(sub));
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
          float4 sum = {};
#pragma unroll
          for (int s = 0; s < SPLITS; ++s) {
            const float4 its = own_results[(s * QUADS + q) * SEATS * ACROSS];
            sum = s == 0 ? its : float4{sum.x + its.x, sum.y + its.y, sum.z + its.z, sum.w + its.w};
          }
          const float of[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
          for (int l = 0; l < LINKS; ++l)
            if (link_gate(l) / 4 == q) r[l] = of[link_gate(l) % 4] + own_bias[l * 32];
        }
        // a result of a product is stored as soon as it is known, an x that is saved on its own at the last exchange
        const auto store_known = [&](int stage) {
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            if (there && stage == (sum_of(g) < 0 ? STAGES - 2 : 0))
              *gate_at(row, g) = narrow_gate(sum_of(g) >= 0 ? given[g] + r[sum_of(g) >= 0 ? sum_of(g) : 0] : given[g]);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            if (there && stage == 0) a.apart[direction][(row * APART + i) * UNITS + unit] = narrow_gate(r[apart(i)]);
        };
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
          float v[MOST(VECTORS)], to[2][MOST(VALUES)] = {}, operand[1];
#pragma unroll
          for (int i = 0; i < VECTORS; ++i) v[i] = own_vectors[i * 32];
          run_stage(stage, given, r, state, v, nullptr, m, values, to[0], operand, after);
          if (packs(stage) > 0) {
            float data[4 * MOST(PACKS)] = {};
            summarise(stage, to, there, false, units_of(rank), lane, data);
            const unsigned to_slot = mean_peer + shared_address(slots + slot_of(stage, rank, line)) - base;
            const unsigned to_barrier = mean_peer + barrier_of(stage, line) - base;
#pragma unroll
            for (int pack = 0; pack < PACKS; ++pack) {
              const uint4 words = {__float_as_uint(data[4 * pack]), __float_as_uint(data[4 * pack + 1]),
                                   __float_as_uint(data[4 * pack + 2]), __float_as_uint(data[4 * pack + 3])};
              if (pack >= packs(stage) || lane >= BLOCKS) continue;
              if (pack_words(stage) == 2)
                send_pair(to_slot, to_barrier, {words.x, words.y});
              else
                send(to_slot + pack * 16, to_barrier, words);
            }
            __syncwarp();  // else the compiler stores before it sends
            // what nobody waits for
            if (stage == 0) load(row + row_step, there && t + 1 < time);
            if (SAVED) store_known(stage);
            wait(barrier_of(stage, line), t % 2);
            if (lane == 0) expect(barrier_of(stage, line), summing(stage));
            merge_at_once<BLOCKS>(stage, lane, [&](int source) { return slots + slot_of(stage, source, line); }, m);
          }
        }
#pragma unroll
        for (int s = 0; s < STATES; ++s) state[s] = after[s];
        if (t + 1 < time) {
          const float own = there ? SCALE * state[0] : 0.f, low = __shfl_sync(0xffffffffu, own, lane % 16 * 2);
          const unsigned word = operand_pair(low, __shfl_sync(0xffffffffu, own, lane % 16 * 2 + 1));
#pragma unroll
          for (int p = 0; p < (BLOCKS + 1) / 2; ++p)
            if (BLOCKS % 2 == 0 || 2 * p + lane / 16 < BLOCKS) {
              const unsigned peer = at_rank(base, 2 * p + lane / 16);
              send_word(peer + states_to, peer + barriers + 8 * sub - base, word);
            }
        }
        __syncwarp();
        if (there) a.y[row * width + direction * UNITS + unit] = narrow(after[0]);
        if constexpr (SAVED) {
#pragma unroll
          for (int s = 1; s < STATES; ++s)
            if (there) a.states[direction][(s - 1) * state_stride + row * UNITS + unit] = after[s];
          if (rank == 0 && lane == 0)
#pragma unroll
            for (int i = 0; i < MEANS; ++i) a.levels[direction][row * MEANS + i] = m[i];
        }
        if (t + 1 == time)
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (there) a.finals[s][start] = narrow(after[s]);
        row += row_step;
      }
    }
  }
  cluster_barrier();  // a block that has ended must not be sent to
}
