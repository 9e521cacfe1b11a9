// All steps of a recurrent layer, backward, in one launch, for cells whose step has means: staged_backward.cu where a
// step has one exchange in place of two.
//
// A gradient of what the weights multiply is a sum of terms, vectors times a number of the sequence made of means; and so
// is its product with the transposed weights.  All terms are multiplied before the means are known, as columns of the
// product beside each other, and travel with what means are made of.  Who has got all of it makes the means, then the
// numbers, then the gradient of the first state.  Terms that are the same for all units and steps are multiplied once,
// before the first step.
//
// A step is: wait for what the step before sent | gradients of the states | stage 0 | product, and sums for means | the
// rest of stage 1 of the step before.  The first warps multiply and send; the others compute the cell, each of 16 units
// x 2 sequences, one of a thread, and what needs no gradient of the next step ahead.
//
//   registers  weights and sums of one product; of the warps of the cell all of two steps
//   shared     terms three times, arrived sums and what means are made of twice, vectors, barriers, more weights
//   global     as in staged_backward.cu
//
// What is exchanged lies in shared memory twice: who sends the step after the next has got all of the next, which is sent
// by those who have read this one.  Terms lie there three times: while the cell writes those of a step that need no gradient,
// a warp may still multiply those of the step before the last.  It has multiplied what came before, since its block's
// barrier let others pass whose sums for that step have come.
//
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int WITHIN = 8 / EACH, ROWS = WITHIN * TILES, COUPLES = (ROWS + 1) / 2, ITEMS = GROUPS * COUPLES;
constexpr int PRODUCERS = WARPS - ITEMS, THREADS = 32 * WARPS;
constexpr int STRIPS = CLUSTER * GROUPS, SHARE = (STRIPS + PRODUCERS - 1) / PRODUCERS;
constexpr int DEPTHS = RECURRENT * SLICE / (8 * WORD_ELEMENTS);
constexpr int STRIDE = DEPTHS * 8 + 4;  // of a column: 8 rows of 16 bytes are in 32 different banks
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT;
constexpr int WEIGHT_WORDS = PRODUCERS * STREAMED * 128, TERM_WORDS = 8 * TILES * STRIDE;
constexpr int SUM_WORDS = GROUPS * TILES * CLUSTER * 128, VECTOR_WORDS = VECTORS * SLICE;
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS;
// Of the sums that means are made of: a warp makes so many of a sequence, each known to so many threads.
constexpr int PLACES = power_from(REDUCTIONS < 4 ? 4 : REDUCTIONS), ALIKE = 16 / PLACES;
constexpr int SOURCE_WORDS = 2 * COUPLES * PLACES;
constexpr unsigned OF_PRODUCT = SUM_WORDS * 4, ARRIVING = OF_PRODUCT + SOURCES * SOURCE_WORDS * 4;  // bytes
constexpr int EARLIER = CONSTANTS > 0;  // exchanges before that of the first step
constexpr int COPIES = 3;               // of terms
__device__ __forceinline__ int next_copy(int copy) { return copy + 1 < COPIES ? copy + 1 : 0; }
// Of terms but the first, whose size is not that of gradients: float16 ends at 65,504.
constexpr float SCALE = ELEMENT_BYTES == 2 && !BFLOAT16 ? 1 / 64.f : 1.f;
static_assert(MEAN_WORDS == SOURCES * SOURCE_WORDS, "tiling and kernel disagree");
static_assert(4 * (WEIGHT_WORDS + 2 * SUM_WORDS + COPIES * TERM_WORDS + 2 * MEAN_WORDS + VECTOR_WORDS) + 16 == SHARED,
              "tiling and kernel disagree");

// Where among a source's sums those of a pair of units and of columns lie: 8 pairs of units with the same pair of columns in
// different banks.  The pair of units is that of a thread whose sums they are, or whose unit is one of them.
__device__ __forceinline__ int spot_of(int lane, int columns) { return lane / 4 * 4 + (columns ^ (lane / 8)); }

struct Given {  // what a thread reads as the cell's gradient reads it
  float x[GATES], r[MOST(LINKS)] = {}, before[STATES], m[MOST(MEANS)] = {};
};

