// All steps of a recurrent layer, forward, in one launch.
//
// A cluster of CLUSTER blocks (or one block alone) owns `share` sequences, the batch divided evenly and at most ROWS =
// 8 x TILES: what is exchanged is theirs alone.  Block `rank` owns the units from rank x SLICE on, for every gate; its
// recurrent weights stay in registers, and past RESIDENT depths in shared memory.  At each step it multiplies them with
// the states of all units, which lie in its shared memory, computes the cell for its own units, and sends their new
// states into the shared memory of every block of the cluster.
//
// Within a block, warp (group, split) owns 16 units and, of the depth of the product, the DEPTHS x 8 words from
// split x DEPTHS x 8 on.  Where there are several splits, their partial sums meet in shared memory; then each warp
// computes the cell for some of the group's items.  An item is, for a thread: two neighbouring units of one sequence.
//
// The rows are taken in SUBS sub-tiles, one after the other, so that the states of one travel while the next are
// multiplied; a warp that has no items of a sub-tile goes on to the next without waiting for those that have.  Or
// POINTWISE other warps of each group compute the cell, of which none multiplies.
//
//   registers  weights, sums of the products, the states and the bias of the thread's items, the next step's input
//   shared     states twice (read at this step, arriving for the next), partial sums, two barriers for each sub-tile
//              (with ARRIVALS, and group), more weights
//   global     x in, without its bias, which is added here; gates out in its place where they are saved; y, saved
//              states, final states
//
// What options add stands in options.cu; a kernel without them has none of it.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.
//
// Why one barrier a step is enough in a cluster, where racecheck sees a hazard.  A step begins when all states of the
// step before have arrived, of this block's own units too: they come through the same barrier.
//   - Partial sums are read, the cell is computed of them, its states are sent.  A warp that overwrites them at the next
//     step has waited for those very states: each reader has read.  (Where no state that is sent is made of a sum, its
//     load still stands before the sends in the one queue of the warp's loads and stores.)  With ORDER a sequence that
//     has ended sends nothing: there each warp tells its own block's barrier that it has read.
//   - States that were read at step t are overwritten by what is sent at step t + 1.  Who sends there has waited for
//     the states that this block sent at step t, and a warp sends after the group's barrier (or of its own products), so
//     that all warps of its group have read; every group sends.
// All of it holds for each sub-tile by itself: each has its own states, partial sums and barriers.  And where a group's
// states come by barriers of their own (ARRIVALS): a warp that has multiplied has waited for those of all groups.

// @generated

constexpr int PART = TILES / SUBS;  // row tiles of a sub-tile
constexpr int TAKERS = POINTWISE > 0 ? POINTWISE : SPLITS;  // warps of a group that share its items
constexpr int ROWS = 8 * TILES, ITEMS = 2 * TILES, OWN = (ITEMS + TAKERS - 1) / TAKERS;
constexpr int GROUPS = SLICE / 16, MULTIPLYING = GROUPS * SPLITS, WARPS = MULTIPLYING + GROUPS * POINTWISE;
constexpr int THREADS = 32 * WARPS;
constexpr bool LATE_BIAS = GATEWISE || POINTWISE > 0;  // it enters the sum of all splits, not that of the first
// threads that meet at a group's barrier of a sub-tile
constexpr int MEETING = 32 * (SPLITS + (POINTWISE < 2 * PART ? POINTWISE : 2 * PART));
constexpr int WORDS = SPLITS * DEPTHS * 8;  // depth of the product, padded
constexpr int STREAMED = DEPTHS - RESIDENT;
constexpr int PLANE_WORDS = ROWS * WORDS, STATE_WORDS = PLANES * PLANE_WORDS;
constexpr int PARTIAL_WORDS = SPLITS > 1 ? GROUPS * ITEMS * SPLITS * RECURRENT * 64 : 0;
constexpr int WEIGHT_WORDS = MULTIPLYING * STREAMED * RECURRENT * PLANES * 128;
// masks by gate: bits of all gates for [depth, tile, lane], or as the states for each gate
constexpr int MASK_WORDS = NOISE == BY_GATE         ? SPLITS * DEPTHS * TILES * 32
                           : NOISE == GIVEN_BY_GATE ? RECURRENT * STATE_WORDS
                                                    : 0;
// Of scales that are found anew at each step exact products' come beside the states, of ended sequences too, others in them.
constexpr bool BESIDE = BY_STEP && EXACT, WITHIN = BY_STEP && !EXACT;
constexpr bool TELLS = ORDER && SPLITS > 1 && !BESIDE;
constexpr int READERS = TELLS ? GROUPS * (TAKERS < 2 * PART ? TAKERS : 2 * PART) : 0;  // warps, of a sub-tile
// what scales of states are the inverse of: in each buffer for [depth, item, 4 sequences], or for each sequence alone
constexpr int SCALES = BESIDE ? SPLITS * DEPTHS * TILES * 8 : HALVES && !WITHIN ? ROWS : 0, SCALE_WORDS = SCALES * (1 + BESIDE);
constexpr int WEIGHT_SCALES = HALVES ? MULTIPLYING * RECURRENT * 16 : 0;  // and those of weights: [warp, gate, unit]
constexpr bool PARTED = ORDER && SUBS > 1;  // sub-tiles are done without once all their sequences have ended
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
// Whether what a step reads is asked for before the wait of the step before it, into other registers, and not once that one
// has sent, where it stands behind what is sent: of LSTM with 256 units at batch 128 a step took 1.08 us and takes 0.83, 1.04
// and 0.87 with masks of each step, with 512 units 1.86 and 1.76, 2.11 and 1.87 (bfloat16, one H100).  Two warps that
// share one sub-tile's items gained nothing, nor did float32.
constexpr bool EARLY = ELEMENT_BYTES == 2 && (POINTWISE == 0 ? SUBS == 1 : SUBS > 2) && INPUTS == 0 && NOISE != GIVEN &&
                       zoneout(0) != BY_MASK && zoneout(1) != BY_MASK && zoneout(2) != BY_MASK && zoneout(3) != BY_MASK;
static_assert(4 * (WEIGHT_WORDS + 2 * STATE_WORDS + PARTIAL_WORDS + MASK_WORDS + SCALE_WORDS + WEIGHT_SCALES) + 16 * SUBS * ARRIVALS ==
                  SHARED,
              "tiling and kernel disagree");
static_assert(TILES % SUBS == 0 && (SUBS == 1 || CLUSTER > 1) && GROUPS * SUBS < 16, "no such sub-tiles");
static_assert(SUBS == 1 || 2 * PART % TAKERS == 0 || TAKERS % (2 * PART) == 0, "no round of items is of one sub-tile");
// more weights than 168 registers of a thread hold: warps that compute the cell alone leave some to those that multiply
constexpr bool TRADED = POINTWISE > 0 && SUBS > 1 && MULTIPLYING == 8 && WARPS == 12 && RESIDENT * RECURRENT * PLANES > 28;
// Two warps that share a scheduler are through with their products one after the other, and so one group's states come
// before the other's.  With ARRIVALS they are multiplied meanwhile, those of the last group first: of LSTM with 512 units
// at batch 32 a step that saves took 0.80 us and takes 0.78, with TF32 products 1.00 and 0.90, at 128 1.60 and 1.56, 2.07 and
// 1.99 (H200).
static_assert(ARRIVALS == 1 || (POINTWISE > 0 && ARRIVALS == GROUPS && DEPTHS % (2 * GROUPS) == 0 && !GATEWISE && !BESIDE),
              "no such arrivals");
