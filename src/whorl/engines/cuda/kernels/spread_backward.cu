// All steps of a recurrent layer that one cluster cannot hold, backward, in one launch: the gradients of the gates, of
// the initial states, and sums over the batch for the bias and the vectors.  What is left (dx, dW) are products of
// whole matrices.
//
// BLOCKS = SOURCES x GATHERED blocks own SUBS x ROWS sequences together; block `rank` owns the units from rank x SLICE
// on, and computes the gradient of the cell for them at each step.  For the product with the recurrent weights,
// transposed, the blocks are a rectangle: block (source, place) holds the weights from the gates of the units that the
// GATHERED blocks of its `source` own, to the units of the `place`-th part of all.  So it takes from L2 the gradients of
// the gates of its neighbours, multiplies, and puts a float32 sum for each unit of its part into L2; the owner of a unit
// adds what the SOURCES blocks say of it, in their order.  With GATHERED = 1 no block needs its neighbours' gradients,
// but sums arrive from all; a square rectangle moves the fewest bytes (KERNELS: 8BH/sources + 4BH/places).
//
// The product's rows are the units of a part, 16 in each of STRIPS strips; warp w owns SHARE strips from w x SHARE on.
// A thread computes the cell for two neighbouring units of every PASS-th sequence.
//
// With HALVES a block scales the gradients of a sequence together, and what they were divided by travels behind them; who
// gathers them scales all to the largest.  With WARPGROUPS four warps multiply together (warpgroup.cu).
//
//   registers  weights, sums of the products, gradients of the states, sums for the bias, the next step's input
//   shared     gradients of the gates twice (a warp may still multiply while another begins the next part), more weights
//   global     gates, saved states, y and its gradient in; gradients of the gates out; the ring of gradients, and sums
//
// What options add stands in options.cu; a kernel without them has none of it.  Of a cell with means over the units
// (STAGED) the threads of a sequence make those of its gradients too, as spread_means.cu says.  Of one with products inside
// the step (INSIDE) the gradients of each of their gates are gathered and multiplied, and their sums come back, between two
// stages; gate by gate, in places of their own, where those of other gates come later (spread_inside.cu).
//
// A block waits for all others that own the same sequences, so the launch must be cooperative.

// @generated

constexpr int ROWS = 8 * TILES, PAIRS = SLICE / 2, THREADS = 32 * WARPS, BLOCKS = SOURCES * GATHERED;
// parts of the sequences for which threads enough are there to compute the cell at once, where the product waits for all
__device__ constexpr int parts_at_once() {
  for (int parts = SUBS; GATHERED > 1 && parts > 1; --parts)
    if (SUBS % parts == 0 && parts * ROWS * PAIRS <= THREADS) return parts;
  return 1;
}
constexpr int COMPUTED = parts_at_once() * ROWS, TURNS = SUBS * ROWS / COMPUTED;
constexpr int PASS = THREADS / PAIRS < COMPUTED ? THREADS / PAIRS : COMPUTED, OWN = (COMPUTED + PASS - 1) / PASS;
constexpr int STRIPS = (UNITS + 16 * GATHERED - 1) / (16 * GATHERED), SHARE = (STRIPS + WARPS - 1) / WARPS;
constexpr int DEPTHS = GATHERED * RECURRENT * SLICE / (8 * WORD_ELEMENTS);
constexpr int SCALES = HALVES ? GATHERED : 0, SCALE_WORDS = (SCALES + 3) / 4 * 4;  // of a sequence
constexpr int GATE_WORDS = SLICE / WORD_ELEMENTS, GATE_DEPTHS = DEPTHS / (GATHERED * RECURRENT);
#if INSIDE
constexpr int RESULTS = LINKS, SLOTS = LEAVES + INSIDE, MOST_SLOTS = MOST(LEAVES);  // of a step, of a round
constexpr int SLOT_DEPTHS = GATHERED * GATE_DEPTHS, OWN_WORDS = GATE_WORDS;
#else
#if STAGED
constexpr int RESULTS = MOST(LINKS);  // of which some may be of products whose operands have no gradient
#else
constexpr int RESULTS = RECURRENT;
#endif
constexpr int SLOTS = 1, MOST_SLOTS = 1;
constexpr int SLOT_DEPTHS = DEPTHS, OWN_WORDS = RECURRENT * SLICE / WORD_ELEMENTS;  // of a block's gradients of a sequence
#endif
constexpr int FACTOR_AT = SLOT_DEPTHS * 8, SLOT_WORDS = FACTOR_AT + SCALE_WORDS;
// of a sequence's gradients, and scales behind them: 8 rows of 16 bytes are in 32 different banks
constexpr int STRIDE = WARPGROUPS ? ROWS * 4 + 4 : (MOST_SLOTS * SLOT_WORDS + 3) / 8 * 8 + 4;
// where a word of a sequence's gradients lies: with WARPGROUPS 16 bytes of all sequences beside each other
__device__ constexpr int gradient_at(int row, int word) {
  return WARPGROUPS ? word / 4 * STRIDE + row * 4 + word % 4 : row * STRIDE + word;
}
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT;
constexpr int WEIGHT_WORDS = WARPS * STREAMED * 128, GRADIENT_WORDS = (WARPGROUPS ? DEPTHS * 2 + SCALE_WORDS / 4 : ROWS) * STRIDE;
#if STAGED
typedef Values Known;
constexpr bool ROOMY = (TILES < 3 || COLLECTED) && ELEMENT_BYTES == 2;
#else
constexpr bool ROOMY = TILES < 3 && ELEMENT_BYTES == 2;  // else registers are short
#endif
constexpr int CHAINS = CHUNK * TILES < 4 ? 2 : 1;  // of products that wait for each other
constexpr int CHUNKS = SLOT_WORDS / 4, GATE_APART = INSIDE ? SLOT_WORDS : GATE_WORDS;  // from one gate's words to the next's
constexpr int GATHERED_WORDS = SLOTS * SLOT_WORDS;                            // of one source
constexpr int PITCH = SOURCES * GATHERED_WORDS, SUM_PITCH = BLOCKS * SLICE;  // words of a sequence in L2
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS;
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
constexpr int EVEN_DEPTHS = (SLOT_DEPTHS + 1) / 2 * 2;
// depths of one gate that are multiplied one after another: with masks by gate those of all blocks, where they are taken
// two at a time, or all at once
constexpr bool BY_TURNS = GATEWISE && (WARPGROUPS || INSIDE || GATE_DEPTHS % 2 == 0);
constexpr int GATE_RUN = BY_TURNS ? GATHERED * GATE_DEPTHS : GATE_DEPTHS;
__device__ constexpr int depth_at(int turn) {
  const int gate = turn / GATE_RUN, block = turn % GATE_RUN / GATE_DEPTHS;
  return BY_TURNS ? (block * RECURRENT + gate) * GATE_DEPTHS + turn % GATE_DEPTHS : turn;
}
#if INSIDE
__device__ constexpr int depth_in(int round, int slot, int turn) {  // of the weights
  return (turn / GATE_DEPTHS * RECURRENT + gate_in(round, slot)) * GATE_DEPTHS + turn % GATE_DEPTHS;
}
#else
__device__ constexpr int slots_of(int) { return 1; }
__device__ constexpr int first_slot(int) { return 0; }
#endif
// masks by gate: 4 bits for each gate, for two units of two sequences as a thread has its sums, for [strip, part and
// tile, lane]; those that are given stay in global memory
constexpr int MASK_WORDS = NOISE == BY_GATE ? STRIPS * SUBS * TILES * 32 : 0;
// With means between the stages registers are short: what is the same at all steps, and what each thread sums over them,
// stay in shared memory: [VECTORS, pair] of two units, [of two sums, thread] of two units each.
constexpr int FIXED_WORDS = ASIDE ? (VECTORS + 1) / 2 * 2 * SLICE : 0;
constexpr int SUM_WORDS = ASIDE ? (GATES + APART + VECTORS + 1) / 2 * 4 * PASS * PAIRS : 0;
constexpr int AT_THE_END = PASS * (GATES + APART + VECTORS) * SLICE;
constexpr int WORDS = WEIGHT_WORDS + 2 * GRADIENT_WORDS + MASK_WORDS + FIXED_WORDS + SUM_WORDS;
static_assert(4 * (WORDS > AT_THE_END ? WORDS : AT_THE_END) == SHARED, "tiling and kernel disagree");
static_assert(GATHERED * OWN_WORDS % 8 == 0 && (!(GATEWISE || INSIDE) || GATE_WORDS % 8 == 0), "depths are not whole");
static_assert(!HALVES || (32 % PAIRS == 0 && PASS * PAIRS % 32 == 0 && !EXACT), "no scales of these");
// A block without units waits for its neighbours; were all of them without, it would run ahead and write over sums that
// nobody has read yet.
static_assert(BLOCKS * SLICE >= UNITS && (SOURCES - 1) * GATHERED * SLICE < UNITS, "the tile does not cover the layer");
typedef Operands<SHARE * DEPTHS, STREAMED> Weights;
static_assert(!WARPGROUPS || (WARPS % 4 == 0 && CHUNK == SHARE && NOISE != GIVEN_BY_GATE && !INSIDE), "no products of four warps");
typedef Arrival<ROWS, CHUNKS, GATHERED * OWN_WORDS + SCALES, PITCH, WARPS, gradient_at(WARPS, 0),
                gradient_at(0, 128), PARTS, SUBS == 1 && LULL == 0, 0, 0> Gathered;

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
  float* sums[2];                          // [batch / (SUBS x ROWS), SUMMED x UNITS]
