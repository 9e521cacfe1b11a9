// All steps of a recurrent layer, backward, in one launch, for cells whose step has several stages: the mirror of
// staged_forward.cu.  Its first lines say what a stage is, those of backward.cu who holds what.
//
// A step is: add up what has come for the first state | stage 0 | exchange | stage 1 | ... | the last stage | product.
// An exchange is of what means are made of (means.cu), or of sums of a product with the transposed weights of one gate,
// inside the step; the last product is of all gates that multiply the first state.
// Where registers allow, what the next step reads is asked for while the means travel.
//
//   registers  weights, sums of one product, and of the thread's items: gradients of the states, means, what stages keep
//   shared     gradients of results twice, arrived sums of each product, what means are made of, vectors, barriers, more
//              weights
//   global     as in backward.cu, and the means that forward saved
//
// What is exchanged lies in shared memory once where a step has several exchanges, twice where it has one.  Gradients of
// results lie there twice, in turns: who writes them has passed the block's barrier after the product before the last.
//
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int ROWS = 8 * TILES, CELLS = GROUPS * TILES, ITEMS = CELLS * SPLITS;
constexpr int PER = 2 / SPLITS, OWN = (ITEMS + WARPS - 1) / WARPS;
constexpr int STRIPS = CLUSTER * GROUPS, SHARE = (STRIPS + WARPS - 1) / WARPS, THREADS = 32 * WARPS;
constexpr int DEPTHS = RECURRENT * SLICE / (8 * WORD_ELEMENTS);
// of a sequence's gradients, and their groups' scales: 8 rows of 16 bytes are in 32 different banks
constexpr int STRIDE = DEPTHS * 8 + (HALVES && GROUPS > 4 ? 12 : 4);
static_assert(!HALVES || (ROUNDS == 0 && GROUPS <= 12), "each group's gradients have one scale, and there is room for it");
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT;
constexpr int WEIGHT_WORDS = WARPS * STREAMED * 128, GRADIENT_WORDS = ROWS * STRIDE, SUM_WORDS = CELLS * CLUSTER * 128;
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS;
constexpr unsigned ARRIVING = SUM_WORDS * 4;
constexpr int GATE_DEPTHS = SLICE / (8 * WORD_ELEMENTS);
// masks by gate, for two units of two sequences as a thread has its sums: 4 bits for each gate for [strip, tile, lane],
// or [gate, strip, tile, lane, 4]
constexpr int MASK_WORDS = NOISE == BY_GATE         ? STRIPS * TILES * 32
                           : NOISE == GIVEN_BY_GATE ? MASKED * STRIPS * TILES * 128 / WORD_ELEMENTS
                                                    : 0;
constexpr int COPIES = EXCHANGES > 1 ? 1 : 2;  // of what is exchanged
constexpr int ARRIVED_WORDS = COPIES * ((LEAVES > 0) + ROUNDS) * SUM_WORDS, BARRIERS = 1 + STAGES + ROUNDS;
constexpr int VECTOR_WORDS = VECTORS * SLICE;
// Where one warp of each scheduler computes cells, and has registers for it.  Then LSTM with layer norm in bfloat16 took
// 2.04 us a step on an H200, not 2.25 (256 units, batch 32).  Without means nothing is long enough for the loads.
constexpr bool READS_AHEAD = OWN * PER == 1 && ITEMS <= 4 && ELEMENT_BYTES == 2 && MEAN_WORDS > 0;
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
static_assert(4 * (WEIGHT_WORDS + ARRIVED_WORDS + 2 * GRADIENT_WORDS + COPIES * MEAN_WORDS + VECTOR_WORDS + MASK_WORDS) +
                      8 * COPIES * BARRIERS == SHARED,
              "tiling and kernel disagree");

// Whether a gate's weights are in a product: with the first state (0), or of a round inside the step.
__device__ constexpr bool is_in(int round, int gate) {
  return round == 0 ? leaf_of(gate) >= 0 : pull_gate(round - 1) == gate;
}

// Bytes that a barrier waits for: 0 of the first state, from 1 on the means of each stage, then the sums of each round.
__device__ constexpr unsigned arriving(int exchange) {
  return exchange == 0 || exchange > STAGES ? ARRIVING : (unsigned)(ROWS * CLUSTER * GROUPS * packs(exchange - 1) * 16);
}

struct Arguments {
  const Gate* gates[2];       // for each direction [time, batch, GATES x UNITS]: as forward saved them
  const Weight* weights[2];   // [RECURRENT x UNITS, UNITS], with HALVES as halve.cu makes them
  const Element* vectors[2][MOST(VECTORS)];
  const Element* initial[STATES];  // [directions, batch, UNITS], all or null
  const Element* y;                // [time, batch, directions x UNITS]
  const Gate* apart[2];            // [time, batch, APART x UNITS]
  const float* states[2];          // [STATES - 1, time, batch, UNITS]
  const Element* y_gradient;       // [time, batch, directions x UNITS] or null
  const Element* final_gradients[STATES];  // [directions, batch, UNITS] or null
  Element* gate_gradients[2];              // [time, batch, GATES x UNITS]
  Element* apart_gradients[2];             // [time, batch, APART x UNITS]
  Element* initial_gradients[STATES];      // [directions, batch, UNITS], all or null
  float* sums[2];                          // [clusters x TILES x SPLITS, SUMMED x UNITS]
  const float* levels[2];                  // [time, batch, LEVELS]: the means that forward saved
  long long time, batch;
#if OPTIONS
  Options o;
#else
  static constexpr Options o = {};
#endif
};

struct Read {  // what one thread reads for an item at a step: two units of each of PER sequences
  GatePair gates[PER][GATES], apart[PER][MOST(APART)];
  Pair y_gradient[PER], before[PER];
  float2 states[PER][MOST(STATES - 1)];
  float levels[PER][MOST(LEVELS)];
};

struct Item {
  Read read;
  float m[PER][MOST(MEANS)];  // those that forward saved come first
  bool within[PER], valid[PER], cut[PER];  // before the end; the step counts; no state came into it from the one before
  float2 zones[PER][STATES], noise[PER], inputs[PER][MOST(INPUTS)];
  Pair state_gradients[PER][STATES];
};