struct Kept {  // of a step
  Given given;
  Values values;
  float d[STATES], dx[GATES], dr[MOST(LINKS)], ds[STATES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;                         // [warp, strip and depth, lane]
  float4* const arrived = (float4*)(memory + WEIGHT_WORDS);       // [copy, group, tile, source, spot]
  unsigned* const terms = memory + WEIGHT_WORDS + 2 * SUM_WORDS;  // [copy, column, gate, unit]
  float* const slots = (float*)(terms + COPIES * TERM_WORDS);
  float* const own_vectors = slots + 2 * MEAN_WORDS;  // [vector, unit of the block]
  const unsigned base = shared_address(memory), barriers = shared_address(own_vectors + VECTOR_WORDS);

  const int warp = own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int batch = (int)a.batch, cluster = blockIdx.x / CLUSTER, time = (int)a.time;
  const Element* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
  const auto weights_of = [&](int depth) {
    const int own = (int)rank * SLICE + depth % SLICE;
    return WeightRow{weights + ((long long)(depth / SLICE) * UNITS + own) * WEIGHT_PITCH, UNITS - own};
  };
  bring_columns<First<RESIDENT>, STRIPS, SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS, SLICE>(
      memory, warp, lane, UNITS, [](int s, int d) { return s * DEPTHS + d; }, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) {
        if (warp < PRODUCERS) streamed[(warp * STREAMED + i) * 32 + lane] = words;
      });
  for (int i = threadIdx.x; i < VECTOR_WORDS; i += THREADS) {
    const int own = rank * SLICE + i % SLICE;
    own_vectors[i] = own < UNITS ? wide(a.vectors[direction][i / SLICE][own]) : 0.f;
  }
  for (int i = threadIdx.x; i < COPIES * TERM_WORDS; i += THREADS) terms[i] = 0;  // columns that nobody writes
  if (threadIdx.x == 0) {
    for (int copy = 0; copy < 2; ++copy) start_barrier(barriers + 8 * copy, 1);
    barriers_started();
    for (int copy = 0; copy < 2; ++copy) expect(barriers + 8 * copy, copy < EARLIER ? OF_PRODUCT : ARRIVING);
  }
  cluster_barrier();