#if STAGED
  const float* levels[2];  // [time, batch, LEVELS]: the means that forward saved
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
  // ones: [directions, RING, batch, PITCH] if GATHERED > 1, [1 + INSIDE, directions, 2, SOURCES, batch, SUM_PITCH], and for
  // means [directions, 2, batch, MEAN_WORDS]
  unsigned* ring;
  long long first_row, first_direction, directions;
#if SIDED
  Places places;
#endif
};

// Sums are multiplied with part of what their gradients were divided by, then with the rest and what weights were: there
// is no overflow between, and gradients from 2^-84 on are scaled in full.
constexpr float SUM_SHARE = 0x1p-28f, LEAST_SCALED = 0x1p-84f;

struct Item {  // what one thread reads of a sequence at a step: two units
  GatePair gates[GATES], apart[MOST(APART)];
  Pair y_gradient, before;
  float2 states[MOST(STATES - 1)];
#if STAGED
  float m[MOST(LEVELS)];
#endif
  Step step;
};

struct Unit {  // of one unit of a sequence: what the cell's gradient reads, and what it makes
  float x[GATES], r[RESULTS] = {}, before[STATES], v[MOST(VECTORS)], e[MOST(INPUTS)], d[STATES];
  float to_s[STATES], to_v[MOST(VECTORS)] = {}, to_e[MOST(INPUTS)], stayed[STATES], to_z[STATES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  if (MASK || LENGTHS || NOISE >= BY_GATE) let_the_next_launch_begin();  // masked.cu runs beside it
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;               // [warp, strip and depth, lane]
  unsigned* const gradients = memory + WEIGHT_WORDS;    // [2, sequence, block, gate, unit]
  unsigned* const masks = gradients + 2 * GRADIENT_WORDS;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if SIDED
  const unsigned own = own_place(a.places, memory);
  if (own == NO_PLACE) return;
#else
  const unsigned own = blockIdx.x;
#endif
  const int rank = own % BLOCKS, source = rank / GATHERED, place = rank % GATHERED;
  const int direction = (int)a.first_direction + blockIdx.y, batch = (int)a.batch;
  const int row0 = (int)a.first_row + own / BLOCKS * (SUBS * ROWS);
  const Weight* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
#if HALVES
  float unscale[SHARE][2];  // what a sum is multiplied with, since the weights of its unit were scaled
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int column = (place * STRIPS + warp * SHARE + s) * 16 + lane / 4 * 2;
    const bool first = warp * SHARE + s < STRIPS && column < UNITS, second = first && column + 1 < UNITS;
    const float2 its = load_wide_pair(scales_behind(weights) + source * UNITS + column, first, second);
    unscale[s][0] = its.x, unscale[s][1] = its.y;
  }
#endif
  const auto number_of = [](int strip, int depth) {  // of an operand of the warp
    const int chunk = strip / CHUNK * CHUNK;
    return chunk * DEPTHS + depth * min(CHUNK, SHARE - chunk) + strip - chunk;
  };
  const int first_column = place * STRIPS * 16;
  const auto weights_of = [&](int depth) {
    const int own = (source * GATHERED + depth / (RECURRENT * SLICE)) * SLICE + depth % SLICE;
    const Weight* const at = weights + ((long long)(depth / SLICE % RECURRENT) * UNITS + own) * WEIGHT_PITCH;
    return WeightRow{at + first_column, UNITS - own};
  };
  bring_columns<Weights, STRIPS, SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS, SLICE>(
      memory, warp, lane, UNITS - first_column, number_of, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) {
#if WARPGROUPS
        put_square<512>(memory + (warp / 4 * STREAMED + i) * 512 + warp % 4 * 64, lane, words);
#else
        streamed[(warp * STREAMED + i) * 32 + lane] = words;
#endif
      });

  // of two neighbouring units of two neighbouring sequences of this part, as a thread has its sums
  const auto mask_of = [&](int gate, int sub, int strip, int n, int e) {
    const int unit = (place * STRIPS + strip) * 16 + lane / 4 * 2 + e / 2;
    const int at = row0 + sub * ROWS + n * 8 + lane % 4 * 2 + e % 2;
    return at < batch && unit < UNITS ? a.o.noise[direction][(gate * a.batch + sequence_at(a, at)) * UNITS + unit] : 0.f;
  };
  if constexpr (NOISE == BY_GATE)
    for (int item = warp; item < STRIPS * SUBS * TILES; item += WARPS) {
      const int tile = item % (SUBS * TILES);
      unsigned bits = 0;
      for (int i = 0; i < MASKED * 4; ++i)
        bits |= (mask_of(i / 4, tile / TILES, item / (SUBS * TILES), tile % TILES, i % 4) != 0.f) << i;
      masks[item * 32 + lane] = bits;
    }

  // steps of the longest of these sequences; they are computed from the one that forward computed last
  const int time = LENGTHS ? longest(a, row0, SUBS * ROWS) : (int)a.time;
  const bool reverse = direction == 1, has_output_gradient = a.y_gradient != nullptr;
  const auto step_of = [&](int t) { return reverse ? t : time - 1 - t; };
  const int first_step = time > 0 ? step_of(0) : 0;
  long long rows = rows_of(a, first_step), next_rows = rows_of(a, time > 1 ? step_of(1) : first_step);
  long long row_step = PACKED ? next_rows - rows : reverse ? batch : -(long long)batch, rows_before = rows;
  const long long width = a.directions * UNITS, begin = rows;
  const long long state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  const int pair = threadIdx.x % PAIRS, own_row = threadIdx.x / PAIRS, unit = rank * SLICE + pair * 2;
  const bool has_first = unit < UNITS && own_row < PASS, has_second = has_first && unit + 1 < UNITS;
  const int own_left = own_row < PASS ? batch - row0 - own_row : 0, left = batch - row0 - warp;
  const auto is_row = [&](int turn, int j) {
    return own_left > turn * COMPUTED + j * PASS && (COMPUTED % PASS == 0 || own_row + j * PASS < COMPUTED);
  };
  Back kept[TURNS][OWN];  // from step to step
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      Back& own = kept[turn][j];
      const int at = row0 + turn * COMPUTED + own_row + j * PASS;
      own.there = has_first && is_row(turn, j);
      own.sequence = is_row(turn, j) ? sequence_at(a, at) : at;
      own.ends = LENGTHS && is_row(turn, j) ? min(time, (int)a.o.lengths[own.sequence]) : time;
    }
  const auto sequence_of = [&](int turn, int j) {
    return ORDER ? kept[turn][j].sequence : (long long)row0 + own_row + turn * COMPUTED + j * PASS;
  };
  const auto further_on = [&](int turn, int j) {
    return ORDER ? sequence_of(turn, j) - sequence_of(0, 0) : turn * COMPUTED + j * PASS;
  };
  const auto start_of = [&](int turn, int j) {  // in a tensor [directions, batch, UNITS]
    return ((long long)direction * batch + sequence_of(turn, j)) * UNITS + unit;
  };
  const long long row_first = begin + sequence_of(0, 0);  // in tensors [time, batch]
  const Gate* gates_at = a.gates[direction] + row_first * GATES * UNITS + unit;
  const Gate* apart_at = a.apart[direction] + row_first * APART * UNITS + unit;
  const float* states_at = a.states[direction] + row_first * UNITS + unit;
  const Element* y_at = a.y + row_first * width + direction * UNITS + unit;
  const Element* before_at = BEFORE ? a.o.before[direction] + row_first * UNITS + unit : nullptr;
  const Element* y_gradient_at = a.y_gradient + row_first * width + direction * UNITS + unit;
  Element* gate_gradients_at = a.gate_gradients[direction] + row_first * GATES * UNITS + unit;
  Element* apart_gradients_at = a.apart_gradients[direction] + row_first * APART * UNITS + unit;