struct Given {  // what the cell's gradient reads of one unit of a sequence
  float x[GATES], r[MOST(LINKS)] = {}, before[STATES], v[MOST(VECTORS)], e[MOST(INPUTS)];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;                        // [warp, strip and depth, lane]
  float4* const arrived = (float4*)(memory + WEIGHT_WORDS);      // [round, copy, cell, source, spot]
  unsigned* const gradients = memory + WEIGHT_WORDS + ARRIVED_WORDS;  // [2, sequence, gate, unit]
  float* const slots = (float*)(gradients + 2 * GRADIENT_WORDS);
  float* const own_vectors = slots + COPIES * MEAN_WORDS;  // [vector, unit of the block]
  unsigned* const mask_bits = (unsigned*)(own_vectors + VECTOR_WORDS);
  Element* const masks = (Element*)mask_bits;
  const unsigned base = shared_address(memory);
  const unsigned barriers = shared_address(mask_bits + MASK_WORDS);

  // with `own_warp` masks by gate make the kernel of LSTM with a projection spill two words
  const int warp = NOISE == BY_GATE ? threadIdx.x / 32 : own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int batch = (int)a.batch, cluster = blockIdx.x / CLUSTER;
  const Weight* const weights = a.weights[direction];

  // rows 0 to 7 of an operand are a strip's even units, rows 8 to 15 the odd
  uint4 resident[MOST(RESIDENT)];
#if HALVES
  float unscale[SHARE][2];  // what scales of weights are the inverse of
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int strip = warp * SHARE + s, column = strip * 16 + lane / 4 * 2;
    const bool first = strip < STRIPS && rank * SLICE < UNITS && column < UNITS, second = first && column + 1 < UNITS;
    const float2 its = load_wide_pair(scales_behind(weights) + rank * UNITS + column, first, second);
    unscale[s][0] = its.x, unscale[s][1] = its.y;
  }
