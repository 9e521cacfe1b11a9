// All steps of a recurrent layer, backward, in one launch, for cells whose step has means over the units: one block
// computes the cell of a whole sequence, as whole_forward.cu does.
//
// Block `rank` of a cluster multiplies with the weights of the units from rank x SLICE on, transposed, for all sequences of
// the cluster, and computes the cell for all units of every CLUSTER-th sequence.  A step is
//
//   a sequence's warps  wait for sums of all blocks | stage 0 | means | stage 1 | ... | send each block the gradients of
//                       what its weights multiply
//   multiplying warps   wait for these of all sequences | product | send each sequence's sums to its block
//
// Multiplying warp has SHARE strips of 16 units, two neighbouring ones at a time, whose sums of a sequence are 16 bytes
// of a thread.  A thread of the cell has two neighbouring units.
//
//   registers  weights and sums of a product; of a sequence's warps what they carry, read and add up over all steps
//   shared     gradients of all sequences and the block's units, sums of all blocks for this block's sequences, means of
//              each warp, barriers, more weights
//   global     as in staged_backward.cu
//
// What is exchanged lies in shared memory once: who sends at step t + 1 has waited for something that was sent after all
// of step t was read.
//   - Gradients are read, the product is made of them and sent.  Who sends a sequence's next ones has waited for the sums
//     of all warps that multiply.
//   - Sums are read, means are made of them by all warps of the sequence together, then gradients are sent.  A warp that
//     multiplies at the next step has waited for gradients of each sequence.
//
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int ROWS = 8 * TILES, SEATS = (ROWS + CLUSTER - 1) / CLUSTER, MULTIPLYING = WARPS - SEATS * WHOLE, THREADS = 32 * WARPS;
constexpr int STRIPS = (UNITS + 15) / 16, COUPLES = (STRIPS + 1) / 2, EACH = (COUPLES + MULTIPLYING - 1) / MULTIPLYING;
constexpr int SHARE = 2 * EACH, DEPTHS = RECURRENT * SLICE / (8 * WORD_ELEMENTS), STREAMED = SHARE * DEPTHS - RESIDENT;
constexpr int STRIDE = DEPTHS * 8 + 4;  // words of a sequence: 8 times 16 bytes are in 32 different banks
constexpr int WEIGHT_WORDS = MULTIPLYING * STREAMED * 128, GRADIENT_WORDS = ROWS * STRIDE;
constexpr int SOURCES = (UNITS + SLICE - 1) / SLICE, SUM_WORDS = SOURCES * COUPLES * 32;  // of a sequence
constexpr int SCALE_WORDS = HALVES ? 2 * ROWS : 0;
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS;
// Warps that multiply leave registers to those that compute the cell, where both are whole groups of four.
constexpr bool TRADED = WARPS == 12 && MULTIPLYING == 8;
constexpr int BESIDE = SLICE / 2 < 32 ? SLICE / 2 : 32;  // threads of a warp whose units are of one block
static_assert(4 * (WEIGHT_WORDS + GRADIENT_WORDS + SEATS * (SUM_WORDS + MEAN_WORDS) + SCALE_WORDS) + 8 * (1 + SEATS) == SHARED,
              "tiling and kernel disagree");
static_assert(CLUSTER > 1 && ROUNDS == 0 && LEAVES == RECURRENT && REDUCTIONS > 0 && !OPTIONS, "such steps have means alone");
static_assert(ELEMENT_BYTES == 2 || (HALVES && (SLICE == 16 || SLICE == 32 || SLICE == 64)), "a scale is of a block's units");
static_assert(WHOLE * 64 >= UNITS && SEATS < 16, "a thread has two units");

constexpr int EIGHTS = (PACKS + 1) / 2;  // of sums that means are made of
static_assert(sums_alone(), "backward needs no variance");