#if STAGED
  const float* levels_at = a.levels[direction] + row_first * LEVELS;
#endif
  const Backwards<Arguments> stepper = {a, unit, direction, width, has_second, reverse};

  float carried[TURNS][OWN][STATES][2], vectors[MOST(VECTORS)][2], summed[MOST(SUMMED)][2] = {};
  Item item[TURNS][OWN];
  // what is read at the step that the places above have come to; `last`: nothing came before it
  const auto load = [&](int turn, int j, int step, bool last) {
    const bool first = kept[turn][j].there && (!LENGTHS || step < kept[turn][j].ends), second = first && has_second;
    const auto further = further_on(turn, j);
    Item& into = item[turn][j];
#if STAGED
    const bool row_there = is_row(turn, j) && (!LENGTHS || step < kept[turn][j].ends);
#pragma unroll
    for (int i = 0; i < LEVELS; ++i) into.m[i] = row_there ? levels_at[further * LEVELS + i] : 0.f;
#endif
#pragma unroll
    for (int g = 0; g < GATES; ++g)
      into.gates[g] = load_gates(gates_at + (further * GATES + g) * UNITS, first, second);
#pragma unroll
    for (int i = 0; i < APART; ++i)
      into.apart[i] = load_gates(apart_at + (further * APART + i) * UNITS, first, second);
    into.y_gradient =
        load_pair(y_gradient_at + further * width, first && has_output_gradient, second && has_output_gradient);
    if constexpr (BEFORE) {
      into.before = ENTERED ? Pair{} : load_pair(before_at + further * UNITS, first, second);
#pragma unroll
      for (int s = 1; s < STATES; ++s)
        into.states[s - 1] = load_wide_pair(states_at + (s - 1) * state_stride + further * UNITS, first, second);
    } else {
      const bool given = a.initial[0] != nullptr;
      if (last)
        into.before = load_pair(a.initial[0] + start_of(turn, j), first && given, second && given);
      else
        into.before = load_pair(y_at + (further + row_step) * width, first, second);
      // Initial states may have two bytes and be made wide.  They then take the place of what is loaded: two branches that
      // give the one or the other meet in a move, and a move waits for the load, in the midst of the product.
#pragma unroll
      for (int s = 1; s < STATES; ++s) {
        const float* const at = states_at + (s - 1) * state_stride + (further + row_step) * UNITS;
        into.states[s - 1] = load_wide_pair(at, first && !last, second && !last);
        if (last) into.states[s - 1] = wide_pair(load_pair(a.initial[s] + start_of(turn, j), first && given, second && given));
      }
    }
  };
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    vectors[v][0] = has_first ? wide(a.vectors[direction][v][unit]) : 0.f;
    vectors[v][1] = has_second ? wide(a.vectors[direction][v][unit + 1]) : 0.f;
  }
  float2* const fixed = (float2*)(memory + WORDS - SUM_WORDS - FIXED_WORDS) + pair;
  float4* const aside = (float4*)(memory + WORDS - SUM_WORDS) + threadIdx.x;
  if constexpr (ASIDE) {
    if (own_row == 0)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) fixed[v * PAIRS] = {vectors[v][0], vectors[v][1]};
    if (own_row < PASS)
#pragma unroll
      for (int i = 0; i < SUMMED; i += 2) aside[i / 2 * PASS * PAIRS] = {0.f, 0.f, 0.f, 0.f};
    __syncthreads();
  }
  const auto vector_of = [&](int v) { return ASIDE ? fixed[v * PAIRS] : float2{vectors[v][0], vectors[v][1]}; };
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const bool first = has_first && is_row(turn, j), second = first && has_second;
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        const float2 value = final_gradient_pair(a, s, start_of(turn, j), first, second);
        carried[turn][j][s][0] = value.x;
        carried[turn][j][s][1] = value.y;
      }
      load(turn, j, first_step, time == 1 && !goes_on_before(a));
      if constexpr (OPTIONS) {
        stepper.load(item[turn][j].step, kept[turn][j], first_step, rows);
        if constexpr (NOISE == HELD)
          item[turn][j].step.noise =
              load_wide_pair(a.o.noise[direction] + sequence_of(turn, j) * UNITS + unit, first, second);
      }
    }

  // where things lie in L2
  const long long buffer = (long long)batch * PITCH, plane = (long long)batch * SUM_PITCH;
  unsigned* const ring = a.ring + direction * RING * buffer + (long long)row0 * PITCH;
  unsigned* const sums_at = a.ring + (GATHERED > 1 ? a.directions * RING * buffer : 0) +
                             direction * 2 * SOURCES * plane + (long long)row0 * SUM_PITCH;