#endif
  const auto weights_of = [&](int depth) {
    const int own = (int)rank * SLICE + depth % SLICE;
    return WeightRow{weights + ((long long)(depth / SLICE) * UNITS + own) * WEIGHT_PITCH, UNITS - own};
  };
  bring_columns<First<RESIDENT>, STRIPS, SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS, SLICE>(
      memory, warp, lane, UNITS, [](int s, int d) { return s * DEPTHS + d; }, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) { streamed[(warp * STREAMED + i) * 32 + lane] = words; });

  for (int i = threadIdx.x; i < VECTOR_WORDS; i += THREADS) {
    const int own = rank * SLICE + i % SLICE;
    own_vectors[i] = own < UNITS ? wide(a.vectors[direction][i / SLICE][own]) : 0.f;
  }
  if constexpr (GATEWISE)
    for (int item = threadIdx.x; item < STRIPS * TILES * 32; item += THREADS) {
      unsigned bits = 0;
      for (int i = 0; i < MASKED * 4; ++i) {
        const int e = i % 4, its = item % 32, tile = item / 32 % TILES, strip = item / 32 / TILES;
        const int gate = i / 4, unit = strip * 16 + its / 4 * 2 + e / 2;
        const int place = cluster * ROWS + tile * 8 + its % 4 * 2 + e % 2;
        const bool there = place < batch && unit < UNITS;
        const long long sequence = there ? sequence_at(a, place) : 0;
        const float mask = there ? a.o.noise[direction][(gate * a.batch + sequence) * UNITS + unit] : 0.f;
        if constexpr (NOISE == GIVEN_BY_GATE) masks[(gate * STRIPS * TILES * 32 + item) * 4 + e] = narrow(mask);
        bits |= (mask != 0.f) << i;
      }
      if constexpr (NOISE == BY_GATE) mask_bits[item] = bits;
    }
  // steps of the longest sequence of the cluster; they are computed from the one that forward computed last
  const int time = LENGTHS ? longest(a, cluster * ROWS) : (int)a.time, width = gridDim.y * UNITS;
  const bool reverse = direction == 1;
  const int first_step = reverse || time == 0 ? 0 : time - 1;
  long long rows = rows_of(a, first_step), next_rows = rows_of(a, time > 1 ? reverse ? 1 : time - 2 : first_step);
  long long row_step = PACKED ? next_rows - rows : reverse ? batch : -(long long)batch;
  const long long begin = rows, state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  const bool has_output_gradient = a.y_gradient != nullptr;

  float carried[OWN][STATES][PER][2], summed[OWN][2][MOST(SUMMED)] = {};
  Item item[OWN];
  bool in[OWN][PER][2];  // whether the value of this sequence and unit is there
  long long sequence[OWN][PER];
  int ends[OWN][PER];  // steps of each sequence
  // of the step before, whose product arrives: what multiplied its operand, whether a reset came before it
  float factor[OWN][PER][2], held[OWN][PER][2] = {}, noise_sums[OWN][PER][2] = {}, reset_sums[OWN][STATES][PER][2] = {};
  float2 operand_before[OWN][PER];
  bool was_cut[OWN][PER];
  unsigned drawn[OWN][PER];
  const auto away = [&](int j, int b) { return ORDER ? sequence[j][b] - sequence[j][0] : b; };
  const Gate* gates_at[OWN];
  Element *gradients_at[OWN], *apart_gradients_at[OWN];
  long long outputs_at[OWN], apart_at[OWN], states_at[OWN], levels_at[OWN];
  // An item is 16 units x 8 sequences for a warp, or where SPLITS is 2 half of those: two threads with the same pair of
  // sequences then have one each, and add up the sums of half the sources for both (backward.cu).
  const auto cell_of = [&](int j) { return (warp + j * WARPS) / SPLITS; };
  const auto part_of = [&](int j) { return (warp + j * WARPS) % SPLITS; };
  const auto unit_of = [&](int j) { return (int)rank * SLICE + cell_of(j) / TILES * 16 + lane / 4 * 2; };
  const auto row_of = [&](int j, int b) {
    return cell_of(j) % TILES * 8 + (SPLITS == 1 ? lane % 4 * 2 + b : part_of(j) * 4 + lane % 4);
  };
  const auto start_of = [&](int j, int b) {  // in a tensor [directions, batch, UNITS]
    return ((long long)direction * batch + sequence[j][b]) * UNITS + unit_of(j);
  };
  // what options need of a step, whose rows begin at `at`
  const auto load_options = [&](int j, int b, int step, long long at) {
    const bool there = in[j][b][0] && (!LENGTHS || step < ends[j][b]), also = there && in[j][b][1];
    const long long row = at + sequence[j][b], from = row * UNITS + unit_of(j);
    Item& to = item[j];
    to.within[b] = there;
    to.valid[b] = there && (!MASK || a.o.mask[row]);
    if constexpr (RESET)
      to.cut[b] = reverse ? in[j][b][0] && step + 1 < ends[j][b] && a.o.reset[rows_of(a, step + 1) + sequence[j][b]]
                          : there && a.o.reset[row];
    if constexpr (NOISE == GIVEN) to.noise[b] = load_wide_pair(a.o.noise[direction] + from, there, also);
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      if (zoneout(s) == BY_MASK) to.zones[b][s] = load_wide_pair(a.o.zoneout[direction][s] + from, there, also);
      if constexpr (SEQUENCES) {
        const bool wanted = a.o.sequences[s] != nullptr;
        to.state_gradients[b][s] = load_pair(a.o.sequences[s] + row * width + direction * UNITS + unit_of(j),
                                             there && wanted, also && wanted);
      }
    }
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) to.inputs[b][i] = load_wide_pair(a.o.inputs[i] + from, there, also);
    if constexpr (DRAWS) drawn[j][b] = drawn_bits(a, unit_of(j), step, sequence[j][b], direction, there);
  };
  // what an item reads at the step that the places above have come to; `last`: nothing came before it
  const auto load = [&](int j, int step, bool last, Read& into) {
#pragma unroll
    for (int b = 0; b < PER; ++b) {
      const bool there = !LENGTHS || step < ends[j][b], first = there && in[j][b][0], second = there && in[j][b][1];
#pragma unroll
      for (int i = 0; i < LEVELS; ++i)
        into.levels[b][i] = first ? a.levels[direction][levels_at[j] + away(j, b) * LEVELS + i] : 0.f;
#pragma unroll
      for (int g = 0; g < GATES; ++g)
        into.gates[b][g] = load_gates(gates_at[j] + (away(j, b) * GATES + g) * UNITS, first, second);
#pragma unroll
      for (int i = 0; i < APART; ++i)
        into.apart[b][i] =
            load_gates(a.apart[direction] + apart_at[j] + (away(j, b) * APART + i) * UNITS, first, second);
      into.y_gradient[b] = load_pair(a.y_gradient + outputs_at[j] + away(j, b) * width,
                                        first && has_output_gradient, second && has_output_gradient);
      if constexpr (BEFORE) {
        const long long at = states_at[j] + away(j, b) * UNITS;
        into.before[b] = load_pair(a.o.before[direction] + at, first, second);
#pragma unroll
        for (int s = 1; s < STATES; ++s)
          into.states[b][s - 1] =
              load_wide_pair(a.states[direction] + at + (s - 1) * state_stride, first, second);
      } else {
        const bool given = a.initial[0] != nullptr;
        if (last)
          into.before[b] = load_pair(a.initial[0] + start_of(j, b), first && given, second && given);
        else
          into.before[b] = load_pair(a.y + outputs_at[j] + (row_step + away(j, b)) * width, first, second);
        // Initial states may have two bytes and be made wide.  They then take the place of what is loaded: two branches
        // that give the one or the other meet in a move, and a move waits for the load, before the product.
#pragma unroll
        for (int s = 1; s < STATES; ++s) {
          into.states[b][s - 1] = load_wide_pair(
              a.states[direction] + states_at[j] + (s - 1) * state_stride + (row_step + away(j, b)) * UNITS,
              first && !last, second && !last);
          if (last)
            into.states[b][s - 1] =
                wide_pair(load_pair(a.initial[s] + start_of(j, b), first && given, second && given));
        }
      }
    }
  };
  const auto begin_item = [&](int j) {  // with what has been read
#pragma unroll
    for (int b = 0; b < PER; ++b)
#pragma unroll
      for (int i = 0; i < LEVELS; ++i) item[j].m[b][i] = item[j].read.levels[b][i];
  };
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const int unit = unit_of(j), place = cluster * ROWS + row_of(j, 0);
    const bool own = warp + j * WARPS < ITEMS;
#pragma unroll
    for (int b = 0; b < PER; ++b) {
      sequence[j][b] = place + b < batch ? sequence_at(a, place + b) : place + b;
      ends[j][b] = LENGTHS && place + b < batch ? min(time, (int)a.o.lengths[sequence[j][b]]) : time;
    }
    const long long row = sequence[j][0];
    gates_at[j] = a.gates[direction] + (begin + row) * GATES * UNITS + unit;
    gradients_at[j] = a.gate_gradients[direction] + (begin + row) * GATES * UNITS + unit;
    apart_gradients_at[j] = a.apart_gradients[direction] + (begin + row) * APART * UNITS + unit;
    outputs_at[j] = (begin + row) * width + direction * UNITS + unit;
    apart_at[j] = (begin + row) * APART * UNITS + unit;
    states_at[j] = (begin + row) * UNITS + unit;
    levels_at[j] = (begin + row) * LEVELS;
#pragma unroll
    for (int b = 0; b < PER; ++b) {
      in[j][b][0] = own && place + b < batch && unit < UNITS;
      in[j][b][1] = own && place + b < batch && unit + 1 < UNITS;
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        const bool given = a.final_gradients[s] != nullptr;
        const float2 value =
            wide_pair(load_pair(a.final_gradients[s] + start_of(j, b), given && in[j][b][0], given && in[j][b][1]));
        carried[j][s][b][0] = value.x;
        carried[j][s][b][1] = value.y;
      }
    }
    load(j, first_step, time == 1, item[j].read);
    begin_item(j);
    if constexpr (OPTIONS)