// Of four neighbouring threads, each with four words: the n-th gets the n-th of each.
__device__ __forceinline__ uint4 turned(const unsigned (&words)[4], int lane) {
  const bool odd = lane & 1, far = lane & 2;
  const unsigned first = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  const unsigned second = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
  // of gate `odd` and `odd + 2` those of this couple of threads
  const uint2 low = odd ? uint2{first, words[1]} : uint2{words[0], first};
  const uint2 high = odd ? uint2{second, words[3]} : uint2{words[2], second};
  const uint2 mine = far ? high : low, given = far ? low : high;
  const unsigned x = __shfl_xor_sync(0xffffffffu, given.x, 2), y = __shfl_xor_sync(0xffffffffu, given.y, 2);
  return far ? uint4{x, y, mine.x, mine.y} : uint4{mine.x, mine.y, x, y};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;                  // [warp, strip and depth, lane]
  unsigned* const gradients = memory + WEIGHT_WORDS;       // [sequence, gate, unit of the block]
  float* const sums_here = (float*)(gradients + GRADIENT_WORDS);  // [seat, source, two strips, 8, strip, odd or even unit]
  float* const slots = sums_here + SEATS * SUM_WORDS;      // [seat, stage, warp, number]
  float2* const scales = (float2*)(slots + SEATS * MEAN_WORDS);  // what those of gradients are the inverse of, [sequence]
  const unsigned base = shared_address(memory), barriers = shared_address((float*)scales + SCALE_WORDS);

  const int warp = own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int batch = (int)a.batch, clusters = gridDim.x / CLUSTER, share = (batch + clusters - 1) / clusters;
  const int first_place = blockIdx.x / CLUSTER * share, lines = max(0, min(share, batch - first_place)), time = (int)a.time;
  const Weight* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
  float unscale[SHARE][2];
#if HALVES
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int column = (warp * SHARE + s) * 16 + lane / 4 * 2;
    const bool first = warp < MULTIPLYING && rank * SLICE < UNITS && column < UNITS;
    const float2 its = load_wide_pair(scales_behind(weights) + rank * UNITS + column, first, first && column + 1 < UNITS);
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
      [&](int i, uint4 words) {
        if (warp < MULTIPLYING) streamed[(warp * STREAMED + i) * 32 + lane] = words;
      });
  for (int i = threadIdx.x; i < GRADIENT_WORDS; i += THREADS) gradients[i] = 0;
  for (int i = threadIdx.x; i < SCALE_WORDS; i += THREADS) ((float*)scales)[i] = 0.f;
  // What comes for a step: of all sequences those of the block's units; of one the sums of all blocks.
  const int own_chunks = (max(0, min(SLICE, UNITS - (int)rank * SLICE)) + 7) / 8;
  const unsigned arriving = lines * (own_chunks * RECURRENT * 16 + (HALVES ? 8 : 0)), resulting = SUM_WORDS * 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 1 + SEATS; ++i) start_barrier(barriers + 8 * i, 1);
    barriers_started();
    for (int i = 0; i < 1 + SEATS; ++i) expect(barriers + 8 * i, i == 0 ? arriving : resulting);
  }
  cluster_barrier();

  if (warp < MULTIPLYING) {
    if constexpr (TRADED) take_fewer_registers<120>();
    const unsigned columns = shared_address(gradients) + (lane % 8 * STRIDE + lane / 8 * 4) * 4;
    // Warps without strips send nothing, so nobody waits for them: they must not wait, the barrier's phases could pass them by.
    const int steps = lines > 0 && own_chunks > 0 && warp * EACH < COUPLES ? time : 0;
    for (int t = 0; t < steps; ++t) {
      wait(barriers, t % 2);
      if (threadIdx.x == 0) expect(barriers, arriving);
#pragma unroll
      for (int c = 0; c < EACH; ++c) {
        float sums[2][TILES][2][4] = {};  // [strip, tile, odd or even depth]
#pragma unroll
        for (int d = 0; d < DEPTHS; d += 2) {
          uint4 b[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const unsigned at = columns + (n * 8 * STRIDE + d * 8) * 4;
            b[n] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (d + half < DEPTHS)
#pragma unroll
              for (int s = 0; s < 2; ++s) {
                const int i = (c * 2 + s) * DEPTHS + d + half;
                const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0]
                                                         : streamed[(warp * STREAMED + i - RESIDENT) * 32 + lane]);
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                  multiply(sums[s][n][half], weight, right_of(half ? b[n].z : b[n].x, half ? b[n].w : b[n].y));
              }
        }
        const int couple = warp * EACH + c;
        if (EACH * MULTIPLYING != COUPLES && couple >= COUPLES) break;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int line = n * 8 + lane % 4 * 2 + e, seat = line / CLUSTER;
            const float its = HALVES ? scales[line].x : 1.f;
            float own[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // two neighbouring units of each strip
              own[i] = sums[i / 2][n][0][e + i % 2 * 2] + sums[i / 2][n][1][e + i % 2 * 2];
              if constexpr (HALVES) own[i] = own[i] * unscale[c * 2 + i / 2][i % 2] * its;
            }
            if (line < lines) {
              const unsigned target = at_rank(base, line % CLUSTER);
              const int to = (seat * SUM_WORDS + ((int)rank * COUPLES + couple) * 32 + lane / 4 * 4) * 4;
              send(target + shared_address(sums_here) - base + to, target + barriers - base + 8 * (1 + seat),
                   {__float_as_uint(own[0]), __float_as_uint(own[1]), __float_as_uint(own[2]), __float_as_uint(own[3])});
            }
          }
      }
    }
  } else {
    if constexpr (TRADED) take_more_registers<224>();
    const int seat = (warp - MULTIPLYING) / WHOLE, part = (warp - MULTIPLYING) % WHOLE, line = seat * CLUSTER + rank;
    const int pair = part * 32 + lane, unit = pair * 2, sequence = first_place + line, width = gridDim.y * UNITS;
    const bool first = line < lines && unit < UNITS, second = line < lines && unit + 1 < UNITS, reverse = direction == 1;
    const bool has_output_gradient = a.y_gradient != nullptr, has_initial = a.initial[0] != nullptr;
    const long long row_step = reverse ? batch : -(long long)batch, state_stride = a.time * batch * UNITS;
    const long long begin = (reverse || time == 0 ? 0 : (long long)(time - 1) * batch) + sequence;
    const long long start = ((long long)direction * batch + sequence) * UNITS + unit;
    const Gate *gates_at = a.gates[direction] + begin * GATES * UNITS + unit,
               *apart_at = a.apart[direction] + begin * APART * UNITS + unit;
    const float *states_at = a.states[direction] + (begin + row_step) * UNITS + unit,
                *levels_at = a.levels[direction] + begin * LEVELS;
    long long outputs = begin * width + direction * UNITS + unit;
    Element *gradients_at = a.gate_gradients[direction] + begin * GATES * UNITS + unit,
            *apart_gradients_at = a.apart_gradients[direction] + begin * APART * UNITS + unit;
    const auto load = [&](int t, Read& read) {  // what is read of step t, the next after what was read last
      const bool there = first && t < time, beyond = second && t < time, last = t + 1 >= time, also = first && !last;
#pragma unroll
      for (int i = 0; i < LEVELS; ++i) read.levels[i] = line < lines && t < time ? levels_at[i] : 0.f;
#pragma unroll
      for (int g = 0; g < GATES; ++g) read.gates[g] = load_gates(gates_at + g * UNITS, there, beyond);
#pragma unroll
      for (int i = 0; i < APART; ++i) read.apart[i] = load_gates(apart_at + i * UNITS, there, beyond);
      read.y_gradient = load_pair(a.y_gradient + outputs, there && has_output_gradient, beyond && has_output_gradient);
      read.before = load_pair(a.y + outputs + row_step * width, also, second && !last);
#pragma unroll
      for (int s = 1; s < STATES; ++s)
        read.states[s - 1] = load_wide_pair(states_at + (s - 1) * state_stride, also, second && !last);
      gates_at += row_step * GATES * UNITS, apart_at += row_step * APART * UNITS, states_at += row_step * UNITS;
      levels_at += row_step * LEVELS, outputs += row_step * width;
    };
    Given now[2];
    float2 initial[STATES];
    float carried[STATES][2], summed[2][MOST(SUMMED)] = {};
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      initial[s] = wide_pair(load_pair(a.initial[s] + start, first && has_initial, second && has_initial));
      const bool given = a.final_gradients[s] != nullptr;
      const float2 value = wide_pair(load_pair(a.final_gradients[s] + start, given && first, given && second));
      carried[s][0] = value.x, carried[s][1] = value.y;
    }
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
        now[u].v[i] = (u == 0 ? first : second) ? wide(a.vectors[direction][i][unit + u]) : 0.f;
    const float2* const own_sums = (const float2*)(sums_here + seat * SUM_WORDS) + pair / 16 * 16 + pair % 8 * 2 + pair / 8 % 2;
    float* const own_slots = slots + seat * MEAN_WORDS;
    const int chunk = unit / 8 * 8, owner = chunk / SLICE;  // of the 16 bytes that four threads send, and whose they are
    const unsigned target = at_rank(base, owner);
    const int gradients_to = shared_address(gradients) - base + (line * STRIDE + chunk % SLICE / WORD_ELEMENTS) * 4;
    const bool sends = chunk < UNITS;
    Read even, odd;  // what steps read is asked for two steps ahead
    load(0, even), load(1, odd);

    const auto step = [&](int t, Read& read) {
      const bool goes_on = t < time, last = t + 1 == time;
      float m[MOST(MEANS)];
      Values values[2];
      const float2 output = wide_pair(read.y_gradient);
      if (goes_on) {
#pragma unroll
        for (int i = 0; i < LEVELS; ++i) m[i] = read.levels[i];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) now[u].x[g] = half_of(wide_gates(read.gates[g]), u);
#pragma unroll
          for (int i = 0; i < APART; ++i) now[u].r[apart(i)] = half_of(wide_gates(read.apart[i]), u);
          now[u].before[0] = half_of(last ? initial[0] : wide_pair(read.before), u);
#pragma unroll
          for (int s = 1; s < STATES; ++s) now[u].before[s] = half_of(last ? initial[s] : read.states[s - 1], u);
          run_ahead(now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u]);
        }
      }
      if (t > 0) {
        wait(barriers + 8 * (1 + seat), (t - 1) % 2);
        if (part == 0 && lane == 0) expect(barriers + 8 * (1 + seat), resulting);
        float2 sum[2] = {};
        if (first)
#pragma unroll
          for (int source = 0; source < SOURCES; ++source) {
            const float2 value = own_sums[source * COUPLES * 16];
            sum[source % 2].x += value.x, sum[source % 2].y += value.y;
          }
        carried[0][0] += sum[0].x + sum[1].x, carried[0][1] += sum[0].y + sum[1].y;
        ready(carried[0][0]), ready(carried[0][1]);
      }
      if (!goes_on) return;
      float d[2][STATES], dx[2][GATES], dr[2][MOST(LINKS)], ds[2][STATES], de[1], after[STATES];
      const float q[1] = {};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int s = 0; s < STATES; ++s) d[u][s] = carried[s][u];
        d[u][0] += half_of(output, u);
      }
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        float to[2][MOST(VALUES)], operand[1];
#pragma unroll
        for (int u = 0; u < 2; ++u)
          run_stage(stage, now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], to[u], operand, d[u], q,
                    u == 0 ? first : second, dx[u], dr[u], ds[u], summed[u] + SUMMED - VECTORS, de, after);
        if (packs(stage) > 0) {
          float own[EIGHTS][8] = {};
          int place = 0;
#pragma unroll
          for (int i = 0; i < REDUCTIONS; ++i) {
            if (reduction_stage(i) != stage) continue;
#pragma unroll
            for (int k = 0; k < VALUES; ++k)
              if (k >= reduction_first(i) && k < reduction_first(i) + reduction_count(i))
                own[place / 8][place % 8] += (first ? to[0][k] : 0.f) + (second ? to[1][k] : 0.f);
            ++place;
          }
          float* const at = own_slots + mean_offset(stage);
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) {
            const float2 sums = sums_of_warp(own[e], lane);
            if (lane < 4 && e * 2 + lane / 2 < packs(stage)) *(float2*)(at + part * 4 * packs(stage) + e * 8 + lane * 2) = sums;
          }
          if constexpr (WHOLE > 1)
            named_barrier(1 + seat, 32 * WHOLE);
          else
            __syncwarp();
          float4 all[MOST(PACKS)] = {};
