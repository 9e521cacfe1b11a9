// All steps of a recurrent layer that one cluster cannot hold, forward, in one launch.
//
// BLOCKS blocks own SUBS x ROWS sequences together; block `rank` owns the units from rank x SLICE on, for every gate.
// Its recurrent weights stay in registers, and past RESIDENT in shared memory.  At each step it takes the states of all
// units out of L2, multiplies its weights with them, computes the cell for its own units, and puts their new states
// into L2 for the other blocks (exchange.cu says how).  The SUBS parts of its sequences are taken in turn, so that the
// states of one travel while another is computed.
//
// The product's rows are the block's units times gates, 16 in each strip; warp (group, split) owns SHARE strips and, of
// the depth, the DEPTHS x 8 words from split x DEPTHS x 8 on.  The partial sums of all splits meet in shared memory.
// With WARPGROUPS the four warps of neighbouring groups multiply together (warpgroup.cu); with BESIDE the product of a part
// of the units runs while the next part is on its way.
// Then a thread computes the cell for two neighbouring units of every PASS-th sequence.
//
// With HALVES float32 is multiplied, and travels, as float16 (ptx.cu): each row of weights has a scale, the states of a
// sequence have one for all steps but the first, or with options for all; BY_STEP, of states that may be of any size, each
// block has one of its own anew at each step, and who takes them brings them to one (levels.cu).  Where products are exact
// it does so as two, in two planes: of weights those of the first come before those of the second, of states they are
// rows behind the others.  Tensor cores cut off what they add: so sums of the first planes' products go on in float32's
// own registers every RUN x 16 units; those with a second plane are too small for it to matter.
//
//   registers  weights, sums of the products, the states and the bias of the thread's units, states on their way
//   shared     the states of one part, partial sums, more weights, scales
//   global     x in, without its bias, which is added here; gates out in its place where they are saved; y, saved
//              states, final states; the ring of states
//
// What options add stands in options.cu; a kernel without them has none of it.  Of a cell with means over the units
// (STAGED) the threads of a sequence make them between the stages of its step, as spread_means.cu says.  What enters a
// product inside the step (INSIDE) all blocks exchange as they do the states, and multiply it with the gates of that
// product alone (spread_inside.cu).
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for all others that own the same sequences, so the launch must be cooperative.

// @generated

constexpr int ROWS = 8 * TILES, PAIRS = SLICE / 2, THREADS = 32 * WARPS, SPLITS = WARPS / GROUPS;
constexpr int PASS = THREADS / PAIRS < ROWS ? THREADS / PAIRS : ROWS, OWN = (ROWS + PASS - 1) / PASS;
#if INSIDE
constexpr int RESULTS = LINKS, SHARE = STRIPS_OF_WARP, STRIPS = GROUPS * SHARE, FEWEST = fewest_strips();
#else
constexpr int RESULTS = RECURRENT, STRIPS = (RECURRENT * SLICE + 15) / 16, SHARE = (STRIPS + GROUPS - 1) / GROUPS;
constexpr int FEWEST = SHARE;  // strips of a warp that are multiplied together
#endif
constexpr int WORDS = SPLITS * DEPTHS * 8;  // depth of the product, padded
// of a sequence's states, or of 16 bytes of all sequences': 8 times 16 bytes are in 32 different banks
constexpr int STRIDE = WARPGROUPS ? PLANES * ROWS * 4 + 4 : WORDS + 4;
constexpr int SUM_STRIDE = STRIPS * 16 + 4;
constexpr int STREAMED = PLANES * SHARE * DEPTHS - RESIDENT;
constexpr int STATE_WORDS = (WARPGROUPS ? WORDS / 4 : PLANES * ROWS) * STRIDE, PARTIAL_WORDS = SPLITS * ROWS * SUM_STRIDE;
// strips of four warps' operands in shared memory: of exact products those alone that have rows, since room is scarce there
constexpr int TOGETHER = PLANES > 1 && GROUPS == 4 && STRIPS < 4 ? STRIPS : 4;
constexpr int WEIGHT_WORDS = WARPS * STREAMED * 128 * TOGETHER / 4;
// what scales are the inverse of: of weights for [warp, strip, row], of each sequence's initial states
constexpr int WEIGHT_SCALES = HALVES ? WARPS * SHARE * 16 : 0, SCALES = HALVES ? SUBS * ROWS : 0;
constexpr int SCALE_WORDS = SCALES * (1 + BY_STEP);  // of this step, and of the one before, which others may still read
// masks by gate: strips have rows of one gate where they can, else of two, which are multiplied one after the other
constexpr bool APIECE = GATEWISE && SLICE % 16 == 0;
constexpr bool EVEN = APIECE && !INSIDE && SHARE * 16 % SLICE == 0;  // the gates of a warp are its own
constexpr bool SOLE = EVEN && SHARE * 16 == SLICE && WORD_ELEMENTS == 2;  // of which it has one
// as bits, for [depth, part and tile, lane], of all gates; of SOLE ones for [gate, split, part, depths, lane], of the tiles of
// so many depths; those that are given stay in global memory
constexpr int DEEP = 8 / TILES / 2 * 2, DEEPS = (DEPTHS + DEEP - 1) / DEEP;
constexpr int MASK_WORDS = NOISE == BY_GATE ? SPLITS * SUBS * 32 * (SOLE ? GROUPS * DEEPS : DEPTHS * TILES) : 0;
constexpr int CHAINS = FEWEST * TILES < 4 && DEPTHS > 1 && PLANES == 1 ? 2 : 1;  // of products that wait for each other
constexpr int ACROSS = 4 * WORD_ELEMENTS;  // units of 16 bytes
// of a sequence in the ring: 16 bytes of a plane, its words, all words
constexpr int CHUNKS = (UNITS + ACROSS - 1) / ACROSS, PLANE_PITCH = CHUNKS * 4;
constexpr int LEVEL_PITCH = BY_STEP ? (BLOCKS + 3) / 4 * 4 : 0;  // and of its scales, as levels.cu has them
constexpr int PITCH = PLANES * PLANE_PITCH + LEVEL_PITCH;
constexpr int LEVEL_WORDS = ROWS * LEVEL_PITCH / 2;  // what a part's states are multiplied with, two blocks in a word
constexpr bool LATE_BIAS = GATEWISE || HALVES;  // sums are scaled first
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
// With means between the stages registers are short, and what is the same at all steps stays in shared memory.
constexpr int FIXED = ASIDE ? RESULTS + GATES + VECTORS : 0;
static_assert(4 * (WEIGHT_WORDS + STATE_WORDS + PARTIAL_WORDS + WEIGHT_SCALES + MASK_WORDS + SCALE_WORDS + LEVEL_WORDS +
                   FIXED * SLICE) == SHARED, "tiling and kernel disagree");