static_assert(POINTWISE == 0 || (SPLITS > 1 && CLUSTER > 1), "sums come to other warps through shared memory");

#if HALVES
__device__ __forceinline__ float largest(float one, float other) { return WITHIN ? larger(one, other) : fmaxf(one, other); }
#endif

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

struct Read {  // what one thread has loaded of an item for a step: two units of one sequence
  GatePair x[GATES];
  unsigned valid, cut;     // the step counts; no state comes into the next: as loaded, to be awaited at their use
  unsigned drawn, enters;  // what is drawn for its zoneout (4 bits for each unit), and for the next step's operand
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;  // [warp, depth, gate, plane, lane]
  unsigned* const states = memory + WEIGHT_WORDS;
  float* const partial = (float*)(states + 2 * STATE_WORDS);  // [group, item, split, two gates, lane, gate, unit]
  unsigned* const masks = (unsigned*)(partial + PARTIAL_WORDS);
  float* const scales = (float*)(masks + MASK_WORDS);
  float2* const weight_scales = (float2*)(scales + SCALE_WORDS);
  const unsigned barriers = shared_address(scales + SCALE_WORDS + WEIGHT_SCALES);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool multiplies = POINTWISE == 0 || warp < MULTIPLYING;
  const int group = multiplies ? warp / SPLITS : (warp - MULTIPLYING) / MOST(POINTWISE);
  const int split = multiplies ? warp % SPLITS : (warp - MULTIPLYING) % MOST(POINTWISE);  // or of the pointwise, which
  const int direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int unit = rank * SLICE + group * 16 + lane / 4 * 2;  // and unit + 1
  const bool has_first = unit < UNITS, has_second = unit + 1 < UNITS;
  const int batch = (int)a.batch, clusters = gridDim.x / CLUSTER, share = (batch + clusters - 1) / clusters;
  const int first_place = blockIdx.x / CLUSTER * share, last_place = min(batch, first_place + share);
  const Weight* const weights = a.weights[direction];

  // rows 0 to 7 of an operand are this group's even units, rows 8 to 15 the odd: a thread has two neighbours
  Planes resident[MOST(RESIDENT)][RECURRENT];
#if HALVES
  float unscale[(RECURRENT + 1) / 2];  // of the group's 16 units, two gates at a time; asked for before the weights
#pragma unroll
  for (int g = 0; g < RECURRENT; g += 2) {
    const int own = rank * SLICE + group * 16 + lane % 16, gate = g + lane / 16;
    unscale[g / 2] = gate < RECURRENT && own < UNITS ? scales_behind(weights)[gate * UNITS + own] : 0.f;
  }
#endif
  constexpr int OPERANDS = RECURRENT * PLANES;  // of a depth
  const int first_column = split * DEPTHS * 8 * WORD_ELEMENTS;
  const auto weights_of = [&](int s, int m) {
    const int own = rank * SLICE + group * 16 + m, gate = s / PLANES, plane = s % PLANES;
    const Weight* const at = weights + ((long long)(plane * RECURRENT + gate) * UNITS + own) * WEIGHT_PITCH;
    return WeightRow{at + first_column, own < UNITS ? UNITS - first_column : 0};
  };
  if (multiplies)
    bring_rows<First<RESIDENT * OPERANDS>, OPERANDS, DEPTHS, STREAMED * OPERANDS, MULTIPLYING, 4 * WEIGHT_WORDS>(
        memory, warp, lane, [](int s, int depth) { return depth * OPERANDS + s; }, weights_of,
        [&](int i, uint4 words) { resident[i / OPERANDS][i / PLANES % RECURRENT].plane[i % PLANES] = words; },
        [&](int i, uint4 words) { streamed[(warp * STREAMED * OPERANDS + i) * 32 + lane] = words; });
  else
    __syncthreads();  // as it does
#if HALVES
#pragma unroll
  for (int g = 0; g < RECURRENT; g += 2)
    if (multiplies && g + lane / 16 < RECURRENT)
      ((float*)weight_scales)[(warp * RECURRENT + g) * 16 + lane] = unscale[g / 2];
#endif

  // steps of the longest sequence of the cluster
  const int time = LENGTHS ? longest(a, first_place, share) : (int)a.time;
  const bool reverse = direction == 1;
  const int first_step = reverse && time > 0 ? time - 1 : 0;
  int lasting[SUBS];  // and of each sub-tile, which is its first
#pragma unroll
  for (int sub = 0; sub < SUBS; ++sub)
    lasting[sub] = PARTED ? longest(a, first_place + sub * 8 * PART, min(8 * PART, share - sub * 8 * PART)) : time;
  const auto lasting_of = [&](int sub) {
    int steps = lasting[0];
#pragma unroll
    for (int i = 1; i < SUBS; ++i)
      if (sub == i) steps = lasting[i];
    return steps;
  };
  const auto first_step_of = [&](int sub) { return PARTED ? reverse ? max(0, lasting_of(sub) - 1) : 0 : first_step; };