#pragma unroll
          for (int warp = 0; warp < WHOLE; ++warp)
#pragma unroll
            for (int pack = 0; pack < PACKS; ++pack)
              if (pack < packs(stage)) {
                const float4 its = ((const float4*)at)[warp * packs(stage) + pack];
                all[pack] = {all[pack].x + its.x, all[pack].y + its.y, all[pack].z + its.z, all[pack].w + its.w};
              }
#pragma unroll
          for (int i = 0, place = 0; i < REDUCTIONS; ++i) {
            if (reduction_stage(i) != stage) continue;
            const float4 pack = all[place / 4];
            m[reduction_place(i)] = (place % 4 == 0 ? pack.x : place % 4 == 1 ? pack.y : place % 4 == 2 ? pack.z : pack.w) *
                                    (1.f / (float)(UNITS * reduction_count(i)));
            ++place;
          }
        }
      }
      float scale = 1.f;
#if HALVES
      float most = 0.f;  // of the gradients of this sequence that the block's weights multiply
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int l = 0; l < LEAVES; ++l) most = fmaxf(most, (u == 0 ? first : second) ? fabsf(dr[u][l]) : 0.f);
#pragma unroll
      for (int away = 1; away < BESIDE; away *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, away));
      scale = scale_of(unscale_of(most));
      if (lane % BESIDE == 0 && sends)
        send_pair(target + shared_address(scales) - base + line * 8, target + barriers - base,
                  {__float_as_uint(unscale_of(most)), 0u});
