// All steps of a recurrent layer, backward, in one launch: the gradients of the gates, of the initial states, and sums
// over the batch for the bias and the vectors.  What is left (dx, dW) are products of whole matrices.
//
// A cluster owns `share` sequences of ROWS = 8 x TILES, a block the units from rank x SLICE on, as in the forward
// kernel.  At each step a block computes the gradient of the cell for its own units, multiplies it with its own slice of
// the recurrent weights, transposed, and sends to each block what concerns that block's units: a float32 sum from each
// source, added by the receiver in the order of the sources, or those of each half of them and then the two.
//
// The product's rows are all units, 16 in each of CLUSTER x GROUPS strips; warp w owns SHARE strips from w x SHARE on.
// The cell is computed in items of 16 units x 8 sequences, of which warp w owns w, w + WARPS, ...; a thread has two
// neighbouring units of two neighbouring sequences of each.  Or an item is 4 of those sequences (SPLITS = 2), and a
// thread has two units of one: two threads with the same pair each add up the sums of half the sources for both.
//
// The rows are taken in SUBS sub-tiles: while the sums of one travel, and the warps that have its items compute them,
// the others multiply the gradients of the one before it.
//
//   registers  weights, sums of the products, gradients of the states, sums for the bias, the next step's input
//   shared     gradients of the gates twice (a warp may still multiply while another begins the next step), arrived
//              sums twice, two barriers (of each sub-tile, and two more of those that multiply it), more weights
//   global     gates, saved states, y and its gradient in; gradients of the gates out
//
// What options add stands in options.cu; a kernel without them has none of it.
//
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.
//
// Arrived sums are added up before the block's gradients are made, those are multiplied after a barrier of the block, and
// what is made of them is sent: who overwrites sums of step t, by sending at step t + 1, has waited for all of that.
// With sub-tiles a warp may begin step t + 1 while another multiplies at step t, but not step t + 2, since for that every
// block has sent what it made at step t + 1 of the sums that all warps sent at step t; hence two of everything.

// @generated

constexpr int PART = TILES / SUBS;  // row tiles of a sub-tile
constexpr int ROWS = 8 * TILES, GROUPS = SLICE / 16, CELLS = GROUPS * TILES;
constexpr int ITEMS = CELLS * SPLITS, PER = 2 / SPLITS, OWN = (ITEMS + WARPS - 1) / WARPS;
constexpr int STRIPS = CLUSTER * GROUPS, SHARE = (STRIPS + WARPS - 1) / WARPS, THREADS = 32 * WARPS;
constexpr int DEPTHS = RECURRENT * SLICE / (8 * WORD_ELEMENTS);
// of a sequence's gradients: 8 rows of 16 bytes are in 32 different banks; behind them a float for each group
constexpr int STRIDE = DEPTHS * 8 + (HALVES && GROUPS > 4 ? 12 : 4), PLANE_WORDS = ROWS * STRIDE;
static_assert(!HALVES || GROUPS <= 12, "no room for a scale of each group");
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT;
constexpr int WEIGHT_WORDS = WARPS * STREAMED * PLANES * 128, GRADIENT_WORDS = PLANES * PLANE_WORDS, SUM_WORDS = CELLS * CLUSTER * 128;
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS;
constexpr int PART_ITEMS = GROUPS * PART * SPLITS;
static_assert(WARPS % SPLITS == 0, "a thread's share of an item is not always the same");
constexpr bool WHOLE = TILES == 1;  // all 8 are sent, without a branch, over which the compiler moves no product
constexpr bool ROOMY = SPLITS > 1 ? OWN == 1 : TILES == 1 && ELEMENT_BYTES == 2;  // else registers are short
constexpr bool AT_ONCE = EXACT && SUBS == 1 && !ROOMY;  // for each unit at its place the compiler spills, with sub-tiles all at once
constexpr int CHAINS = !HALVES && CHUNK * PART < 4 ? 2 : 1;  // of products that wait for each other
constexpr int GATE_DEPTHS = DEPTHS / RECURRENT;
// gates whose scaled sums go behind their masks once all have been added up, where registers allow, and not each time
constexpr int SUMS_APART = HALVES && NOISE == BY_GATE && CHUNK * PART <= 3 ? RECURRENT : 1;
// masks by gate, for two units of two sequences as a thread has its sums: 4 bits for each gate for [strip, tile, lane],
// or [gate, strip, tile, lane, 4]
constexpr int MASK_WORDS = NOISE == BY_GATE         ? STRIPS * TILES * 32
                           : NOISE == GIVEN_BY_GATE ? RECURRENT * STRIPS * TILES * 128 / WORD_ELEMENTS
                                                    : 0;
constexpr bool PARTED = ORDER && SUBS > 1;  // sub-tiles are done without where all their sequences have ended
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
static_assert(4 * (WEIGHT_WORDS + 2 * SUM_WORDS + 2 * GRADIENT_WORDS + MASK_WORDS) + (SUBS > 1 ? 32 * SUBS : 16) == SHARED,
              "tiling and kernel disagree");
static_assert(TILES % SUBS == 0 && (SUBS == 1 || CLUSTER > 1), "no such sub-tiles");

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
};

