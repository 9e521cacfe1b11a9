// All steps of a recurrent layer, forward, in one launch, for cells whose step has several stages: means over the units,
// and products with the recurrent weights inside the step.
//
// Who holds what is as in forward.cu: a cluster of CLUSTER blocks owns `share` sequences, at most ROWS = 8 x TILES, and all
// weights, block `rank` the units from rank x SLICE on, warp (group, split) 16 units and a part of the products' depth; an
// item is, for a thread: two neighbouring units of one sequence.  A step is
//
//   wait for all of the first state | product | stage 0 | exchange | stage 1 | ... | the last stage | send the new state
//
// and an exchange is of what means are made of (means.cu), of the operands of products, or of both: each is sent to all
// blocks of the cluster and counted by a barrier of its own.  Stages are generated; what a later one reads of an earlier
// one stays in registers.
//
//   registers  weights, sums of one product, and of the thread's items: the states, the means, results of products, what
//              stages keep
//   shared     operands of each product, partial sums, what means are made of, vectors, barriers, more weights
//   global     as in forward.cu; for backward also means, and the operands of products inside the step
//
// The operand of each product is multiplied with a mask: the first state with that of the step that it enters, what enters
// a product inside a step with that of the same step (or, as options.cu says, with none), and by gate each with that of
// the gate, as it is multiplied.
//
// What is exchanged lies in shared memory once where a step has several exchanges, twice where it has one: who sends at
// step t + 1 has waited, in between, for what was sent after everything of step t was read.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int ROWS = 8 * TILES, ITEMS = 2 * TILES, OWN = (ITEMS + SPLITS - 1) / SPLITS;
constexpr int WARPS = GROUPS * SPLITS, THREADS = 32 * WARPS;
constexpr int WORDS = SPLITS * DEPTHS * 8;  // depth of the product, padded
constexpr int STREAMED = DEPTHS - RESIDENT;
typedef Operands<DEPTHS * RECURRENT, STREAMED * RECURRENT> Weights;
constexpr int STATE_WORDS = ROWS * WORDS, PARTIAL_WORDS = SPLITS > 1 ? GROUPS * ITEMS * SPLITS * WIDEST * 64 : 0;
constexpr int COPIES = EXCHANGES > 1 ? 1 : 2;                  // of what is exchanged
constexpr int OPERAND_WORDS = COPIES * ((LEAVES > 0) + ROUNDS) * STATE_WORDS, BARRIERS = 1 + STAGES + ROUNDS;
constexpr int VECTOR_WORDS = VECTORS * SLICE;
constexpr int WEIGHT_WORDS = WARPS * STREAMED * RECURRENT * 128;
// masks by gate: bits of all gates for [depth, tile, lane], or as the states for each gate
constexpr int MASK_WORDS = NOISE == BY_GATE         ? SPLITS * DEPTHS * TILES * 32
                           : NOISE == GIVEN_BY_GATE ? MASKED * STATE_WORDS
                                                    : 0;
// what scales are the inverse of: of each sequence's states, and of weights for [warp, gate, unit]
constexpr int SCALES = HALVES ? ROWS : 0, WEIGHT_SCALES = HALVES ? WARPS * RECURRENT * 16 : 0;
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
static_assert(4 * (WEIGHT_WORDS + OPERAND_WORDS + COPIES * MEAN_WORDS + VECTOR_WORDS + PARTIAL_WORDS + MASK_WORDS + SCALES +
                   WEIGHT_SCALES) +
                      8 * COPIES * BARRIERS == SHARED,
              "tiling and kernel disagree");

// Bytes of one sequence that a barrier waits for: 0 the first state, from 1 on the means of each stage, then the operand
// of each round.
__device__ constexpr int arriving(int exchange) {
  if (exchange == 0 || exchange > STAGES) return CLUSTER * SLICE * OPERAND_BYTES;
  return CLUSTER * GROUPS * packs(exchange - 1) * pack_bytes(exchange - 1);
}

// The next step's x is asked for while what the first stage sends travels: later its loads stand behind what is sent.
constexpr bool EARLY = ELEMENT_BYTES == 2 || (HALVES && !EXACT);

// The stage behind whose exchange a gate is stored for backward: a result of a product as soon as it is known, an x that
// is saved on its own at the last exchange.  All behind the new state, where others wait for it, LSTM with layer norm of r
// and c took 1 to 3 percent longer, but with 128 units (bfloat16, H200).
__device__ constexpr int stored_at(int link) {
  if (!EARLY || REDUCTIONS == 0) return STAGES - 1;
  return link < 0 ? MOST(STAGES - 1) - 1 : link_round(link) == 0 ? 0 : round_stage(link_round(link)) + 1;
}