#endif
#pragma unroll
      for (int from = 0; from < RECURRENT; from += 4) {
        unsigned words[4] = {};
#pragma unroll
        for (int l = 0; l < LEAVES; ++l)
          if (leaf_gate(l) / 4 * 4 == from)
            words[leaf_gate(l) % 4] = operand_pair(first ? scale * dr[0][l] : 0.f, second ? scale * dr[1][l] : 0.f);
        const uint4 data = turned(words, lane);
        const int gate = from + lane % 4;
        if (sends && gate < RECURRENT)
          send(target + gradients_to + gate * SLICE / WORD_ELEMENTS * 4, target + barriers - base, data);
      }
      // what nobody waits for
#pragma unroll
      for (int s = 0; s < STATES; ++s) carried[s][0] = ds[0][s], carried[s][1] = ds[1][s];
      load(t + 2, read);
      if constexpr (BIAS) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) summed[u][g] += dx[u][g];
#pragma unroll
          for (int i = 0; i < APART; ++i) summed[u][GATES + i] += dr[u][apart(i)];
        }
      }
#pragma unroll
      for (int g = 0; g < GATES; ++g) store_pair(gradients_at + g * UNITS, dx[0][g], dx[1][g], first, second);
#pragma unroll
      for (int i = 0; i < APART; ++i)
        store_pair(apart_gradients_at + i * UNITS, dr[0][apart(i)], dr[1][apart(i)], first, second);
      gradients_at += row_step * GATES * UNITS, apart_gradients_at += row_step * APART * UNITS;
    };
    // In turns: what is moved from one place to another would have to have come.
    for (int t = 0; line < lines; t += 2) {  // the same for all warps of a sequence
      step(t, even);
      if (t == time) break;
      step(t + 1, odd);
      if (t + 1 == time) break;
    }
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      store_pair(a.initial_gradients[s] + start, carried[s][0], carried[s][1],
                 first && a.initial_gradients[s] != nullptr, second && a.initial_gradients[s] != nullptr);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i)
      store_wide_pair(a.sums[direction] + ((long long)sequence * SUMMED + i) * UNITS + unit, summed[0][i], summed[1][i], first,
                      second);
  }
  cluster_barrier();  // a block that has ended must not be sent to
}