  for (int i = threadIdx.x; i < 2 * STATE_WORDS; i += THREADS) states[i] = 0;
  for (int i = threadIdx.x; i < SCALE_WORDS; i += THREADS) scales[i] = 0.f;
  __syncthreads();
  if constexpr (NOISE == BY_GATE)
    for (int i = threadIdx.x; i < SPLITS * DEPTHS * TILES * 32; i += THREADS) {
      const int its = i % 32, place = first_place + i / 32 % TILES * 8 + its / 4;
      masks[i] = gates_bits(a, place, (i / 32 / TILES * 8 + its % 4) * WORD_ELEMENTS, direction);
    }
  if constexpr (NOISE == GIVEN_BY_GATE)
    for (int i = threadIdx.x; i < RECURRENT * ROWS * WORDS * WORD_ELEMENTS; i += THREADS) {
      const int column = i % (WORDS * WORD_ELEMENTS), line = i / (WORDS * WORD_ELEMENTS);
      const int gate = line / ROWS, place = first_place + line % ROWS;
      const bool there = place < last_place && column < UNITS;
      const long long sequence = there ? sequence_at(a, place) : 0;
      const float value = there ? a.o.noise[direction][(gate * a.batch + sequence) * UNITS + column] : 0.f;
      unsigned* const to = masks + gate * STATE_WORDS + word_of(line % ROWS, column / WORD_ELEMENTS);
      ((Element*)to)[column % WORD_ELEMENTS] = narrow(value);
    }
#if BY_STEP
  for (int i = threadIdx.x; i < share * CLUSTER * GROUPS && (has_initial(a) || RESET_TO); i += THREADS) {
    const int line = i % share, depth = i / share;
    const auto value = [&](int at) {
      const int place = first_place + line, column = depth * 16 + at;
      if (place >= last_place || column >= UNITS) return 0.f;
#if OPTIONS
      return first_operand(a, sequence_at(a, place), column, direction, first_step_of(line / (8 * PART)));
#else
      return first_state(a)[((long long)direction * batch + place) * UNITS + column];
#endif
    };
    float most = 0.f;
#pragma unroll
    for (int at = 0; at < 16; ++at) most = largest(most, fabsf(value(at)));
    const unsigned level = WITHIN ? level_of(most) : 0;
    const float unscale = WITHIN ? unscale_of_level(level) : unscale_of(most), scale = scale_of(unscale);
    if (BESIDE) scales[(depth * ITEMS + line / 8 * 2 + line % 2) * 4 + line % 8 / 2] = unscale;
#pragma unroll
    for (int word = 0; word < 8; ++word) {
      unsigned* const to = states + word_of(line, depth * 8 + word);
      split_halves(value(2 * word) * scale, value(2 * word + 1) * scale, to[0], to[PLANE_WORDS]);
      if (WITHIN) to[0] |= part_of_level(level, word);
    }
  }
#elif HALVES
#if OPTIONS
  for (int line = warp; line < ROWS; line += WARPS) {
    const bool there = line < share && first_place + line < last_place;
    const float most = largest_operand(a, first_place + line, there, direction, lane), scale = scale_of(unscale_of(most));
    if (lane == 0) scales[line] = unscale_of(most);
    if (!there || (a.initial[0] == nullptr && !RESET_TO)) continue;
    const long long sequence = sequence_at(a, first_place + line);
    const auto value = [&](int column) {
      return column < UNITS ? scale * first_operand(a, sequence, column, direction, first_step_of(line / (8 * PART))) : 0.f;
    };
    for (int word = lane; 2 * word < UNITS; word += 32)
      states[word_of(line, word)] = half_pair(value(2 * word), value(2 * word + 1));
  }
#else
  for (int line = warp; line < ROWS && (SCALES_STAY || has_initial(a)); line += WARPS) {
    const bool there = line < share && first_place + line < last_place && has_initial(a);
    const Element* const from = first_state(a) + ((long long)direction * batch + first_place + line) * UNITS;
    float most = SCALES_STAY ? 1.f : 0.f;
    for (int column = lane; column < UNITS && there; column += 32) most = fmaxf(most, fabsf(from[column]));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
    const float scale = scale_of(unscale_of(most));
    if (lane == 0) scales[line] = unscale_of(most);
    for (int word = lane; 2 * word < UNITS && there; word += 32) {
      const float odd = 2 * word + 1 < UNITS ? from[2 * word + 1] : 0.f;
      states[word_of(line, word)] = half_pair(from[2 * word] * scale, odd * scale);
    }
  }
#endif
#else
  if (has_initial(a) || RESET_TO) {
    for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
      const int place = first_place + i / UNITS, column = i % UNITS;
      if (place < last_place) {
        const Element value = first_operand(a, sequence_at(a, place), column, direction, first_step_of(i / UNITS / (8 * PART)));
        unsigned* const at = states + word_of(i / UNITS, column / WORD_ELEMENTS);
#if ELEMENT_BYTES == 2
        ((Element*)at)[column % WORD_ELEMENTS] = value;
#else
        *at = operand(value);
#endif
      }
    }
  }
#endif

  // what a thread computes: its items.  Of two groups, different warps have one more item than the others.
  const bool computes = POINTWISE == 0 || !multiplies;
  const int position = computes ? (split + TAKERS - group * (ITEMS % TAKERS) % TAKERS) % TAKERS : ITEMS;
  float bias[RECURRENT][2], x_bias[GATES][2], vectors[MOST(VECTORS)][2], state[OWN][STATES][2];

  const int width = gridDim.y * UNITS;
  const long long state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  // the thread's first item, and how many sequences further on the others are
  const int place = first_place + lane % 4 * 2 + position / 2 * 8 + position % 2;
  const auto beyond = [](int j) { return TAKERS == 1 ? j / 2 * 8 + j % 2 : j * TAKERS / 2 * 8; };
  const auto takes = [&](int sub) {  // whether the warp has items of a sub-tile
    if (SUBS == 1 || !computes) return position < ITEMS;
    return TAKERS <= 2 * PART || (position + sub * 2 * PART / TAKERS * TAKERS) / (2 * PART) == sub;
  };
  const auto is_line = [&](int j) {
    return place + beyond(j) < last_place && (OWN * TAKERS == ITEMS || position + j * TAKERS < ITEMS);
  };
  const auto is_there = [&](int j) { return has_first && is_line(j); };
  const auto sub_of = [&](int j) {  // the item's sub-tile
    return TAKERS <= 2 * PART ? j * TAKERS / (2 * PART) : (position + j * TAKERS) / (2 * PART);
  };
  int sequence[OWN], row;
  const auto further = [&](int j) { return (long long)(ORDER ? sequence[j] - row : beyond(j)); };

  // The rows of a step begin at `rows`; `next_rows` are those of the step that is computed after it.
  long long rows = rows_of(a, first_step), next_rows = rows_of(a, time > 1 ? reverse ? time - 2 : 1 : first_step);
  long long row_step = PACKED ? next_rows - rows : reverse ? -(long long)batch : batch;
  const long long begin = rows;
  int ends[OWN];  // steps of each item's sequence
  Read read[OWN], coming[OWN];  // for this step, and where it is EARLY for the next
  float held[OWN][2], noise[OWN][2], zones[OWN][STATES][2];
  float2 inputs[OWN][MOST(INPUTS)];
  const auto within = [&](int j, int step) { return is_there(j) && (!LENGTHS || step < ends[j]); };
  const auto counts = [&](int j, int step, long long at) {
    return loaded<MASK>(a.o.mask, at + sequence[j], within(j, step), 1);
  };
  // before a step, as it is computed, which there is if it is `wanted`
  const auto is_cut = [&](int j, int step, long long at, long long after, bool wanted) {
    const bool may = wanted && is_there(j) && (reverse ? step + 1 < (LENGTHS ? ends[j] : time) : within(j, step));
    return loaded<RESET>(a.o.reset, (reverse ? after : at) + sequence[j], may, 0);
  };
  const auto load_options = [&](int j, int step, long long at) {  // of a step: zoneout and extra inputs
    const bool first = within(j, step), second = first && has_second;
    const long long from = (at + sequence[j]) * UNITS + unit;
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      if (zoneout(s) == BY_MASK) {
        const float2 value = load_wide_pair(a.o.zoneout[direction][s] + from, first, second);
        zones[j][s][0] = value.x, zones[j][s][1] = value.y;
      }
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) inputs[j][i] = load_wide_pair(a.o.inputs[i] + from, first, second);
  };
  const auto load_noise = [&](int j, int step, long long at) {  // of what enters a step
    const bool first = NOISE == HELD ? is_there(j) : within(j, step), second = first && has_second;
    const float2 value = load_wide_pair(a.o.noise[direction] + (at + sequence[j]) * UNITS + unit, first, second);
    noise[j][0] = value.x, noise[j][1] = value.y;
  };
  const auto reset_state = [&](int j, int s, int u) {
    const bool there = RESET_TO && is_there(j) && (u == 0 || has_second);
    return there ? wide(a.o.reset_to[s][((long long)direction * batch + sequence[j]) * UNITS + unit + u]) : 0.f;
  };

  Gate *gates_at, *gates_next, *apart_at;  // of a step, and x of the one after it, but where products are exact
  Element *y_at, *before_at;  // with BEFORE it and `states_at` are those of the step after
  float* states_at;
  const unsigned short* drawn_at;  // what is drawn for each sequence and step, PACKED too; from where it is loaded next
  const int draw_step = reverse ? -batch : batch;
  // Where an item's values lie, `more` rows after those of the step.  Of several sequences in another order: from
  // the rows of the step, which takes fewer registers than an address that goes from step to step.
  constexpr bool BY_ROWS = ORDER && OWN > 1;
  const auto row_of = [&](int j, long long more) { return (long long)((Row)(rows + more) + (Row)sequence[j]); };
  const auto gates_of = [&](int j, long long more) {
    return BY_ROWS ? a.gates[direction] + row_of(j, more) * (GATES * UNITS) + unit
                   : gates_at + (more + further(j)) * GATES * UNITS;
  };
  const auto apart_of = [&](int j) {
    return BY_ROWS ? a.apart[direction] + row_of(j, 0) * (APART * UNITS) + unit
                   : apart_at + further(j) * APART * UNITS;
  };
  const auto y_of = [&](int j) {
    return BY_ROWS ? a.y + (long long)(Row)(row_of(j, 0) * gridDim.y + direction) * UNITS + unit
                   : y_at + further(j) * width;
  };
  const auto before_of = [&](int j, long long more) {
    return BY_ROWS ? a.o.before[direction] + row_of(j, more) * UNITS + unit
                   : before_at + (more + further(j)) * UNITS;
  };
  const auto states_of = [&](int j, int s, long long more) {
    return (BY_ROWS ? a.states[direction] + row_of(j, more) * UNITS + unit
                    : states_at + (more + further(j)) * UNITS) + (s - 1) * state_stride;
  };
  // what is drawn for an item, so many rows further on
  const auto drawn_of = [&](int j, long long more, bool wanted) {
    unsigned bits = 0;
    if (is_there(j) && wanted) bits = drawn_at[(more + further(j)) * DRAWN_PAIRS];
    return bits;
  };
  const auto go_next = [&] {  // addresses of the step after
    gates_next += row_step * GATES * UNITS;
    if constexpr (BEFORE) before_at += row_step * UNITS, states_at += row_step * UNITS;
  };
  const auto begin_items = [&] {  // what a thread has of its items before the first step, and of their units
#pragma unroll
    for (int j = 0; j < OWN; ++j) sequence[j] = is_line(j) ? (int)sequence_at(a, place + beyond(j)) : place + beyond(j);
    row = sequence[0];
    gates_at = gates_next = a.gates[direction] + (begin + row) * GATES * UNITS + unit;
    apart_at = a.apart[direction] + (begin + row) * APART * UNITS + unit;
    y_at = a.y + (begin + row) * width + direction * UNITS + unit;
    before_at = BEFORE ? a.o.before[direction] + (begin + row) * UNITS + unit : nullptr;
    states_at = a.states[direction] + (begin + row) * UNITS + unit;
    drawn_at = DRAWS ? a.o.drawn[direction] + ((long long)first_step * batch + row) * DRAWN_PAIRS + unit / 2 : nullptr;
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g) {  // it enters the sum of the first split
      const Element* const at = a.bias[direction] + g * UNITS + unit;
      const bool mine = split == 0 || LATE_BIAS;
      bias[g][0] = mine && a.bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
      bias[g][1] = mine && a.bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
    }