  if (warp < PRODUCERS) {
    const unsigned columns = shared_address(terms) + ((lane % 8) * STRIDE + lane / 8 * 4) * 4;
    const int spot = spot_of(lane, lane % 4);
    for (int n = 0, copy = 0; n < time + EARLIER; ++n, copy = next_copy(copy)) {
      named_barrier(1, THREADS);
#pragma unroll
      for (int i0 = 0; i0 < SHARE; i0 += CHUNK) {
        float sums[CHUNK][TILES][2][4] = {};
#pragma unroll
        for (int d = 0; d < DEPTHS; d += 2) {
          uint4 b[TILES];
#pragma unroll
          for (int n0 = 0; n0 < TILES; ++n0) {
            const unsigned at = columns + (unsigned)copy * TERM_WORDS * 4 + (n0 * 8 * STRIDE + d * 8) * 4;
            b[n0] = d + 1 < DEPTHS ? load_columns(at) : load_half_columns(at);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (d + half < DEPTHS)
#pragma unroll
              for (int c = 0; c < CHUNK; ++c)
                if (i0 + c < SHARE) {
                  const int i = (i0 + c) * DEPTHS + d + half;
                  const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0]
                                                           : streamed[(warp * STREAMED + i - RESIDENT) * 32 + lane]);
#pragma unroll
                  for (int n0 = 0; n0 < TILES; ++n0)
                    multiply(sums[c][n0][half], weight,
                             right_of(half ? b[n0].z : b[n0].x, half ? b[n0].w : b[n0].y));
                }
        }
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
          const int strip = warp * SHARE + i0 + c;
          if (i0 + c >= SHARE || strip >= STRIPS) break;
          const unsigned target = at_rank(base, strip / GROUPS);
#pragma unroll
          for (int n0 = 0; n0 < TILES; ++n0) {  // two columns of one unit, then of the next
            const float(&one)[4] = sums[c][n0][0], (&two)[4] = sums[c][n0][1];
            const int slot = n % 2 * (SUM_WORDS / 4) + ((strip % GROUPS * TILES + n0) * CLUSTER + rank) * 32 + spot;
            const uint4 data = {__float_as_uint(one[0] + two[0]), __float_as_uint(one[1] + two[1]),
                                __float_as_uint(one[2] + two[2]), __float_as_uint(one[3] + two[3])};
            send(target + WEIGHT_WORDS * 4 + slot * 16, target + barriers - base + 8 * (n % 2), data);
          }
        }
      }
    }
  } else {
    const int item = warp - PRODUCERS, group = item / COUPLES, seat = item % COUPLES * 2 + lane % 2;
    const int row = seat < ROWS ? seat : 0;  // of the cluster's sequences
    const int of_block = group * 16 + lane / 2, unit = (int)rank * SLICE + of_block, sequence = cluster * ROWS + row;
    const int width = gridDim.y * UNITS, source = rank * GROUPS + group;
    const bool counts = seat < ROWS, there = counts && sequence < batch && unit < UNITS, reverse = direction == 1;
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

    // what is read of step `t`, the next after what was read last; of the last step states are those of the call
    const auto load = [&](int t, Read& into) {
      const bool reads = there && t < time, follows = there && t + 1 < time;
#pragma unroll
      for (int i = 0; i < LEVELS; ++i) into.levels[i] = reads ? levels_at[i] : 0.f;
#pragma unroll
      for (int g = 0; g < GATES; ++g) into.gates[g] = reads ? gates_at[g * UNITS] : Gate{};
#pragma unroll
      for (int i = 0; i < APART; ++i) into.apart[i] = reads ? apart_at[i * UNITS] : Gate{};
      into.y_gradient = reads && has_output_gradient ? a.y_gradient[outputs] : Element{};
      into.before = follows ? a.y[outputs + row_step * width] : Element{};
#pragma unroll
      for (int s = 1; s < STATES; ++s) into.states[s - 1] = follows ? states_at[(s - 1) * state_stride] : 0.f;
      gates_at += row_step * GATES * UNITS, apart_at += row_step * APART * UNITS, states_at += row_step * UNITS;
      levels_at += row_step * LEVELS, outputs += row_step * width;
    };
    float initial[STATES];
#pragma unroll
    for (int s = 0; s < STATES; ++s) initial[s] = there && has_initial ? wide(a.initial[s][start]) : 0.f;
    const auto given_of = [&](const Read& read, bool last) {
      Given given;
#pragma unroll
      for (int g = 0; g < GATES; ++g) given.x[g] = wide_gate(read.gates[g]);
#pragma unroll
      for (int i = 0; i < APART; ++i) given.r[apart(i)] = wide_gate(read.apart[i]);
      given.before[0] = last ? initial[0] : wide(read.before);
#pragma unroll
      for (int s = 1; s < STATES; ++s) given.before[s] = last ? initial[s] : read.states[s - 1];
#pragma unroll
      for (int i = 0; i < LEVELS; ++i) given.m[i] = read.levels[i];
      return given;
    };
    const int column = row / WITHIN * 8 + row % WITHIN * EACH;  // the first of the sequence
    Element* const own_terms = (Element*)(terms + column * STRIDE) + of_block;
    const auto put = [&](int copy, const float (&w)[TERMS * LEAVES], bool first) {  // the first term, or all others
      if (counts)
#pragma unroll
        for (int k = 0; k < TERMS; ++k)
          if ((k == 0) == first)
#pragma unroll
            for (int l = 0; l < LEAVES; ++l)
              own_terms[(copy * TERM_WORDS + k * STRIDE) * 2 + leaf_gate(l) * SLICE] =
                  narrow(there ? (first ? 1.f : SCALE) * w[k * LEAVES + l] : 0.f);
    };
    const auto wait_for = [&](int n) {
      wait(barriers + 8 * (n % 2), n / 2 % 2);
      if (threadIdx.x == 32 * PRODUCERS) expect(barriers + 8 * (n % 2), ARRIVING);
    };
    // of two columns beside each other, from an even one of a tile on, the sums of all sources
    const auto gather = [&](int n, int tile, int from) {
      const float2* const at = (const float2*)(arrived + n % 2 * (SUM_WORDS / 4) + (group * TILES + tile) * CLUSTER * 32 +
                                               spot_of(lane, from / 2)) + lane / 2 % 2;
      float2 sum = at[0];
#pragma unroll
      for (int source = 1; source < CLUSTER; ++source)
        sum.x += at[source * 64].x, sum.y += at[source * 64].y;
      return sum;
    };
    // Sums over the 16 units, of which a thread gets one: that of number lane / (32 / PLACES).
    const auto added = [&](const float (&to)[MOST(VALUES)]) {
      float own[PLACES] = {};
#pragma unroll
      for (int i = 0; i < REDUCTIONS; ++i)
#pragma unroll
        for (int k = 0; k < reduction_count(i); ++k) own[i] += unit < UNITS ? to[reduction_first(i) + k] : 0.f;
      return dealt_sum<2>(own, lane);
    };
    // Sums lie as [source, couple of sequences, 4 sums, sequence, sum]: a warp sends 16 bytes of a sequence and 4 sums.
    constexpr int STEP = 32 / PLACES;  // lanes between two sums
    const int place = lane / STEP, sharer = lane / 2 % ALIKE;
    const int pack = ((item % COUPLES * (PLACES / 4) + place / 4) * 2 + lane % 2) * 4;
    const auto send_sums = [&](int n, float sum) {
      const float beside = __shfl_xor_sync(0xffffffffu, sum, STEP);
      const float low = place % 2 ? beside : sum, high = place % 2 ? sum : beside;
      const float far_low = __shfl_xor_sync(0xffffffffu, low, 2 * STEP);
      const float far_high = __shfl_xor_sync(0xffffffffu, high, 2 * STEP);
      const bool second = place % 4 / 2;
      const uint4 data = {__float_as_uint(second ? far_low : low), __float_as_uint(second ? far_high : high),
                          __float_as_uint(second ? low : far_low), __float_as_uint(second ? high : far_high)};
      const int slot = shared_address(slots) - base + (n % 2 * MEAN_WORDS + source * SOURCE_WORDS + pack) * 4;
#pragma unroll
      for (int p = 0; p < CLUSTER; p += 4 * ALIKE) {
        const int rank_to = p + place % 4 * ALIKE + sharer;
        if (rank_to < CLUSTER) {
          const unsigned target = at_rank(base, rank_to);
          send(target + slot, target + barriers - base + 8 * (n % 2), data);
        }
      }
    };
    const auto receive_means = [&](int n, float (&m)[MOST(MEANS)]) {
      const float* const from = slots + n % 2 * MEAN_WORDS + pack + place % 4 + sharer * SOURCE_WORDS;
      float sum = ALIKE <= SOURCES || sharer < SOURCES ? from[0] : 0.f;
#pragma unroll
      for (int other = ALIKE; other < SOURCES; other += ALIKE)
        if (SOURCES % ALIKE == 0 || other + sharer < SOURCES) sum += from[other * SOURCE_WORDS];
#pragma unroll
      for (int away = 2; away < 2 * ALIKE; away *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
#pragma unroll
      for (int i = 0; i < REDUCTIONS; ++i)
        m[reduction_place(i)] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(sum), i * STEP + lane % 2)) *
                                (1.f / (float)(UNITS * reduction_count(i)));
    };

    float carried[STATES], summed[MOST(SUMMED)] = {}, constant[MOST(CONSTANTS)] = {};
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      const bool given = there && a.final_gradients[s] != nullptr;
      carried[s] = given ? wide(a.final_gradients[s][start]) : 0.f;
    }
    Read even, odd;  // what steps read is asked for two steps ahead
    load(0, even), load(1, odd);
    if constexpr (EARLIER > 0) {
      if (item % COUPLES == 0 && lane % 2 == 0)
#pragma unroll
        for (int c = 0; c < CONSTANTS; ++c)
#pragma unroll
          for (int l = 0; l < LEAVES; ++l)
            ((Element*)(terms + c * STRIDE))[leaf_gate(l) * SLICE + of_block] =
                narrow(unit < UNITS ? constant_term(c * LEAVES + l) : 0.f);
      arrive_at_barrier(1, THREADS);
      wait_for(0);
#pragma unroll
      for (int c = 0; c < CONSTANTS; ++c) {
        const float2 sums = gather(0, 0, c / 2 * 2);
        constant[c] = c % 2 ? sums.y : sums.x;
      }
    }

    int copy = EARLIER;  // of the terms of the step
    const auto step = [&](int t, Read& read, Kept& now, Kept& before) {
      const int n = t + EARLIER;
      const bool goes_on = t < time;
      float w[TERMS * LEAVES], to[MOST(VALUES)], de[1], after[STATES], f[TERMS + MOST(CONSTANTS)], operands[1];
      const float q[1] = {};
      float v[MOST(VECTORS)];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) v[i] = own_vectors[i * SLICE + of_block];
      const float output = wide(read.y_gradient);
      now.given = given_of(read, t + 1 == time);
      {  // what needs no gradient, while sums travel
        const float d[STATES] = {};
        float dx[GATES], dr[MOST(LINKS)], ds[STATES], dv[MOST(VECTORS)] = {};
        Values values;
        const Given& g = now.given;
        run_stage(0, g.x, g.r, g.before, v, nullptr, g.m, values, to, operands, d, q, true, dx, dr, ds, dv, de, after, f, w);
      }
      if (goes_on) put(copy, w, false);

      if (t > 0) {  // the states' gradients
        wait_for(n - 1);
        Given& g = before.given;
        receive_means(n - 1, g.m);
        float2 sums[EACH / 2];
#pragma unroll
        for (int k = 0; k < TERMS; k += 2) sums[k / 2] = gather(n - 1, row / WITHIN, row % WITHIN * EACH + k);
        float dx[GATES], dr[MOST(LINKS)], dv[MOST(VECTORS)] = {}, none[TERMS * LEAVES];
        run_stage(1, g.x, g.r, g.before, v, nullptr, g.m, before.values, to, operands, before.d, q, true, dx, dr,
                  before.ds, dv, de, after, f, none);
        float sum = sums[0].x;
#pragma unroll
        for (int k = 1; k < TERMS; ++k) sum += 1 / SCALE * f[k] * (k % 2 ? sums[k / 2].y : sums[k / 2].x);
#pragma unroll
        for (int c = 0; c < CONSTANTS; ++c) sum += f[TERMS + c] * constant[c];
#pragma unroll
        for (int s = 0; s < STATES; ++s) carried[s] = before.ds[s];
        carried[0] += sum;
      }
      if (goes_on) {
        const Given& g = now.given;
#pragma unroll
        for (int s = 0; s < STATES; ++s) now.d[s] = carried[s];
        now.d[0] += output;
        run_stage(0, g.x, g.r, g.before, v, nullptr, g.m, now.values, to, operands, now.d, q, there, now.dx, now.dr, now.ds,
                  summed + SUMMED - VECTORS, de, after, f, w);
        put(copy, w, true);
        arrive_at_barrier(1, THREADS);
        send_sums(n, added(to));
      }
      if (t > 0) {  // what nobody waits for
        const Given& g = before.given;
        float ds[STATES], none[TERMS * LEAVES];
        run_stage(1, g.x, g.r, g.before, v, nullptr, g.m, before.values, to, operands, before.d, q, there, before.dx, before.dr,
                  ds, summed + SUMMED - VECTORS, de, after, f, none);
        if constexpr (BIAS) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) summed[g] += there ? before.dx[g] : 0.f;