#if STAGED
  const long long mean_plane = (long long)batch * MEAN_WORDS;
  unsigned* means_at = a.ring + a.directions * ((GATHERED > 1 ? RING : 0) * buffer + (1 + INSIDE) * 2 * SOURCES * plane) +
                       direction * 2 * mean_plane + (long long)(row0 + own_row) * MEAN_WORDS;
  keep(means_at);
#endif
  const int pair_at = pair * (2 / WORD_ELEMENTS), scale_at = (GATHERED - place) * OWN_WORDS + place;  // for the first pair
  unsigned* given = ring + own_row * (long long)PITCH + source * GATHERED_WORDS + place * OWN_WORDS + pair_at;
  const unsigned* gathered = ring + warp * (long long)PITCH + source * GATHERED_WORDS + lane * 4;
  long long ring_at = 0;
  const long long round_plane = a.directions * 2 * SOURCES * plane;  // from the sums of a round to those of the next
  const unsigned* arriving = sums_at + own_row * (long long)SUM_PITCH + unit;
  unsigned* putting = sums_at + source * plane + lane % 4 * 2 * (long long)SUM_PITCH +
                            (place * STRIPS + warp * SHARE) * 16 + lane / 4 * 2;
  const int putting_left = batch - row0 - lane % 4 * 2;
  int weights_at = warp * STREAMED * 32 + lane, arrived_at = gradient_at(warp, lane * 4);
  int columns_at = (lane % 8) * STRIDE + lane / 8 * 4;
  keep(given), keep(gathered), keep(arriving), keep(putting), keep(weights_at), keep(arrived_at), keep(columns_at);
  keep(gates_at), keep(states_at), keep(y_at), keep(y_gradient_at), keep(gate_gradients_at);
  const bool comes_round = OPERAND_BYTES == 2 && GATHERED > 1 && time > RING;
  const auto rows_left = [&](int sub) {  // rows of a part from this warp's on
    return ROWS % WARPS == 0 ? left - sub * ROWS : min(left - sub * ROWS, ROWS - warp);
  };

  Gathered arrivals[MOST_SLOTS];
  int place_now = 0;  // of gradients in shared memory, where a step has several products
  const auto place_for = [&](int t, int sub) { return (INSIDE ? place_now : (t * SUBS + sub) % 2) * GRADIENT_WORDS; };

  // adds up the sums of all sources for two units of a sequence, of which each word's last bit says whether it has come
  const auto add_sums = [&](const unsigned* from, unsigned phase, float(&to)[2]) {
    constexpr int TOGETHER = SOURCES < 32 ? SOURCES : 32;
#pragma unroll
    for (int p0 = 0; p0 < SOURCES; p0 += TOGETHER) {
      uint2 words[TOGETHER];
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p)
        if (p0 + p < SOURCES) words[p] = look_pair(from + (p0 + p) * plane);
      for (;;) {
        unsigned other = 0;
#pragma unroll
        for (int p = 0; p < TOGETHER; ++p)
          if (p0 + p < SOURCES) other |= (words[p].x ^ phase) | (words[p].y ^ phase);
        if ((other & 1u) == 0) break;
#pragma unroll
        for (int p = 0; p < TOGETHER; ++p)
          if (p0 + p < SOURCES && ((words[p].x ^ phase) | (words[p].y ^ phase)) & 1u)
            words[p] = look_pair(from + (p0 + p) * plane);
      }
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p)
        if (p0 + p < SOURCES) {
          to[0] += __uint_as_float(words[p].x & ~1u);
          to[1] += __uint_as_float(words[p].y & ~1u);
        }
    }
  };
  // the sums of step t - 1
  const auto arrive = [&](int t, int turn) {
    const unsigned phase = (t - 1) / 2 % 2;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      if (!has_first || !is_row(turn, j)) continue;
      const unsigned* const from =
          arriving + (t % 2 ? 0 : SOURCES * plane) + (turn * COMPUTED + j * PASS) * SUM_PITCH;
      float arrived[2] = {};
      float(&to)[2] = OPTIONS ? arrived : carried[turn][j][0];
      if constexpr (FIRST) add_sums(from, phase, to);
      if constexpr (OPTIONS)
        stepper.arrive(kept[turn][j], carried[turn][j], arrived, step_of(t - 1), rows_before);
    }
  };

  // what one unit's step is computed from
  const auto values = [&](const Item& read, int u, float(&x)[GATES], float(&r)[RESULTS], float(&before)[STATES],
                          float(&v)[MOST(VECTORS)], float(&e)[MOST(INPUTS)]) {
#pragma unroll
    for (int g = 0; g < GATES; ++g) x[g] = half_of(wide_gates(read.gates[g]), u);
#pragma unroll
    for (int i = 0; i < APART; ++i) r[apart(i)] = half_of(wide_gates(read.apart[i]), u);
    before[0] = half_of(wide_pair(read.before), u);
#pragma unroll
    for (int s = 1; s < STATES; ++s) before[s] = half_of(read.states[s - 1], u);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) v[i] = u == 0 ? vector_of(i).x : vector_of(i).y;
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) e[i] = half_of(read.step.inputs[i], u);
  };
  // what of a step needs no gradient, for the thread's units
  const auto look_ahead = [&](int turn, Known(&ahead)[OWN][2]) {
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float x[GATES], r[RESULTS] = {}, before[STATES], v[MOST(VECTORS)], e[MOST(INPUTS)];
        values(item[turn][j], u, x, r, before, v, e);
#if STAGED
        run_ahead(x, r, before, v, e, item[turn][j].m, ahead[j][u]);
#else
        ahead[j][u] = known(x, r, before, v, e);
#endif
      }
  };

  // Loads answer in order: what the next step reads would keep the gradients waiting if it were asked for before.
  const auto read_on = [&](int t) {
    if (t + 1 == time) return;
    gates_at += row_step * GATES * UNITS;
    apart_at += row_step * APART * UNITS;
    states_at += row_step * UNITS;
    y_at += row_step * width;
    if constexpr (BEFORE) before_at += row_step * UNITS;
    y_gradient_at += row_step * width;
#if STAGED
    levels_at += row_step * LEVELS;
#endif
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        load(turn, j, step_of(t + 1), t + 2 == time && !goes_on_before(a));
        if constexpr (OPTIONS) stepper.load(item[turn][j].step, kept[turn][j], step_of(t + 1), next_rows);
        if (t + 1 + AHEAD < time && has_first && is_row(turn, j) && !PACKED) {
          const auto further = further_on(turn, j);
#pragma unroll
          for (int g = 0; g < GATES; ++g) prefetch(gates_at + AHEAD * row_step * GATES * UNITS + (further * GATES + g) * UNITS);
#pragma unroll
          for (int i = 0; i < APART; ++i) prefetch(apart_at + AHEAD * row_step * APART * UNITS + (further * APART + i) * UNITS);
          // not of zoneout alone: LSTM of 100 steps at batch 128 in bfloat16 took 200 us with 256 units where it took 177,
          // and 323 and 731 with 512 and 1,024, where it took 324 and 724; dropout by step 165, where it took 172 (H200)
          if constexpr (NOISE == DRAWN)
            prefetch(drawn_place(a, unit, step_of(t + 1 + AHEAD), kept[turn][j].sequence, direction));
          if (has_output_gradient) prefetch(y_gradient_at + (AHEAD * row_step + further) * width);
          if constexpr (!BEFORE)
            prefetch(y_at + (AHEAD * row_step + further) * width);
          else if constexpr (!ENTERED)
            prefetch(before_at + (AHEAD * row_step + further) * UNITS);
#pragma unroll
          for (int s = 1; s < STATES; ++s)
            prefetch(states_at + (s - 1) * state_stride + (AHEAD * row_step + further) * UNITS);
        }
      }
  };

  // of two neighbouring units of two neighbouring sequences, from row `at` of all parts on
  const auto put_sums = [&](unsigned* there, int at, const float(&sum)[4], unsigned phase) {
    const auto word = [&](int e) { return (__float_as_uint(sum[e]) & ~1u) | phase; };
    if (putting_left > at) put_pair(there, word(0), word(2));
    if (putting_left > at + 1) put_pair(there + SUM_PITCH, word(1), word(3));
  };
  // of scaled gradients and weights, as they have to be
  const auto unscaled = [&](int place, int strip, int n, float(&sum)[4]) {
#if HALVES
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned factor = gradients[place + gradient_at(n * 8 + lane % 4 * 2 + e % 2, FACTOR_AT)];
      sum[e] = sum[e] * __uint_as_float(factor) * (unscale[min(strip, SHARE - 1)][e / 2] * (1.f / SUM_SHARE));
    }