struct Arguments {
  Gate* gates[2];             // for each direction [time, batch, GATES x UNITS]: x without its bias; where saved, x + r, or x
  const Weight* weights[2];   // [RECURRENT x UNITS, UNITS], with HALVES as halve.cu makes them
  const Element* bias[2];     // [RECURRENT x UNITS] or null
  const Element* x_bias[2];   // [GATES x UNITS] or null
  const Element* vectors[2][MOST(VECTORS)];
  const Element* initial[STATES];  // [directions, batch, UNITS], all or null
  Element* finals[STATES];         // [directions, batch, UNITS]
  Element* y;                      // [time, batch, directions x UNITS]
  Gate* apart[2];                  // [time, batch, APART x UNITS]: results of products that are not in a sum
  float* states[2];                // [STATES - 1, time, batch, UNITS]: every state but the first, after each step
  float* levels[2];                // [time, batch, MEANS]: means of each step
  Element* operands[2];            // [ROUNDS, time, batch, UNITS]: what entered the products inside the step
  long long time, batch;
#if OPTIONS
  Options o;
#else
  static constexpr Options o = {};
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;  // [warp, depth, gate, lane]
  unsigned* const states = memory + WEIGHT_WORDS;
  float* const partial = (float*)(states + OPERAND_WORDS);  // [group, item, split, two results, lane, result, unit]
  float* const slots = partial + PARTIAL_WORDS;
  float* const own_vectors = slots + COPIES * MEAN_WORDS;  // [vector, unit of the block]
  unsigned* const masks = (unsigned*)(own_vectors + VECTOR_WORDS);
  float* const scales = (float*)(masks + MASK_WORDS);
  float2* const weight_scales = (float2*)(scales + SCALES);
  const unsigned barriers = shared_address(scales + SCALES + WEIGHT_SCALES);

  const int warp = own_warp(), lane = threadIdx.x % 32, group = warp / SPLITS, split = warp % SPLITS;
  const int direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int unit = rank * SLICE + group * 16 + lane / 4 * 2;  // and unit + 1
  const bool has_first = unit < UNITS, has_second = unit + 1 < UNITS;
  const int batch = (int)a.batch, clusters = gridDim.x / CLUSTER, share = (batch + clusters - 1) / clusters;
  const int first_place = blockIdx.x / CLUSTER * share, last_place = min(batch, first_place + share);
  const Weight* const weights = a.weights[direction];

  // rows 0 to 7 of an operand are this group's even units, rows 8 to 15 the odd: a thread has two neighbours
  uint4 resident[MOST(RESIDENT * RECURRENT)];
#if HALVES
  float unscale[(RECURRENT + 1) / 2];  // of the group's 16 units, two gates at a time; asked for before the weights
#pragma unroll
  for (int g = 0; g < RECURRENT; g += 2) {
    const int own = rank * SLICE + group * 16 + lane % 16, gate = g + lane / 16;
    unscale[g / 2] = gate < RECURRENT && own < UNITS ? scales_behind(weights)[gate * UNITS + own] : 0.f;
  }
#endif
  const int first_column = split * DEPTHS * 8 * WORD_ELEMENTS;
  bring_rows<Weights, RECURRENT, DEPTHS, STREAMED * RECURRENT, WARPS, 4 * WEIGHT_WORDS>(
      memory, warp, lane, [](int gate, int depth) { return depth * RECURRENT + gate; },
      [&](int gate, int m) {
        const int own = rank * SLICE + group * 16 + m;
        const Weight* const at = weights + ((long long)gate * UNITS + own) * WEIGHT_PITCH;
        return WeightRow{at + first_column, own < UNITS ? UNITS - first_column : 0};
      },
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) { streamed[(warp * STREAMED * RECURRENT + i) * 32 + lane] = words; });

#if HALVES
#pragma unroll
  for (int g = 0; g < RECURRENT; g += 2)
    if (g + lane / 16 < RECURRENT) ((float*)weight_scales)[(warp * RECURRENT + g) * 16 + lane] = unscale[g / 2];
#endif

  // steps of the longest sequence of the cluster
  const int time = LENGTHS ? longest(a, first_place, share) : (int)a.time;
  const bool reverse = direction == 1;
  const int first_step = reverse && time > 0 ? time - 1 : 0;

  for (int i = threadIdx.x; i < OPERAND_WORDS; i += THREADS) states[i] = 0;
  for (int i = threadIdx.x; i < VECTOR_WORDS; i += THREADS) {
    const int own = rank * SLICE + i % SLICE;
    own_vectors[i] = own < UNITS ? wide(a.vectors[direction][i / SLICE][own]) : 0.f;
  }
  __syncthreads();
  if constexpr (NOISE == BY_GATE)
    for (int i = threadIdx.x; i < SPLITS * DEPTHS * TILES * 32; i += THREADS) {
      const int its = i % 32, place = first_place + i / 32 % TILES * 8 + its / 4;
      const long long sequence = place < last_place ? sequence_at(a, place) : 0;
      unsigned bits = 0;
      for (int word = 0; word < 2; ++word)
        for (int e = 0; e < WORD_ELEMENTS; ++e) {
          const int column = (i / 32 / TILES * 8 + its % 4 + word * 4) * WORD_ELEMENTS + e;
          for (int g = 0; g < MASKED && place < last_place && column < UNITS; ++g)
            if (a.o.noise[direction][(g * a.batch + sequence) * UNITS + column] != 0.f) bits |= bit_of(g * 2 + word, e);
        }
      masks[i] = bits;
    }
  if constexpr (NOISE == GIVEN_BY_GATE)
    for (int i = threadIdx.x; i < MASKED * ROWS * WORDS * WORD_ELEMENTS; i += THREADS) {
      const int column = i % (WORDS * WORD_ELEMENTS), line = i / (WORDS * WORD_ELEMENTS);
      const int gate = line / ROWS, place = first_place + line % ROWS;
      const bool there = place < last_place && column < UNITS;
      const long long sequence = there ? sequence_at(a, place) : 0;
      const float value = there ? a.o.noise[direction][(gate * a.batch + sequence) * UNITS + column] : 0.f;
      unsigned* const to = masks + gate * STATE_WORDS + word_of(line % ROWS, column / WORD_ELEMENTS);
      ((Element*)to)[column % WORD_ELEMENTS] = narrow(value);
    }
