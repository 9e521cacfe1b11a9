// All steps of a recurrent layer, forward, in one launch.
//
// A cluster of CLUSTER blocks (or one block alone) owns ROWS = 8 x TILES sequences.  Block `rank` owns the units from
// rank x SLICE on, for every gate; its recurrent weights stay in registers, and past RESIDENT depths in shared memory.
// At each step it multiplies them with the states of all units, which lie in its shared memory, computes the cell for
// its own units, and sends their new states into the shared memory of every block of the cluster.
//
// Within a block, warp (group, split) owns 16 units and, of the depth of the product, the DEPTHS x 8 words from
// split x DEPTHS x 8 on.  Where there are several splits, their partial sums meet in shared memory; then each warp
// computes the cell for some of the group's items.  An item is, for a thread: two neighbouring units of one sequence.
//
//   registers  weights, sums of the products, the states and the bias of the thread's items, the next step's input
//   shared     states twice (read at this step, arriving for the next), partial sums, two barriers, more weights
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
//     load still stands before the sends in the one queue of the warp's loads and stores.)
//   - States that were read at step t are overwritten by what is sent at step t + 1.  Who sends there has waited for
//     the states that this block sent at step t, and a warp sends after the group's barrier (or of its own products), so
//     that all warps of its group have read; every group sends.

// @generated

constexpr int ROWS = 8 * TILES, ITEMS = 2 * TILES, OWN = (ITEMS + SPLITS - 1) / SPLITS;
constexpr int GROUPS = SLICE / 16, WARPS = GROUPS * SPLITS, THREADS = 32 * WARPS;
constexpr int WORDS = SPLITS * DEPTHS * 8;  // depth of the product, padded
constexpr int STRIDE = WORDS + 4;           // of a sequence's states: 8 rows of 16 bytes are in 32 different banks
constexpr int STREAMED = DEPTHS - RESIDENT;
constexpr int STATE_WORDS = ROWS * STRIDE, PARTIAL_WORDS = SPLITS > 1 ? GROUPS * ITEMS * SPLITS * RECURRENT * 64 : 0;
constexpr int WEIGHT_WORDS = WARPS * STREAMED * RECURRENT * 128;
// masks by gate: bits of all gates for [depth, tile, lane], or as the states for each gate
constexpr int MASK_WORDS = NOISE == BY_GATE         ? SPLITS * DEPTHS * TILES * 32
                           : NOISE == GIVEN_BY_GATE ? RECURRENT * STATE_WORDS
                                                    : 0;
constexpr unsigned ARRIVING = ROWS * CLUSTER * SLICE * ELEMENT_BYTES;
constexpr int AHEAD = 4;  // steps between asking L2 for a step's input and computing it
static_assert(4 * (WEIGHT_WORDS + 2 * STATE_WORDS + PARTIAL_WORDS + MASK_WORDS) + 16 == SHARED,
              "tiling and kernel disagree");