#pragma unroll
    for (int g = 0; g < GATES; ++g) {  // x's own goes with r's where the cell uses nothing but x + r
      const Element* const at = a.x_bias[direction] + g * UNITS + unit;
      x_bias[g][0] = a.x_bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
      x_bias[g][1] = a.x_bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
      if (sum_of(g) >= 0 && (split == 0 || LATE_BIAS)) {
        bias[sum_of(g) >= 0 ? sum_of(g) : 0][0] += x_bias[g][0];
        bias[sum_of(g) >= 0 ? sum_of(g) : 0][1] += x_bias[g][1];
      }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      vectors[v][0] = has_first ? wide(a.vectors[direction][v][unit]) : 0.f;
      vectors[v][1] = has_second ? wide(a.vectors[direction][v][unit + 1]) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      ends[j] = LENGTHS && is_line(j) ? min(time, (int)a.o.lengths[sequence[j]]) : time;
      const bool first = is_there(j), second = first && has_second;
      const int its_first = PARTED ? first_step_of(sub_of(j)) : first_step;
      const long long its_rows = PARTED ? rows_of(a, its_first) : rows, shift = its_rows - rows;
      const long long start = ((long long)direction * batch + row + further(j)) * UNITS + unit;
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        const float2 value = initial_pair(a, s, start, first, second);
        state[j][s][0] = value.x;
        state[j][s][1] = value.y;
      }
      Read& to = (EARLY ? coming : read)[j];
      const bool there = within(j, its_first), also = there && has_second;
#pragma unroll
      for (int g = 0; g < GATES; ++g) to.x[g] = load_gates(gates_of(j, shift) + g * UNITS, there, also);
      if constexpr (OPTIONS) {
        const int next = PARTED && reverse ? its_first - 1 : reverse ? time - 2 : 1;
        const long long its_next = PARTED ? rows_of(a, max(0, next)) : next_rows;
        held[j][0] = held[j][1] = 0.f;
        to.valid = counts(j, its_first, its_rows);
        to.cut = is_cut(j, next, its_next, its_rows, next >= 0 && next < time);
        if (is_cut(j, its_first, its_rows, its_rows, true))  // forward: backwards nothing comes before the last step
#pragma unroll
          for (int s = 0; s < STATES; ++s) state[j][s][0] = reset_state(j, s, 0), state[j][s][1] = reset_state(j, s, 1);
        load_options(j, its_first, its_rows);
        if constexpr (NOISE == HELD) load_noise(j, its_first, 0);
        if constexpr (NOISE == GIVEN) load_noise(j, next, its_next);
        const long long its_draws = (long long)(its_first - first_step) * batch;
        if constexpr (ZONES_DRAWN) to.drawn = drawn_of(j, its_draws, true);
        if constexpr (NOISE == DRAWN) to.enters = drawn_of(j, its_draws + draw_step, next >= 0 && next < time);
        if constexpr (BEFORE && SAVED) {
          const bool stored = PACKED ? there : first;
          float2 value = {state[j][0][0], state[j][0][1]};
          if constexpr (ENTERED) value = first_entered(a, sequence[j], unit, direction, its_first, there, also);
          store_pair(before_of(j, shift), value.x, value.y, stored, stored && has_second);
#pragma unroll
          for (int s = 1; s < STATES; ++s)
            store_wide_pair(states_of(j, s, shift), state[j][s][0], state[j][s][1], stored,
                            stored && has_second);
        }
      }
    }
    go_next();
    if constexpr (DRAWS) drawn_at += (long long)draw_step * (NOISE == DRAWN ? 2 : 1) * DRAWN_PAIRS;
  };
  if constexpr (POINTWISE == 0) begin_items();

  const auto has_lines = [&](int sub) { return SUBS == 1 || sub * 8 * PART < share; };
  const auto late = [&](int sub) { return PARTED && reverse ? time - lasting[sub] : 0; };  // steps before its first
  const auto lasts = [&](int t, int sub) {
    return PARTED ? reverse ? t >= time - lasting[sub] : t < lasting[sub] : has_lines(sub);
  };
  // of a sub-tile's states for an even or odd step; where each group's have their own, those of the last group are first
  const auto barrier_of = [](int sub, int odd, int arrival) { return 8 * ((2 * sub + odd) * ARRIVALS + arrival); };
  const int arrival = ARRIVALS > 1 ? GROUPS - 1 - group : 0;  // the group's own