#if HALVES
  for (int line = warp; line < ROWS; line += WARPS) {
    const bool there = line < share && first_place + line < last_place, given = there && (a.initial[0] != nullptr || RESET_TO);
    const long long sequence = there ? sequence_at(a, first_place + line) : 0;
    const float most = largest_operand(a, first_place + line, there, direction, lane), scale = scale_of(unscale_of(most));
    if (lane == 0) scales[line] = unscale_of(most);
    const auto value = [&](int column) {
      return column < UNITS ? scale * first_operand(a, sequence, column, direction, first_step) : 0.f;
    };
    for (int word = lane; 2 * word < UNITS && given && LEAVES > 0; word += 32)
      states[word_of(line, word)] = half_pair(value(2 * word), value(2 * word + 1));
  }
#else
  if (LEAVES > 0 && (a.initial[0] != nullptr || RESET_TO)) {
    for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
      const int place = first_place + i / UNITS, column = i % UNITS;
      if (place < last_place) {
        const Element value = first_operand(a, sequence_at(a, place), column, direction, first_step);
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
  const int position = (split + SPLITS - group * (ITEMS % SPLITS) % SPLITS) % SPLITS;
  float bias[MOST(LINKS)][2], x_bias[GATES][2], state[OWN][STATES][2];
#pragma unroll
  for (int l = 0; l < LINKS; ++l) {  // it enters the sum of the first split
    const Element* const at = a.bias[direction] + link_gate(l) * UNITS + unit;
    const bool mine = split == 0 || GATEWISE;  // which is added to the sum of all
    bias[l][0] = mine && a.bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
    bias[l][1] = mine && a.bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
  }
#pragma unroll
  for (int g = 0; g < GATES; ++g) {  // x's own goes with r's where the cell uses nothing but x + r
    const Element* const at = a.x_bias[direction] + g * UNITS + unit;
    x_bias[g][0] = a.x_bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
    x_bias[g][1] = a.x_bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
    if (sum_of(g) >= 0 && (split == 0 || GATEWISE)) {
      bias[sum_of(g) >= 0 ? sum_of(g) : 0][0] += x_bias[g][0];
      bias[sum_of(g) >= 0 ? sum_of(g) : 0][1] += x_bias[g][1];
    }
  }

  const int width = gridDim.y * UNITS;
  const long long state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  // the thread's first item, and how many sequences further on the others are
  const int place = first_place + lane % 4 * 2 + position / 2 * 8 + position % 2;
  const auto beyond = [](int j) { return SPLITS == 1 ? j / 2 * 8 + j % 2 : j * SPLITS / 2 * 8; };
  const auto is_there = [&](int j) {
    return has_first && place + beyond(j) < last_place && (OWN * SPLITS == ITEMS || position + j * SPLITS < ITEMS);
  };
  long long sequence[OWN];
#pragma unroll
  for (int j = 0; j < OWN; ++j) sequence[j] = is_there(j) ? sequence_at(a, place + beyond(j)) : place + beyond(j);
  const long long row = sequence[0];
  const auto further = [&](int j) { return ORDER ? sequence[j] - row : beyond(j); };

  // The rows of a step begin at `rows`; `next_rows` are those of the step that is computed after it.
  long long rows = rows_of(a, first_step), next_rows = rows_of(a, time > 1 ? reverse ? time - 2 : 1 : first_step);
  long long row_step = PACKED ? next_rows - rows : reverse ? -(long long)batch : batch;
  const long long begin = rows;
  int ends[OWN];  // steps of each item's sequence
  bool valid[OWN], cut[OWN];  // the step counts; no state comes into the next
  unsigned drawn[OWN], enters[OWN];  // what is drawn for this step (4 bits of zoneout for each unit), and for the next
  float held[OWN][2], zones[OWN][STATES][2];
  float noise_now[OWN][2], noise[OWN][2];  // the mask of this step, and of the next: of the state that enters it
  float2 inputs[OWN][MOST(INPUTS)];
  const auto within = [&](int j, int step) { return is_there(j) && (!LENGTHS || step < ends[j]); };
  const auto counts = [&](int j, int step, long long at) {
    return within(j, step) && (!MASK || a.o.mask[at + sequence[j]]);
  };
  const auto is_cut = [&](int j, int step, long long at, long long after) {  // before a step, as it is computed
    return RESET && is_there(j) && (reverse ? step + 1 < (LENGTHS ? ends[j] : time) && a.o.reset[after + sequence[j]]
                                            : within(j, step) && a.o.reset[at + sequence[j]]);
  };
  // of a step, and of the one after it what enters, where there is such a one
  const auto draw = [&](int j, int step, bool begins, bool goes_on, int later) {
    if constexpr (ZONES_DRAWN || (NOISE == DRAWN && ROUNDS > 0))
      drawn[j] = NOISE == DRAWN && !begins ? enters[j] : drawn_bits(a, unit, step, sequence[j], direction, is_there(j));
    if constexpr (NOISE == DRAWN)
      enters[j] = drawn_bits(a, unit, later, sequence[j], direction, is_there(j) && goes_on);
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
  const auto noise_inside = [&](int j, int u) {  // of what enters a product inside the step
    if constexpr (!NOISE_INSIDE) return 1.f;
    if constexpr (NOISE == HELD) return noise[j][u];
    if constexpr (NOISE == GIVEN) return noise_now[j][u];
    if constexpr (NOISE == DRAWN) return drawn[j] >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
    return 1.f;  // masks by gate are in the product
  };
  const auto reset_state = [&](int j, int s, int u) {
    const bool there = RESET_TO && is_there(j) && (u == 0 || has_second);
    return there ? wide(a.o.reset_to[s][((long long)direction * batch + sequence[j]) * UNITS + unit + u]) : 0.f;
  };

  Gate* gates_at = a.gates[direction] + (begin + row) * GATES * UNITS + unit;
  Element* y_at = a.y + (begin + row) * width + direction * UNITS + unit;
  Gate* apart_at = a.apart[direction] + (begin + row) * APART * UNITS + unit;
  float* states_at = a.states[direction] + (begin + row) * UNITS + unit;
  Element* before_at = BEFORE ? a.o.before[direction] + (begin + row) * UNITS + unit : nullptr;
  GatePair x[OWN][GATES];
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    ends[j] = LENGTHS && is_there(j) ? min(time, (int)a.o.lengths[sequence[j]]) : time;
    const bool first = is_there(j), second = first && has_second;
    const long long start = ((long long)direction * batch + row + further(j)) * UNITS + unit;
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      const bool given = a.initial[s] != nullptr;
      const float2 value = wide_pair(load_pair(a.initial[s] + start, given && first, given && second));
      state[j][s][0] = value.x;
      state[j][s][1] = value.y;
    }
    const bool read = within(j, first_step), also = read && has_second;
#pragma unroll
    for (int g = 0; g < GATES; ++g)
      x[j][g] = load_gates(gates_at + (further(j) * GATES + g) * UNITS, read, also);
    if constexpr (OPTIONS) {
      const int next = reverse ? time - 2 : 1;
      held[j][0] = held[j][1] = 0.f;
      valid[j] = counts(j, first_step, rows);
      cut[j] = next >= 0 && next < time && is_cut(j, next, next_rows, rows);
      if (is_cut(j, first_step, rows, rows))  // forward: backwards nothing comes before the last step
#pragma unroll
        for (int s = 0; s < STATES; ++s) state[j][s][0] = reset_state(j, s, 0), state[j][s][1] = reset_state(j, s, 1);
      load_options(j, first_step, rows);
      if constexpr (NOISE == HELD) load_noise(j, first_step, 0);
      if constexpr (NOISE == GIVEN) {
        load_noise(j, first_step, rows);
        noise_now[j][0] = noise[j][0], noise_now[j][1] = noise[j][1];
        load_noise(j, next, next_rows);
      }
      if constexpr (DRAWS) draw(j, first_step, true, next >= 0 && next < time, next);
      if constexpr (BEFORE && SAVED) {
        const bool stored = PACKED ? read : first;
        store_pair(before_at + further(j) * UNITS, state[j][0][0], state[j][0][1], stored, stored && has_second);
#pragma unroll
        for (int s = 1; s < STATES; ++s)
          store_wide_pair(states_at + (s - 1) * state_stride + further(j) * UNITS, state[j][s][0], state[j][s][1],
                          stored, stored && has_second);
      }
    }
  }

#if CLUSTER > 1
  const unsigned remote = shared_address(states) - shared_address(memory);
  constexpr int PEERS = (CLUSTER + SENDERS - 1) / SENDERS;
  const int sender = lane / 4 % SENDERS;
  constexpr int ADDRESSES = BY_WORDS ? 0 : PEERS;  // in other blocks, which are kept
  unsigned peer[MOST(ADDRESSES)];
#pragma unroll
  for (int p = 0; p < ADDRESSES; ++p) peer[p] = at_rank(shared_address(memory), (sender + p * SENDERS) % CLUSTER);
  const unsigned barrier_offset = barriers - shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < COPIES * BARRIERS; ++i) start_barrier(barriers + 8 * i, 1);
    barriers_started();
    for (int i = 0; i < COPIES * BARRIERS; ++i) expect(barriers + 8 * i, share * arriving(i / COPIES));
  }
  cluster_barrier();