#endif
  };
  const auto sums_of = [&](int t, int round, int strip) {
    return putting + round * round_plane + (t % 2 ? SOURCES * plane : 0) + strip * 16;
  };
  const auto has_units = [&](int strip) { return (place * STRIPS + warp * SHARE + strip) * 16 + lane / 4 * 2 < UNITS; };

  const auto product = [&](int t, int sub, int round) {
    const int place_in = place_for(t, sub);
    const bool reads_on = round == 0 && sub + 1 == SUBS;
#if WARPGROUPS
    // by gate those of a gate while the one before it goes behind its mask
    float sums[GATEWISE ? 2 : 1][SHARE][TILES][4], all[SHARE][TILES][4] = {};
    // found anew at each step, or the compiler would find all that follow before the first, and spill them
    const unsigned rows_at = operand_at(shared_address(memory) + of_warp(warp / 4) * STREAMED * 2048, 1024);
    const unsigned columns_at =
        operand_at(shared_address(gradients) + of_warp(place_in) * 4, STRIDE * 4);
    const auto begin = [&](float(&to)[SHARE][TILES][4], int first, int count) {  // of so many depths, by their turns
      begin_products();
#pragma unroll
      for (int turn = first; turn < first + count; ++turn)
#pragma unroll
        for (int strip = 0; strip < SHARE; ++strip) {
          const int depth = depth_at(turn), i = depth * SHARE + strip;
          const unsigned columns = columns_at + depth * 2 * STRIDE / 4;
          if (Weights::streamed(i))
            multiply_shared(to[strip], rows_at + Weights::before(i) * (2048 / 16), columns, turn > first);
          else
            multiply_columns(to[strip], resident[Weights::resident(i)], columns, turn > first);
        }
      end_products();
    };
    const auto have = [&](float(&of)[SHARE][TILES][4]) {
#pragma unroll
      for (int i = 0; i < SHARE * TILES * 4; ++i) keep(of[i / (TILES * 4)][i / 4 % TILES][i % 4]);
    };
    if constexpr (GATEWISE) {
#pragma unroll
      for (int gate = 0; gate <= RECURRENT; ++gate) {
        if (gate < RECURRENT) begin(sums[gate % 2], gate * GATE_RUN, GATE_RUN);
        if (gate == 0) {
          if (reads_on) read_on(t);
          continue;
        }
        if (gate < RECURRENT)
          multiplied_but_the_last();
        else
          multiplied();
        have(sums[(gate - 1) % 2]);
#pragma unroll
        for (int strip = 0; strip < SHARE; ++strip)
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const unsigned bits = masks[((min(warp * SHARE + strip, STRIPS - 1) * SUBS + sub) * TILES + n) * 32 + lane];
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (bits >> ((gate - 1) * 4 + e) & 1) all[strip][n][e] += sums[(gate - 1) % 2][strip][n][e];
          }
      }
    } else {
      begin(sums[0], 0, DEPTHS);
      if (reads_on) read_on(t);
      multiplied();
      have(sums[0]);
    }
#pragma unroll
    for (int strip = 0; strip < SHARE; ++strip) {
      if (warp * SHARE + strip >= STRIPS) break;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const int at = sub * ROWS + n * 8;
        float(&sum)[4] = GATEWISE ? all[strip][n] : sums[0][strip][n];
        unscaled(place_in, strip, n, sum);
        if (has_units(strip)) put_sums(sums_of(t, round, strip) + at * SUM_PITCH, at, sum, t / 2 % 2);
      }
    }
#else
    if (warp * SHARE >= STRIPS) {  // the same for the whole warp
      if (reads_on) read_on(t);
      return;
    }
    const unsigned columns = shared_address(gradients) + (place_in + columns_at) * 4;