#if CLUSTER > 1
  const unsigned remote = shared_address(states) - shared_address(memory);
  constexpr int PEERS = (CLUSTER + SENDERS - 1) / SENDERS;
  const int sender = lane / 4 % SENDERS;
  constexpr int ADDRESSES = BY_WORDS ? 0 : PEERS;  // in other blocks, which are kept
  unsigned peer[MOST(ADDRESSES)];
  const auto begin_sending = [&] {
#pragma unroll
    for (int p = 0; p < ADDRESSES; ++p) peer[p] = at_rank(shared_address(memory), (sender + p * SENDERS) % CLUSTER);
  };
  if constexpr (POINTWISE == 0) begin_sending();
  const unsigned barrier_offset = barriers - shared_address(memory);
  constexpr int EXPECTING = TRADED ? MULTIPLYING : 0;  // the warp that expects states
  // Which sequences have not ended takes a vote: behind the product, where warps multiply alone and wait for nothing else.
  // 200 steps took 135 us in place of 144 with 256 units at batch 32, 116 and 124 with 128 (bfloat16, H200).
  constexpr bool LATER = ORDER && POINTWISE > 0 && !TRADED;
  int line_ends[ORDER ? (ROWS + 31) / 32 : 1];         // of lines lane, lane + 32, ...: steps of their sequences
  if constexpr (ORDER)
    for (int i = 0; i < (ROWS + 31) / 32; ++i) {
      const int line = first_place + lane + 32 * i;
      line_ends[i] = warp == EXPECTING && line < last_place ? min(time, (int)a.o.lengths[sequence_at(a, line)]) : 0;
    }
  // bytes that come for a step of a sub-tile: of the lines that are there, and scales of all
  const auto arriving = [&](int t, int sub) {
    unsigned lines = min(8 * PART, share - sub * 8 * PART);
    if constexpr (ORDER) {  // whose sequences have not ended; all of the warp come here
      const int step = reverse ? lasting_of(sub) - 1 - t : t;
      lines = 0;
#pragma unroll
      for (int i = 0; i < (ROWS + 31) / 32; ++i)
        lines += __popc(__ballot_sync(0xffffffffu, (lane + 32 * i) / (8 * PART) == sub && line_ends[i] > step));
    }
    return CLUSTER * (lines * SLICE * OPERAND_BYTES * PLANES + BESIDE * GROUPS * 2 * PART * 16) / ARRIVALS;
  };
  // Of a step that none computes nothing comes: a phase of no bytes would be over at once, and warps that still wait for
  // the one before it would wait for ever.
  const auto expect_some = [&](int sub, int odd, unsigned bytes) {
    if (ORDER ? lane == 0 && bytes > 0 : true)
#pragma unroll
      for (int a = 0; a < ARRIVALS; ++a) expect(barriers + barrier_of(sub, odd, a), bytes);
  };
  const auto expect_more = [&](int t, int sub) {  // of the step after the next, once those of this one have come
    if (ORDER ? warp != EXPECTING : threadIdx.x != 32 * EXPECTING) return;
    expect_some(sub, t % 2, arriving(t + 2, sub));
  };
  if (ORDER ? warp == EXPECTING : threadIdx.x == 0) {
    if (!ORDER || lane == 0) {
      for (int i = 0; i < 2 * SUBS * ARRIVALS; ++i) start_barrier(barriers + 8 * i, 1 + READERS / ARRIVALS);
      barriers_started();
    }
    for (int i = 0; i < 2 * SUBS; ++i) {
      if (has_lines(i / 2)) expect_some(i / 2, i % 2, arriving(i % 2 ? 1 : 2, i / 2));
    }
  }
  cluster_barrier();
#else
  __syncthreads();
#endif

  // 16 threads have the addresses of a depth, and of the next of the same group where its states come apart from others
  const int its_word = ARRIVALS > 1 ? lane / 16 * ARRIVALS * 8 + lane / 8 % 2 * 4 : lane / 8 * 4;
  unsigned columns = shared_address(states + word_of(lane % 8, split * DEPTHS * 8 + its_word));
  if (!EXACT) ready(columns);  // else the compiler computes it anew once the states have come
  float sums[RECURRENT][PART][4];
  const auto multiply_states = [&](int t, int sub) {  // into the sums of a sub-tile
    const int now = t % 2;
    const auto await_states = [&](int a) {
#if CLUSTER > 1
      if (t > 0) {
        wait(barriers + barrier_of(sub, now, a), (t - 1) / 2 % 2);
        if (a + 1 == ARRIVALS && !TRADED && !LATER) expect_more(t, sub);
      }
#endif
    };
    if constexpr (ARRIVALS == 1) await_states(0);  // of several each before its product
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
      for (int n = 0; n < PART; ++n) {
        sums[g][n][0] = sums[g][n][1] = LATE_BIAS || HALVES ? 0.f : bias[g][0];
        sums[g][n][2] = sums[g][n][3] = LATE_BIAS || HALVES ? 0.f : bias[g][1];
      }
#if BY_STEP && !EXACT
    bool unusual = false;  // whether a word says that it has another level than the usual one
    float unscales[(DEPTHS + 3) / 4][PART] = {}, reach[PART];  // of the depths d + lane % 4, and the largest of a sequence
#endif
    const unsigned from = columns + (now * STATE_WORDS + sub * PART * 64) * 4;
    const unsigned masks_from = columns + shared_address(masks) - shared_address(states);
    constexpr int PAIRS = (DEPTHS + 1) / 2;  // of depths: d and the next; with ARRIVALS the next of the same group
    const auto multiply_depths = [&](bool again) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int turn = pair * ARRIVALS / PAIRS, d = ARRIVALS - 1 - turn + (pair - turn * PAIRS / ARRIVALS) * 2 * ARRIVALS;
        if (ARRIVALS > 1 && d < ARRIVALS && !again) await_states(turn);
        uint4 b[PART], low[PART];  // and the second plane
#pragma unroll
        for (int n = 0; n < PART; ++n) {
          const unsigned at = from + (d * TILES + n) * 256;
          b[n] = d + ARRIVALS < DEPTHS ? load_columns(at) : load_half_columns(at);
          if constexpr (PLANES > 1) {
            const unsigned at_low = at + PLANE_WORDS * 4;
            low[n] = d + ARRIVALS < DEPTHS ? load_columns(at_low) : load_half_columns(at_low);
          }
#if BY_STEP && !EXACT
          if (again) {
            const auto unscale_at = [&](int depth) {
              return __shfl_sync(0xffffffffu, unscales[depth / 4][n], lane / 4 * 4 + depth % 4);
            };
            const Brought first(unscale_at(d), reach[n]), second(unscale_at(d + ARRIVALS < DEPTHS ? d + ARRIVALS : d), reach[n]);
            b[n] = {first(b[n].x), first(b[n].y), second(b[n].z), second(b[n].w)};
          } else {
            unusual = unusual || is_unusual(b[n].x) || is_unusual(b[n].z);
          }
#endif
        }
        if constexpr (GATEWISE) {
          unsigned bits[PART][2];
          if constexpr (NOISE == BY_GATE)
#pragma unroll
            for (int n = 0; n < PART; ++n) {
              const unsigned* const at = masks + ((split * DEPTHS + d) * TILES + sub * PART + n) * 32 + lane;
              bits[n][0] = at[0], bits[n][1] = d + ARRIVALS < DEPTHS ? at[ARRIVALS * TILES * 32] : 0u;
            }
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g) {
            uint4 own[PART];
#pragma unroll
            for (int n = 0; n < PART; ++n) {
              if constexpr (NOISE == BY_GATE) {
                own[n] = {passed(b[n].x, bits[n][0], g * 2), passed(b[n].y, bits[n][0], g * 2 + 1),
                          passed(b[n].z, bits[n][1], g * 2), passed(b[n].w, bits[n][1], g * 2 + 1)};
              } else {
                const unsigned at = masks_from + (g * STATE_WORDS + (d * TILES + sub * PART + n) * 64) * 4;
                const uint4 mask = d + ARRIVALS < DEPTHS ? load_columns(at) : load_half_columns(at);
                own[n] = {times(b[n].x, mask.x), times(b[n].y, mask.y), times(b[n].z, mask.z), times(b[n].w, mask.w)};
              }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (d + half * ARRIVALS < DEPTHS) {
                const int at = d + half * ARRIVALS, far = ((warp * STREAMED + at - RESIDENT) * RECURRENT + g) * 32 + lane;
                const Planes weight = at < RESIDENT ? resident[at < RESIDENT ? at : 0][g] : weights_at(streamed + far);
#pragma unroll
                for (int n = 0; n < PART; ++n)
                  multiply(sums[g][n], left_of(weight),
                           right_of(half ? own[n].z : own[n].x, half ? own[n].w : own[n].y));
              }
          }
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (d + half * ARRIVALS < DEPTHS) {
            Right right[PART];
#pragma unroll
            for (int n = 0; n < PART; ++n) {
              right[n] = right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#if HALVES && EXACT
              right[n].low = half ? uint2{low[n].z, low[n].w} : uint2{low[n].x, low[n].y};
              const float* const at =
                  scales + now * SCALES + ((split * DEPTHS + d + half * ARRIVALS) * ITEMS + (sub * PART + n) * 2) * 4 + lane % 4;
              right[n].unscale = {at[0], at[4]};
#endif
            }
#pragma unroll
            for (int g = 0; g < RECURRENT; ++g) {
              const int at = d + half * ARRIVALS;
              const int far = ((warp * STREAMED + at - RESIDENT) * RECURRENT + g) * PLANES * 32 + lane;
              const Left weight =
                  left_of(at < RESIDENT ? resident[at < RESIDENT ? at : 0][g] : weights_at(streamed + far));
#pragma unroll
              for (int n = 0; n < PART; ++n)
                multiply(sums[g][n], weight, right[n]);
            }
          }
      }
    };
    multiply_depths(false);