struct Item {  // what one thread reads for an item at a step: two units of each of its sequences
  GatePair gates[PER][GATES], apart[PER][MOST(APART)];
  Pair y_gradient[PER], before[PER];
  float2 states[PER][MOST(STATES - 1)];
  unsigned valid[PER], cut[PER];  // the step counts; no state came into it from the one before: as loaded
  float2 zones[PER][STATES], noise[PER], inputs[PER][MOST(INPUTS)];
  Pair state_gradients[PER][STATES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;                        // [warp, strip and depth, plane, lane]
  float4* const arrived = (float4*)(memory + WEIGHT_WORDS);      // [2, cell, source, spot]
  unsigned* const gradients = memory + WEIGHT_WORDS + 2 * SUM_WORDS;  // [2, sequence, gate, unit]
  unsigned* const mask_bits = gradients + 2 * GRADIENT_WORDS;
  Element* const masks = (Element*)mask_bits;
  const unsigned base = shared_address(memory);
  const unsigned barriers = shared_address(gradients + 2 * GRADIENT_WORDS + MASK_WORDS);

  // 256 units at batch 128 with zoneout, in two bytes, take 133 to 137 us with `own_warp`, so 128 to 130; others less (H100)
  const int warp = TILES > 1 && ELEMENT_BYTES == 2 ? threadIdx.x / 32 : own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  // where a thread's sums lie: those of two neighbouring sequences in a row, since others are not sent where the cluster
  // has none; 8 threads in a row read from different banks
  const auto spot_of = [](int units, int sequences) { return sequences * 8 + (units ^ sequences * 2); };
  // the pair of units and the pair of sequences that a thread has of an item; of that pair, where it has one, which
  const int its_units = SPLITS == 1 ? lane / 4 : lane % 8, its_half = SPLITS == 1 ? 0 : lane / 16;
  const int its_pair = SPLITS == 1 ? lane % 4 : warp % 2 * 2 + lane / 8 % 2, its_line = its_pair * 2 + its_half;
  const int batch = (int)a.batch, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int share = (batch + clusters - 1) / clusters, first_place = cluster * share;
  const int last_place = min(batch, first_place + share);
  const Weight* const weights = a.weights[direction];

  // rows 0 to 7 of an operand are a strip's even units, rows 8 to 15 the odd
  Planes resident[MOST(RESIDENT)];
  float unscale[SHARE][2];  // what a sum is multiplied with, where what is multiplied was scaled
#if HALVES
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int strip = warp * SHARE + s, column = strip * 16 + lane / 4 * 2;
    const bool first = strip < STRIPS && rank * SLICE < UNITS && column < UNITS, second = first && column + 1 < UNITS;
    const float2 its = load_wide_pair(scales_behind(weights) + rank * UNITS + column, first, second);
    unscale[s][0] = its.x, unscale[s][1] = its.y;
  }
#endif
  const auto weights_of = [&](int depth) {  // of all gates, and of the second plane behind the first
    const int own = rank * SLICE + depth % SLICE;
    return WeightRow{weights + ((long long)(depth / SLICE) * UNITS + own) * WEIGHT_PITCH, UNITS - own};
  };
  bring_columns<First<RESIDENT * PLANES>, STRIPS, SHARE, DEPTHS * PLANES, STREAMED * PLANES, WARPS, 4 * WEIGHT_WORDS, SLICE>(
      memory, warp, lane, UNITS, [](int s, int d) { return (s * DEPTHS + d % DEPTHS) * PLANES + d / DEPTHS; }, weights_of,
      [&](int i, uint4 words) { resident[i / PLANES].plane[i % PLANES] = words; },
      [&](int i, uint4 words) { streamed[(warp * STREAMED * PLANES + i) * 32 + lane] = words; });

  if constexpr (GATEWISE)
    for (int item = threadIdx.x; item < STRIPS * TILES * 32; item += THREADS) {
      unsigned bits = 0;
      for (int i = 0; i < RECURRENT * 4; ++i) {
        const int e = i % 4, its = item % 32, tile = item / 32 % TILES, strip = item / 32 / TILES;
        const int gate = i / 4, unit = strip * 16 + its / 4 * 2 + e / 2;
        const int place = first_place + tile * 8 + its % 4 * 2 + e % 2;
        const bool there = place < last_place && unit < UNITS;
        const long long sequence = there ? sequence_at(a, place) : 0;
        const float mask = there ? a.o.noise[direction][(gate * a.batch + sequence) * UNITS + unit] : 0.f;
        if constexpr (NOISE == GIVEN_BY_GATE) masks[(gate * STRIPS * TILES * 32 + item) * 4 + e] = narrow(mask);
        bits |= (mask != 0.f) << i;
      }
      if constexpr (NOISE == BY_GATE) mask_bits[item] = bits;
    }
  // steps of the longest sequence of the cluster; they are computed from the one that forward computed last
  const int time = LENGTHS ? longest(a, first_place, share) : (int)a.time, width = gridDim.y * UNITS;
  const bool reverse = direction == 1;
  const int first_step = reverse || time == 0 ? 0 : time - 1;
  int lasting[SUBS];  // and of each sub-tile, which is its first
#pragma unroll
  for (int sub = 0; sub < SUBS; ++sub)
    lasting[sub] = PARTED ? longest(a, first_place + sub * 8 * PART, min(8 * PART, share - sub * 8 * PART)) : time;
  const auto lasting_of = [&](int item) {  // the sub-tile of an item of a warp
    int steps = lasting[0];
#pragma unroll
    for (int i = 1; i < SUBS; ++i)
      if (PARTED && (warp + item * WARPS) / PART_ITEMS == i) steps = lasting[i];
    return steps;
  };
  long long rows = rows_of(a, first_step), next_rows = rows_of(a, time > 1 ? reverse ? 1 : time - 2 : first_step);
  long long row_step = PACKED ? next_rows - rows : reverse ? batch : -(long long)batch;
  const long long state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  const bool has_output_gradient = a.y_gradient != nullptr;