static_assert(!SOLE || DEEP * TILES <= 8, "a word has not the bits of so many tiles");
static_assert(!GATEWISE || SLICE % 8 == 0, "a strip has rows of more than two gates");
static_assert(WORDS * WORD_ELEMENTS >= UNITS && BLOCKS * SLICE >= UNITS && SLICE % 2 == 0, "the tile does not cover the layer");
#if HALVES && EXACT
typedef PlanedOperands<SHARE * DEPTHS, STREAMED> Weights;
static_assert(!GATEWISE, "masks by gate are of one plane");
#else
typedef Operands<SHARE * DEPTHS, STREAMED> Weights;
#endif
constexpr int RUN = 4;  // every step of depth: 2.2e-7 of a sum over 1,024 terms, emulated; every fourth 3.0e-7, float32 2.1e-7
// A part's input is read while its own product is computed: for as many registers as all parts' would take there are weights.
constexpr bool LATE_X = PLANES > 1 && SUBS > 1;
static_assert(!WARPGROUPS || (GROUPS % 4 == 0 && WARPS == 8 && !GATEWISE), "four warps have one depth");
// where a word of a sequence's states lies; of the second plane that of a sequence ROWS further on
__device__ constexpr int state_at(int row, int word) {
  return WARPGROUPS ? word / 4 * STRIDE + row * 4 + word % 4 : row * STRIDE + word;
}
typedef Arrival<ROWS, CHUNKS, (UNITS + 1) / 2 * (2 / WORD_ELEMENTS), PITCH, WARPS, state_at(WARPS, 0), state_at(0, 128), PARTS,
                (SUBS == 1 && LULL == 0) || INSIDE, PLANE_PITCH, state_at(ROWS, 0), BESIDE ? SPLITS : 0,
                BESIDE ? 2 * DEPTHS : CHUNKS>
    States;
// At the end of a step, before pointers go on, and not at the beginning of the next: that is slower where states come in one
// part, and options' kernels have no registers for it.
constexpr bool ASKS_EARLY = LULL > 0 && SIDED && PARTS > 1;
constexpr bool OUTPUTS_FIRST = ELEMENT_BYTES == 4 && TILES > 2;  // their way is longer than a lull, which begins behind them
static_assert(LULL == 0 || (SUBS == 1 && !INSIDE && !BY_STEP), "a lull is for all states of a step, asked for once");
#if BY_STEP
typedef Levels<BLOCKS, PITCH, ROWS, WARPS> StepLevels;
static_assert(!STAGED && PLANES == 1 && 32 % PAIRS == 0 && PASS * PAIRS % 32 == 0 && ROWS * PAIRS % 32 == 0,
              "threads of one warp have a sequence's states of a block");
#endif
constexpr int PART_DEPTHS = BESIDE ? States::OF_PART * 16 : DEPTHS;  // steps of depth of a part
static_assert(!BESIDE || (WARPGROUPS && PLANES == 1), "all states are there before the product");

struct Arguments {
  Gate* gates[2];             // for each direction [time, batch, GATES x UNITS]: x without its bias; where saved, x + r, or x
  const Weight* weights[2];   // [RECURRENT x UNITS, UNITS], with HALVES as halve.cu makes them
  const Element* bias[2];     // [RECURRENT x UNITS] or null
  const Element* x_bias[2];   // [GATES x UNITS] or null
  const Element* vectors[2][MOST(VECTORS)];
  const Element* initial[STATES];  // [directions, batch, UNITS], all or null
  Element* finals[STATES];         // [directions, batch, UNITS]
  Element* y;                      // [time, batch, directions x UNITS]
  Gate* apart[2];                  // [time, batch, APART x UNITS]: r of gates that are not a sum
  float* states[2];                // [STATES - 1, time, batch, UNITS]: every state but the first, after each step
#if STAGED
  float* levels[2];      // [time, batch, MEANS]: means of each step
  Element* operands[2];  // [INSIDE, time, batch, UNITS]: what entered the products inside the step
#endif
  long long time, batch;
#if CARRIED
  const float* come[STATES];  // as carried.cu has them
  float* left[STATES];
#endif
#if OPTIONS
  Options o;
#else
  static constexpr Options o = {};
#endif
  // ones: [1 + INSIDE, directions, RING, batch, PITCH], and for means [directions, 2, batch, MEAN_WORDS]
  unsigned* ring;
  long long first_row, first_direction, directions;
#if SIDED
  Places places;
#endif
};

#if !INSIDE
// of row m of the product, the gate, and the unit of the block: a thread that reads a sequence's sums finds its two
// units' values of two gates side by side, and its neighbour's behind them, or those of one gate
__device__ __forceinline__ void place_of(int m, int& gate, int& unit) {
  if constexpr (APIECE) {
    gate = m / SLICE, unit = m % SLICE;
    return;
  }
  const int section = m / (2 * SLICE), within = m % (2 * SLICE);
  const bool two = 2 * section + 1 < RECURRENT;
  gate = 2 * section + (two ? within % 4 / 2 : 0);
  unit = (two ? within / 4 : within / 2) * 2 + within % 2;
}
__device__ constexpr int result_gate(int result) { return result; }
#endif
// whether the product has row m, which is of a gate
__device__ __forceinline__ bool is_row(int m, int gate) { return INSIDE ? gate < RECURRENT : m < RECURRENT * SLICE; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;  // [warp, strip and depth, lane]
  unsigned* const states = memory + WEIGHT_WORDS;
  float* const partial = (float*)(states + STATE_WORDS);             // [split, sequence, SUM_STRIDE]
  float2* const weight_scales = (float2*)(partial + PARTIAL_WORDS);  // of an even row and the odd one behind it
  unsigned* const masks = (unsigned*)(partial + PARTIAL_WORDS + WEIGHT_SCALES);
  float* const scales = (float*)(masks + MASK_WORDS);
#if BY_STEP
  uint2* const factors = (uint2*)(scales + SCALE_WORDS);  // [sequence, four blocks]
#endif

  const int warp = own_warp(), lane = threadIdx.x % 32;
  const int group = WARPGROUPS ? warp % GROUPS : warp / SPLITS, split = WARPGROUPS ? warp / GROUPS : warp % SPLITS;
#if SIDED
  const unsigned place = own_place(a.places, memory);
  if (place == NO_PLACE) return;
#else
  const unsigned place = blockIdx.x;
#endif
  const int rank = place % BLOCKS, direction = (int)a.first_direction + blockIdx.y;
  const int batch = (int)a.batch, row0 = (int)a.first_row + place / BLOCKS * (SUBS * ROWS);
  const Weight* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
#if HALVES
  float unscale[(SHARE + 1) / 2];  // of 16 rows, two strips at a time; asked for before the weights
#pragma unroll
  for (int s = 0; s < SHARE; s += 2) {
    const int m = (group * SHARE + s) * 16 + lane;
    int gate, unit;
    place_of(m, gate, unit);
    unit += rank * SLICE;
    const bool there = s + lane / 16 < SHARE && is_row(m, gate) && unit < UNITS;
    unscale[s / 2] = there ? scales_behind(weights)[gate * UNITS + unit] : 0.f;
  }
#endif
  const int first_column = split * DEPTHS * 8 * WORD_ELEMENTS;
  const auto weights_of = [&](int s, int m) {
    int gate, unit;
    m += (group * SHARE + s % SHARE) * 16;
    place_of(m, gate, unit);
    unit += rank * SLICE;
    const bool there = is_row(m, gate) && unit < UNITS;
    const Weight* const at = weights + ((long long)(s / SHARE * RECURRENT + gate) * UNITS + unit) * WEIGHT_PITCH;
    return WeightRow{at + first_column, there ? UNITS - first_column : 0};
  };
  bring_rows<Weights, PLANES * SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS>(
      memory, warp, lane, [](int s, int depth) { return (s / SHARE * DEPTHS + depth) * SHARE + s % SHARE; }, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) {
#if WARPGROUPS
        if (warp % 4 < TOGETHER)
          put_square<TOGETHER * 128>(memory + (warp / 4 * STREAMED + i) * TOGETHER * 128 + warp % 4 * 64, lane, words);
#else
        streamed[(warp * STREAMED + i) * 32 + lane] = words;
#endif
      });