struct Arguments {
  Gate* gates[2];             // for each direction [time, batch, GATES x UNITS]: x without its bias; where saved, x + r, or x
  const Element* weights[2];  // [RECURRENT x UNITS, UNITS]
  const Element* bias[2];     // [RECURRENT x UNITS] or null
  const Element* x_bias[2];   // [GATES x UNITS] or null
  const Element* vectors[2][MOST(VECTORS)];
  const Element* initial[STATES];  // [directions, batch, UNITS], all or null
  Element* finals[STATES];         // [directions, batch, UNITS]
  Element* y;                      // [time, batch, directions x UNITS]
  Gate* apart[2];                  // [time, batch, APART x UNITS]: r of gates that are not a sum
  float* states[2];                // [STATES - 1, time, batch, UNITS]: every state but the first, after each step
  long long time, batch;
#if OPTIONS
  Options o;
#else
  static constexpr Options o = {};
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;  // [warp, depth, gate, lane]
  unsigned* const states = memory + WEIGHT_WORDS;
  float* const partial = (float*)(states + 2 * STATE_WORDS);  // [group, item, split, two gates, lane, gate, unit]
  unsigned* const masks = (unsigned*)(partial + PARTIAL_WORDS);
  const unsigned barriers = shared_address(masks + MASK_WORDS);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / SPLITS, split = warp % SPLITS;
  const int direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int unit = rank * SLICE + group * 16 + lane / 4 * 2;  // and unit + 1
  const bool has_first = unit < UNITS, has_second = unit + 1 < UNITS;
  const int batch = (int)a.batch, row0 = blockIdx.x / CLUSTER * ROWS + lane % 4 * 2;
  const Element* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)][RECURRENT];
  const auto ask = [&](int i, unsigned* to) {
    const int own = rank * SLICE + group * 16 + row_of_chunk(lane);
    const int column = (split * DEPTHS + i / RECURRENT) * 8 * WORD_ELEMENTS + column_of_chunk(lane);
    const Element* const row = weights + ((long long)(i % RECURRENT) * UNITS + own) * UNITS;
    bring(to, row + column, own < UNITS ? UNITS - column : 0);
  };
  bring_operands<First<RESIDENT * RECURRENT>, Rows, DEPTHS * RECURRENT, STREAMED * RECURRENT, WARPS>(
      memory, warp, lane, ask,
      [&](int i, uint4 words) { resident[i / RECURRENT][i % RECURRENT] = words; });

  // steps of the longest sequence of the cluster
  const int time = LENGTHS ? longest(a, blockIdx.x / CLUSTER * ROWS) : (int)a.time;
  const bool reverse = direction == 1;
  const int first_step = reverse && time > 0 ? time - 1 : 0;

  for (int i = threadIdx.x; i < 2 * STATE_WORDS; i += THREADS) states[i] = 0;
  __syncthreads();
  if constexpr (NOISE == BY_GATE)
    for (int i = threadIdx.x; i < SPLITS * DEPTHS * TILES * 32; i += THREADS) {
      const int its = i % 32, place = blockIdx.x / CLUSTER * ROWS + i / 32 % TILES * 8 + its / 4;
      masks[i] = gate_bits(a, place, (i / 32 / TILES * 8 + its % 4) * WORD_ELEMENTS, direction);
    }
  if constexpr (NOISE == GIVEN_BY_GATE)
    for (int i = threadIdx.x; i < RECURRENT * ROWS * WORDS * WORD_ELEMENTS; i += THREADS) {
      const int column = i % (WORDS * WORD_ELEMENTS), line = i / (WORDS * WORD_ELEMENTS);
      const int gate = line / ROWS, place = blockIdx.x / CLUSTER * ROWS + line % ROWS;
      const bool there = place < batch && column < UNITS;
      const long long sequence = there ? sequence_at(a, place) : 0;
      const float value = there ? a.o.noise[direction][(gate * a.batch + sequence) * UNITS + column] : 0.f;
      ((Element*)(masks + line * STRIDE))[column] = narrow(value);
    }
  if (a.initial[0] != nullptr || RESET_TO) {
    for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
      const int place = blockIdx.x / CLUSTER * ROWS + i / UNITS, column = i % UNITS;
      if (place < batch) {
        const Element value = first_operand(a, sequence_at(a, place), column, direction, first_step);
        unsigned* const at = states + i / UNITS * STRIDE;
#if ELEMENT_BYTES == 2
        ((Element*)at)[column] = value;
#else
        at[column] = operand(value);
#endif
      }
    }
  }

  // what a thread computes: its items.  Of two groups, different warps have one more item than the others.
  const int position = (split + SPLITS - group * (ITEMS % SPLITS) % SPLITS) % SPLITS;
  float bias[RECURRENT][2], x_bias[GATES][2], vectors[MOST(VECTORS)][2], state[OWN][STATES][2];