  float carried[OWN][STATES][PER][2], vectors[OWN][MOST(VECTORS)][2], summed[OWN][MOST(SUMMED)][2] = {};
  Item item[OWN];
  bool in[OWN][PER][2];  // whether the value of this sequence and unit is there
  int sequence[OWN][PER];
  int ends[OWN][PER];  // steps of each sequence
  // of the step before, whose product arrives: what multiplied its operand, whether a reset came before it
  float factor[OWN][PER][2], held[OWN][PER][2] = {}, noise_sums[OWN][PER][2] = {}, reset_sums[OWN][STATES][PER][2] = {};
  float2 operand_before[OWN][PER];
  unsigned was_cut[OWN][PER];
  unsigned drawn[OWN][PER];
  const auto away = [&](int j, int b) { return (long long)(ORDER ? sequence[j][b] - sequence[j][0] : b); };
  const Gate* gates_at[OWN];
  Element *gradients_at[OWN], *apart_gradients_at[OWN];
  long long outputs_at[OWN], apart_at[OWN], states_at[OWN];
  // Of one item the addresses themselves go from step to step, where registers allow: a direction's own come from
  // constant memory, for which the warps that compute the cell wait before their product.
  constexpr bool ALONE = OWN == 1 && GROUPS == 1;
  const float* states_from;
  const Element* before_from;
  const char* drawn_from;
  const auto states_of = [&](int j) { return ALONE ? states_from : a.states[direction] + states_at[j]; };
  const auto before_of = [&](int j) { return ALONE ? before_from : a.o.before[direction] + states_at[j]; };
  // what is drawn of two units has two bytes: as many as states have elements
  const auto drawn_of = [&](int j) { return ALONE ? drawn_from : (const char*)a.o.drawn[direction] + states_at[j]; };
  const auto cell_of = [&](int j) { return (warp + j * WARPS) / SPLITS; };
  const auto unit_of = [&](int j) { return (int)rank * SLICE + cell_of(j) % GROUPS * 16 + its_units * 2; };
  const auto start_of = [&](int j, int b) {  // in a tensor [directions, batch, UNITS]
    return ((long long)direction * batch + sequence[j][b]) * UNITS + unit_of(j);
  };
  // what options need of a step, whose rows begin at `at`
  const auto load_options = [&](int j, int b, int step, long long at) {
    const bool there = in[j][b][0] && (!LENGTHS || step < ends[j][b]), also = there && in[j][b][1];
    const long long row = at + sequence[j][b], from = row * UNITS + unit_of(j);
    Item& to = item[j];
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
  };
  // With what the step is computed from, whose first use waits for every load that is on its way.
  const auto load_marks = [&](int j, int b, int step, long long at) {
    const bool there = in[j][b][0] && (!LENGTHS || step < ends[j][b]);
    const bool may = reverse ? in[j][b][0] && step + 1 < ends[j][b] : there;
    item[j].valid[b] = loaded<MASK>(a.o.mask, at + sequence[j][b], there, 1);
    if constexpr (RESET)
      item[j].cut[b] = loaded<RESET>(a.o.reset, (reverse ? rows_of(a, step + 1) : at) + sequence[j][b], may, 0);
  };
  // what the item reads at the step that the places above have come to; `last`: nothing came before it
  const auto load = [&](int j, int step, bool last) {
#pragma unroll
    for (int b = 0; b < PER; ++b) {
      const bool there = !LENGTHS || step < ends[j][b], first = there && in[j][b][0], second = there && in[j][b][1];
#pragma unroll
      for (int g = 0; g < GATES; ++g)
        item[j].gates[b][g] = load_gates(gates_at[j] + (away(j, b) * GATES + g) * UNITS, first, second);
#pragma unroll
      for (int i = 0; i < APART; ++i)
        item[j].apart[b][i] =
            load_gates(a.apart[direction] + apart_at[j] + (away(j, b) * APART + i) * UNITS, first, second);
      item[j].y_gradient[b] = load_pair(a.y_gradient + outputs_at[j] + away(j, b) * width,
                                        first && has_output_gradient, second && has_output_gradient);
      if constexpr (BEFORE) {
        const long long at = away(j, b) * UNITS;
        item[j].before[b] = ENTERED ? Pair{} : load_pair(before_of(j) + at, first, second);
#pragma unroll
        for (int s = 1; s < STATES; ++s)
          item[j].states[b][s - 1] = load_wide_pair(states_of(j) + at + (s - 1) * state_stride, first, second);
      } else {
        const bool given = a.initial[0] != nullptr;
        if (last)
          item[j].before[b] = load_pair(a.initial[0] + start_of(j, b), first && given, second && given);
        else
          item[j].before[b] = load_pair(a.y + outputs_at[j] + (row_step + away(j, b)) * width, first, second);
        // Initial states may have two bytes and be made wide.  They then take the place of what is loaded: two branches
        // that give the one or the other meet in a move, and a move waits for the load, before the product.
#pragma unroll
        for (int s = 1; s < STATES; ++s) {
          item[j].states[b][s - 1] = load_wide_pair(
              states_of(j) + (s - 1) * state_stride + (row_step + away(j, b)) * UNITS,
              first && !last, second && !last);
          if (last)
            item[j].states[b][s - 1] =
                wide_pair(load_pair(a.initial[s] + start_of(j, b), first && given, second && given));
        }
      }
      // here and not with the rest of the options: it is wanted as soon as the sums of the step before have come
      if constexpr (DRAWS && !PACKED && UNITS % 2 == 0) {
        drawn[j][b] = 0;
        if (first) drawn[j][b] = *(const unsigned short*)(drawn_of(j) + away(j, b) * UNITS);
      } else if constexpr (DRAWS) {
        drawn[j][b] = drawn_bits(a, unit_of(j), step, sequence[j][b], direction, first);
      }
    }
  };
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const int unit = unit_of(j), place = first_place + cell_of(j) / GROUPS * 8 + its_line;
    const bool own = warp + j * WARPS < ITEMS;
#pragma unroll
    for (int b = 0; b < PER; ++b) {
      sequence[j][b] = place + b < last_place ? (int)sequence_at(a, place + b) : place + b;
      ends[j][b] = LENGTHS && place + b < last_place ? min(time, (int)a.o.lengths[sequence[j][b]]) : time;
    }
    const long long row = sequence[j][0];
    const int its_first = PARTED ? reverse ? 0 : max(0, lasting_of(j) - 1) : first_step;
    const long long begin = PARTED ? rows_of(a, its_first) : rows;
    gates_at[j] = a.gates[direction] + (begin + row) * GATES * UNITS + unit;
    gradients_at[j] = a.gate_gradients[direction] + (begin + row) * GATES * UNITS + unit;
    apart_gradients_at[j] = a.apart_gradients[direction] + (begin + row) * APART * UNITS + unit;
    outputs_at[j] = (begin + row) * width + direction * UNITS + unit;
    apart_at[j] = (begin + row) * APART * UNITS + unit;
    states_at[j] = (begin + row) * UNITS + unit;
    states_from = a.states[direction] + states_at[j];
    before_from = BEFORE ? a.o.before[direction] + states_at[j] : nullptr;
    drawn_from = DRAWS ? (const char*)a.o.drawn[direction] + states_at[j] : nullptr;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      vectors[j][v][0] = own && unit < UNITS ? wide(a.vectors[direction][v][unit]) : 0.f;
      vectors[j][v][1] = own && unit + 1 < UNITS ? wide(a.vectors[direction][v][unit + 1]) : 0.f;
    }