#if HALVES
#pragma unroll
  for (int s = 0; s < SHARE; s += 2)
    if (s + lane / 16 < SHARE) ((float*)weight_scales)[(warp * SHARE + s) * 16 + lane] = unscale[s / 2];
#endif
  // steps of the longest of these sequences
  const int time = LENGTHS ? longest(a, row0, SUBS * ROWS) : (int)a.time;
  const bool reverse = direction == 1;
  const int first_step = reverse && time > 0 ? time - 1 : 0;

  for (int i = threadIdx.x; i < STATE_WORDS; i += THREADS) states[i] = 0;
  if constexpr (NOISE == BY_GATE)
    for (int i = threadIdx.x; i < MASK_WORDS; i += THREADS) {
      const int its = i % 32;
      if constexpr (SOLE) {
        const int sub = i / 32 / DEEPS % SUBS, split = i / 32 / DEEPS / SUBS % SPLITS, gate = i / 32 / DEEPS / SUBS / SPLITS;
        unsigned bits = 0;
#pragma unroll
        for (int pair = 0; pair < DEEP * TILES; ++pair) {
          const int place = row0 + (sub * TILES + pair % TILES) * 8 + its / 4, depth = i / 32 % DEEPS * DEEP + pair / TILES;
          const int column = ((split * DEPTHS + depth) * 8 + its % 4) * WORD_ELEMENTS;
          if (depth < DEPTHS) bits |= gate_bits(a, place, column, direction, gate, pair * 2);
        }
        masks[i] = bits;
      } else {
        const int place = row0 + i / 32 % (SUBS * TILES) * 8 + its / 4, depth = i / 32 / (SUBS * TILES);
        masks[i] = gates_bits(a, place, (depth * 8 + its % 4) * WORD_ELEMENTS, direction);
      }
    }
#if HALVES
  for (int line = warp; line < SCALES; line += WARPS) {
#if OPTIONS && !BY_STEP
    const float most = largest_operand(a, row0 + line, row0 + line < batch, direction, lane);
#else
#if OPTIONS
    float most = 0.f;  // of what enters the first step alone
    for (int column = lane; column < UNITS && row0 + line < batch; column += 32)
      most = fmaxf(most, fabsf(first_operand(a, sequence_at(a, row0 + line), column, direction, first_step)));
#else
    const bool there = has_initial(a) && row0 + line < batch;
    const Element* const from = first_state(a) + ((long long)direction * batch + row0 + line) * UNITS;
    float most = 0.f;
#pragma unroll 16
    for (int column = lane * 2; column < UNITS; column += 64) {
      const float2 two = load_wide_pair(from + column, there, there && column + 1 < UNITS);
      most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
#endif
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
#endif
    if (lane == 0) scales[line] = unscale_of(most);
  }
#endif
#if WARPGROUPS
  show_products();  // weights, and zeros
#endif
  __syncthreads();

  const int pair = threadIdx.x % PAIRS, own_row = threadIdx.x / PAIRS, unit = rank * SLICE + pair * 2;
  const bool has_first = unit < UNITS && own_row < PASS, has_second = has_first && unit + 1 < UNITS;
  const int own_left = has_first ? batch - row0 - own_row : 0, left = batch - row0 - warp;
  const auto is_there = [&](int sub, int j) {
    return own_left > sub * ROWS + j * PASS && (ROWS % PASS == 0 || own_row + j * PASS < ROWS);
  };
  float bias[RESULTS][2], x_bias[GATES][2], vectors[MOST(VECTORS)][2], state[SUBS][OWN][STATES][2];
#pragma unroll
  for (int g = 0; g < RESULTS; ++g) {
    const Element* const at = a.bias[direction] + result_gate(g) * UNITS + unit;
    bias[g][0] = a.bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
    bias[g][1] = a.bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
  }
#pragma unroll
  for (int g = 0; g < GATES; ++g) {  // x's own goes with r's where the cell uses nothing but x + r
    const Element* const at = a.x_bias[direction] + g * UNITS + unit;
    x_bias[g][0] = a.x_bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
    x_bias[g][1] = a.x_bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
    if (sum_of(g) >= 0) {
      bias[sum_of(g) >= 0 ? sum_of(g) : 0][0] += x_bias[g][0];
      bias[sum_of(g) >= 0 ? sum_of(g) : 0][1] += x_bias[g][1];
    }
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    vectors[v][0] = has_first ? wide(a.vectors[direction][v][unit]) : 0.f;
    vectors[v][1] = has_second ? wide(a.vectors[direction][v][unit + 1]) : 0.f;
  }
  constexpr int OF_X = RESULTS, OF_VECTORS = RESULTS + GATES;
  float2* const fixed = (float2*)(memory + SHARED / 4 - FIXED * SLICE) + pair;  // [FIXED, PAIRS]
  if constexpr (FIXED > 0) {
    if (own_row == 0) {
#pragma unroll
      for (int g = 0; g < RESULTS; ++g) fixed[g * PAIRS] = {bias[g][0], bias[g][1]};
#pragma unroll
      for (int g = 0; g < GATES; ++g) fixed[(OF_X + g) * PAIRS] = {x_bias[g][0], x_bias[g][1]};
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) fixed[(OF_VECTORS + v) * PAIRS] = {vectors[v][0], vectors[v][1]};
    }
    __syncthreads();
  }
  const auto fixed_at = [&](int i) { return fixed[i * PAIRS]; };
  const auto bias_of = [&](int g) { return FIXED > 0 ? fixed_at(g) : float2{bias[g][0], bias[g][1]}; };
  const auto x_bias_of = [&](int g) { return FIXED > 0 ? fixed_at(OF_X + g) : float2{x_bias[g][0], x_bias[g][1]}; };
  const auto vector_of = [&](int v) { return FIXED > 0 ? fixed_at(OF_VECTORS + v) : float2{vectors[v][0], vectors[v][1]}; };

  // The rows of a step begin at `rows`; `next_rows` are those of the step that is computed after it.
  const int second_step = reverse ? time - 2 : 1;
  long long rows = rows_of(a, first_step), next_rows = rows_of(a, time > 1 ? second_step : first_step);
  long long row_step = PACKED ? next_rows - rows : reverse ? -(long long)batch : batch;
  const long long width = a.directions * UNITS, begin = rows;
  const long long state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  const Forwards<Arguments> stepper = {a, unit, direction, time, has_second, reverse};
  Ahead items[SUBS][OWN];
#pragma unroll
  for (int sub = 0; sub < SUBS; ++sub)
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      Ahead& item = items[sub][j];
      const int place = row0 + sub * ROWS + own_row + j * PASS;
      item.there = is_there(sub, j);
      item.sequence = item.there ? sequence_at(a, place) : place;
      item.ends = LENGTHS && item.there ? min(time, (int)a.o.lengths[item.sequence]) : time;
    }
  // the first sequence, and how many rows further on the others are
  const auto sequence_of = [&](int sub, int j) {
    return ORDER ? items[sub][j].sequence : (long long)row0 + own_row + sub * ROWS + j * PASS;
  };
  const long long row = sequence_of(0, 0), first = begin + row;  // in tensors of [time, batch]
  const auto further_on = [&](int sub, int j) { return ORDER ? sequence_of(sub, j) - row : sub * ROWS + j * PASS; };
  const auto step_of = [&](int t) { return reverse ? time - 1 - t : t; };
  Gate* gates_at = a.gates[direction] + first * GATES * UNITS + unit;
  Element* y_at = a.y + first * width + direction * UNITS + unit;
  Gate* apart_at = a.apart[direction] + first * APART * UNITS + unit;
  float* states_at = a.states[direction] + first * UNITS + unit;
  Element* before_at = BEFORE ? a.o.before[direction] + first * UNITS + unit : nullptr;
  // the states before a step, at its rows; of the first what `entered`, with ENTERED
  const auto store_before = [&](int sub, int j, int step, long long beyond, float2 entered) {
    const Ahead& item = items[sub][j];
    const bool stored = PACKED ? stepper.within(item, step) : item.there, also = stored && has_second;
    const long long at = (beyond + further_on(sub, j)) * UNITS;
    const float2 value = ENTERED ? entered : float2{state[sub][j][0][0], state[sub][j][0][1]};
    store_pair(before_at + at, value.x, value.y, stored, also);
#pragma unroll
    for (int s = 1; s < STATES; ++s)
      store_wide_pair(states_at + (s - 1) * state_stride + at, state[sub][j][s][0], state[sub][j][s][1], stored, also);
  };