#pragma unroll
  for (int g = 0; g < RECURRENT; ++g) {  // it enters the sum of the first split
    const Element* const at = a.bias[direction] + g * UNITS + unit;
    const bool mine = split == 0 || GATEWISE;  // which is added to the sum of all
    bias[g][0] = mine && a.bias[direction] != nullptr && has_first ? wide(at[0]) : 0.f;
    bias[g][1] = mine && a.bias[direction] != nullptr && has_second ? wide(at[1]) : 0.f;
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
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    vectors[v][0] = has_first ? wide(a.vectors[direction][v][unit]) : 0.f;
    vectors[v][1] = has_second ? wide(a.vectors[direction][v][unit + 1]) : 0.f;
  }

  const int width = gridDim.y * UNITS;
  const long long state_stride = (PACKED ? a.o.starts[a.time] : a.time * batch) * UNITS;
  // the thread's first item, and how many sequences further on the others are
  const int place = row0 + position / 2 * 8 + position % 2;
  const auto beyond = [](int j) { return SPLITS == 1 ? j / 2 * 8 + j % 2 : j * SPLITS / 2 * 8; };
  const auto is_there = [&](int j) {
    return has_first && place + beyond(j) < batch && (OWN * SPLITS == ITEMS || position + j * SPLITS < ITEMS);
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
  unsigned valid[OWN], cut[OWN];  // the step counts; no state comes into the next: as loaded, to be awaited at their use
  unsigned drawn[OWN];  // what is drawn for this step's zoneout (4 bits for each unit), for the next step's operand
  float held[OWN][2], noise[OWN][2], zones[OWN][STATES][2];
  float2 inputs[OWN][MOST(INPUTS)];
  const auto within = [&](int j, int step) { return is_there(j) && (!LENGTHS || step < ends[j]); };
  const auto counts = [&](int j, int step, long long at) {
    return within(j, step) ? loaded<MASK>(a.o.mask, at + sequence[j], 1) : 0;
  };
  const auto is_cut = [&](int j, int step, long long at, long long after) {  // before a step, as it is computed
    const bool may = is_there(j) && (reverse ? step + 1 < (LENGTHS ? ends[j] : time) : within(j, step));
    return may ? loaded<RESET>(a.o.reset, (reverse ? after : at) + sequence[j], 0) : 0;
  };
  const auto draw = [&](int j, int zone_step, int operand_step) {
    drawn[j] = drawn_for(a, unit, zone_step, operand_step, sequence[j], direction);
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
      cut[j] = next >= 0 && next < time ? is_cut(j, next, next_rows, rows) : 0;
      if (is_cut(j, first_step, rows, rows))  // forward: backwards nothing comes before the last step
#pragma unroll
        for (int s = 0; s < STATES; ++s) state[j][s][0] = reset_state(j, s, 0), state[j][s][1] = reset_state(j, s, 1);
      load_options(j, first_step, rows);
      if constexpr (NOISE == HELD) load_noise(j, first_step, 0);
      if constexpr (NOISE == GIVEN) load_noise(j, next, next_rows);
      if constexpr (DRAWS) draw(j, first_step, next);
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
  constexpr int PEERS = (CLUSTER + SHARERS - 1) / SHARERS;
  const int sharer = lane / 4 % SHARERS;  // of the threads that hold the same 16 bytes, which one
  unsigned peer[PEERS];
#pragma unroll
  for (int p = 0; p < PEERS; ++p) peer[p] = at_rank(shared_address(memory), (sharer + p * SHARERS) % CLUSTER);
  const unsigned barrier_offset = barriers - shared_address(memory);
  if (threadIdx.x == 0) {
    start_barrier(barriers);
    start_barrier(barriers + 8);
    barriers_started();
    expect(barriers, ARRIVING);
    expect(barriers + 8, ARRIVING);
  }
  cluster_barrier();
#else
  __syncthreads();
#endif

  const unsigned columns = shared_address(states) + ((lane % 8) * STRIDE + split * DEPTHS * 8 + lane / 8 * 4) * 4;
  for (int t = 0; t < time; ++t) {
    const int now = t % 2;
#if CLUSTER > 1
    if (t > 0) {
      wait(barriers + 8 * now, (t - 1) / 2 % 2);
      if (threadIdx.x == 0) expect(barriers + 8 * now, ARRIVING);
    }
#endif

    float sums[RECURRENT][TILES][4];
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        sums[g][n][0] = sums[g][n][1] = GATEWISE ? 0.f : bias[g][0];
        sums[g][n][2] = sums[g][n][3] = GATEWISE ? 0.f : bias[g][1];
      }
    const unsigned from = columns + now * STATE_WORDS * 4;
    const unsigned masks_from = columns + shared_address(masks) - shared_address(states);
#pragma unroll
    for (int d = 0; d < DEPTHS; d += 2) {
      uint4 b[TILES];
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const unsigned at = from + (n * 8 * STRIDE + d * 8) * 4;
        b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
      }
      if constexpr (GATEWISE) {
        unsigned bits[TILES][2];
        if constexpr (NOISE == BY_GATE)
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const unsigned* const at = masks + ((split * DEPTHS + d) * TILES + n) * 32 + lane;
            bits[n][0] = at[0], bits[n][1] = d + 1 < DEPTHS ? at[TILES * 32] : 0u;
          }
#pragma unroll
        for (int g = 0; g < RECURRENT; ++g) {
          uint4 own[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            if constexpr (NOISE == BY_GATE) {
              own[n] = {passed(b[n].x, bits[n][0], g * 2), passed(b[n].y, bits[n][0], g * 2 + 1),
                        passed(b[n].z, bits[n][1], g * 2), passed(b[n].w, bits[n][1], g * 2 + 1)};
            } else {
              const unsigned at = masks_from + (g * STATE_WORDS + n * 8 * STRIDE + d * 8) * 4;
              const uint4 mask = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
              own[n] = {times(b[n].x, mask.x), times(b[n].y, mask.y), times(b[n].z, mask.z), times(b[n].w, mask.w)};
            }
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (d + half < DEPTHS) {
              const int at = d + half, far = ((warp * STREAMED + at - RESIDENT) * RECURRENT + g) * 32 + lane;
              const uint4 weight = at < RESIDENT ? resident[at < RESIDENT ? at : 0][g] : streamed[far];
#pragma unroll
              for (int n = 0; n < TILES; ++n)
                multiply(sums[g][n], left_of(weight),
                         right_of(half ? own[n].z : own[n].x, half ? own[n].w : own[n].y));
            }
        }
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (d + half < DEPTHS) {
          Right right[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n) right[n] = right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g) {
            const int at = d + half;
            const int far = ((warp * STREAMED + at - RESIDENT) * RECURRENT + g) * 32 + lane;
            const Left weight = left_of(at < RESIDENT ? resident[at < RESIDENT ? at : 0][g] : streamed[far]);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
              multiply(sums[g][n], weight, right[n]);
          }
        }
    }

    if constexpr (SPLITS > 1) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        float* const to = partial + ((group * ITEMS + item) * SPLITS + split) * RECURRENT * 64;
        const int n = item / 2, e = item % 2;
#pragma unroll
        for (int g = 0; g + 1 < RECURRENT; g += 2)
          *(float4*)(to + g * 64 + lane * 4) = {sums[g][n][e], sums[g][n][e + 2], sums[g + 1][n][e],
                                                sums[g + 1][n][e + 2]};
        if constexpr (RECURRENT % 2)
          *(float2*)(to + (RECURRENT - 1) * 64 + lane * 2) = {sums[RECURRENT - 1][n][e], sums[RECURRENT - 1][n][e + 2]};
      }
      named_barrier(1 + group, 32 * SPLITS);
    }

    const int step_now = reverse ? time - 1 - t : t, next = reverse ? step_now - 1 : step_now + 1;
    if (position < ITEMS) {  // the same for the whole warp
      float r[OWN][2][RECURRENT], given[OWN][2][GATES], after[OWN][2][STATES];
      float output[OWN][2], entering[OWN][2];
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const int item = min(position + j * SPLITS, ITEMS - 1);
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
            r[j][0][g] = sums[g][j / 2][j % 2];
            r[j][1][g] = sums[g][j / 2][j % 2 + 2];
          }
        }
        if constexpr (GATEWISE)
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g)
#pragma unroll
            for (int u = 0; u < 2; ++u) r[j][u][g] = (float)a.o.noise_scale * r[j][u][g] + bias[g][u];
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
          const float2 value = wide_gates(x[j][g]);
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
              const float share = zoneout(s) == BY_MASK ? zones[j][s][u] : (float)a.o.zoneout_share[s];
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
          if constexpr (NOISE == DRAWN) entering[j][u] *= drawn[j] >> (8 + u) & 1 ? (float)a.o.noise_scale : 0.f;
        }
      }

      if (t + 1 < time) {  // send; what is past the units is zero, whatever the cell makes of it
        uint4 data[OWN];
#pragma unroll
        for (int j = 0; j < OWN; ++j)
          data[j] = gathered(has_first ? entering[j][0] : 0.f, has_second ? entering[j][1] : 0.f, lane);
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          const int item = position + j * SPLITS;
          if (OWN * SPLITS > ITEMS && item >= ITEMS) break;
          const int chunk = group * 16 + lane / (4 * SHARERS) * SHARERS * 2;  // first unit of the 16 bytes
          const unsigned offset = ((1 - now) * STATE_WORDS + (lane % 4 * 2 + item / 2 * 8 + item % 2) * STRIDE +
                                   (rank * SLICE + chunk) / WORD_ELEMENTS) * 4;
#if CLUSTER > 1
#pragma unroll
          for (int p = 0; p < PEERS; ++p)
            if (CLUSTER % SHARERS == 0 || sharer + p * SHARERS < CLUSTER)
              send(peer[p] + remote + offset, peer[p] + barrier_offset + 8 * (1 - now), data[j]);
#else
          if (lane / 4 % SHARERS == 0) *(uint4*)((char*)states + offset) = data[j];
#endif
        }
      }