#pragma unroll
    for (int b = 0; b < PER; ++b) {
      in[j][b][0] = own && place + b < last_place && unit < UNITS;
      in[j][b][1] = in[j][b][0] && (UNITS % 2 == 0 || unit + 1 < UNITS);
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        const float2 value = final_gradient_pair(a, s, start_of(j, b), in[j][b][0], in[j][b][1]);
        carried[j][s][b][0] = value.x;
        carried[j][s][b][1] = value.y;
      }
    }
    load(j, its_first, time == 1 && !goes_on_before(a));
    if constexpr (OPTIONS)
#pragma unroll
      for (int b = 0; b < PER; ++b) {
        load_options(j, b, its_first, begin);
        load_marks(j, b, its_first, begin);
        if constexpr (NOISE == HELD)
          item[j].noise[b] = load_wide_pair(a.o.noise[direction] + (long long)sequence[j][b] * UNITS + unit, in[j][b][0], in[j][b][1]);
      }
  }

  // the items that the warp has of a sub-tile are some of those from `first_item` to `last_item`
  const auto first_item = [](int sub) { return SUBS == 1 ? 0 : sub * PART_ITEMS / WARPS; };
  const auto last_item = [](int sub) { return SUBS == 1 ? OWN : ((sub + 1) * PART_ITEMS - 1) / WARPS + 1; };
  const auto has = [&](int sub, int j) {
    return (OWN * WARPS == ITEMS || warp + j * WARPS < ITEMS) && (SUBS == 1 || (warp + j * WARPS) / PART_ITEMS == sub);
  };
  const auto has_lines = [&](int sub) { return SUBS == 1 || sub * 8 * PART < share; };
  const auto late = [&](int sub) { return PARTED && !reverse ? time - lasting[sub] : 0; };  // steps before its first
  const auto lasts = [&](int t, int sub) {
    return PARTED ? reverse ? t < lasting[sub] : t >= time - lasting[sub] : has_lines(sub);
  };
#if CLUSTER > 1
  const unsigned made = barriers + 16 * SUBS;  // of sub-tiles: whether their gradients are in shared memory
  const auto arriving = [&](int sub) {  // bytes at a step: of each pair of lines of which one is there
    return (WHOLE ? 8 : (min(8 * PART, share - sub * 8 * PART) + 1) & ~1) * 64 * GROUPS * CLUSTER;
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * SUBS; ++i) start_barrier(barriers + 8 * i, 1);
    for (int i = 0; i < 2 * SUBS && SUBS > 1; ++i) start_barrier(made + 8 * i, PART_ITEMS);
    barriers_started();
    for (int i = 0; i < 2 * SUBS; ++i)
      if (has_lines(i / 2)) expect(barriers + 8 * i, arriving(i / 2));
  }
  cluster_barrier();