#pragma unroll
  for (int sub = 0; sub < SUBS; ++sub)
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      Ahead& item = items[sub][j];
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        const long long at = ((long long)direction * batch + sequence_of(sub, j)) * UNITS + unit;
        const float2 value = initial_pair(a, s, at, item.there, item.there && has_second);
        state[sub][j][s][0] = value.x;
        state[sub][j][s][1] = value.y;
      }
      if constexpr (OPTIONS) {
        stepper.begin(item, state[sub][j], first_step, rows, second_step, next_rows);
        if constexpr (BEFORE && SAVED) {
          const bool there = stepper.within(item, first_step);
          float2 entered = {};
          if constexpr (ENTERED) entered = first_entered(a, item.sequence, unit, direction, first_step, there, there && has_second);
          store_before(sub, j, first_step, 0, entered);
        }
      }
    }

  // the ring: what this thread reads and writes; the places of the step before, which is read, and of this step
  const long long buffer = (long long)batch * PITCH;
  unsigned* const ring = a.ring + direction * RING * buffer + (long long)row0 * PITCH;
  const unsigned *first_seen = ring + (long long)warp * PITCH + lane * 4, *seen = first_seen;
  unsigned* sent = ring + (long long)own_row * PITCH + unit / WORD_ELEMENTS;
  long long sent_at = 0;
  const bool comes_round = OPERAND_BYTES == 2 && time > RING;
  const auto rows_left = [&](int sub) {  // rows of a part from this warp's on
    return ROWS % WARPS == 0 ? left - sub * ROWS : min(left - sub * ROWS, ROWS - warp);
  };
#if STAGED
  const long long mean_plane = (long long)batch * MEAN_WORDS;
  unsigned* means_at = a.ring + (1 + INSIDE) * a.directions * RING * buffer + direction * 2 * mean_plane +
                       (long long)(row0 + own_row) * MEAN_WORDS;
  float* levels_at = a.levels[direction] + first * MEANS;
  keep(means_at);
#endif
#if INSIDE
  const long long round_pitch = a.directions * RING * buffer;  // from one product's words in the ring to the next one's
  Element* operands_at = a.operands[direction] + first * UNITS + unit;
  keep(operands_at);
#endif
  States arrival;
#if BY_STEP
  StepLevels levels;
  const int level_at = PLANE_PITCH + rank - unit / WORD_ELEMENTS;  // beside where the first pair's states are sent
  const auto levels_of = [&](const unsigned* from) { return from - lane * 4 + PLANE_PITCH; };
#endif
  unsigned given_at = 0;  // when the block had given its states
  const auto meet = [&] {
    __syncthreads();  // warps that compute no cell would ask before others have given
    given_at = ticks();
  };
  const auto look_after_lull = [&](const unsigned* from, int step) {
    if (OUTPUTS_FIRST) meet();
    pause(given_at, LULL);
    arrival.look_at(from, rows_left(0), lane, phase_of(step));
    if (comes_round && step % PERIOD == 0) fence();  // while all is on its way
  };
  int weights_at = warp * STREAMED * 32 + lane, arrived_at = state_at(warp, lane * 4);
  int partial_to = (split * ROWS + lane % 4 * 2) * SUM_STRIDE + (INSIDE ? 0 : group * SHARE * 16) + lane / 4 * 2;
  int partial_from = own_row * SUM_STRIDE + pair * (INSIDE ? 2 : 4);
  keep(sent), keep(first_seen), keep(gates_at), keep(y_at), keep(states_at);
  keep(weights_at), keep(arrived_at), keep(partial_to), keep(partial_from);
  // what a lane was given the assembler cannot make anew either, at each step, while all wait for it
  if constexpr (STAGED) partial_from = __shfl_sync(0xffffffffu, partial_from, lane);
  const long long ahead = AHEAD * row_step * GATES * UNITS;
#if !WARPGROUPS
  const unsigned columns = shared_address(states) + ((lane % 8) * STRIDE + split * DEPTHS * 8 + lane / 8 * 4) * 4;
#endif

  // what of two words of the product's operand the mask of gate `first_gate` + `gate` leaves
  const int first_gate = EVEN ? group * (SHARE * 16 / SLICE) : 0;
  unsigned of_depths = 0;  // bits of the tiles of some depths
  const auto behind_mask = [&](int sub, int n, int depth, int gate, unsigned word, unsigned second) {
    if constexpr (NOISE == BY_GATE && SOLE) {
      const int pair = depth % DEEP * TILES + n;
      return right_of(passed(word, of_depths, pair * 2), passed(second, of_depths, pair * 2 + 1));
    }
    if constexpr (NOISE == BY_GATE) {
      const unsigned all = masks[((split * DEPTHS + depth) * SUBS * TILES + sub * TILES + n) * 32 + lane];
      const unsigned bits = bits_from(all, first_gate);
      return right_of(passed(word, bits, gate * 2), passed(second, bits, gate * 2 + 1));
    }
    const int place = row0 + sub * ROWS + n * 8 + lane / 4, own = min(first_gate + gate, MASKED - 1);
    const int column = ((split * DEPTHS + depth) * 8 + lane % 4) * WORD_ELEMENTS;
    return right_of(times(word, mask_word(a, own, place, column, direction)),
                    times(second, mask_word(a, own, place, column + 4 * WORD_ELEMENTS, direction)));
  };

#if HALVES
  // What scales of a thread's states are the inverse of: of initial ones that of the largest; then those are in [-1, 1],
  // or of a cell that takes each to a number there or between that and what it was, no larger than 1 and the largest.
  // BY_STEP those of this step.
  int scales_now = 0;
  const auto unscale_at = [&](int sub, int j, bool begins) {
    constexpr float least = 1.f / STATE_SCALE;
    const auto initial = [&] { return scales[scales_now + sub * ROWS + own_row + j * PASS]; };
    return begins || SCALES_STAY || BY_STEP ? initial() : BOUNDED ? least : fmaxf(initial(), least);
  };
#if INSIDE
  // what enters a product inside the step is no larger than 1, or than the state before the step
  const auto unscale_inside = [&](int sub, int j, bool begins) {
    return begins ? fmaxf(unscale_at(sub, j, true), unscale_at(sub, j, false)) : unscale_at(sub, j, false);
  };
#endif
#endif