#if BY_STEP && !EXACT
    float of_sums[PART][2];
#pragma unroll
    for (int n = 0; n < PART; ++n) of_sums[n][0] = of_sums[n][1] = USUAL_UNSCALE;
    if (__any_sync(0xffffffffu, unusual)) {
      // All again, where states are brought to one scale: that of the sequence's largest that the warp multiplies.
#pragma unroll
      for (int n = 0; n < PART; ++n) {
        reach[n] = 0.f;
#pragma unroll
        for (int d = 0; d < DEPTHS; d += 4) {
          if (d + 4 > DEPTHS && d + lane % 4 >= DEPTHS) continue;
          const unsigned* const at = states + now * STATE_WORDS;
          const int row = (sub * PART + n) * 8 + lane / 4, word = (split * DEPTHS + d + lane % 4) * 8;
          const uint4 first = *(const uint4*)(at + word_of(row, word)), second = *(const uint4*)(at + word_of(row, word + 4));
          unscales[d / 4][n] = unscale_of_level(level_of_words(first));
          if (!is_zero(first) || !is_zero(second)) reach[n] = larger(reach[n], reach_of(unscales[d / 4][n]));
        }
#pragma unroll
        for (int apart = 1; apart < 4; apart *= 2) reach[n] = larger(reach[n], __shfl_xor_sync(0xffffffffu, reach[n], apart));
#pragma unroll
        for (int e = 0; e < 2; ++e) of_sums[n][e] = UNRAISED * __shfl_sync(0xffffffffu, reach[n], (lane % 4 * 2 + e) * 4);
#pragma unroll
        for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[g][n][e] = 0.f;
      }
      multiply_depths(true);
    }
#endif

#if HALVES
    const bool starts = SCALES_STAY || (!BY_STEP && t == 0 && has_initial(a));
#pragma unroll
    for (int n = 0; n < PART; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float its = BY_STEP ? 1.f : 1.f / STATE_SCALE;
        if (starts) its = scales[(sub * PART + n) * 8 + lane % 4 * 2 + e % 2];
#if BY_STEP && !EXACT
        its = of_sums[n][e % 2];
#endif
#pragma unroll
        for (int g = 0; g < RECURRENT; ++g) {  // weights' scale first, so that states of any size overflow nothing
          const float sum = sums[g][n][e] * half_of(weight_scales[(warp * RECURRENT + g) * 8 + lane / 4], e / 2);
          sums[g][n][e] = sum * its + (LATE_BIAS ? 0.f : bias[g][e / 2]);
        }
      }
#endif
    if constexpr (SPLITS > 1) {
#pragma unroll
      for (int i = 0; i < 2 * PART; ++i) {
        float* const to = partial + ((group * ITEMS + sub * 2 * PART + i) * SPLITS + split) * RECURRENT * 64;
        const int n = i / 2, e = i % 2;
#pragma unroll
        for (int g = 0; g + 1 < RECURRENT; g += 2)
          *(float4*)(to + g * 64 + lane * 4) = {sums[g][n][e], sums[g][n][e + 2], sums[g + 1][n][e],
                                                sums[g + 1][n][e + 2]};
        if constexpr (RECURRENT % 2)
          *(float2*)(to + (RECURRENT - 1) * 64 + lane * 2) = {sums[RECURRENT - 1][n][e], sums[RECURRENT - 1][n][e + 2]};
      }
      if (takes(sub)) {
        named_barrier(1 + group * SUBS + sub, MEETING);
      } else {
        arrive_at_barrier(1 + group * SUBS + sub, MEETING);
      }
    }
  };
  // the items that a warp has of a sub-tile are some of those from `first_item` to `last_item`
  const auto first_item = [](int sub) { return sub * 2 * PART / TAKERS; };
  const auto last_item = [](int sub) { return SUBS == 1 ? OWN : ((sub + 1) * 2 * PART - 1) / TAKERS + 1; };
  // what an item reads for the step after its step t of `time`, where there is such a one
  const auto read_on = [&](Read& to, int j, int t, int time) {
    const int step_now = reverse ? time - 1 - t : t, next = reverse ? step_now - 1 : step_now + 1;
    const int later = reverse ? next - 1 : next + 1;  // the step after the next
    const bool there = within(j, next), also = there && has_second, goes_on = t + 2 < time;
    if constexpr (ZONES_DRAWN) to.drawn = NOISE == DRAWN ? to.enters : drawn_of(j, 0, true);
    if constexpr (NOISE == DRAWN) to.enters = drawn_of(j, 0, goes_on);
    const Gate* const from = BY_ROWS || EXACT ? gates_of(j, row_step) : gates_next + further(j) * GATES * UNITS;
#pragma unroll
    for (int g = 0; g < GATES; ++g) to.x[g] = load_gates(from + g * UNITS, there, also);
    if constexpr (MASK || (EARLY && LENGTHS)) to.valid = counts(j, next, next_rows);
    if constexpr (RESET) {
      const long long later_rows = !PACKED ? next_rows + row_step : goes_on ? rows_of(a, later) : next_rows;
      to.cut = is_cut(j, later, later_rows, next_rows, goes_on);
    }
  };
  const auto read_early = [&](int t, int sub) {  // before the wait of a sub-tile's step
    if (EARLY && takes(sub)) {
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) read[j] = coming[j];
      if (t + 1 < lasting[sub])
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j) read_on(coming[j], j, t, lasting[sub]);
    }
  };
  // the thread's of a sub-tile, at its own step t of `time`; `takes` is the same for the whole warp
  const auto compute_items = [&](int t, int sub) {
    const int time = lasting[sub];
    const int now = t % 2, step_now = reverse ? time - 1 - t : t, next = reverse ? step_now - 1 : step_now + 1;
    if (takes(sub)) {
      float factor[OWN][2];  // of what enters the next product, before there is anything to multiply
      if constexpr (NOISE == DRAWN)
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j)
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            factor[j][u] = read[j].enters >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
            ready(factor[j][u]);
          }
      if constexpr (POINTWISE > 0) named_barrier(1 + group * SUBS + sub, MEETING);