#endif

  const auto arrive = [&](int sub, int t, long long was) {  // t: its steps done before; the last one's rows begin at `was`
#if CLUSTER > 1
    const unsigned barrier = barriers + 8 * (2 * sub + t % 2);
    if (SUBS == 1 || warp == sub * PART_ITEMS % WARPS || (warp + WARPS - sub * PART_ITEMS % WARPS) % WARPS < PART_ITEMS) {
      wait(barrier, (t - 1) / 2 % 2);
      if (lane == 0 && warp == sub * PART_ITEMS % WARPS) expect(barrier, arriving(sub));
    }
#else
    __syncthreads();
#endif
#pragma unroll
    for (int j = first_item(sub); j < last_item(sub); ++j) {
      if (!has(sub, j)) continue;
      constexpr int SOURCES = SPLITS == 1 || CLUSTER == 1 ? CLUSTER : CLUSTER / 2;  // that a thread adds up
      const int first_source = SOURCES < CLUSTER ? its_half * SOURCES : 0;
      const float4* const from =
          arrived + ((t % 2 * CELLS + cell_of(j)) * CLUSTER + first_source) * 32 + spot_of(its_units, its_pair);
      float4 sum = from[0];
#pragma unroll
      for (int source = 1; source < SOURCES; ++source) {
        const float4 part = from[source * 32];
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
      }
      float sums[PER][2] = {{its_half ? sum.z : sum.x, its_half ? sum.w : sum.y}};
      if constexpr (SPLITS == 1) sums[PER - 1][0] = sum.z, sums[PER - 1][1] = sum.w;
      if constexpr (SOURCES < CLUSTER) {  // with the other half of the sources of its own sequence, the other thread's
        sums[0][0] += __shfl_xor_sync(0xffffffffu, its_half ? sum.x : sum.z, 16);
        sums[0][1] += __shfl_xor_sync(0xffffffffu, its_half ? sum.y : sum.w, 16);
      }
#pragma unroll
      for (int b = 0; b < PER; ++b) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float scale = GATEWISE ? a.o.noise_scale : factor[j][b][u];
          carried[j][0][b][u] += NOISE ? scale * sums[b][u] : sums[b][u];
          if constexpr (NOISE_GRADIENT) noise_sums[j][b][u] += sums[b][u] * half_of(operand_before[j][b], u);
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
  // the same of two gates' depths in turn
  const unsigned columns_of_two =
      shared_address(gradients) + ((lane % 8) * STRIDE + lane / 8 % 2 * 4 + lane / 16 * GROUPS * 8) * 4;
  const bool wants_initial = a.initial_gradients[0] != nullptr || goes_on_before(a) || RESET_TO || NOISE_GRADIENT;
  long long rows_before = rows;
  for (int t = 0; t < time; ++t) {
    const long long rows_arriving = rows_before;
    rows_before = rows;
    const int step_now = reverse ? t : time - 1 - t, next = reverse ? t + 1 : time - 2 - t;

    float2 dx[OWN][PER][GATES], dr[OWN][PER][RECURRENT], to_inputs[OWN][PER][MOST(INPUTS)], to_zones[OWN][PER][STATES];
    Pair entered[OWN][PER];
    const bool all_go_on = t + 1 < time || wants_initial;
    const auto goes_on = [&](int sub) { return PARTED ? t - late(sub) + 1 < lasting[sub] || wants_initial : all_go_on; };
    const auto read_marks = [&](int j) {
#pragma unroll
      for (int b = 0; b < PER && (MARKED || RESET); ++b) load_marks(j, b, next, next_rows);
    };
    const auto read_on = [&](int sub) {  // what the next step needs
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) {
        if (SUBS > 1 && !has(sub, j)) continue;
        gates_at[j] += row_step * GATES * UNITS;
        outputs_at[j] += row_step * width;
        apart_at[j] += row_step * APART * UNITS;
        states_at[j] += row_step * UNITS;
        if constexpr (ALONE) {
          states_from += row_step * UNITS;
          if constexpr (BEFORE) before_from += row_step * UNITS;
          if constexpr (DRAWS) drawn_from += row_step * UNITS;
        }
        load(j, next, t + 2 == time && !goes_on_before(a));
        if constexpr (ROOMY) read_marks(j);
      }
    };
    const auto leave = [&](int sub) {  // what nobody waits for
      const int its = t - late(sub);
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) {
        if (SUBS > 1 && !has(sub, j)) continue;
        if (!ROOMY && its + 1 < lasting[sub]) read_marks(j);
#pragma unroll
        for (int b = 0; b < PER; ++b) {
          const bool shown = !PACKED || step_now < ends[j][b], first = shown && in[j][b][0], second = shown && in[j][b][1];
          const auto beyond = away(j, b);
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            store_pair(gradients_at[j] + (beyond * GATES + g) * UNITS, dx[j][b][g].x, dx[j][b][g].y, first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_pair(apart_gradients_at[j] + (beyond * APART + i) * UNITS, dr[j][b][apart(i)].x,
                       dr[j][b][apart(i)].y, first, second);
          if constexpr (OPTIONS) {
            const long long from = (rows + sequence[j][b]) * UNITS + unit_of(j);
            if constexpr (NOISE && !GATEWISE && !ENTERED) {
              const float2 pair = wide_pair(entered[j][b]);
              store_pair(a.o.entered[direction] + from, pair.x, pair.y, first, second);
            }
#pragma unroll
            for (int s = 0; s < STATES; ++s)
              if (ZONEOUT_GRADIENT && zoneout(s) == BY_MASK)
                store_wide_pair(a.o.zoneout_gradients[direction][s] + from, to_zones[j][b][s].x, to_zones[j][b][s].y,
                                first, second);
#pragma unroll
            for (int i = 0; i < INPUTS; ++i)
              store_wide_pair(a.o.input_gradients[direction][i] + from, to_inputs[j][b][i].x, to_inputs[j][b][i].y,
                              first, second);
            if (its + 1 < lasting[sub]) load_options(j, b, next, next_rows);
          }
          if (its + 1 + AHEAD < lasting[sub] && first && !PACKED) {
            const auto far = AHEAD * row_step + beyond;
            if constexpr (DRAWS && UNITS % 2 == 0)
              prefetch(drawn_of(j) + far * UNITS);
            if constexpr (MASK) prefetch(a.o.mask + next_rows + AHEAD * row_step + sequence[j][b]);
            if constexpr (RESET) prefetch(a.o.reset + next_rows + AHEAD * row_step + sequence[j][b]);
#pragma unroll
            for (int g = 0; g < GATES; ++g) prefetch(gates_at[j] + (far * GATES + g) * UNITS);
#pragma unroll
            for (int i = 0; i < APART; ++i)
              prefetch(a.apart[direction] + apart_at[j] + (far * APART + i) * UNITS);
            if (has_output_gradient) prefetch(a.y_gradient + outputs_at[j] + far * width);
            if constexpr (!BEFORE)
              prefetch(a.y + outputs_at[j] + far * width);
            else if constexpr (!ENTERED)
              prefetch(before_of(j) + far * UNITS);
#pragma unroll
            for (int s = 1; s < STATES; ++s)
              prefetch(states_of(j) + (s - 1) * state_stride + far * UNITS);
          }
        }
        gradients_at[j] += row_step * GATES * UNITS;
        apart_gradients_at[j] += row_step * APART * UNITS;
      }
    };
    const auto read = [&](int j, int b, int u, float(&x)[GATES], float(&r)[RECURRENT], float(&before)[STATES],
                          float(&v)[MOST(VECTORS)], float(&e)[MOST(INPUTS)]) {  // what one unit's step is computed from
#pragma unroll
      for (int g = 0; g < GATES; ++g) x[g] = half_of(wide_gates(item[j].gates[b][g]), u);
#pragma unroll
      for (int i = 0; i < APART; ++i) r[apart(i)] = half_of(wide_gates(item[j].apart[b][i]), u);
      before[0] = half_of(wide_pair(item[j].before[b]), u);
#pragma unroll
      for (int s = 1; s < STATES; ++s) before[s] = half_of(item[j].states[b][s - 1], u);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) v[i] = vectors[j][i][u];
#pragma unroll
      for (int i = 0; i < INPUTS; ++i) e[i] = half_of(item[j].inputs[b][i], u);
    };
    const auto compute = [&](int sub) {  // the gradients of a sub-tile's items, into shared memory too
      const int its = t - late(sub);  // its own step
      Known ahead[OWN][PER][2];
      const auto look_ahead = [&] {
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j) {
          if (!has(sub, j)) continue;
#pragma unroll
          for (int b = 0; b < PER; ++b)
#pragma unroll
            for (int u = 0; u < 2; ++u) {
              float x[GATES], r[RECURRENT] = {}, before[STATES], v[MOST(VECTORS)], e[MOST(INPUTS)];
              read(j, b, u, x, r, before, v, e);
              ahead[j][b][u] = known(x, r, before, v, e);
            }
        }
      };
      if constexpr (ROOMY) look_ahead();  // while the sums travel
      if (its > 0) arrive(sub, its, rows_arriving);
      if constexpr (AT_ONCE) look_ahead();
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) {
        if (SUBS > 1 && !has(sub, j)) continue;
#pragma unroll
        for (int b = 0; b < PER; ++b) {
          const float2 output = wide_pair(item[j].y_gradient[b]), h = wide_pair(item[j].before[b]);
          if constexpr (RESET) was_cut[j][b] = item[j].cut[b];
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            float x[GATES], r[RECURRENT] = {}, before[STATES], v[MOST(VECTORS)], d[STATES];
            float to_x[GATES], to_r[RECURRENT], to_s[STATES], to_v[MOST(VECTORS)], to_e[MOST(INPUTS)], e[MOST(INPUTS)];
            const bool valid = !MARKED || item[j].valid[b];
            read(j, b, u, x, r, before, v, e);
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
              if constexpr (SEQUENCES) carried[j][s][b][u] += half_of(wide_pair(item[j].state_gradients[b][s]), u);
              d[s] = carried[j][s][b][u];
            }
            d[0] += half_of(output, u);
            if constexpr (MASK) {  // what came to an output that was held goes to the step that it was held from
              held[j][b][u] += half_of(output, u);
              d[0] = carried[j][0][b][u] + held[j][b][u];
              if (valid) held[j][b][u] = 0.f;
            }
            float stayed[STATES];  // gradients of what zoneout kept
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
              stayed[s] = 0.f;
              if constexpr (OPTIONS) {
                const float share =
                    zoneout(s) == BY_MASK ? half_of(item[j].zones[b][s], u) : a.o.zoneout_share[s];
                const bool keeps = zoneout(s) == AT_RANDOM && drawn[j][b] >> (u * 4 + s) & 1;
                if (u == 0) to_zones[j][b][s].x = d[s];
                if (u == 1) to_zones[j][b][s].y = d[s];
                if (zoneout(s) == BY_SHARE || zoneout(s) == BY_MASK) stayed[s] = share * d[s], d[s] -= stayed[s];
                if (keeps) stayed[s] = d[s], d[s] = 0.f;
              }
            }