#else
  __syncthreads();
#endif

  const unsigned columns = shared_address(states + word_of(lane % 8, split * DEPTHS * 8 + lane / 8 * 4));
  const bool cells = position < ITEMS;  // the warp computes some: the same for all of it
  const int in_group = units_of(rank * GROUPS + group);
  // where the operand of a round lies, as words of `states`, and the slots of a stage, as bytes
  const auto operand_at = [&](int round, int copy) {
    return ((round == 0 ? 0 : round - 1 + (LEAVES > 0)) * COPIES + copy) * STATE_WORDS;
  };
  const auto slots_at = [&](int stage, int copy) { return (copy * MEAN_WORDS + mean_offset(stage)) * 4; };
  const auto place_of = [&](int item) { return item * 4 + lane % 4; };  // of a sequence in the slots
  const auto row_of = [&](int item) { return lane % 4 * 2 + item / 2 * 8 + item % 2; };
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
      expect(barriers + 8 * (exchange * COPIES + copy), share * arriving(exchange));
    };
    if (stage < 0 && LEAVES > 0 && t > 0) expect_one(0);
    if (stage >= 0 && packs(stage) > 0) expect_one(1 + stage);
#pragma unroll
    for (int round = 1; round <= ROUNDS; ++round)
      if (stage >= 0 && round_stage(round) == stage) expect_one(STAGES + round);