#if INSIDE
  // the gates of a round times its operand, which lies in shared memory
  const auto multiply_round = [&](int round, int sub) {
    float sums[CHAINS][SHARE][TILES][4] = {};
#pragma unroll
    for (int d = 0; d < DEPTHS; d += 2) {
      uint4 b[TILES];
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const unsigned at = columns + (n * 8 * STRIDE + d * 8) * 4;
        b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (d + half >= DEPTHS) break;
        const auto words_of = [&](int n) { return half ? uint2{b[n].z, b[n].w} : uint2{b[n].x, b[n].y}; };
        Right right[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) right[n] = right_of(words_of(n).x, words_of(n).y);
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
          if (!is_in(round, s)) continue;
          if (GATEWISE && (NOISE_INSIDE || round == 0))
#pragma unroll
            for (int n = 0; n < TILES; ++n)
              right[n] = behind_mask(sub, n, d + half, gate_of_strip(group, s), words_of(n).x, words_of(n).y);
          const int i = (d + half) * SHARE + s;
          const Left weight = left_of(Weights::streamed(i) ? streamed[weights_at + Weights::before(i) * 32]
                                                           : resident[Weights::resident(i)]);
#pragma unroll
          for (int n = 0; n < TILES; ++n) multiply(sums[half % CHAINS][s][n], weight, right[n]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < SHARE; ++s) {
      if (!is_in(round, s)) continue;
#if HALVES
      const float2 its = weight_scales[(warp * SHARE + s) * 8 + lane / 4];
#else
      constexpr float2 its = {1.f, 1.f};
#endif
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        float* const to = partial + partial_to + n * 8 * SUM_STRIDE + column_of_strip(group, s);
        float(&sum)[4] = sums[0][s][n];
        if constexpr (CHAINS == 2) add(sum, sums[CHAINS - 1][s][n]);
        *(float2*)to = {sum[0] * its.x, sum[2] * its.y};
        *(float2*)(to + SUM_STRIDE) = {sum[1] * its.x, sum[3] * its.y};
      }
    }
  };
  // What a round gives a thread's units, once all warps have multiplied.
  const auto take_results = [&](int round, int sub, bool begins, float(&r)[OWN][2][RESULTS]) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      if (ROWS % PASS != 0 && own_row + j * PASS >= ROWS) break;
      float scale = GATEWISE && (NOISE_INSIDE || round == 0) ? (float)a.o.noise_scale : 1.f;
#if HALVES
      scale *= round == 0 ? unscale_at(sub, j, begins) : unscale_inside(sub, j, begins);
#endif
#pragma unroll
      for (int l = 0; l < LINKS; ++l) {
        if (link_round(l) != round) continue;
        float2 sum = LATE_BIAS ? float2{0.f, 0.f} : bias_of(l);
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          const float* const part = partial + partial_from + (s * ROWS + j * PASS) * SUM_STRIDE;
          const float2 one = *(const float2*)(part + column_of_gate(link_gate(l)));
          sum.x += one.x, sum.y += one.y;
        }
        r[j][0][l] = LATE_BIAS ? scale * sum.x + bias_of(l).x : sum.x;
        r[j][1][l] = LATE_BIAS ? scale * sum.y + bias_of(l).y : sum.y;
      }
    }
  };
#endif

  // x of a part at step t, whose place is given
  GatePair x[LATE_X ? 1 : SUBS][OWN][GATES];
  const auto read = [&](int sub, int t, const Gate* place, GatePair(&into)[OWN][GATES]) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const Gate *const at = place + further_on(sub, j) * GATES * UNITS, *const far = at + ahead;
      const bool first = stepper.within(items[sub][j], step_of(t)), second = first && has_second;
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        into[j][g] = load_gates(at + g * UNITS, first, second);
        if (t + AHEAD < time && first && !PACKED) prefetch(far + g * UNITS);
      }
      if (DRAWS && t + AHEAD < time && first)
        prefetch(drawn_place(a, unit, step_of(t + AHEAD), items[sub][j].sequence, direction));
    }
  };