#if ZONEOUT_GRADIENT
            float after[STATES];
            step(x, r, before, v, e, after);
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
              const float apart = valid ? before[s] - after[s] : 0.f;
              if (u == 0) to_zones[j][b][s].x = valid ? to_zones[j][b][s].x * apart : 0.f;
              if (u == 1) to_zones[j][b][s].y = valid ? to_zones[j][b][s].y * apart : 0.f;
            }
#endif
            step_backward(ROOMY || AT_ONCE ? ahead[j][b][u] : known(x, r, before, v, e), x, r, before, v, e, d, to_x, to_r, to_s, to_v, to_e);
#pragma unroll
            for (int s = 0; s < STATES; ++s)
              if (valid) carried[j][s][b][u] = to_s[s] + stayed[s];
            const bool there = in[j][b][u] && valid;  // a sum never takes what the cell makes of nothing
            if constexpr (MARKED)
#pragma unroll
              for (int g = 0; g < GATES; ++g) to_x[g] = valid ? to_x[g] : 0.f;
#pragma unroll
            for (int i = 0; i < INPUTS; ++i) {
              if (u == 0) to_inputs[j][b][i].x = valid ? to_e[i] : 0.f;
              if (u == 1) to_inputs[j][b][i].y = valid ? to_e[i] : 0.f;
            }
            if constexpr (NOISE == HELD || NOISE == GIVEN) factor[j][b][u] = valid ? half_of(item[j].noise[b], u) : 0.f;
            if constexpr (NOISE == DRAWN) factor[j][b][u] = drawn[j][b] >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
#pragma unroll
            for (int g = 0; g < RECURRENT; ++g) {
              const float value = there ? to_r[g] : 0.f;
              if (u == 0) dr[j][b][g].x = value;
              if (u == 1) dr[j][b][g].y = value;
            }
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
              if (u == 0) dx[j][b][g].x = to_x[g];
              if (u == 1) dx[j][b][g].y = to_x[g];
              if constexpr (BIAS) summed[j][g][u] += there ? to_x[g] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < APART; ++i)
              if constexpr (BIAS) summed[j][GATES + i][u] += there ? to_r[apart(i)] : 0.f;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) summed[j][SUMMED - VECTORS + i][u] += there ? to_v[i] : 0.f;
          }
          if constexpr (NOISE && !GATEWISE)
            entered[j][b] = narrow_pair(h.x * factor[j][b][0], h.y * factor[j][b][1]), operand_before[j][b] = h;
        }
      }
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) {
        if (!has(sub, j)) continue;
        const int group = cell_of(j) % GROUPS, tile = cell_of(j) / GROUPS;
#pragma unroll
        for (int b = 0; b < PER; ++b) {
          unsigned* const line = gradients + its % 2 * GRADIENT_WORDS + (tile * 8 + its_line + b) * STRIDE;
#if HALVES
          float most = 0.f;  // of the group's gradients of this sequence
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g) most = fmaxf(most, fmaxf(fabsf(dr[j][b][g].x), fabsf(dr[j][b][g].y)));
#pragma unroll
          for (int apart = SPLITS == 1 ? 4 : 1; apart < (SPLITS == 1 ? 32 : 8); apart *= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
          const float scale = scale_of(unscale_of(most));
          if (its_units == 0) line[DEPTHS * 8 + group] = __float_as_uint(unscale_of(most));
#endif
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g) {
            unsigned* const to = line + g * SLICE / WORD_ELEMENTS + (group * 16 + its_units * 2) / WORD_ELEMENTS;
#if HALVES
            unsigned low;
            split_halves(dr[j][b][g].x * scale, dr[j][b][g].y * scale, to[0], low);
            if constexpr (PLANES > 1) to[PLANE_WORDS] = low;
#elif ELEMENT_BYTES == 2
            *to = narrow_pair(dr[j][b][g].x, dr[j][b][g].y);
#else
            to[0] = operand(dr[j][b][g].x), to[1] = operand(dr[j][b][g].y);
#endif
          }
        }
      }