#endif
  };
#if HALVES
  // What scales of an item's operand are the inverse of.  Initial states may be of any size, and what enters a product
  // inside the step is no larger than 1, or than the state before the step.
  const auto unscale_in = [&](int round, int item, bool begins) {
    constexpr float least = 1.f / STATE_SCALE;
    const float own = scales[row_of(item)];
    return SCALES_STAY || (begins && round == 0) ? own : begins ? fmaxf(own, least) : least;
  };
#endif
  // the operand of a round to all blocks; what is past the units is zero, whatever the cell makes of it
  const auto spread = [&](int round, int copy, const float (&entering)[OWN][2], bool begins) {
    Sent data[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      float scale = 1.f;
#if HALVES
      scale = scale_of(unscale_in(round, min(position + j * SPLITS, ITEMS - 1), begins));
#endif
      data[j] = to_send(has_first ? scale * entering[j][0] : 0.f, has_second ? scale * entering[j][1] : 0.f, lane);
    }
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int item = position + j * SPLITS;
      if (OWN * SPLITS > ITEMS && item >= ITEMS) break;
      const int chunk = group * 16 + lane / (4 * SENDERS) * SENDERS * 2;  // first unit of what is sent
      const unsigned offset =
          (operand_at(round, copy) + word_of(row_of(item), (rank * SLICE + chunk) / WORD_ELEMENTS)) * 4;
#if CLUSTER > 1
      const unsigned barrier = 8 * ((round == 0 ? 0 : STAGES + round) * COPIES + copy);
#pragma unroll
      for (int p = 0; p < PEERS; ++p)
        if (row_of(item) < share && (CLUSTER % SENDERS == 0 || sender + p * SENDERS < CLUSTER))
#if BY_WORDS
          send_word(at_rank(shared_address(states), p) + offset, at_rank(barriers + barrier, p), data[j]);
#else
          send(peer[p] + remote + offset, peer[p] + barrier_offset + barrier, data[j].plane[0]);
#endif
#else
      if (lane / 4 % SENDERS == 0) *(uint4*)((char*)states + offset) = data[j].plane[0];
#endif
    }
  };
  float r[OWN][2][MOST(LINKS)];
  // results of all links of a round
  const auto multiply_round = [&](int round, int copy, bool begins) {
    const bool behind_masks = NOISE_INSIDE || round == 0;
    float sums[MOST(WIDEST)][TILES][4];
#pragma unroll
    for (int i = 0; i < WIDEST; ++i)
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const int l = i < width_of(round) ? link_at(round * LINKS + i) : 0;
        sums[i][n][0] = sums[i][n][1] = GATEWISE || HALVES ? 0.f : bias[l][0];
        sums[i][n][2] = sums[i][n][3] = GATEWISE || HALVES ? 0.f : bias[l][1];
      }
    const unsigned from = columns + operand_at(round, copy) * 4;
    const unsigned masks_from = columns + shared_address(masks) - shared_address(states);
#pragma unroll
    for (int d = 0; d < DEPTHS; d += 2) {
      uint4 b[TILES];
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const unsigned at = from + (d * TILES + n) * 256;
        b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
      }
      unsigned bits[TILES][2];
      if constexpr (NOISE == BY_GATE)
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const unsigned* const at = masks + ((split * DEPTHS + d) * TILES + n) * 32 + lane;
          bits[n][0] = at[0], bits[n][1] = d + 1 < DEPTHS ? at[TILES * 32] : 0u;
        }