#pragma unroll
  for (int sub = 0; sub < SUBS && !LATE_X; ++sub) read(sub, 0, gates_at, x[sub]);
  for (int t = 0; t < time; ++t) {
    const unsigned* const seen_next = first_seen + sent_at;
    const int step_now = step_of(t), next_step = step_of(t + 1);
    const unsigned phase = phase_of(t), phase_before = phase_of(t - 1);
#pragma unroll
    for (int sub = 0; sub < SUBS; ++sub) {
      const auto settle = [&](int part) {
        const unsigned* const from = seen + sub * ROWS * PITCH;
        if (LULL > 0 && !ASKS_EARLY && part == 0) look_after_lull(from, t - 1);
#if BY_STEP
        uint2* const its_factors = factors + warp * (LEVEL_PITCH / 4);
        if (part == 0) {
          arrival.await_the_first(from, lane, phase_before);
          if (States::AFTER_ONE) levels.look_at(levels_of(from), rows_left(sub), lane);
          arrival.look_on(from, rows_left(sub), lane, phase_before);
          levels.settle(levels_of(from), lane);
          levels.keep(its_factors, scales + scales_now + sub * ROWS + warp, rows_left(sub), lane);
        }
        arrival.settle(states + arrived_at, from, rows_left(sub), lane, phase_before, part,
                       Levelled<LEVEL_PITCH / 4, SLICE, WARPS>{its_factors});
#else
        arrival.settle(states + arrived_at, from, rows_left(sub), lane, phase_before, part);
#endif
      };
      if (t > 0) {
#pragma unroll
        for (int part = 0; part < (BESIDE ? 1 : PARTS) && FIRST; ++part) settle(part);
      } else if (has_initial(a) || RESET_TO || (INSIDE && sub > 0)) {  // else there are zeros
        for (int i = threadIdx.x; i < ROWS * PLANE_PITCH; i += THREADS) {
          const int line = i / PLANE_PITCH, word = i % PLANE_PITCH;
          const int place = row0 + sub * ROWS + line, column = word * WORD_ELEMENTS;
          const bool there = place < batch && column < UNITS;
          const long long sequence = there ? sequence_at(a, place) : 0;
          const auto value = [&](int unit) {
            return there && unit < UNITS ? first_operand(a, sequence, unit, direction, first_step) : Element{};
          };
#if HALVES
          const float scale = scale_of(scales[sub * ROWS + line]);
          unsigned words[2];
          split_halves(value(column) * scale, value(column + 1) * scale, words[0], words[1]);
#pragma unroll
          for (int p = 0; p < PLANES; ++p) states[state_at(p * ROWS + line, word)] = words[p];
#elif ELEMENT_BYTES == 2
          states[state_at(line, word)] = joined(value(column), value(column + 1));
#else
          states[state_at(line, word)] = operand(value(column));
#endif
        }
      }
#if WARPGROUPS
      show_products();
#endif
      __syncthreads();

      GatePair next[OWN][GATES];
      const auto read_on = [&] {  // beside the product
        if constexpr (LATE_X)
          read(sub, t, gates_at, x[0]);
        else if (t + 1 < time)
          read(sub, t + 1, gates_at + row_step * GATES * UNITS, next);
      };
#if INSIDE
      if constexpr (FIRST) multiply_round(0, sub);
#else
      {
#if WARPGROUPS && HALVES && EXACT
        // a warp past the last strip reads what lies behind an operand, and has sums that nobody asks for
        // `last` are of the weights' second plane.  All begin as zeros: of sums that were undefined where a product began
        // them anew the compiler left out those of the first run.
        float sums[1][SHARE][TILES][4] = {}, last[SHARE][TILES][4] = {};
        float high[SHARE][TILES][4] = {}, low[SHARE][TILES][4] = {};
        const unsigned rows_at =
            operand_at(shared_address(streamed) + of_warp(warp / 4) * STREAMED * TOGETHER * 512, TOGETHER * 256);
        const unsigned columns_at = operand_at(shared_address(states) + of_warp(split) * DEPTHS * 2 * STRIDE * 4, STRIDE * 4);
#pragma unroll
        for (int first = 0; first < DEPTHS; first += RUN) {
          begin_products();
#pragma unroll
          for (int i = first * SHARE; i < min(first + RUN, DEPTHS) * SHARE; ++i) {
            const unsigned columns = columns_at + i / SHARE * 2 * STRIDE / 4;
            const int s = i % SHARE, second = SHARE * DEPTHS + i;
            if (Weights::streamed(i))
              multiply_both_shared(high[s], low[s], rows_at + Weights::before(i) * TOGETHER * 32, columns, i / SHARE > first);
            else
              multiply_both_columns(high[s], low[s], resident[Weights::resident(i)], columns, i / SHARE > first);
            if (Weights::streamed(second))
              multiply_shared(last[s], rows_at + Weights::before(second) * TOGETHER * 32, columns, true);
            else
              multiply_columns(last[s], resident[Weights::resident(second)], columns, true);
          }
          end_products();
          if (first == 0) read_on();
          multiplied();
#pragma unroll
          for (int i = 0; i < SHARE * TILES * 4; ++i) {
            const int s = i / (TILES * 4), n = i / 4 % TILES;
            keep(high[s][n][i % 4]), keep(low[s][n][i % 4]);
            sums[0][s][n][i % 4] += high[s][n][i % 4] + low[s][n][i % 4] * (1.f / LOW_SCALE);
          }
        }
#pragma unroll
        for (int i = 0; i < SHARE * TILES * 4; ++i) {
          const int s = i / (TILES * 4), n = i / 4 % TILES;
          keep(last[s][n][i % 4]);
          sums[0][s][n][i % 4] += last[s][n][i % 4] * (1.f / LOW_SCALE);
        }
#elif WARPGROUPS
        float sums[CHAINS][SHARE][TILES][4];
        // found anew at each step, or the compiler would find all that follow before the first, and spill them
        const unsigned rows_at = operand_at(shared_address(streamed) + of_warp(warp / 4) * STREAMED * 2048, 1024);
        const unsigned columns_at = operand_at(shared_address(states) + of_warp(split) * DEPTHS * 2 * STRIDE * 4, STRIDE * 4);
        begin_products();
#pragma unroll
        for (int i = 0; i < SHARE * DEPTHS; ++i) {
          if (i > 0 && i % (SHARE * PART_DEPTHS) == 0) {
            end_products();
            if (t > 0) {
              settle(i / (SHARE * PART_DEPTHS));
              show_products();
              __syncthreads();
            }
            begin_products();
          }
          const unsigned columns = columns_at + i / SHARE * 2 * STRIDE / 4;
          const bool adds = i >= SHARE * CHAINS;
          float(&to)[TILES][4] = sums[i / SHARE % CHAINS][i % SHARE];
          if (Weights::streamed(i))
            multiply_shared(to, rows_at + Weights::before(i) * (2048 / 16), columns, adds);
          else
            multiply_columns(to, resident[Weights::resident(i)], columns, adds);
        }
        end_products();
        read_on();
        multiplied();
#pragma unroll
        for (int i = 0; i < CHAINS * SHARE * TILES * 4; ++i)
          keep(sums[i / (SHARE * TILES * 4)][i / (TILES * 4) % SHARE][i / 4 % TILES][i % 4]);
#else
        float sums[CHAINS][SHARE][TILES][4] = {};
#if HALVES && EXACT
        float low_sums[SHARE][TILES][4] = {};
#endif
        int row_gate = lane / 4 % 2;  // of the two gates that a strip has rows of, which has the thread's
        // else the weights of each gate alone are made before the loop, and spilled
        if constexpr (GATEWISE && !APIECE) keep(row_gate);
#pragma unroll
        for (int d = 0; d < DEPTHS; d += 2) {
          if (d == (LATE_X ? 0 : DEPTHS / 4 / 2 * 2)) read_on();
          if (NOISE == BY_GATE && SOLE && d % DEEP == 0)
            of_depths = masks[(((group * SPLITS + split) * SUBS + sub) * DEEPS + d / DEEP) * 32 + lane];
          uint4 b[TILES], low[TILES];  // and the second plane
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const unsigned at = columns + (n * 8 * STRIDE + d * 8) * 4, at_low = at + ROWS * STRIDE * 4;
            b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
            if constexpr (PLANES > 1) low[n] = d + 1 < DEPTHS ? load_columns(at_low) : load_half_columns(at_low);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (d + half < DEPTHS) {
              Right right[TILES];
#pragma unroll
              for (int n = 0; n < TILES; ++n) {
                right[n] = right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#if HALVES && EXACT
                right[n].low = half ? uint2{low[n].z, low[n].w} : uint2{low[n].x, low[n].y};
#endif
              }
              const auto weight_at = [&](int i) {
                return Weights::streamed(i) ? streamed[weights_at + Weights::before(i) * 32] : resident[Weights::resident(i)];
              };
#pragma unroll
              for (int s = 0; s < SHARE; ++s) {
                const int i = (d + half) * SHARE + s;
                const uint4 weight = weight_at(i);
                if constexpr (GATEWISE && !APIECE) {
#pragma unroll
                  for (int which = 0; which < 2; ++which) {
                    const int gate = (group * SHARE + s) * 16 / (2 * SLICE) * 2 + which;
                    if (gate >= RECURRENT) break;
                    const bool mine = gate + 1 - which == RECURRENT || row_gate == which;
                    const uint4 own = mine ? weight : uint4{0, 0, 0, 0};
#pragma unroll
                    for (int n = 0; n < TILES; ++n)
                      multiply(sums[half % CHAINS][s][n], left_of(own),
                               behind_mask(sub, n, d + half, gate, half ? b[n].z : b[n].x, half ? b[n].w : b[n].y));
                  }
                  continue;
                }
                if (APIECE && (!EVEN || s * 16 % SLICE == 0)) {  // another gate begins
                  const int gate = EVEN ? s * 16 / SLICE : (group * SHARE + s) * 16 / SLICE;  // past the last: of no weight
#pragma unroll
                  for (int n = 0; n < TILES; ++n)
                    right[n] = behind_mask(sub, n, d + half, gate, half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
                }
#if HALVES && EXACT
                const Left whole = {weight, weight_at(SHARE * DEPTHS + i)};
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                  multiply_apart(sums[0][s][n], low_sums[s][n], whole, right[n]);
#else
                const Left whole = left_of(weight);
#pragma unroll
                for (int n = 0; n < TILES; ++n) multiply(sums[half % CHAINS][s][n], whole, right[n]);
#endif
              }
            }
        }
#endif
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
          if (STRIPS % GROUPS != 0 && group * SHARE + s >= STRIPS) break;
#if HALVES
          const float2 its = weight_scales[(warp * SHARE + s) * 8 + lane / 4];
#else
          constexpr float2 its = {1.f, 1.f};
#endif
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            float* const to = partial + partial_to + n * 8 * SUM_STRIDE + s * 16;
            float(&sum)[4] = sums[0][s][n];
#pragma unroll
            for (int chain = 1; chain < CHAINS; ++chain) add(sum, sums[chain][s][n]);
#if !WARPGROUPS && HALVES && EXACT
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += low_sums[s][n][e] * (1.f / LOW_SCALE);
#endif
            *(float2*)to = {sum[0] * its.x, sum[2] * its.y};
            *(float2*)(to + SUM_STRIDE) = {sum[1] * its.x, sum[3] * its.y};
          }
        }
      }
#endif
      const auto look_at_next_part = [&] {
        if (SUBS > 1 && FIRST && (sub + 1 < SUBS ? t > 0 : t + 1 < time)) {
          const int after = sub + 1 < SUBS ? sub + 1 : 0;
#if BY_STEP
          levels.look_at(levels_of((sub + 1 < SUBS ? seen : seen_next) + after * ROWS * PITCH), rows_left(after), lane);
#endif
          arrival.look_at((sub + 1 < SUBS ? seen : seen_next) + after * ROWS * PITCH, rows_left(after), lane,
                          sub + 1 < SUBS ? phase_before : phase);
        }
      };
      if (!INSIDE) look_at_next_part();
      __syncthreads();

      float given[OWN][2][GATES], r[OWN][2][RESULTS], after[OWN][2][STATES] = {}, output[OWN][2] = {};
      const auto read_unit = [&](int j, int u, float(&v)[MOST(VECTORS)], float(&e)[MOST(INPUTS)], float(&before)[STATES]) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) v[i] = u == 0 ? vector_of(i).x : vector_of(i).y;