#pragma unroll
    for (int i0 = 0; i0 < SHARE; i0 += CHUNK) {
      float sums[CHAINS][CHUNK][TILES][4] = {}, all[CHUNK][TILES][4] = {};
      if (i0 > 0 && warp * SHARE + i0 >= STRIPS) break;
#pragma unroll
      for (int all_turns = 0; all_turns < slots_of(round) * EVEN_DEPTHS; all_turns += 2) {
        const int slot = all_turns / EVEN_DEPTHS, turn = all_turns % EVEN_DEPTHS;
#if INSIDE
        const int first = turn;  // depth of the slot's gradients
#else
        const int first = depth_at(turn);
#endif
        if (reads_on && i0 == 0 && slot == 0 && turn == SLOT_DEPTHS / 4 / 2 * 2) read_on(t);
        uint4 b[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const unsigned at = columns + (n * 8 * STRIDE + slot * SLOT_WORDS + first * 8) * 4;
          b[n] = first + 1 < SLOT_DEPTHS ? load_columns(at) : load_half_columns(at);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (first + half < SLOT_DEPTHS) {
#if INSIDE
            const int d = depth_in(round, slot, turn + half), gate = gate_in(round, slot);
#else
            const int d = first + half, gate = (turn + half) / GATE_RUN % RECURRENT;
#endif
            Right right[TILES];
#pragma unroll
            for (int n = 0; n < TILES; ++n) right[n] = right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#pragma unroll
            for (int c = 0; c < CHUNK; ++c)
              if (i0 + c < SHARE) {
                const int i = i0 * DEPTHS + d * min(CHUNK, SHARE - i0) + c;
                const Left weight = left_of(Weights::streamed(i) ? streamed[weights_at + Weights::before(i) * 32]
                                                                 : resident[Weights::resident(i)]);
#pragma unroll
                for (int n = 0; n < TILES; ++n) multiply(sums[half % CHAINS][c][n], weight, right[n]);
                if constexpr (GATEWISE)  // the sums of a gate go behind its mask
                  if ((turn + half + 1) % GATE_RUN == 0) {
                    const int strip = min(warp * SHARE + i0 + c, STRIPS - 1);
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
                      float(&sum)[4] = sums[0][c][n];
                      if constexpr (CHAINS == 2) add(sum, sums[CHAINS - 1][c][n]);
                      unsigned bits = 0;
                      if constexpr (NOISE == BY_GATE) bits = masks[((strip * SUBS + sub) * TILES + n) * 32 + lane];
#pragma unroll
                      for (int e = 0; e < 4; ++e) {
                        if (!NOISE_INSIDE && gate >= MASKED)
                          all[c][n][e] += sum[e];
                        else if constexpr (NOISE == GIVEN_BY_GATE)
                          all[c][n][e] += mask_of(gate, sub, strip, n, e) * sum[e];
                        else if (bits >> (gate * 4 + e) & 1)
                          all[c][n][e] += sum[e];
                        sum[e] = sums[CHAINS - 1][c][n][e] = 0.f;
                      }
                    }
                  }
              }
          }
      }
#pragma unroll
      for (int c = 0; c < CHUNK; ++c) {
        if (i0 + c >= SHARE || warp * SHARE + i0 + c >= STRIPS) break;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          float(&sum)[4] = GATEWISE ? all[c][n] : sums[0][c][n];
          if constexpr (CHAINS == 2 && !GATEWISE) add(sum, sums[CHAINS - 1][c][n]);
          unscaled(place_in, i0 + c, n, sum);
          const int at = sub * ROWS + n * 8;
          if (has_units(i0 + c)) put_sums(sums_of(t, round, i0 + c) + at * SUM_PITCH, at, sum, t / 2 % 2);
        }
      }
    }
#endif
  };

  // The gradients that a warp has gathered, at a part of theirs in shared memory, to the scale of the largest of a sequence.
  const auto level = [&](unsigned* part) {
#if HALVES
    __syncwarp();
#pragma unroll
    for (int row = warp; row < ROWS; row += WARPS) {
      constexpr int PIECES = GATHERED * OWN_WORDS / 4, ACROSS = (PIECES + 31) / 32;  // of 16 bytes
      unsigned factors[ACROSS], most = 0;
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        const int block = (j * 32 + lane) / (OWN_WORDS / 4);
        factors[j] = block < GATHERED ? part[gradient_at(row, FACTOR_AT + block)] : 0;
        most = max(most, factors[j]);
      }
      most = __reduce_max_sync(0xffffffffu, most);  // of powers of two as numbers
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        if (j * 32 + lane >= PIECES) break;
        const float ratio = __int_as_float(max(0x3f800000 - (int)(most - factors[j]), 0));
        uint4& words = *(uint4*)(part + gradient_at(row, (j * 32 + lane) * 4));
        const unsigned both = half_pair(ratio, ratio);
        words = {times_pair(words.x, both), times_pair(words.y, both), times_pair(words.z, both), times_pair(words.w, both)};
      }
      if (lane == 0) part[gradient_at(row, FACTOR_AT)] = most;
    }
#endif
  };
  const auto show_gradients = [] {
#if WARPGROUPS
    show_products();
#endif
  };
  // The gradients of a round's gates of some parts of the sequences, gathered, and their product.
  const auto gather = [&](int t, int first, int count, int round) {
    const unsigned* const from = gathered + ring_at + first_slot(round) * SLOT_WORDS;
    const auto look_at = [&](int sub) {
#pragma unroll
      for (int slot = 0; slot < slots_of(round); ++slot)
        arrivals[slot].look_at(from + slot * SLOT_WORDS + sub * ROWS * PITCH, rows_left(sub), lane, phase_of(t));
    };
    if (LULL > 0) __syncthreads(), pause(ticks(), LULL);  // warps that compute no cell would ask before others have given
    look_at(first);
    if (LULL > 0 && comes_round && t % PERIOD == 0) fence();  // while all is on its way
#pragma unroll
    for (int sub = first; sub < first + count; ++sub) {
      unsigned* const to = gradients + place_for(t, sub);
#pragma unroll
      for (int slot = 0; slot < slots_of(round); ++slot) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          arrivals[slot].settle(to + slot * SLOT_WORDS + arrived_at, from + slot * SLOT_WORDS + sub * ROWS * PITCH, rows_left(sub),
                                lane, phase_of(t), part);
        level(to + slot * SLOT_WORDS);
      }
      show_gradients();
      __syncthreads();
      if (sub + 1 < first + count) look_at(sub + 1);  // not before: what shows gradients would wait for the words
      product(t, sub, round);
      place_now = 1 - place_now;
    }
  };

  // The gradients of a round's gates, of two units of a sequence, to where they are multiplied, or gathered before that.
  const auto hand_on = [&](int t, int turn, int j, int round, const float(&given_of)[2][RESULTS]) {
    const int count = INSIDE ? slots_of(round) : RECURRENT;
#if STAGED && !INSIDE
    float of[2][MOST(RECURRENT)];
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
      for (int u = 0; u < 2; ++u) of[u][g] = leaf_of(g) >= 0 ? given_of[u][leaf_of(g) >= 0 ? leaf_of(g) : 0] : 0.f;
#else
    const float(&of)[2][RESULTS] = given_of;
#endif
    const bool row_there = is_row(turn, j), in_shared = COMPUTED % PASS == 0 || own_row + j * PASS < COMPUTED;
    unsigned* const given_to = given + ring_at + first_slot(round) * SLOT_WORDS + (turn * COMPUTED + j * PASS) * PITCH;
    unsigned* const put_to = gradients + place_for(t, turn);
    float scale = 1.f;
#if HALVES
    float most = LEAST_SCALED;
#pragma unroll
    for (int g = 0; g < count; ++g) most = fmaxf(most, fmaxf(fabsf(of[0][g]), fabsf(of[1][g])));
#pragma unroll
    for (int far = 1; far < PAIRS; far *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, far));
    const float unscaled = unscale_of(most);
    const unsigned factor = __float_as_uint(unscaled * SUM_SHARE);
    scale = scale_of(unscaled);
    if (pair == 0) {
      if (GATHERED == 1 && in_shared) put_to[gradient_at(own_row + j * PASS, FACTOR_AT)] = factor;
#pragma unroll
      for (int slot = 0; slot < slots_of(round); ++slot)
        if (GATHERED > 1 && row_there) put(given_to + slot * SLOT_WORDS + scale_at, factor);
    }
#endif
#pragma unroll
    for (int g = 0; g < count; ++g) {
      if constexpr (GATHERED > 1) {
        if (row_there) give(given_to + g * GATE_APART, 0, of[0][g] * scale, of[1][g] * scale, phase_of(t));
      } else if (in_shared) {
        unsigned* const to = put_to + gradient_at(own_row + j * PASS, pair_at + g * GATE_APART);
#if ELEMENT_BYTES == 2 || HALVES
        *to = operand_pair(of[0][g] * scale, of[1][g] * scale);
#else
        *(uint2*)to = {operand(of[0][g]), operand(of[1][g])};
#endif
      }
    }
  };