#pragma unroll
      for (int i = 0; i < WIDEST; ++i) {
        if (i >= width_of(round)) break;
        const int g = link_gate(link_at(round * LINKS + i));
        uint4 own[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          own[n] = b[n];
          if (NOISE == BY_GATE && behind_masks)
            own[n] = {passed(b[n].x, bits[n][0], g * 2), passed(b[n].y, bits[n][0], g * 2 + 1),
                      passed(b[n].z, bits[n][1], g * 2), passed(b[n].w, bits[n][1], g * 2 + 1)};
          if (NOISE == GIVEN_BY_GATE && behind_masks) {
            const unsigned at = masks_from + (g * STATE_WORDS + (d * TILES + n) * 64) * 4;
            const uint4 mask = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
            own[n] = {times(b[n].x, mask.x), times(b[n].y, mask.y), times(b[n].z, mask.z), times(b[n].w, mask.w)};
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (d + half < DEPTHS) {
            const int at = (d + half) * RECURRENT + g, far = (warp * STREAMED * RECURRENT + Weights::before(at)) * 32 + lane;
            const Left weight = left_of(Weights::streamed(at) ? streamed[far] : resident[Weights::resident(at)]);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
              multiply(sums[i][n], weight, right_of(half ? own[n].z : own[n].x, half ? own[n].w : own[n].y));
          }
      }
    }
#if HALVES
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float its = unscale_in(round, 2 * n + e % 2, begins);
#pragma unroll
        for (int i = 0; i < WIDEST; ++i) {  // weights' scale first, so that states of any size overflow nothing
          if (i >= width_of(round)) break;
          const int l = link_at(round * LINKS + i), g = link_gate(l);
          const float sum = sums[i][n][e] * half_of(weight_scales[(warp * RECURRENT + g) * 8 + lane / 4], e / 2);
          sums[i][n][e] = sum * its + (GATEWISE ? 0.f : bias[l][e / 2]);
        }
      }
#endif
    if constexpr (SPLITS > 1) {
      // of two rounds that were sent at once: a warp may still read the sums of the first
      if (round > 1 && round_stage(round) == round_stage(round - 1)) named_barrier(1 + group, 32 * SPLITS);
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        float* const to = partial + ((group * ITEMS + item) * SPLITS + split) * WIDEST * 64;
        const int n = item / 2, e = item % 2;
#pragma unroll
        for (int i = 0; i < WIDEST; i += 2) {
          if (i + 1 < width_of(round))
            *(float4*)(to + i * 64 + lane * 4) = {sums[i][n][e], sums[i][n][e + 2], sums[i + 1 < WIDEST ? i + 1 : 0][n][e],
                                                  sums[i + 1 < WIDEST ? i + 1 : 0][n][e + 2]};
          else if (i < width_of(round))
            *(float2*)(to + i * 64 + lane * 2) = {sums[i][n][e], sums[i][n][e + 2]};
        }
      }
      named_barrier(1 + group, 32 * SPLITS);
    }
    if (!cells) return;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int item = min(position + j * SPLITS, ITEMS - 1);
#pragma unroll
      for (int i = 0; i < WIDEST; ++i) {
        if (i >= width_of(round)) break;
        const int l = link_at(round * LINKS + i);
        float2 sum = {};
        if constexpr (SPLITS > 1) {
#pragma unroll
          for (int s = 0; s < SPLITS; ++s) {
            const float* const part = partial + ((group * ITEMS + item) * SPLITS + s) * WIDEST * 64;
            const bool paired = i % 2 == 1 || i + 1 < width_of(round);
            const float2 value = paired ? *(const float2*)(part + i / 2 * 128 + lane * 4 + i % 2 * 2)
                                        : *(const float2*)(part + i * 64 + lane * 2);
            sum = s == 0 ? value : float2{sum.x + value.x, sum.y + value.y};
          }
        } else {
          sum = {sums[i][j / 2][j % 2], sums[i][j / 2][j % 2 + 2]};
        }
        const float scale = behind_masks ? a.o.noise_scale : 1.f;
        r[j][0][l] = GATEWISE ? scale * sum.x + bias[l][0] : sum.x;
        r[j][1][l] = GATEWISE ? scale * sum.y + bias[l][1] : sum.y;
      }
    }
  };

  for (int t = 0; t < time; ++t) {
    const int copy = COPIES > 1 ? t % 2 : 0;
    if constexpr (LEAVES > 0) {
      if (t > 0) {
        if (CLUSTER == 1) __syncthreads();
        await(0, copy, t - 1);
      }
      multiply_round(0, copy, t == 0);
    }
    const int step_now = reverse ? time - 1 - t : t, next = reverse ? step_now - 1 : step_now + 1;
    const auto read_on = [&](int j) {  // x of the next step
      if (t + 1 == time) return;
      const bool read = within(j, next), also = read && has_second;
#pragma unroll
      for (int g = 0; g < GATES; ++g)
        x[j][g] = load_gates(gates_at + ((further(j) + row_step) * GATES + g) * UNITS, read, also);
    };
    float given[OWN][2][GATES], after[OWN][2][STATES], m[OWN][MOST(MEANS)], entered[OWN][2][MOST(ROUNDS)];
    Values values[OWN][2];
    const auto store_known = [&](int j, int stage) {
      const bool first = PACKED ? within(j, step_now) : is_there(j), second = first && has_second;
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        if (stored_at(sum_of(g)) != stage) continue;
        Gate* const at = gates_at + (further(j) * GATES + g) * UNITS;
        if (sum_of(g) >= 0)
          store_gates(at, given[j][0][g] + r[j][0][sum_of(g)], given[j][1][g] + r[j][1][sum_of(g)], first, second);
        else
          store_gates(at, given[j][0][g], given[j][1][g], first, second);
      }
#pragma unroll
      for (int i = 0; i < APART; ++i)
        if (stored_at(apart(i)) == stage)
          store_gates(apart_at + (further(j) * APART + i) * UNITS, r[j][0][apart(i)], r[j][1][apart(i)], first, second);
    };
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const float2 value = wide_gates(x[j][g]);
        given[j][0][g] = sum_of(g) >= 0 ? value.x : value.x + x_bias[g][0];
        given[j][1][g] = sum_of(g) >= 0 ? value.y : value.y + x_bias[g][1];
      }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      float to[OWN][2][MOST(VALUES)], operand[OWN][2][MOST(ROUNDS)];
      if (cells) {
#pragma unroll
        for (int j = 0; j < OWN; ++j)
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            float v[MOST(VECTORS)], e[MOST(INPUTS)], before[STATES];
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) v[i] = own_vectors[i * SLICE + group * 16 + lane / 4 * 2 + u];
#pragma unroll
            for (int i = 0; i < INPUTS; ++i) e[i] = half_of(inputs[j][i], u);