#if CLUSTER > 1
      if (TRADED && t > 0) expect_more(t, sub);  // the warps that multiply have no register for it
#endif
      float r[OWN][2][RECURRENT], given[OWN][2][GATES], after[OWN][2][STATES];
      float output[OWN][2], entering[OWN][2];
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) {
        const int item = min(position + j * TAKERS, ITEMS - 1);
        if constexpr (SPLITS > 1) {
#pragma unroll
          for (int s = 0; s < SPLITS; ++s) {
            const float* const part = partial + ((group * ITEMS + item) * SPLITS + s) * RECURRENT * 64;
#pragma unroll
            for (int g = 0; g < RECURRENT; ++g) {
              float2 value;
              if (g + 1 == RECURRENT && RECURRENT % 2) {
                value = *(const float2*)(part + g * 64 + lane * 2);
              } else {
                const float4 two = *(const float4*)(part + g / 2 * 128 + lane * 4);
                value = g % 2 ? float2{two.z, two.w} : float2{two.x, two.y};
              }
              r[j][0][g] = s == 0 ? value.x : r[j][0][g] + value.x;
              r[j][1][g] = s == 0 ? value.y : r[j][1][g] + value.y;
            }
          }
        } else {
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g) {
            r[j][0][g] = sums[g][j / 2 - sub * PART][j % 2];
            r[j][1][g] = sums[g][j / 2 - sub * PART][j % 2 + 2];
          }
        }
        if constexpr (LATE_BIAS)
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
            for (int u = 0; u < 2; ++u)
              r[j][u][g] = (GATEWISE ? a.o.noise_scale : 1.f) * r[j][u][g] + bias[g][u];
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
          const float2 value = wide_gates(read[j].x[g]);
          given[j][0][g] = sum_of(g) >= 0 ? value.x : value.x + x_bias[g][0];
          given[j][1][g] = sum_of(g) >= 0 ? value.y : value.y + x_bias[g][1];
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          float v[MOST(VECTORS)], e[MOST(INPUTS)], before[STATES];
#pragma unroll
          for (int i = 0; i < VECTORS; ++i) v[i] = vectors[i][u];
#pragma unroll
          for (int i = 0; i < INPUTS; ++i) e[i] = half_of(inputs[j][i], u);
#pragma unroll
          for (int s = 0; s < STATES; ++s) before[s] = state[j][s][u];
          step(given[j][u], r[j][u], before, v, e, after[j][u]);
#pragma unroll
          for (int s = 0; s < STATES; ++s) {
            if constexpr (OPTIONS) {
              const float share = zoneout(s) == BY_MASK ? zones[j][s][u] : a.o.zoneout_share[s];
              after[j][u][s] = kept(zoneout(s), share, read[j].drawn >> (u * 4 + s) & 1, before[s], after[j][u][s]);
              if (MARKED && !read[j].valid) after[j][u][s] = before[s];
            }
            state[j][s][u] = after[j][u][s];
            if (RESET && read[j].cut) state[j][s][u] = reset_state(j, s, u);
          }
          output[j][u] = after[j][u][0];
          if constexpr (MASK) output[j][u] = held[j][u] = read[j].valid ? after[j][u][0] : held[j][u];
          if (LENGTHS && step_now >= ends[j]) output[j][u] = 0.f;
          entering[j][u] = state[j][0][u];
          if constexpr (NOISE == HELD || NOISE == GIVEN) entering[j][u] *= noise[j][u];
          if constexpr (NOISE == DRAWN) entering[j][u] *= factor[j][u];
        }
      }

#if CLUSTER > 1
      if (TELLS && t + 1 < time) {
        __syncwarp();
        if (lane == 0) arrive_here(barriers + barrier_of(sub, 1 - now, arrival));
      }
#endif
      if (t + 1 < time) {  // send; what is past the units is zero, whatever the cell makes of it
        Sent data[OWN];
        float unscales[OWN];
        unsigned level[OWN];  // of states that have one, what their word has of it
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j) {
          float first = has_first ? entering[j][0] : 0.f, second = has_second ? entering[j][1] : 0.f;
          level[j] = 0;
#if HALVES
          unscales[j] = 1.f / STATE_SCALE;
          if constexpr (SCALES_STAY) {
            const int item = min(position + j * TAKERS, ITEMS - 1);
            unscales[j] = scales[item / 2 * 8 + lane % 4 * 2 + item % 2];
          }
          if constexpr (BY_STEP) {
            float most = largest(fabsf(first), fabsf(second));
            if (WITHIN) unscales[j] = USUAL_UNSCALE;
            if (BESIDE || !__all_sync(0xffffffffu, is_usual(most))) {
#pragma unroll
              for (int apart = 4; apart < 32; apart *= 2) most = largest(most, __shfl_xor_sync(0xffffffffu, most, apart));
              unscales[j] = WITHIN ? unscale_of_level(level_of(most)) : unscale_of(most);
              if (WITHIN) level[j] = part_of_level(level_of(most), lane / 4);
            }
          }
          first *= scale_of(unscales[j]), second *= scale_of(unscales[j]);
#endif
          data[j] = to_send(first, second, lane, level[j]);
        }
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j) {
          const int item = position + j * TAKERS;
          if (OWN * TAKERS > ITEMS && item >= ITEMS) break;
          const int chunk = group * 16 + lane / (4 * SENDERS) * SENDERS * 2;  // first unit of what is sent
          const int word = (rank * SLICE + chunk) / WORD_ELEMENTS, line = item / 2 * 8 + lane % 4 * 2 + item % 2;
          const unsigned offset = ((1 - now) * STATE_WORDS + word_of(line, word)) * 4;
#if BY_STEP && EXACT
          const uint4 its = gathered_words<1>(__float_as_uint(unscales[j]), lane);
          float* const to = scales + (1 - now) * SCALES + ((rank * GROUPS + group) * ITEMS + item) * 4;
#if CLUSTER > 1
          if (lane < CLUSTER)
            send(at_rank(shared_address(to), lane), at_rank(barriers + barrier_of(sub, 1 - now, arrival), lane), its);
#else
          if (lane == 0) *(uint4*)to = its;
#endif
#endif
#if CLUSTER > 1
          const bool sent = ORDER ? is_line(j) && next < ends[j] : line < share;
#pragma unroll
          for (int p = 0; p < PEERS; ++p)
            if (sent && (CLUSTER % SENDERS == 0 || sender + p * SENDERS < CLUSTER)) {
              const unsigned barrier = barrier_of(sub, 1 - now, arrival);
#if BY_WORDS  // addresses in other blocks are not kept over steps: of a thread's registers they would take too many
              send_word(at_rank(shared_address(states), p) + offset, at_rank(barriers + barrier, p), data[j]);
#else
#pragma unroll
              for (int plane = 0; plane < PLANES; ++plane)
                send(peer[p] + remote + offset + plane * PLANE_WORDS * 4, peer[p] + barrier_offset + barrier, data[j].plane[plane]);
#endif
            }
#else
          if (lane / 4 % SENDERS == 0)
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
              *(uint4*)((char*)states + offset + plane * PLANE_WORDS * 4) = data[j].plane[plane];
#endif
        }
      }
      // What is sent others wait for: else the compiler asks for the next step's input before it is sent.
      if constexpr (POINTWISE == 0) __syncwarp();

      // not behind all that is stored: what reads x waits for every load, and so does the next sub-tile as it begins
      if (!EARLY && t + 1 < time)