#pragma unroll
      for (int b = 0; b < PER; ++b) {
        load_options(j, b, first_step, rows);
        if constexpr (NOISE == HELD)
          item[j].noise[b] = load_wide_pair(a.o.noise[direction] + sequence[j][b] * UNITS + unit, in[j][b][0], in[j][b][1]);
      }
  }

#if CLUSTER > 1
  if (threadIdx.x == 0) {
    for (int i = 0; i < COPIES * BARRIERS; ++i) start_barrier(barriers + 8 * i, 1);
    barriers_started();
    for (int i = 0; i < COPIES * BARRIERS; ++i) expect(barriers + 8 * i, arriving(i / COPIES));
  }
  cluster_barrier();
#else
  __syncthreads();
#endif

  const bool cells = warp < ITEMS;  // the warp computes some: the same for all of it
  const auto await = [&](int exchange, int copy, int completed) {
#if CLUSTER > 1
    wait(barriers + 8 * (exchange * COPIES + copy), completed / COPIES % 2);
#endif
  };
  // of the next step what was awaited before stage 0 (-1) or after a stage, once this warp keeps nobody waiting
  const auto expect_more = [&](int t, int stage, int copy) {
#if CLUSTER > 1
    if (threadIdx.x != 0) return;
    const auto expect_one = [&](int exchange) {
      expect(barriers + 8 * (exchange * COPIES + copy), arriving(exchange));
    };
    if (stage < 0 && LEAVES > 0 && t > 0) expect_one(0);
    if (stage >= 0 && packs(stage) > 0) expect_one(1 + stage);
#pragma unroll
    for (int round = 1; round <= ROUNDS; ++round)
      if (stage >= 0 && round_stage(round) == stage) expect_one(STAGES + round);
#endif
  };
  const auto sums_at = [&](int round, int copy) {  // where the sums of a round lie, as float4 of `arrived`
    return ((round == 0 ? 0 : round - 1 + (LEAVES > 0)) * COPIES + copy) * CELLS * CLUSTER * 32;
  };
  const auto slots_at = [&](int stage, int copy) { return (copy * MEAN_WORDS + mean_offset(stage)) * 4; };  // bytes
  const auto place_of = [&](int j, int b) { return cell_of(j) % TILES * 8 + (part_of(j) + b) * 4 + lane % 4; };
  // where among a source's sums those of a thread's pairs of units and sequences lie: apart for the two halves of the
  // sources, so that 8 threads in a row read from different banks
  const auto spot_of = [&](int source, int units, int pair) {
    return units * 4 + (pair ^ (SPLITS == 2 && source >= CLUSTER / 2 ? 2 : 0));
  };
  const auto gather = [&](int round, int copy, int j, float (&sums)[PER][2]) {
    constexpr int SHARES = SPLITS <= CLUSTER ? SPLITS : 1, EACH = CLUSTER / SHARES;  // sources that a thread adds up
    const int half = SPLITS == 1 ? 0 : lane % 2, pair = SPLITS == 1 ? lane % 4 : part_of(j) * 2 + lane % 4 / 2;
    const int first = SHARES == 1 ? 0 : half * EACH;
    const float4* const from = arrived + sums_at(round, copy) + (cell_of(j) * CLUSTER + first) * 32 +
                               spot_of(SHARES == 1 ? 0 : first, lane / 4, pair);
    float4 sum = from[0];
#pragma unroll
    for (int source = 1; source < EACH; ++source) {
      const float4 part = from[source * 32];
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    sums[0][0] = half ? sum.z : sum.x, sums[0][1] = half ? sum.w : sum.y;
    if constexpr (SPLITS == 1) sums[PER - 1][0] = sum.z, sums[PER - 1][1] = sum.w;
    if constexpr (SHARES > 1) {
      sums[0][0] += __shfl_xor_sync(0xffffffffu, half ? sum.x : sum.z, 1);
      sums[0][1] += __shfl_xor_sync(0xffffffffu, half ? sum.y : sum.w, 1);
    }
  };
  const auto put_gradient = [&](int turn, int gate, int j, int b, float first, float second) {
    const int group = cell_of(j) / TILES;
    unsigned* const to = gradients + turn * GRADIENT_WORDS + row_of(j, b) * STRIDE +
                         (gate * SLICE + group * 16 + lane / 4 * 2) / WORD_ELEMENTS;
#if HALVES
    *to = half_pair(first, second);
#elif ELEMENT_BYTES == 2
    *to = narrow_pair(first, second);
#else
    to[0] = operand(first), to[1] = operand(second);
#endif
  };
  // what a group's gradients of a sequence are multiplied with, of which `most` is the largest in this thread
  const auto scale_gradients = [&](int turn, int j, int b, float most) {
#if HALVES
#pragma unroll
    for (int away = 4; away < 32; away *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, away));
    if (lane / 4 == 0)
      gradients[turn * GRADIENT_WORDS + row_of(j, b) * STRIDE + DEPTHS * 8 + cell_of(j) / TILES] = __float_as_uint(unscale_of(most));
    return scale_of(unscale_of(most));
#else
    return 1.f;
#endif
  };

  const auto given_of = [&](int j, int b, int u) {
    Given given;
    const Read& read = item[j].read;
#pragma unroll
    for (int g = 0; g < GATES; ++g) given.x[g] = half_of(wide_gates(read.gates[b][g]), u);
#pragma unroll
    for (int i = 0; i < APART; ++i) given.r[apart(i)] = half_of(wide_gates(read.apart[b][i]), u);
    given.before[0] = half_of(wide_pair(read.before[b]), u);
#pragma unroll
    for (int s = 1; s < STATES; ++s) given.before[s] = half_of(read.states[b][s - 1], u);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      given.v[i] = own_vectors[i * SLICE + cell_of(j) / TILES % GROUPS * 16 + lane / 4 * 2 + u];
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) given.e[i] = half_of(item[j].inputs[b][i], u);
    return given;
  };
  const auto noise_of = [&](int j, int b, int u) {  // what multiplied each operand of the step that has a mask
    if constexpr (NOISE == HELD || NOISE == GIVEN) return half_of(item[j].noise[b], u);
    if constexpr (NOISE == DRAWN) return drawn[j][b] >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
    return 1.f;  // masks by gate are in the product
  };
  const auto arrive = [&](int t, long long was) {  // t: steps done before; the rows of the last of them begin at `was`
    const int copy = COPIES > 1 ? t % 2 : 0;
    if constexpr (LEAVES > 0) {
      if (CLUSTER == 1) __syncthreads();
      await(0, copy, t - 1);
    }
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      if (OWN * WARPS > ITEMS && warp + j * WARPS >= ITEMS) break;
      float sums[PER][2] = {};
      if constexpr (LEAVES > 0) gather(0, copy, j, sums);
#pragma unroll
      for (int b = 0; b < PER; ++b) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          carried[j][0][b][u] += NOISE && !GATEWISE ? factor[j][b][u] * sums[b][u] : sums[b][u];
          if constexpr (NOISE_GRADIENT && LEAVES > 0) noise_sums[j][b][u] += sums[b][u] * half_of(operand_before[j][b], u);
          if (RESET && was_cut[j][b])
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
              if constexpr (RESET_TO) reset_sums[j][s][b][u] += carried[j][s][b][u];
              carried[j][s][b][u] = 0.f;
            }
        }
        if (NOISE_GRADIENT && NOISE == GIVEN) {
          const bool there = in[j][b][0] && (!PACKED || (reverse ? t - 1 : time - t) < ends[j][b]);
          store_wide_pair(a.o.noise_gradients[direction] + (was + sequence[j][b]) * UNITS + unit_of(j),
                          noise_sums[j][b][0], noise_sums[j][b][1], there, there && in[j][b][1]);
          noise_sums[j][b][0] = noise_sums[j][b][1] = 0.f;
        }
      }
    }
  };

  const unsigned columns = shared_address(gradients) + ((lane % 8) * STRIDE + lane / 8 * 4) * 4;
  // of two gates, of the same 16 units
  const unsigned columns_of_two = columns + lane / 16 * (GATE_DEPTHS - 1) * 32;
  const bool wants_initial = a.initial_gradients[0] != nullptr || RESET_TO || NOISE_GRADIENT;
  long long rows_before = rows;
  // sums of a product with the transposed weights of a round's gates, to the blocks that own their units
  const auto multiply_round = [&](int round, int copy, int turn) {
#pragma unroll
    for (int i0 = 0; i0 < SHARE; i0 += CHUNK) {
      float sums[CHUNK][TILES][4] = {}, all[CHUNK][TILES][4] = {};
#if HALVES
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {  // whose gradients of a sequence have a scale of their own
        float factors[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            factors[n][e] = __uint_as_float(
                gradients[turn * GRADIENT_WORDS + (n * 8 + lane % 4 * 2 + e) * STRIDE + DEPTHS * 8 + group]);
        const auto add_up = [&](int c, int n, int gate) {  // its masks say what of a gate's sums counts
          const int strip = min(warp * SHARE + i0 + c, STRIPS - 1);
          const unsigned bits = GATEWISE ? mask_bits[(strip * TILES + n) * 32 + lane] >> gate * 4 : 0u;
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // in this order, which neither weights nor gradients of any size overflow
            const float sum = sums[c][n][e] * unscale[min(i0 + c, SHARE - 1)][e / 2] * factors[n][e % 2];
            if constexpr (!GATEWISE)
              all[c][n][e] += sum;
            else
              all[c][n][e] += bits >> e & 1 ? a.o.noise_scale * sum : 0.f;
            sums[c][n][e] = 0.f;
          }
        };
#pragma unroll
        for (int g = 0; g < RECURRENT; g += 2) {
          uint4 b[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const unsigned at = columns_of_two + (turn * GRADIENT_WORDS + n * 8 * STRIDE + (g * GROUPS + group) * 8) * 4;
            b[n] = g + 1 < RECURRENT ? load_columns(at) : load_half_columns(at);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (g + half < RECURRENT)
#pragma unroll
              for (int c = 0; c < CHUNK; ++c)
                if (i0 + c < SHARE) {
                  const int i = (i0 + c) * DEPTHS + (g + half) * GROUPS + group;
                  const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0]
                                                           : streamed[(warp * STREAMED + i - RESIDENT) * 32 + lane]);
#pragma unroll
                  for (int n = 0; n < TILES; ++n) {
                    multiply(sums[c][n], weight, right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y));
                    if constexpr (GATEWISE) add_up(c, n, g + half);
                  }
                }
        }
        if constexpr (!GATEWISE)
#pragma unroll
          for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int n = 0; n < TILES; ++n) add_up(c, n, 0);
      }