#pragma unroll
        for (int i = 0; i < INPUTS; ++i) e[i] = half_of(items[sub][j].inputs[i], u);
#pragma unroll
        for (int s = 0; s < STATES; ++s) before[s] = state[sub][j][s][u];
      };
      const auto begin_step = [&] {
#if INSIDE
        if constexpr (FIRST) take_results(0, sub, t == 0, r);
#endif
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          if (ROWS % PASS != 0 && own_row + j * PASS >= ROWS) break;
#if !INSIDE
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g)
            r[j][0][g] = LATE_BIAS ? 0.f : bias_of(g).x, r[j][1][g] = LATE_BIAS ? 0.f : bias_of(g).y;
#pragma unroll
          for (int s = 0; s < SPLITS; ++s) {
            const float* const part = partial + partial_from + (s * ROWS + j * PASS) * SUM_STRIDE;
#pragma unroll
            for (int g = 0; g < RECURRENT; g += APIECE ? 1 : 2) {
              if (!APIECE && g + 1 < RECURRENT) {
                const float4 two = *(const float4*)(part + g * SLICE);
                r[j][0][g] += two.x;
                r[j][1][g] += two.y;
                r[j][0][g + 1 < RECURRENT ? g + 1 : g] += two.z;
                r[j][1][g + 1 < RECURRENT ? g + 1 : g] += two.w;
              } else {
                const float2 one = *(const float2*)(part + g * SLICE - pair * 2);
                r[j][0][g] += one.x;
                r[j][1][g] += one.y;
              }
            }
          }
          if constexpr (LATE_BIAS) {
#if HALVES
            const float scale = unscale_at(sub, j, t == 0) * (GATEWISE ? (float)a.o.noise_scale : 1.f);
#else
            const float scale = (float)a.o.noise_scale;
#endif
#pragma unroll
            for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
              for (int u = 0; u < 2; ++u) r[j][u][g] = scale * r[j][u][g] + (u == 0 ? bias_of(g).x : bias_of(g).y);
          }
#endif
#pragma unroll
          for (int g = 0; g < GATES; ++g) {
            const float2 value = wide_gates(x[LATE_X ? 0 : sub][j][g]);
            given[j][0][g] = sum_of(g) >= 0 ? value.x : value.x + x_bias_of(g).x;
            given[j][1][g] = sum_of(g) >= 0 ? value.y : value.y + x_bias_of(g).y;
          }
        }
      };
#if STAGED
      Values values[OWN][2];
      float m[OWN][MOST(MEANS)], entered[OWN][2][MOST(INSIDE)];
      unsigned* const means = means_at;
      const auto row_there = [&](int j) { return batch - row0 - own_row > sub * ROWS + j * PASS; };
      const auto run_cells = [&](int stage) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {  // what all exchange travels at once
          if (ROWS % PASS != 0 && own_row + j * PASS >= ROWS) break;
          float to[2][MOST(VALUES)], operand[2][MOST(ROUNDS)];
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            float v[MOST(VECTORS)], e[MOST(INPUTS)], before[STATES];
            read_unit(j, u, v, e, before);
            run_stage(stage, given[j][u], r[j][u], before, v, e, m[j], values[j][u], to[u], operand[u], after[j][u]);
          }
#if INSIDE
          int asked = 0;
#pragma unroll
          for (int round = 1; round <= INSIDE; ++round) {
            if (round_stage(round) != stage) continue;
            float scale = 1.f;
#if HALVES
            scale = scale_of(unscale_inside(sub, j, t == 0));
#endif
#pragma unroll
            for (int u = 0; u < 2; ++u)
              entered[j][u][round - 1] = stepper.inside(items[sub][j], u) * operand[u][asked < INSIDE ? asked : 0];
            ++asked;
            if (is_there(sub, j))
              give(sent + round * round_pitch + sent_at + (sub * ROWS + j * PASS) * PITCH, PLANE_PITCH,
                   entered[j][0][round - 1] * scale, has_second ? entered[j][1][round - 1] * scale : 0.f, phase);
          }
#endif
          if (numbers(stage) == 0) continue;
          float data[4 * MOST(PACKS)] = {};
          summarise(stage, to, has_first, has_second, units_of(rank), lane, data);
          if (pair == 0 && row_there(j)) give_means(stage, data, means + (sub * ROWS + j * PASS) * MEAN_WORDS, rank, t / 2 % 2);
        }
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          if (numbers(stage) == 0 || (ROWS % PASS != 0 && own_row + j * PASS >= ROWS)) break;
          const int at = sub * ROWS + j * PASS;
          take_means(stage, means + at * MEAN_WORDS, t / 2 % 2, row_there(j), own_row + at, rank, lane, m[j]);
        }
      };
#endif
      const auto end_step = [&] {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          if (ROWS % PASS != 0 && own_row + j * PASS >= ROWS) break;
          float entering[2];
#if STAGED
          if (SAVED && rank == 0 && pair == 0 && (PACKED ? stepper.within(items[sub][j], step_now) : row_there(j)))
#pragma unroll
            for (int i = 0; i < MEANS; ++i) levels_at[further_on(sub, j) * MEANS + i] = m[j][i];
#endif
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            float v[MOST(VECTORS)], e[MOST(INPUTS)], before[STATES];
            read_unit(j, u, v, e, before);
#if !STAGED
            step(given[j][u], r[j][u], before, v, e, after[j][u]);
#endif
            stepper.end(items[sub][j], u, step_now, before, after[j][u], state[sub][j], output[j][u], entering[u]);
          }
#if BY_STEP
          float unscale = 0.f;  // of what the block has of the sequence
          if (t + 1 < time) {
            float most = has_first ? fabsf(entering[0]) : 0.f;
            if (has_second) most = fmaxf(most, fabsf(entering[1]));
#pragma unroll
            for (int apart = 1; apart < PAIRS; apart *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
            unscale = unscale_of(most);
          }
#endif
          if (t + 1 < time && FIRST && is_there(sub, j)) {
#if BY_STEP
            if (pair == 0)
              put(sent + sent_at + (sub * ROWS + j * PASS) * PITCH + level_at, __float_as_uint(unscale) >> 23);
            entering[0] *= scale_of(unscale), entering[1] *= scale_of(unscale);
#elif HALVES
            const float scale = scale_of(unscale_at(sub, j, false));
            entering[0] *= scale, entering[1] *= scale;
#endif
            give(sent + sent_at + (sub * ROWS + j * PASS) * PITCH, PLANE_PITCH, entering[0], has_second ? entering[1] : 0.f,
                 phase);
          }
        }
      };