#pragma unroll
          for (int i = 0; i < APART; ++i) summed[GATES + i] += there ? before.dr[apart(i)] : 0.f;
        }
        if (there) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) gradients_at[g * UNITS] = narrow(before.dx[g]);
#pragma unroll
          for (int i = 0; i < APART; ++i) apart_gradients_at[i * UNITS] = narrow(before.dr[apart(i)]);
        }
        gradients_at += row_step * GATES * UNITS, apart_gradients_at += row_step * APART * UNITS;
      }
      load(t + 2, read);
      copy = next_copy(copy);
    };
    // In turns: what is moved from one place to another would have to have come.
    Kept first = {}, second = {};
    for (int t = 0;; t += 2) {
      step(t, even, first, second);
      if (t == time) break;
      step(t + 1, odd, second, first);
      if (t + 1 == time) break;
    }

#pragma unroll
    for (int s = 0; s < STATES; ++s)
      if (there && a.initial_gradients[s] != nullptr) a.initial_gradients[s][start] = narrow(carried[s]);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
      summed[i] += __shfl_xor_sync(0xffffffffu, summed[i], 1);
      if (lane % 2 == 0 && unit < UNITS)
        a.sums[direction][((long long)(cluster * COUPLES + item % COUPLES) * SUMMED + i) * UNITS + unit] = summed[i];
    }
  }
  cluster_barrier();  // a block that has ended must not be sent to
}