#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const bool first = PACKED ? within(j, step_now) : is_there(j), second = first && has_second;
        Gate* const now_at = gates_at + further(j) * GATES * UNITS;
        if (t + 1 < time) {
          const bool read = within(j, next), also = read && has_second;
#pragma unroll
          for (int g = 0; g < GATES; ++g) x[j][g] = load_gates(now_at + (row_step * GATES + g) * UNITS, read, also);
        }
        if (t + AHEAD < time && is_there(j) && !PACKED) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) prefetch(now_at + (AHEAD * row_step * GATES + g) * UNITS);
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
#pragma unroll
          for (int g = 0; g < GATES; ++g)
            if (sum_of(g) >= 0)
              store_gates(now_at + g * UNITS, given[j][0][g] + r[j][0][sum_of(g)], given[j][1][g] + r[j][1][sum_of(g)],
                          first, second);
            else
              store_gates(now_at + g * UNITS, given[j][0][g], given[j][1][g], first, second);
#pragma unroll
          for (int i = 0; i < APART; ++i)
            store_gates(apart_at + (further(j) * APART + i) * UNITS, r[j][0][apart(i)], r[j][1][apart(i)], first,
                       second);
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
            if constexpr (RESET) cut[j] = goes_on ? is_cut(j, later, later_rows, next_rows) : 0;
            load_options(j, next, next_rows);
            if (NOISE == GIVEN && goes_on) load_noise(j, later, later_rows);
            if constexpr (DRAWS) draw(j, next, later);
          }
        }
      }
    }
    gates_at += row_step * GATES * UNITS;
    y_at += row_step * width;
    apart_at += row_step * APART * UNITS;
    states_at += row_step * UNITS;
    if constexpr (BEFORE) before_at += row_step * UNITS;
    if constexpr (OPTIONS) {
      rows = next_rows;
      if (t + 2 < time) next_rows = rows_of(a, reverse ? next - 1 : next + 1);
      if constexpr (PACKED) row_step = next_rows - rows;
    }
#if CLUSTER == 1
    __syncthreads();
#endif
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
        if constexpr (SAVED) store_pair(a.o.before[direction] + at * UNITS + unit, 0.f, 0.f, first, second);
      }
    }
  }
#if CLUSTER > 1
  cluster_barrier();  // a block that has ended must not be sent to
#endif
}