#if INSIDE
  // What the product of a round inside the step makes of what has been handed on: its sums, for a thread's units.
  const auto multiply_inside = [&](int t, int turn, int round, float(&sums)[OWN][2]) {
    if constexpr (GATHERED > 1) {
      gather(t, turn * (COMPUTED / ROWS), COMPUTED / ROWS, round);
    } else {
      __syncthreads();
      product(t, turn, round);
      place_now = 1 - place_now;
    }
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      sums[j][0] = sums[j][1] = 0.f;
      const unsigned* const from = arriving + round * round_plane + (t % 2 ? SOURCES * plane : 0);
      if (has_first && is_row(turn, j)) add_sums(from + (turn * COMPUTED + j * PASS) * SUM_PITCH, t / 2 % 2, sums[j]);
    }
    __syncwarp();
  };
#endif

  const auto begin_unit = [&](int turn, int j, int u, Unit& of) {  // what the cell's gradient reads of a unit
    const Item& read = item[turn][j];
    values(read, u, of.x, of.r, of.before, of.v, of.e);
    const float output = half_of(wide_pair(read.y_gradient), u);
    stepper.begin(read.step, kept[turn][j], u, output, carried[turn][j], of.d, of.stayed, of.to_z);
  };
  // the cell's gradients for the thread's units
  constexpr int BESIDE = INSIDE ? OWN : 1;  // sequences of a thread that go through the stages side by side
  const auto compute = [&](int t, int turn, const Known(&ahead)[OWN][2]) {
    const bool computes = own_row < PASS;
    if (!INSIDE && !computes) return;
#pragma unroll
    for (int j0 = 0; j0 < OWN; j0 += BESIDE) {
      float all_dx[BESIDE][2][GATES], all_dr[BESIDE][2][RESULTS];
#if STAGED
      Unit all_units[BESIDE][2];
      Values between[BESIDE][2];  // what stages keep
      float m[BESIDE][MOST(MEANS)], q[BESIDE][2][MOST(INSIDE)];
#pragma unroll
      for (int i = 0; i < BESIDE; ++i) {
        if (!computes) break;
        const Item& read = item[turn][j0 + i];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          begin_unit(turn, j0 + i, u, all_units[i][u]);
          if (ROOMY) between[i][u] = ahead[j0 + i][u];
        }
#pragma unroll
        for (int l = 0; l < LEVELS; ++l) m[i][l] = read.m[l];
      }
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        float operands[BESIDE][2][MOST(ROUNDS)];
#pragma unroll
        for (int i = 0; i < BESIDE; ++i) {
          if (!computes) break;
          const int j = j0 + i;
          const bool row_there = is_row(turn, j), first = has_first && row_there, second = first && has_second;
          const bool valid = !MARKED || item[turn][j].step.valid;
          float to[2][MOST(VALUES)];
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            Unit& of = all_units[i][u];
            const bool there = (u == 0 ? first : second) && valid;
            float after[STATES];  // written by the first stage
            if (!ROOMY && stage == 0) run_ahead(of.x, of.r, of.before, of.v, of.e, m[i], between[i][u]);
            run_stage(stage, of.x, of.r, of.before, of.v, of.e, m[i], between[i][u], to[u], operands[i][u], of.d, q[i][u], there,
                      all_dx[i][u], all_dr[i][u], of.to_s, of.to_v, of.to_e, after);
#pragma unroll
            for (int round = 0; round < INSIDE; ++round) operands[i][u][round] = there ? operands[i][u][round] : 0.f;
#if ZONEOUT_GRADIENT
            if (stage == 0)
#pragma unroll
              for (int s = 0; s < STATES; ++s) of.to_z[s] = valid ? of.to_z[s] * (of.before[s] - after[s]) : 0.f;
#endif
          }
          if (numbers(stage) == 0) continue;
          const int beyond = turn * COMPUTED + j * PASS;
          unsigned* const means = means_at + beyond * MEAN_WORDS;
          const bool member = row_there && rank < MEMBERS;
          if (shared_out(stage)) {
            give_sums(stage, to, unit < UNITS, unit + 1 < UNITS, means, rank, t / 2 % 2, member, lane);
          } else {
            float data[4 * MOST(PACKS)] = {};
            summarise(stage, to, unit < UNITS, unit + 1 < UNITS, units_of(rank), lane, data);
            if (pair == 0 && member) give_means(stage, data, means, rank, t / 2 % 2);
          }
          take_means(stage, means, t / 2 % 2, member, own_row + beyond, rank, lane, m[i]);
        }
#if INSIDE
        int asked = 0;
#pragma unroll
        for (int round = 1; round <= INSIDE; ++round) {
          if (round_stage(round) != stage) continue;
#pragma unroll
          for (int j = 0; j < OWN; ++j) {
            if (!computes) break;
            const float of[2][RESULTS] = {{operands[j][0][asked]}, {operands[j][1][asked]}};
            hand_on(t, turn, j, round, of);
          }
          asked = asked + 1 < INSIDE ? asked + 1 : asked;
          float sums[OWN][2];
          multiply_inside(t, turn, round, sums);
#pragma unroll
          for (int j = 0; j < OWN; ++j) {
            if (!computes) break;
            Back& own = kept[turn][j];
            const Step& marks = item[turn][j].step;
            const bool valid = !MARKED || marks.valid, there = has_first && is_row(turn, j) && valid;
#pragma unroll
            for (int u = 0; u < 2; ++u) {
              q[j][u][round - 1] = stepper.inside(marks, u, valid) * sums[j][u];
              if (NOISE_GRADIENT && NOISE_INSIDE && there && (u == 0 || has_second))
                own.noise_sums[u] += sums[j][u] * entered_in(between[j][u], round - 1);
            }
          }
        }
#endif
      }