#pragma unroll
        for (int j = first_item(sub); j < last_item(sub); ++j) read_on(read[j], j, t, time);
#pragma unroll
      for (int j = first_item(sub); j < last_item(sub); ++j) {
        const bool first = PACKED ? within(j, step_now) : is_there(j), second = first && has_second;
        Gate* const now_at = gates_of(j, 0);
        if (t + AHEAD < time && is_there(j) && !PACKED) {
          const Gate* const far = BY_ROWS ? gates_of(j, AHEAD * row_step) : now_at;
#pragma unroll
          for (int g = 0; g < GATES; ++g) prefetch(far + ((BY_ROWS ? 0 : AHEAD * row_step * GATES) + g) * UNITS);
          if constexpr (DRAWS)  // of the same step: what is loaded next is of the next, or of the one after it
            prefetch(drawn_at + ((AHEAD - (NOISE == DRAWN ? 2 : 1)) * (long long)draw_step + further(j)) * DRAWN_PAIRS);
        }
        store_pair(y_of(j), output[j][0], output[j][1], first, second);
        if constexpr (SEQUENCES) {
          const bool shown = !LENGTHS || step_now < ends[j];
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (a.o.sequences[s] != nullptr)
              store_pair(a.o.sequences[s] + (y_of(j) - a.y), shown ? after[j][0][s] : 0.f,
                         shown ? after[j][1][s] : 0.f, first, second);
        }
        if constexpr (SAVED) {
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            if (sum_of(g) >= 0)
              store_gates(now_at + g * UNITS, given[j][0][g] + r[j][0][sum_of(g)], given[j][1][g] + r[j][1][sum_of(g)],
                          first, second);
            else
              store_gates(now_at + g * UNITS, given[j][0][g], given[j][1][g], first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_gates(apart_of(j) + i * UNITS, r[j][0][apart(i)], r[j][1][apart(i)], first,
                       second);
          if constexpr (BEFORE) {
            if (t + 1 < time) {
              const bool stored = PACKED ? within(j, next) : is_there(j), also = stored && has_second;
              const long long more = BY_ROWS ? row_step : 0;
              // Past the end of a sequence too, where every gradient is zero: to choose zero there took 100 steps with every
              // option at once, 256 units at batch 32 in bfloat16, 77 us and not 71 (one H100).
              const float(&value)[2] = ENTERED ? entering[j] : state[j][0];
              store_pair(before_of(j, more), value[0], value[1], stored, also);
#pragma unroll
              for (int s = 1; s < STATES; ++s)
                store_wide_pair(states_of(j, s, more), state[j][s][0], state[j][s][1], stored, also);
            }
          } else {
#pragma unroll
            for (int s = 1; s < STATES; ++s)
              store_wide_pair(states_of(j, s, 0), after[j][0][s],
                              after[j][1][s], first, second);
          }
        }
        if (t + 1 == time) {
          const long long end = ((long long)direction * batch + row + further(j)) * UNITS + unit;
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            leave_pair(a, s, end, after[j][0][s], after[j][1][s], is_there(j), is_there(j) && has_second);
        }
      }
      if constexpr (OPTIONS) {
        if (t + 1 < time) {  // what the next step reads, and of the one after it what enters
          const int later = reverse ? next - 1 : next + 1;
          const bool goes_on = t + 2 < time;
          const long long later_rows = goes_on ? rows_of(a, later) : next_rows;
#pragma unroll
          for (int j = first_item(sub); j < last_item(sub); ++j) {
            if constexpr (LENGTHS && !MASK && !EARLY) read[j].valid = counts(j, next, next_rows);
            load_options(j, next, next_rows);
            if (NOISE == GIVEN && goes_on) load_noise(j, later, later_rows);
          }
        }
      }
    }
  };
  const auto step_on = [&](int t) {
    const int next = reverse ? time - 2 - t : t + 1;
    gates_at = EXACT ? gates_at + row_step * GATES * UNITS : gates_next;
    y_at += row_step * width;
    apart_at += row_step * APART * UNITS;
    if constexpr (!BEFORE) states_at += row_step * UNITS;
    if constexpr (DRAWS) drawn_at += (long long)draw_step * DRAWN_PAIRS;
    if constexpr (OPTIONS) {
      rows = next_rows;
      if (t + 2 < time) next_rows = rows_of(a, reverse ? next - 1 : next + 1);
      if constexpr (PACKED) row_step = next_rows - rows;
    }
    go_next();
  };
  if constexpr (POINTWISE == 0) {
    for (int t = 0; t < time; ++t) {
#pragma unroll
      for (int sub = 0; sub < SUBS; ++sub) {
        if (!PARTED && !has_lines(sub)) break;  // where none ends, not `continue`, for which the compiler spills
        if (PARTED && !lasts(t, sub)) continue;
        read_early(t - late(sub), sub);
        multiply_states(t - late(sub), sub);
        compute_items(t - late(sub), sub);
      }
      step_on(t);
#if CLUSTER == 1
      __syncthreads();
#endif
    }
  } else if (multiplies) {
#if CLUSTER > 1
    if constexpr (TRADED) take_more_registers<192>();
#endif
    for (int t = 0; t < time; ++t) {
#pragma unroll
      for (int sub = 0; sub < SUBS; ++sub)
        if (lasts(t, sub)) {
          multiply_states(t - late(sub), sub);
#if CLUSTER > 1
          if (LATER && t > late(sub)) expect_more(t - late(sub), sub);
#endif
        }
    }
  } else {
#if CLUSTER > 1
    if constexpr (TRADED) take_fewer_registers<120>();
    begin_sending();
#endif
    begin_items();  // here, so that no register holds any of it beside weights
    for (int t = 0; t < time; ++t) {
#pragma unroll
      for (int sub = 0; sub < SUBS; ++sub)
        if (lasts(t, sub)) {
          read_early(t - late(sub), sub);
          compute_items(t - late(sub), sub);
        }
      step_on(t);
    }
  }
  if (LENGTHS && position < ITEMS) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const bool first = is_there(j), second = first && has_second;
      const int computed = PARTED ? lasting_of(sub_of(j)) : time;
      if (computed == 0)
#pragma unroll
        for (int s = 0; s < STATES; ++s)
          store_pair(a.finals[s] + ((long long)direction * batch + sequence[j]) * UNITS + unit, state[j][s][0],
                     state[j][s][1], first, second);
      for (long long t = computed; t < a.time && !PACKED; ++t) {  // past the end of all that are computed together
        const long long at = t * batch + sequence[j], shown = at * width + direction * UNITS + unit;
        store_pair(a.y + shown, 0.f, 0.f, first, second);
        if constexpr (SEQUENCES)
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (a.o.sequences[s] != nullptr) store_pair(a.o.sequences[s] + shown, 0.f, 0.f, first, second);
        if constexpr (SAVED) store_pair(a.o.before[direction] + at * UNITS + unit, 0.f, 0.f, first, second);
      }
    }
  }
#if CLUSTER > 1
  cluster_barrier();  // a block that has ended must not be sent to
#endif
}