#else
#pragma unroll
      for (int d = 0; d < DEPTHS; d += 2) {
        if (!is_in(round, d / GATE_DEPTHS) && !is_in(round, (d + 1) / GATE_DEPTHS)) continue;
        uint4 b[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const unsigned at = columns + (unsigned)turn * GRADIENT_WORDS * 4 + (n * 8 * STRIDE + d * 8) * 4;
          b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (d + half < DEPTHS && is_in(round, (d + half) / GATE_DEPTHS)) {
            Right right[TILES];
#pragma unroll
            for (int n = 0; n < TILES; ++n) right[n] = right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#pragma unroll
            for (int c = 0; c < CHUNK; ++c)
              if (i0 + c < SHARE) {
                const int i = (i0 + c) * DEPTHS + d + half;
                const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0]
                                                         : streamed[(warp * STREAMED + i - RESIDENT) * 32 + lane]);
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                  multiply(sums[c][n], weight, right[n]);
                  if constexpr (GATEWISE)
                    if ((d + half + 1) % GATE_DEPTHS == 0) {
                      const int gate = (d + half) / GATE_DEPTHS, strip = min(warp * SHARE + i0 + c, STRIPS - 1);
                      const int item = (strip * TILES + n) * 32 + lane;
                      const unsigned bits = NOISE == BY_GATE ? mask_bits[item] >> gate * 4 : 0u;
                      const Element* const mask = masks + (gate * STRIPS * TILES * 32 + item) * 4;
#pragma unroll
                      for (int e = 0; e < 4; ++e) {
                        if (!NOISE_INSIDE && gate >= MASKED)
                          all[c][n][e] += sums[c][n][e];
                        else if constexpr (NOISE == BY_GATE)
                          all[c][n][e] += bits >> e & 1 ? a.o.noise_scale * sums[c][n][e] : 0.f;
                        else
                          all[c][n][e] += a.o.noise_scale * wide(mask[e]) * sums[c][n][e];
                        sums[c][n][e] = 0.f;
                      }
                    }
                }
              }
          }
      }