#endif
#pragma unroll
      for (int i = 0; i < BESIDE; ++i) {
        if (!computes) break;
        const int j = j0 + i;
        const Item& read = item[turn][j];
        Back& own = kept[turn][j];
        float(&dx)[2][GATES] = all_dx[i];
        float(&dr)[2][RESULTS] = all_dr[i];
        float2 to_inputs[MOST(INPUTS)], to_zones[STATES];
        const bool row_there = is_row(turn, j), first = has_first && row_there, second = first && has_second;
        const bool valid = !MARKED || read.step.valid;
        const float2 h = wide_pair(read.before);
        float sums_now[MOST(SUMMED) + 1][2] = {};  // of this step, with ASIDE
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#if STAGED
          const Unit& of = all_units[i][u];
#else
          Unit of;
          begin_unit(turn, j, u, of);
#if ZONEOUT_GRADIENT
          float after[STATES];
          step(of.x, of.r, of.before, of.v, of.e, after);
#pragma unroll
          for (int s = 0; s < STATES; ++s) of.to_z[s] = valid ? of.to_z[s] * (of.before[s] - after[s]) : 0.f;
#endif
          step_backward(ROOMY ? ahead[j][u] : known(of.x, of.r, of.before, of.v, of.e), of.x, of.r, of.before, of.v, of.e, of.d, dx[u],
                        dr[u], of.to_s, of.to_v, of.to_e);
#endif
#pragma unroll
          for (int s = 0; s < STATES; ++s) {
            if (valid) carried[turn][j][s][u] = OPTIONS ? of.to_s[s] + of.stayed[s] : of.to_s[s];
            (u == 0 ? to_zones[s].x : to_zones[s].y) = of.to_z[s];
          }
          if constexpr (MARKED)
#pragma unroll
            for (int g = 0; g < GATES; ++g) dx[u][g] = valid ? dx[u][g] : 0.f;
#pragma unroll
          for (int i = 0; i < INPUTS; ++i) (u == 0 ? to_inputs[i].x : to_inputs[i].y) = valid ? of.to_e[i] : 0.f;
          if constexpr (NOISE && !GATEWISE) own.factor[u] = stepper.factor(read.step, u, valid);
          const bool there = (u == 0 ? first : second) && valid;  // a sum never takes what the cell makes of nothing
          const auto sum_up = [&](int i, float value) { (ASIDE ? sums_now : summed)[i][u] += there ? value : 0.f; };
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            if constexpr (BIAS) sum_up(g, dx[u][g]);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            if constexpr (BIAS) sum_up(GATES + i, dr[u][apart(i)]);
#pragma unroll
          for (int i = 0; i < VECTORS; ++i) sum_up(SUMMED - VECTORS + i, of.to_v[i]);
#pragma unroll
          for (int g = 0; g < RESULTS; ++g) dr[u][g] = there ? dr[u][g] : 0.f;
        }
        if constexpr (RESET) own.was_cut = read.step.cut;
        if constexpr (NOISE && !GATEWISE) own.operand_before = h;
        if constexpr (FIRST) hand_on(t, turn, j, 0, dr);
        const auto further = further_on(turn, j);
        const bool shown = first && (!PACKED || step_of(t) < own.ends), also = shown && has_second;
#pragma unroll
        for (int g = 0; g < GATES; ++g)
          store_pair(gate_gradients_at + (further * GATES + g) * UNITS, dx[0][g], dx[1][g], shown, also);
#pragma unroll
        for (int i = 0; i < APART; ++i)
          store_pair(apart_gradients_at + (further * APART + i) * UNITS, dr[0][apart(i)], dr[1][apart(i)], shown, also);
        if constexpr (OPTIONS) stepper.store(own, h, rows, to_zones, to_inputs, shown);
        if constexpr (ASIDE)
#pragma unroll
          for (int i = 0; i < SUMMED; i += 2) {
            float4& both = aside[i / 2 * PASS * PAIRS];
            const float4 before = both;
            both = {before.x + sums_now[i][0], before.y + sums_now[i][1], before.z + sums_now[i + 1][0],
                    before.w + sums_now[i + 1][1]};
          }
        if (comes_round && row_there) {  // everyone has read these
          unsigned* const old = given + ring_at + freed(t) * buffer + (turn * COMPUTED + j * PASS) * PITCH;
#pragma unroll
          for (int g = 0; g < (INSIDE ? SLOTS : RECURRENT); ++g) put(old + g * GATE_APART, NOTHING);
#pragma unroll
          for (int slot = 0; slot < SLOTS; ++slot)
            if (HALVES && pair == 0) put(old + slot * SLOT_WORDS + scale_at, NOTHING);
        }
      }
    }
  };

  const bool wants_initial = a.initial_gradients[0] != nullptr || goes_on_before(a) || RESET_TO || NOISE_GRADIENT;
  for (int t = 0; t < time; ++t) {
    const bool goes_on = t + 1 < time || wants_initial;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      Known ahead[OWN][2];
      if (ROOMY) look_ahead(turn, ahead);  // while the sums travel
      if (t > 0) {
        arrive(t, turn);
        // else threads that leave the wait one by one go on one by one: LSTM in bfloat16, 1024 units at batch 32, took
        // 3.68 us a step on an H200, not 3.18
        __syncwarp();
      }
      compute(t, turn, ahead);
      if (GATHERED == 1 && FIRST && (goes_on || turn + 1 < TURNS)) {
        show_gradients();
        __syncthreads();  // the last step's too: its next turn writes where a product of the step before may still read
      }
      if (GATHERED == 1 && FIRST && goes_on) {
        product(t, turn, 0);
        place_now = 1 - place_now;
      }
    }
    if (GATHERED > 1 && goes_on && FIRST) gather(t, 0, SUBS, 0);
    if (!FIRST) read_on(t);
    gate_gradients_at += row_step * GATES * UNITS;
    apart_gradients_at += row_step * APART * UNITS;
#if STAGED
    means_at += t % 2 == 0 ? mean_plane : -mean_plane;
#endif
    ring_at = (t + 1) % RING == 0 ? 0 : ring_at + buffer;
    if (LULL == 0 && comes_round && t % PERIOD == 0) fence();
    if constexpr (OPTIONS) {
      rows_before = rows, rows = next_rows;
      if (t + 2 < time) next_rows = rows_of(a, step_of(t + 2));
      if constexpr (PACKED) row_step = next_rows - rows;
    }
  }

  if (wants_initial)
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      if (!LENGTHS || time > 0) arrive(time, turn);
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const bool first = has_first && is_row(turn, j), second = first && has_second;
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
          leave_gradient_pair(a, s, start_of(turn, j), carried[turn][j][s][0], carried[turn][j][s][1], first, second);
        }
        if constexpr (OPTIONS) stepper.end(kept[turn][j]);
      }
    }
  if constexpr (LENGTHS && !PACKED)  // past the end of all of the block's sequences
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const bool first = kept[turn][j].there, second = first && has_second;
        for (long long t = time; t < a.time; ++t) {
          const long long row = t * batch + kept[turn][j].sequence;
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            store_pair(a.gate_gradients[direction] + (row * GATES + g) * UNITS + unit, 0.f, 0.f, first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_pair(a.apart_gradients[direction] + (row * APART + i) * UNITS + unit, 0.f, 0.f, first, second);
          stepper.past_the_end(kept[turn][j], t * batch);
        }
      }
  if constexpr (SUMMED > 0) {  // over the block's sequences, in their order
    __syncthreads();
    float* const ended = (float*)memory;  // [PASS, SUMMED, SLICE]
    if constexpr (ASIDE) {
      if (own_row < PASS)
#pragma unroll
        for (int i = 0; i < SUMMED; ++i) {
          const float4 both = aside[i / 2 * PASS * PAIRS];
          summed[i][0] = i % 2 == 0 ? both.x : both.z, summed[i][1] = i % 2 == 0 ? both.y : both.w;
        }
      __syncthreads();
    }
    if (own_row < PASS)
#pragma unroll
      for (int i = 0; i < SUMMED; ++i)
        *(float2*)(ended + (own_row * SUMMED + i) * SLICE + pair * 2) = {summed[i][0], summed[i][1]};
    __syncthreads();
    const long long part = row0 / (SUBS * ROWS);
    for (int i = threadIdx.x; i < SUMMED * SLICE; i += THREADS) {
      float sum = 0.f;
      for (int row = 0; row < PASS; ++row) sum += ended[row * SUMMED * SLICE + i];
      const int at = rank * SLICE + i % SLICE;
      if (at < UNITS) a.sums[direction][(part * SUMMED + i / SLICE) * UNITS + at] = sum;
    }
  }
}