#if CLUSTER > 1
      if constexpr (SUBS > 1) {
        __syncwarp();
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j)
          if (has(sub, j) && lane == 0) arrive_here(made + 8 * (2 * sub + its % 2));
        if (its + 1 < lasting[sub]) read_on(sub);
        leave(sub);
      }
#endif
    };

    // of a strip of the warp's the block with its units, and which 16 of the block's they are
    constexpr bool ALL = SHARE % GROUPS == 0;  // it has all strips of its blocks: most is known when compiled, not kept
    const auto block_of = [&](int i) { return ALL ? warp * (SHARE / GROUPS) + i / GROUPS : (warp * SHARE + i) / GROUPS; };
    const auto group_of = [&](int i) { return ALL ? i % GROUPS : (warp * SHARE + i) % GROUPS; };
    // One without strips sends nothing, so nobody waits for it: it must not wait, the barrier's phases could pass it by.
    const bool has_strips = SHARE * (WARPS - 1) < STRIPS || warp * SHARE < STRIPS;
    const auto multiply_and_send = [&](int sub) {
      const int its = t - late(sub);
#pragma unroll
      for (int i0 = 0; i0 < SHARE; i0 += CHUNK) {
        float sums[CHAINS][CHUNK][PART][4] = {}, all[SUMS_APART][CHUNK][PART][4] = {};
#if HALVES
        unsigned bits[CHUNK][PART];  // of masks
        if constexpr (NOISE == BY_GATE)
#pragma unroll
          for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int n = 0; n < PART; ++n)
              bits[c][n] = mask_bits[(min(warp * SHARE + i0 + c, STRIPS - 1) * TILES + sub * PART + n) * 32 + lane];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {  // whose gradients of a sequence have a scale of their own
          float factors[PART][2];
          const auto read_factors = [&](int n) {
            const unsigned* const at = gradients + its % 2 * GRADIENT_WORDS + DEPTHS * 8 + group +
                                       ((sub * PART + n) * 8 + lane % 4 * 2) * STRIDE;
            factors[n][0] = __uint_as_float(at[0]), factors[n][1] = __uint_as_float(at[STRIDE]);
          };
          const auto add_up = [&](int c, int n, int gate) {  // its masks say what of a gate's sums counts
#pragma unroll
            for (int e = 0; e < 4; ++e) {  // in this order, which neither weights nor gradients of any size overflow
              const float part = sums[0][c][n][e] * unscale[min(i0 + c, SHARE - 1)][e / 2];
              if (!GATEWISE || SUMS_APART > 1 || bits[c][n] >> (gate * 4 + e) & 1)
                all[gate % SUMS_APART][c][n][e] += part * factors[n][e % 2];
              sums[0][c][n][e] = 0.f;
            }
          };
          if constexpr (GATEWISE)
#pragma unroll
            for (int n = 0; n < PART; ++n) read_factors(n);
#pragma unroll
          for (int g = 0; g < RECURRENT; g += 2) {
            uint4 b[PLANES][PART];
#pragma unroll
            for (int p = 0; p < PLANES; ++p)
#pragma unroll
              for (int n = 0; n < PART; ++n) {
                const unsigned at = columns_of_two + (its % 2 * GRADIENT_WORDS + p * PLANE_WORDS +
                                                      (sub * PART + n) * 8 * STRIDE + (g * GROUPS + group) * 8) * 4;
                b[p][n] = g + 1 < RECURRENT ? load_columns(at) : load_half_columns(at);
              }
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (g + half < RECURRENT) {
                Right right[PART];
#pragma unroll
                for (int n = 0; n < PART; ++n) {
                  right[n] = right_of(half ? b[0][n].z : b[0][n].x, half ? b[0][n].w : b[0][n].y);
#if EXACT
                  right[n].low = half ? uint2{b[1][n].z, b[1][n].w} : uint2{b[1][n].x, b[1][n].y};
#endif
                }
#pragma unroll
                for (int c = 0; c < CHUNK; ++c)
                  if (i0 + c < SHARE) {
                    const int i = (i0 + c) * DEPTHS + (g + half) * GROUPS + group;
                    const int far = (warp * STREAMED + i - RESIDENT) * PLANES * 32 + lane;
                    const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0] : weights_at(streamed + far));
#pragma unroll
                    for (int n = 0; n < PART; ++n) {
                      multiply(sums[0][c][n], weight, right[n]);
                      if constexpr (GATEWISE) add_up(c, n, g + half);
                    }
                  }
              }
          }
          if constexpr (!GATEWISE)
#pragma unroll
            for (int n = 0; n < PART; ++n) {
              read_factors(n);
#pragma unroll
              for (int c = 0; c < CHUNK; ++c) add_up(c, n, 0);
            }
        }
#pragma unroll
        for (int c = 0; c < CHUNK; ++c)
#pragma unroll
          for (int n = 0; n < PART; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              sums[0][c][n][e] = SUMS_APART == 1 || bits[c][n] >> e & 1 ? all[0][c][n][e] : 0.f;
#pragma unroll
              for (int gate = 1; gate < SUMS_APART; ++gate)
                if (bits[c][n] >> (gate * 4 + e) & 1) sums[0][c][n][e] += all[gate][c][n][e];
            }