#if INSIDE
      if (own_row < PASS) begin_step();
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        if (own_row < PASS) run_cells(stage);
#pragma unroll
        for (int round = 1; round <= INSIDE; ++round) {
          if (round_stage(round) != stage) continue;
          States inside;
          const unsigned* const from = first_seen + round * round_pitch + sent_at + sub * ROWS * PITCH;
          inside.look_at(from, rows_left(sub), lane, phase);
#pragma unroll
          for (int part = 0; part < PARTS; ++part)
            inside.settle(states + arrived_at, from, rows_left(sub), lane, phase, part);
          __syncthreads();
          if (round == INSIDE) read_on();
          multiply_round(round, sub);
          __syncthreads();
          if (own_row < PASS) take_results(round, sub, t == 0, r);
        }
      }
      if (own_row < PASS) end_step();
      look_at_next_part();
#else
      if (own_row < PASS) {
        begin_step();
#if STAGED
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) run_cells(stage);
#endif
        end_step();
      }
#endif
      if (LULL > 0 && !OUTPUTS_FIRST) meet();

#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        if (!LATE_X && t + 1 < time)
#pragma unroll
          for (int g = 0; g < GATES; ++g) x[LATE_X ? 0 : sub][j][g] = next[j][g];
        const Ahead& item = items[sub][j];
        const bool first = PACKED ? stepper.within(item, step_now) : item.there, second = first && has_second;
        const auto further = further_on(sub, j);
        store_pair(y_at + further * width, output[j][0], output[j][1], first, second);
        if constexpr (SEQUENCES) {
          const bool shown = !LENGTHS || step_now < item.ends;
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (a.o.sequences[s] != nullptr)
              store_pair(a.o.sequences[s] + (y_at - a.y) + further * width, shown ? after[j][0][s] : 0.f,
                         shown ? after[j][1][s] : 0.f, first, second);
        }
        if constexpr (SAVED) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) {
            const bool sum = sum_of(g) >= 0;
            if (!sum && a.x_bias[direction] == nullptr) continue;  // it is there
            const int of_r = sum ? sum_of(g) : 0;
            store_gates(gates_at + (further * GATES + g) * UNITS, given[j][0][g] + (sum ? r[j][0][of_r] : 0.f),
                        given[j][1][g] + (sum ? r[j][1][of_r] : 0.f), first, second);
          }
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_gates(apart_at + (further * APART + i) * UNITS, r[j][0][apart(i)], r[j][1][apart(i)], first, second);
#if INSIDE
          const bool counts = !MARKED || item.valid;  // else it may be anything
#pragma unroll
          for (int i = 0; i < INSIDE; ++i)
            store_pair(operands_at + i * state_stride + further * UNITS, counts ? entered[j][0][i] : 0.f,
                       counts ? entered[j][1][i] : 0.f, first, second);
#endif
          if constexpr (BEFORE) {
            float2 entered = {};
            if constexpr (ENTERED) entered = {stepper.entering(item, state[sub][j], 0), stepper.entering(item, state[sub][j], 1)};
            if (t + 1 < time) store_before(sub, j, next_step, row_step, entered);
          } else {
#pragma unroll
            for (int s = 1; s < STATES; ++s)
              store_wide_pair(states_at + (s - 1) * state_stride + further * UNITS, after[j][0][s], after[j][1][s], first,
                              second);
          }
        }
        if (t + 1 == time) {
          const long long end = ((long long)direction * batch + sequence_of(sub, j)) * UNITS + unit;
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            leave_pair(a, s, end, after[j][0][s], after[j][1][s], item.there, item.there && has_second);
        }
      }
      if constexpr (OPTIONS) {
        if (t + 1 < time) {
          const bool goes_on = t + 2 < time;
          const int later = step_of(t + 2);
          const long long later_rows = goes_on ? rows_of(a, later) : next_rows;
#pragma unroll
          for (int j = 0; j < OWN; ++j)
            stepper.advance(items[sub][j], next_step, next_rows, goes_on, later, later_rows);
        }
      }
    }
    if (comes_round) {  // everyone has read these
      unsigned* const old = sent + sent_at + freed(t) * buffer;
#pragma unroll
      for (int i = 0; i < SUBS * OWN; ++i) {
        if (!is_there(i / OWN, i % OWN)) continue;
        unsigned* const at = old + (i / OWN * ROWS + i % OWN * PASS) * PITCH;
#pragma unroll
        for (int p = 0; p < PLANES; ++p) put(at + p * PLANE_PITCH, NOTHING);
#if BY_STEP
        if (pair == 0) put(at + level_at, NOTHING);
#endif
#if INSIDE
#pragma unroll
        for (int round = 1; round <= INSIDE; ++round) put(at + round * round_pitch, NOTHING);
#endif
      }
    }
    if (ASKS_EARLY && t + 1 < time) look_after_lull(seen_next, t);
    if (SUBS == 1 && FIRST && LULL == 0 && t + 1 < time) {
#if BY_STEP
      if (!States::AFTER_ONE) levels.look_at(levels_of(seen_next), rows_left(0), lane);
#endif
      arrival.look_at(seen_next, rows_left(0), lane, phase);
    }
#if BY_STEP
    scales_now = SCALES - scales_now;
#endif
    if (LULL == 0 && comes_round && t % PERIOD == 0) fence();
    gates_at += row_step * GATES * UNITS;
    y_at += row_step * width;
#if STAGED
    levels_at += row_step * MEANS;
    means_at += t % 2 == 0 ? mean_plane : -mean_plane;
#endif
#if INSIDE
    operands_at += row_step * UNITS;
#endif
    apart_at += row_step * APART * UNITS;
    states_at += row_step * UNITS;
    if constexpr (BEFORE) before_at += row_step * UNITS;
    seen = seen_next;
    sent_at = (t + 1) % RING == 0 ? 0 : sent_at + buffer;
    if constexpr (OPTIONS) {
      rows = next_rows;
      if (t + 2 < time) next_rows = rows_of(a, step_of(t + 2));
      if constexpr (PACKED) row_step = next_rows - rows;
    }
  }
  if constexpr (LENGTHS)
#pragma unroll
    for (int sub = 0; sub < SUBS; ++sub)
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const bool first = items[sub][j].there, second = first && has_second;
        const long long sequence = sequence_of(sub, j);
        if (time == 0)
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            store_pair(a.finals[s] + ((long long)direction * batch + sequence) * UNITS + unit, state[sub][j][s][0],
                       state[sub][j][s][1], first, second);
        for (long long t = time; t < a.time && !PACKED; ++t) {  // past the end of all of the block's sequences
          const long long at = t * batch + sequence, shown = at * width + direction * UNITS + unit;
          store_pair(a.y + shown, 0.f, 0.f, first, second);
          if constexpr (SEQUENCES)
#pragma unroll
            for (int s = 0; s < STATES; ++s)
              if (a.o.sequences[s] != nullptr) store_pair(a.o.sequences[s] + shown, 0.f, 0.f, first, second);
          if constexpr (SAVED) {
            store_pair(a.o.before[direction] + at * UNITS + unit, 0.f, 0.f, first, second);
#if INSIDE
            for (int i = 0; i < INSIDE; ++i)
              store_pair(a.operands[direction] + i * state_stride + at * UNITS + unit, 0.f, 0.f, first, second);
#endif
          }
        }
      }
}