#pragma unroll
            for (int s = 0; s < STATES; ++s) before[s] = state[j][s][u];
            run_stage(stage, given[j][u], r[j][u], before, v, e, m[j], values[j][u], to[j][u], operand[j][u], after[j][u]);
          }
        if (packs(stage) > 0)
#pragma unroll
          for (int j = 0; j < OWN; ++j) {
            const int item = position + j * SPLITS;
            if (OWN * SPLITS > ITEMS && item >= ITEMS) break;
            float data[4 * MOST(PACKS)] = {};
            summarise(stage, to[j], has_first, has_second, in_group, lane, data);
            const int slot = slots_at(stage, copy) + slot_of(stage, rank * GROUPS + group, place_of(item));
            send_means(stage, data, shared_address(slots) - shared_address(memory) + slot, memory,
                       barriers - shared_address(memory) + 8 * ((1 + stage) * COPIES + copy), row_of(item) < share, lane);
          }
        int asked = 0;
#pragma unroll
        for (int round = 1; round <= ROUNDS; ++round)
          if (round_stage(round) == stage) {
            float entering[OWN][2];
#pragma unroll
            for (int j = 0; j < OWN; ++j)
#pragma unroll
              for (int u = 0; u < 2; ++u)
                entering[j][u] = entered[j][u][round - 1] = noise_inside(j, u) * operand[j][u][asked < ROUNDS ? asked : 0];
            ++asked;
            spread(round, copy, entering, t == 0);
          }
      }
      if (stage + 1 < STAGES) expect_more(t, stage - 1, copy);
      if (EARLY && stage == 0 && cells)
#pragma unroll
        for (int j = 0; j < OWN; ++j) read_on(j);  // while what the stage sends travels
      if (SAVED && stage + 1 < STAGES && cells)
#pragma unroll
        for (int j = 0; j < OWN; ++j) store_known(j, stage);
      if (CLUSTER == 1 && stage + 1 < STAGES) __syncthreads();
      if (packs(stage) > 0 && cells) {
        await(1 + stage, copy, t);
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          const int item = min(position + j * SPLITS, ITEMS - 1);
          receive(stage, (const float4*)((const char*)slots + slots_at(stage, copy)), place_of(item), lane, m[j]);
        }
      }
#pragma unroll
      for (int round = 1; round <= ROUNDS; ++round)
        if (round_stage(round) == stage) {
          await(STAGES + round, copy, t);
          multiply_round(round, copy, t == 0);
        }
    }
    if (cells) {
      float output[OWN][2], entering[OWN][2];
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          float before[STATES];
#pragma unroll
          for (int s = 0; s < STATES; ++s) before[s] = state[j][s][u];
#pragma unroll
          for (int s = 0; s < STATES; ++s) {
            if constexpr (OPTIONS) {
              const float share = zoneout(s) == BY_MASK ? zones[j][s][u] : a.o.zoneout_share[s];
              after[j][u][s] = kept(zoneout(s), share, drawn[j] >> (u * 4 + s) & 1, before[s], after[j][u][s]);
              if (MARKED && !valid[j]) after[j][u][s] = before[s];
            }
            state[j][s][u] = after[j][u][s];
            if (RESET && cut[j]) state[j][s][u] = reset_state(j, s, u);
          }
          output[j][u] = after[j][u][0];
          if constexpr (MASK) output[j][u] = held[j][u] = valid[j] ? after[j][u][0] : held[j][u];
          if (LENGTHS && step_now >= ends[j]) output[j][u] = 0.f;
          entering[j][u] = state[j][0][u];
          if constexpr (NOISE == HELD || NOISE == GIVEN) entering[j][u] *= noise[j][u];
          if constexpr (NOISE == DRAWN) entering[j][u] *= enters[j] >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
        }
      }

      if (LEAVES > 0 && t + 1 < time) spread(0, COPIES > 1 ? 1 - copy : 0, entering, false);
      expect_more(t, STAGES - 2, copy), expect_more(t, STAGES - 1, copy);