#else
#pragma unroll
        for (int d = 0; d < DEPTHS; d += 2) {
          uint4 b[PART];
#pragma unroll
          for (int n = 0; n < PART; ++n) {
            const unsigned at = columns + (unsigned)(its % 2) * GRADIENT_WORDS * 4 +
                                ((sub * PART + n) * 8 * STRIDE + d * 8) * 4;
            b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (d + half < DEPTHS) {
              Right right[PART];
#pragma unroll
              for (int n = 0; n < PART; ++n) right[n] = right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#pragma unroll
              for (int c = 0; c < CHUNK; ++c)
                if (i0 + c < SHARE) {
                  const int i = (i0 + c) * DEPTHS + d + half;
                  const int far = (warp * STREAMED + i - RESIDENT) * 32 + lane;
                  const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0] : weights_at(streamed + far));
#pragma unroll
                  for (int n = 0; n < PART; ++n) {
                    multiply(sums[half % CHAINS][c][n], weight, right[n]);
                    if constexpr (GATEWISE)
                      if ((d + half + 1) % GATE_DEPTHS == 0) {
                        const int gate = (d + half) / GATE_DEPTHS, strip = min(warp * SHARE + i0 + c, STRIPS - 1);
                        const int item = (strip * TILES + sub * PART + n) * 32 + lane;
                        const unsigned bits = NOISE == BY_GATE ? mask_bits[item] : 0u;
                        const Element* const mask = masks + (gate * STRIPS * TILES * 32 + item) * 4;
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                          const float sum = CHAINS == 2 ? sums[0][c][n][e] + sums[CHAINS - 1][c][n][e] : sums[0][c][n][e];
                          if constexpr (NOISE == GIVEN_BY_GATE)
                            all[0][c][n][e] += wide(mask[e]) * sum;
                          else if (bits >> (gate * 4 + e) & 1)
                            all[0][c][n][e] += sum;
                          sums[0][c][n][e] = sums[CHAINS - 1][c][n][e] = 0.f;
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
          if (i0 + c >= SHARE || (SHARE * WARPS != STRIPS && strip >= STRIPS)) break;
#if CLUSTER > 1
          const unsigned target = at_rank(base, block_of(i0 + c));
#endif
#pragma unroll
          for (int n = 0; n < PART; ++n) {  // the two units of one sequence, then of the next
            float(&sum)[4] = GATEWISE && !HALVES ? all[0][c][n] : sums[0][c][n];
            if constexpr (CHAINS == 2 && !GATEWISE)
#pragma unroll
              for (int e = 0; e < 4; ++e) sum[e] += sums[CHAINS - 1][c][n][e];
            const int cell = (sub * PART + n) * GROUPS + group_of(i0 + c);
            const int slot = (((its + 1) % 2 * CELLS + cell) * CLUSTER + rank) * 32 + spot_of(lane / 4, lane % 4);
#if CLUSTER > 1
            const uint4 data = {__float_as_uint(sum[0]), __float_as_uint(sum[2]), __float_as_uint(sum[1]),
                                __float_as_uint(sum[3])};
            if (WHOLE || (sub * PART + n) * 8 + lane % 4 * 2 < share)
              send(target + WEIGHT_WORDS * 4 + slot * 16, target + barriers - base + 8 * (2 * sub + (its + 1) % 2), data);
#else
            arrived[slot] = {sum[0], sum[2], sum[1], sum[3]};
#endif
          }
        }
      }
    };

    if constexpr (SUBS == 1) {
      compute(0);
      if (goes_on(0)) __syncthreads();
      if (warp < ITEMS && t + 1 < time) read_on(0);
      if (goes_on(0)) multiply_and_send(0);
      leave(0);
#if CLUSTER > 1
    } else {  // each is computed while others multiply the one before it
      compute(0);
#pragma unroll
      for (int sub = 0; sub < SUBS; ++sub) {
        if (!lasts(t, sub)) break;  // those after it have none that is longer
        if (sub + 1 < SUBS && lasts(t, sub + 1)) compute(sub + 1);
        if (goes_on(sub) && has_strips) {
          const int its = t - late(sub);
          wait(made + 8 * (2 * sub + its % 2), its / 2 % 2);
          multiply_and_send(sub);
        }
      }
#endif
    }
    if constexpr (OPTIONS) {
      rows = next_rows;
      if (t + 2 < time) next_rows = rows_of(a, reverse ? next + 1 : next - 1);
      if constexpr (PACKED) row_step = next_rows - rows;
    }
  }

  if (wants_initial) {
#pragma unroll
    for (int sub = 0; sub < SUBS; ++sub)
      if (has_lines(sub) && (!LENGTHS || lasting[sub] > 0))
        arrive(sub, lasting[sub], PARTED ? rows_of(a, reverse ? lasting[sub] - 1 : 0) : rows_before);
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
      for (int b = 0; b < PER; ++b)
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
          leave_gradient_pair(a, s, start_of(j, b), carried[j][s][b][0], carried[j][s][b][1], in[j][b][0], in[j][b][1]);
          if constexpr (RESET_TO)
            store_pair(a.o.reset_gradients[s] + start_of(j, b), reset_sums[j][s][b][0], reset_sums[j][s][b][1],
                       in[j][b][0], in[j][b][1]);
          if (NOISE_GRADIENT && NOISE == HELD && s == 0)
            store_wide_pair(a.o.noise_gradients[direction] + (long long)sequence[j][b] * UNITS + unit_of(j),
                            noise_sums[j][b][0], noise_sums[j][b][1], in[j][b][0], in[j][b][1]);
        }
  }
  if constexpr (LENGTHS && !PACKED)  // past the end of all that are computed together
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
      for (int b = 0; b < PER; ++b)
        for (long long t = PARTED ? lasting_of(j) : time; t < a.time; ++t) {
          const long long row = t * batch + sequence[j][b], from = row * UNITS + unit_of(j);
          const bool first = in[j][b][0], second = in[j][b][1];
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            store_pair(a.gate_gradients[direction] + (row * GATES + g) * UNITS + unit_of(j), 0.f, 0.f, first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_pair(a.apart_gradients[direction] + (row * APART + i) * UNITS + unit_of(j), 0.f, 0.f, first, second);
          if constexpr (NOISE && !GATEWISE && !ENTERED)
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
    const int unit = unit_of(j), tile = cell_of(j) / GROUPS;
    const bool own = warp + j * WARPS < ITEMS && its_line % (8 / SPLITS) == 0;
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        summed[j][i][u] += __shfl_xor_sync(0xffffffffu, summed[j][i][u], SPLITS == 1 ? 1 : 8);
        summed[j][i][u] += __shfl_xor_sync(0xffffffffu, summed[j][i][u], SPLITS == 1 ? 2 : 16);
      }
      float* const to = a.sums[direction] + ((long long)((cluster * TILES + tile) * SPLITS + warp % SPLITS) * SUMMED + i) * UNITS + unit;
      store_wide_pair(to, summed[j][i][0], summed[j][i][1], own && unit < UNITS, own && unit + 1 < UNITS);
    }
  }
#if CLUSTER > 1
  cluster_barrier();  // a block that has ended must not be sent to
#endif
}