#endif
#pragma unroll
      for (int c = 0; c < CHUNK; ++c) {
        const int strip = warp * SHARE + i0 + c;
        if (i0 + c >= SHARE || strip >= STRIPS) break;
#if CLUSTER > 1
        const unsigned target = at_rank(base, strip / GROUPS);
#endif
#pragma unroll
        for (int n = 0; n < TILES; ++n) {  // the two units of one sequence, then of the next
          const float(&sum)[4] = GATEWISE || HALVES ? all[c][n] : sums[c][n];
          const int slot = sums_at(round, copy) + ((strip % GROUPS * TILES + n) * CLUSTER + rank) * 32 + spot_of(CLUSTER > 1 ? rank : 0, lane / 4, lane % 4);
#if CLUSTER > 1
          const uint4 data = {__float_as_uint(sum[0]), __float_as_uint(sum[2]), __float_as_uint(sum[1]),
                              __float_as_uint(sum[3])};
          const int exchange = round == 0 ? 0 : STAGES + round;
          send(target + WEIGHT_WORDS * 4 + slot * 16, target + barriers - base + 8 * (exchange * COPIES + copy), data);
#else
          arrived[slot] = {sum[0], sum[2], sum[1], sum[3]};
#endif
        }
      }
    }
  };
  int turn = 0;  // which of the two places gradients of results are written to
  for (int t = 0; t < time; ++t) {
    const int step_now = reverse ? t : time - 1 - t, next = reverse ? t + 1 : time - 2 - t;
    const int copy = COPIES > 1 ? t % 2 : 0;
    Read upcoming[MOST(READS_AHEAD * OWN)];
    const auto later = [&](int j) -> Read& { return READS_AHEAD ? upcoming[READS_AHEAD ? j : 0] : item[j].read; };
    const auto read_on = [&] {
      if (!cells || t + 1 == time) return;
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        gates_at[j] += row_step * GATES * UNITS;
        outputs_at[j] += row_step * width;
        apart_at[j] += row_step * APART * UNITS;
        states_at[j] += row_step * UNITS;
        levels_at[j] += row_step * LEVELS;
        load(j, next, t + 2 == time, later(j));
      }
    };
    if (t > 0) arrive(t, rows_before);
    rows_before = rows;

    float dx[OWN][PER][2][GATES], dr[OWN][PER][2][MOST(LINKS)], d[OWN][PER][2][STATES], stayed[OWN][PER][2][STATES];
    float to_s[OWN][PER][2][STATES], to_e[OWN][PER][2][MOST(INPUTS)], to_zones[OWN][PER][2][STATES], q[OWN][PER][2][MOST(ROUNDS)];
    Pair entered[OWN][PER];
    Values values[OWN][PER][2];
    if (cells) {
#pragma unroll
      for (int j = 0; j < OWN; ++j)
#pragma unroll
        for (int b = 0; b < PER; ++b) {
          const float2 output = wide_pair(item[j].read.y_gradient[b]);
          const bool valid = !MARKED || item[j].valid[b];
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            float(&to)[STATES] = d[j][b][u];
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
              if constexpr (SEQUENCES) carried[j][s][b][u] += half_of(wide_pair(item[j].state_gradients[b][s]), u);
              to[s] = carried[j][s][b][u];
            }
            to[0] += half_of(output, u);
            if constexpr (MASK) {  // what came to an output that was held goes to the step that it was held from
              held[j][b][u] += half_of(output, u);
              to[0] = carried[j][0][b][u] + held[j][b][u];
              if (valid) held[j][b][u] = 0.f;
            }
#pragma unroll
            for (int s = 0; s < STATES; ++s) {  // what zoneout kept
              stayed[j][b][u][s] = 0.f;
              if constexpr (OPTIONS) {
                const float share =
                    zoneout(s) == BY_MASK ? half_of(item[j].zones[b][s], u) : a.o.zoneout_share[s];
                to_zones[j][b][u][s] = to[s];
                const bool keeps = zoneout(s) == AT_RANDOM && drawn[j][b] >> (u * 4 + s) & 1;
                if (zoneout(s) == BY_SHARE || zoneout(s) == BY_MASK)
                  stayed[j][b][u][s] = share * to[s], to[s] -= stayed[j][b][u][s];
                if (keeps) stayed[j][b][u][s] = to[s], to[s] = 0.f;
              }
            }
          }
        }
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      float to[OWN][PER][2][MOST(VALUES)], operands[OWN][PER][2][MOST(ROUNDS)];
      if (cells) {
#pragma unroll
        for (int j = 0; j < OWN; ++j)
#pragma unroll
          for (int b = 0; b < PER; ++b)
#pragma unroll
            for (int u = 0; u < 2; ++u) {
              const Given given = given_of(j, b, u);
              const bool there = in[j][b][u] && (!MARKED || item[j].valid[b]);
              float after[STATES];  // written after the first stage
              run_stage(stage, given.x, given.r, given.before, given.v, given.e, item[j].m[b], values[j][b][u],
                        to[j][b][u], operands[j][b][u], d[j][b][u], q[j][b][u], there, dx[j][b][u], dr[j][b][u],
                        to_s[j][b][u], summed[j][u] + SUMMED - VECTORS, to_e[j][b][u], after);
#if ZONEOUT_GRADIENT
              if (stage == 0)
#pragma unroll
                for (int s = 0; s < STATES; ++s)
                  to_zones[j][b][u][s] = there ? to_zones[j][b][u][s] * (given.before[s] - after[s]) : 0.f;
#endif
            }
        if (packs(stage) > 0)
#pragma unroll
          for (int j = 0; j < OWN; ++j) {
            if (OWN * WARPS > ITEMS && warp + j * WARPS >= ITEMS) break;
            const int source = rank * GROUPS + cell_of(j) / TILES, unit = unit_of(j);
#pragma unroll
            for (int b = 0; b < PER; ++b) {
              float data[4 * MOST(PACKS)] = {};
              summarise(stage, to[j][b], unit < UNITS, unit + 1 < UNITS, units_of(source), lane, data);
              const int slot = slots_at(stage, copy) + slot_of(stage, source, place_of(j, b));
              send_means(stage, data, shared_address(slots) - base + slot, memory,
                         barriers - base + 8 * ((1 + stage) * COPIES + copy), true, lane);
            }
          }
      }
      int asked = 0;