#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const bool first = PACKED ? within(j, step_now) : is_there(j), second = first && has_second;
        Gate* const now_at = gates_at + further(j) * GATES * UNITS;
        if (!EARLY) read_on(j);
        if (t + AHEAD < time && is_there(j) && !PACKED) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) prefetch(now_at + (AHEAD * row_step * GATES + g) * UNITS);
          if constexpr (DRAWS)
            prefetch(drawn_place(a, unit, step_now + (reverse ? -AHEAD : AHEAD), sequence[j], direction));
        }
        store_pair(y_at + further(j) * width, output[j][0], output[j][1], first, second);
        if constexpr (SEQUENCES) {
          const bool shown = !LENGTHS || step_now < ends[j];
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (a.o.sequences[s] != nullptr)
              store_pair(a.o.sequences[s] + (y_at - a.y) + further(j) * width, shown ? after[j][0][s] : 0.f,
                         shown ? after[j][1][s] : 0.f, first, second);
        }
        if constexpr (SAVED) {
          store_known(j, STAGES - 1);
          const long long level = (rows + sequence[j]) * MEANS;
          if (MEANS > 0 && is_there(j) && rank == 0 && group == 0 && lane / 4 == 0 && (!PACKED || within(j, step_now)))
#pragma unroll
            for (int i = 0; i < MEANS; ++i) a.levels[direction][level + i] = m[j][i];
#pragma unroll
          for (int round = 0; round < ROUNDS; ++round) {
            const bool counted = !MARKED || valid[j];  // else it may be anything
            store_pair(a.operands[direction] + round * state_stride + (rows + sequence[j]) * UNITS + unit,
                       counted ? entered[j][0][round] : 0.f, counted ? entered[j][1][round] : 0.f, first, second);
          }
          if constexpr (BEFORE) {
            if (t + 1 < time) {
              const bool stored = PACKED ? within(j, next) : is_there(j), also = stored && has_second;
              store_pair(before_at + (row_step + further(j)) * UNITS, state[j][0][0], state[j][0][1], stored, also);
#pragma unroll
              for (int s = 1; s < STATES; ++s)
                store_wide_pair(states_at + (s - 1) * state_stride + (row_step + further(j)) * UNITS, state[j][s][0],
                                state[j][s][1], stored, also);
            }
          } else {
#pragma unroll
            for (int s = 1; s < STATES; ++s)
              store_wide_pair(states_at + (s - 1) * state_stride + further(j) * UNITS, after[j][0][s],
                              after[j][1][s], first, second);
          }
        }
        if (t + 1 == time) {
          const long long end = ((long long)direction * batch + row + further(j)) * UNITS + unit;
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            store_pair(a.finals[s] + end, after[j][0][s], after[j][1][s], is_there(j), is_there(j) && has_second);
        }
      }
      if constexpr (OPTIONS) {
        if (t + 1 < time) {  // what the next step reads, and of the one after it what enters
          const int later = reverse ? next - 1 : next + 1;
          const bool goes_on = t + 2 < time;
          const long long later_rows = goes_on ? rows_of(a, later) : next_rows;
#pragma unroll
          for (int j = 0; j < OWN; ++j) {
            if constexpr (MARKED) valid[j] = counts(j, next, next_rows);
            if constexpr (RESET) cut[j] = goes_on && is_cut(j, later, later_rows, next_rows);
            load_options(j, next, next_rows);
            if constexpr (NOISE == GIVEN) noise_now[j][0] = noise[j][0], noise_now[j][1] = noise[j][1];
            if (NOISE == GIVEN && goes_on) load_noise(j, later, later_rows);
            if constexpr (DRAWS) draw(j, next, false, goes_on, later);
          }
        }
      }
    }
    gates_at += row_step * GATES * UNITS;
    y_at += row_step * width;
    apart_at += row_step * APART * UNITS;
    states_at += row_step * UNITS;
    if constexpr (BEFORE) before_at += row_step * UNITS;
    rows = next_rows;
    if (t + 2 < time) next_rows = rows_of(a, reverse ? next - 1 : next + 1);
    if constexpr (PACKED) row_step = next_rows - rows;
  }
  if (LENGTHS && position < ITEMS) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const bool first = is_there(j), second = first && has_second;
      if (time == 0)
#pragma unroll
        for (int s = 0; s < STATES; ++s)
          store_pair(a.finals[s] + ((long long)direction * batch + sequence[j]) * UNITS + unit, state[j][s][0],
                     state[j][s][1], first, second);
      for (long long t = time; t < a.time && !PACKED; ++t) {  // past the end of all of the cluster's sequences
        const long long at = t * batch + sequence[j], shown = at * width + direction * UNITS + unit;
        store_pair(a.y + shown, 0.f, 0.f, first, second);
        if constexpr (SEQUENCES)
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            if (a.o.sequences[s] != nullptr) store_pair(a.o.sequences[s] + shown, 0.f, 0.f, first, second);
        if constexpr (SAVED) {
          store_pair(a.o.before[direction] + at * UNITS + unit, 0.f, 0.f, first, second);
          for (int round = 0; round < ROUNDS; ++round)
            store_pair(a.operands[direction] + round * state_stride + at * UNITS + unit, 0.f, 0.f, first, second);
        }
      }
    }
  }
#if CLUSTER > 1
  cluster_barrier();  // a block that has ended must not be sent to
#endif
}