#pragma unroll
      for (int round = 1; round <= ROUNDS; ++round)
        if (round_stage(round) == stage) {
          if (cells)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
              if (OWN * WARPS > ITEMS && warp + j * WARPS >= ITEMS) break;
#pragma unroll
              for (int b = 0; b < PER; ++b) {
                const bool valid = !MARKED || item[j].valid[b];
                const int which = asked < ROUNDS ? asked : 0;
                put_gradient(turn, pull_gate(round - 1), j, b, in[j][b][0] && valid ? operands[j][b][0][which] : 0.f,
                             in[j][b][1] && valid ? operands[j][b][1][which] : 0.f);
              }
            }
          ++asked;
          __syncthreads();
          multiply_round(round, copy, turn);
          turn = 1 - turn;
        }
      if (stage + 1 < STAGES) expect_more(t, stage - 1, copy);
      if (READS_AHEAD && stage == 0) read_on();  // while the means travel
      if (CLUSTER == 1 && stage + 1 < STAGES) __syncthreads();
      if (cells) {
        if (packs(stage) > 0) {
          await(1 + stage, copy, t);
#pragma unroll
          for (int j = 0; j < OWN; ++j) {
            if (OWN * WARPS > ITEMS && warp + j * WARPS >= ITEMS) break;
#pragma unroll
            for (int b = 0; b < PER; ++b)
              receive(stage, (const float4*)((const char*)slots + slots_at(stage, copy)), place_of(j, b), lane,
                    item[j].m[b]);
          }
        }
#pragma unroll
        for (int round = 1; round <= ROUNDS; ++round)
          if (round_stage(round) == stage) {
            await(STAGES + round, copy, t);
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
              if (OWN * WARPS > ITEMS && warp + j * WARPS >= ITEMS) break;
              float sums[PER][2];
              gather(round, copy, j, sums);
#pragma unroll
              for (int b = 0; b < PER; ++b)
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                  q[j][b][u][round - 1] = NOISE_INSIDE ? noise_of(j, b, u) * sums[b][u] : sums[b][u];
                  if (NOISE_GRADIENT && NOISE_INSIDE && in[j][b][u] && (!MARKED || item[j].valid[b]))
                    noise_sums[j][b][u] += sums[b][u] * entered_in(values[j][b][u], round - 1);
                }
            }
          }
      }
    }
    if (cells) {
#pragma unroll
      for (int j = 0; j < OWN; ++j)
#pragma unroll
        for (int b = 0; b < PER; ++b) {
          const bool valid = !MARKED || item[j].valid[b];
          const float2 h = wide_pair(item[j].read.before[b]);
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const bool there = in[j][b][u] && valid;  // a sum never takes what the cell makes of nothing
#pragma unroll
            for (int s = 0; s < STATES; ++s)
              if (valid) carried[j][s][b][u] = to_s[j][b][u][s] + stayed[j][b][u][s];
            if constexpr (MARKED) {
#pragma unroll
              for (int g = 0; g < GATES; ++g) dx[j][b][u][g] = valid ? dx[j][b][u][g] : 0.f;
#pragma unroll
              for (int i = 0; i < INPUTS; ++i) to_e[j][b][u][i] = valid ? to_e[j][b][u][i] : 0.f;
            }
            if constexpr (NOISE && !GATEWISE) factor[j][b][u] = valid ? noise_of(j, b, u) : 0.f;
#pragma unroll
            for (int l = 0; l < LINKS; ++l) dr[j][b][u][l] = there ? dr[j][b][u][l] : 0.f;
            if constexpr (BIAS) {
#pragma unroll
              for (int g = 0; g < GATES; ++g) summed[j][u][g] += there ? dx[j][b][u][g] : 0.f;
#pragma unroll
              for (int i = 0; i < APART; ++i) summed[j][u][GATES + i] += dr[j][b][u][apart(i)];
            }
          }
          if constexpr (NOISE && !GATEWISE)
            entered[j][b] = narrow_pair(h.x * factor[j][b][0], h.y * factor[j][b][1]), operand_before[j][b] = h;
          if constexpr (RESET) was_cut[j][b] = item[j].cut[b];
        }
      if constexpr (LEAVES > 0)
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          if (OWN * WARPS > ITEMS && warp + j * WARPS >= ITEMS) break;
#pragma unroll
          for (int b = 0; b < PER; ++b) {
            float most = 0.f;
#pragma unroll
            for (int l = 0; l < LEAVES; ++l) most = fmaxf(most, fmaxf(fabsf(dr[j][b][0][l]), fabsf(dr[j][b][1][l])));
            const float scale = scale_gradients(turn, j, b, most);
#pragma unroll
            for (int l = 0; l < LEAVES; ++l)
              put_gradient(turn, leaf_gate(l), j, b, scale * dr[j][b][0][l], scale * dr[j][b][1][l]);
          }
        }
    }
    const bool goes_on = LEAVES > 0 && (t + 1 < time || wants_initial);
    if (goes_on) __syncthreads();
    if (!READS_AHEAD) read_on();
    if (cells && t + 1 < time)
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        if (READS_AHEAD) item[j].read = later(j);
        begin_item(j);
      }
    if (goes_on) {
      multiply_round(0, COPIES > 1 ? 1 - copy : 0, turn);
      turn = 1 - turn;
    }
    expect_more(t, STAGES - 2, copy), expect_more(t, STAGES - 1, copy);

    if (cells) {  // what nobody waits for
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
#pragma unroll
        for (int b = 0; b < PER; ++b) {
          const bool shown = !PACKED || step_now < ends[j][b], first = shown && in[j][b][0], second = shown && in[j][b][1];
          const auto beyond = away(j, b);
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            store_pair(gradients_at[j] + (beyond * GATES + g) * UNITS, dx[j][b][0][g], dx[j][b][1][g], first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_pair(apart_gradients_at[j] + (beyond * APART + i) * UNITS, dr[j][b][0][apart(i)],
                       dr[j][b][1][apart(i)], first, second);
          if constexpr (OPTIONS) {
            const long long from = (rows + sequence[j][b]) * UNITS + unit_of(j);
            if constexpr (NOISE && !GATEWISE) {
              const float2 pair = wide_pair(entered[j][b]);
              store_pair(a.o.entered[direction] + from, pair.x, pair.y, first, second);
            }
#pragma unroll
            for (int s = 0; s < STATES; ++s)
              if (ZONEOUT_GRADIENT && zoneout(s) == BY_MASK)
                store_wide_pair(a.o.zoneout_gradients[direction][s] + from, to_zones[j][b][0][s], to_zones[j][b][1][s],
                                first, second);
#pragma unroll
            for (int i = 0; i < INPUTS; ++i)
              store_wide_pair(a.o.input_gradients[direction][i] + from, to_e[j][b][0][i], to_e[j][b][1][i],
                              first, second);
            if (t + 1 < time) load_options(j, b, next, next_rows);
          }
          if (t + 1 + AHEAD < time && first && !PACKED) {
            const auto far = AHEAD * row_step + beyond;
            if constexpr (DRAWS)
              prefetch(drawn_place(a, unit_of(j), next + (reverse ? AHEAD : -AHEAD), sequence[j][b], direction));
#pragma unroll
            for (int g = 0; g < GATES; ++g) prefetch(gates_at[j] + (far * GATES + g) * UNITS);
#pragma unroll
            for (int i = 0; i < APART; ++i)
              prefetch(a.apart[direction] + apart_at[j] + (far * APART + i) * UNITS);
            if (has_output_gradient) prefetch(a.y_gradient + outputs_at[j] + far * width);
            if constexpr (BEFORE)
              prefetch(a.o.before[direction] + states_at[j] + far * UNITS);
            else
              prefetch(a.y + outputs_at[j] + far * width);
#pragma unroll
            for (int s = 1; s < STATES; ++s)
              prefetch(a.states[direction] + states_at[j] + (s - 1) * state_stride + far * UNITS);
          }
        }
        gradients_at[j] += row_step * GATES * UNITS;
        apart_gradients_at[j] += row_step * APART * UNITS;
      }
    }
    if constexpr (OPTIONS) {
      rows = next_rows;
      if (t + 2 < time) next_rows = rows_of(a, reverse ? next + 1 : next - 1);
      if constexpr (PACKED) row_step = next_rows - rows;
    }
  }

  if (wants_initial) {
    if (!LENGTHS || time > 0) arrive(time, rows_before);
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
      for (int b = 0; b < PER; ++b)
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
          const bool given = a.initial_gradients[s] != nullptr;
          store_pair(a.initial_gradients[s] + start_of(j, b), carried[j][s][b][0], carried[j][s][b][1],
                     given && in[j][b][0], given && in[j][b][1]);
          if constexpr (RESET_TO)
            store_pair(a.o.reset_gradients[s] + start_of(j, b), reset_sums[j][s][b][0], reset_sums[j][s][b][1],
                       in[j][b][0], in[j][b][1]);
          if (NOISE_GRADIENT && NOISE == HELD && s == 0)
            store_wide_pair(a.o.noise_gradients[direction] + sequence[j][b] * UNITS + unit_of(j), noise_sums[j][b][0],
                            noise_sums[j][b][1], in[j][b][0], in[j][b][1]);
        }
  }
  if constexpr (LENGTHS && !PACKED)  // past the end of all of the cluster's sequences
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
      for (int b = 0; b < PER; ++b)
        for (long long t = time; t < a.time; ++t) {
          const long long row = t * batch + sequence[j][b], from = row * UNITS + unit_of(j);
          const bool first = in[j][b][0], second = in[j][b][1];
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            store_pair(a.gate_gradients[direction] + (row * GATES + g) * UNITS + unit_of(j), 0.f, 0.f, first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_pair(a.apart_gradients[direction] + (row * APART + i) * UNITS + unit_of(j), 0.f, 0.f, first, second);
          if constexpr (NOISE && !GATEWISE)
            store_pair(a.o.entered[direction] + from, 0.f, 0.f, first, second);
          if (NOISE_GRADIENT && NOISE == GIVEN)
            store_wide_pair(a.o.noise_gradients[direction] + from, 0.f, 0.f, first, second);
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (ZONEOUT_GRADIENT && zoneout(s) == BY_MASK)
              store_wide_pair(a.o.zoneout_gradients[direction][s] + from, 0.f, 0.f, first, second);
#pragma unroll
          for (int i = 0; i < INPUTS; ++i)
            store_wide_pair(a.o.input_gradients[direction][i] + from, 0.f, 0.f, first, second);
        }
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const int unit = unit_of(j), tile = cell_of(j) % TILES;
    const bool own = warp + j * WARPS < ITEMS && lane % 4 == 0;
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        summed[j][u][i] += __shfl_xor_sync(0xffffffffu, summed[j][u][i], 1);
        summed[j][u][i] += __shfl_xor_sync(0xffffffffu, summed[j][u][i], 2);
      }
      float* const to = a.sums[direction] + ((long long)((cluster * TILES + tile) * SPLITS + part_of(j)) * SUMMED + i) * UNITS + unit;
      store_wide_pair(to, summed[j][0][i], summed[j][1][i], own && unit < UNITS, own && unit + 1 < UNITS);
    }
  }
#if CLUSTER > 1
  cluster_barrier();  // a block that has ended must not be sent to
#endif
}
