// All steps of a recurrent layer, backward, in one launch, for cells whose step has means over the units: staged_backward.cu
// where a warp computes the cell of one sequence, for the 32 units of its block, and other warps multiply.
//
// A cluster of CLUSTER blocks owns `share` sequences, at most LINES, each block the units from 32 x rank on and weights of
// these.  More than 8 are two sub-tiles, which take turns: one is multiplied while the other's cell is computed.  A step of
// one is
//
//   the warp of a sequence  what needs no gradient, and its sums for means | wait for sums of all blocks | stage 0 | send sums
//                           for means | the rest of stage 0, and what stage 1 needs of no mean | wait for means | stage 1 | ...
//                           | put the gradients of what the weights multiply in place | the rest of the last stage
//   multiplying warps       wait for these | product | send sums to the blocks that have their units
//
// Multiplying warp has SHARE strips of 16 units, whose sums of two sequences are 16 bytes of a thread.
//
//   registers  weights and sums of a product; of a sequence's warp what it carries, reads and adds up over all steps
//   shared     gradients of the block's units, sums and what means are made of from all blocks, vectors, barriers, more weights
//   global     as in staged_backward.cu
//
// What is exchanged, and gradients, lie in shared memory once, each sub-tile's by itself.  The warp of a sequence that has the
// means of step t + 1 knows that in each block the sequence's warp has passed its wait for all sums of step t: so
//   - all warps of its own block that multiply have sent theirs of step t, and it may write gradients;
//   - what multiplies in its block, which waits for the gradients of the sub-tile's sequences, may send sums of step t + 1:
//     those of step t were read before what these means are made of was sent.
// And what means of step t + 1 are made of is sent by a warp that has all sums of step t, which the reader's block made
// after the reader had put its gradients in place, and so had read what means of step t were made of.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for blocks of its own cluster alone, which the hardware starts together: it cannot wait for ever.

// @generated

constexpr int THREADS = 32 * WARPS, MULTIPLYING = WARPS - LINES;
constexpr int BLOCKS = (UNITS + 31) / 32, STRIPS = (UNITS + 15) / 16, SHARE = (STRIPS + MULTIPLYING - 1) / MULTIPLYING;
constexpr int DEPTHS = RECURRENT * 2, STREAMED = SHARE * DEPTHS - RESIDENT;
constexpr int STRIDE = DEPTHS * 8 + 4;  // words of a sequence: 8 times 16 bytes are in 32 different banks
constexpr int CHAINS = CHUNK < 4 ? 2 : 1;  // of products that wait for each other
// of a block's sums: [pair of sequences, strip, 8, unit, sequence], of the odd strip the second sequence first: the 32 units
// of a sequence are in different banks; of a last sequence without another, where a thread has both strips, [8, strip, unit]
constexpr bool COUPLED = SHARE % 2 == 0 && CHUNK % 2 == 0;
constexpr int MOST_LINES = (LINES + TILES - 1) / TILES, PAIRS = (MOST_LINES + 1) / 2, SOURCE_WORDS = TILES * PAIRS * 64;
constexpr int WEIGHT_WORDS = MULTIPLYING * STREAMED * 128, GRADIENT_WORDS = 8 * TILES * STRIDE, SUM_WORDS = BLOCKS * SOURCE_WORDS;
constexpr int VECTOR_WORDS = VECTORS * 32, SCALES = HALVES ? 8 * TILES : 0;
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS;
constexpr int AHEAD = 4;  // steps between asking L2 for what a step reads and reading it
constexpr int BESIDE = LINES | 1;  // sequences of a source: an odd number puts those of several sources into different banks
static_assert(4 * (WEIGHT_WORDS + GRADIENT_WORDS + SUM_WORDS + MEAN_WORDS + VECTOR_WORDS + SCALES) + 8 * (TILES + STAGES * LINES) ==
                  SHARED,
              "tiling and kernel disagree");
static_assert(SLICE == 32 && CLUSTER > 1 && BLOCKS <= CLUSTER && MOST_LINES <= 8 && TILES <= 2, "a thread has a unit of one sequence");
static_assert(ROUNDS == 0 && LEAVES == RECURRENT && REDUCTIONS > 0 && !OPTIONS, "such steps have means alone");
static_assert(ELEMENT_BYTES == 2 || HALVES, "an operand's word is two units");
static_assert(packs(STAGES - 1) == 0, "nobody waits for means of the last stage");

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  uint4* const streamed = (uint4*)memory;             // [warp, strip and depth, lane]
  unsigned* const gradients = memory + WEIGHT_WORDS;  // [sequence, gate, unit of the block]
  float* const sums_here = (float*)(gradients + GRADIENT_WORDS);  // [source, pair of sequences, strip, 8, unit, sequence]
  float* const slots = sums_here + SUM_WORDS;                     // [stage, source, sequence, number]
  float* const own_vectors = slots + MEAN_WORDS;                  // [vector, unit of the block]
  float* const scales = own_vectors + VECTOR_WORDS;               // what those of gradients are the inverse of, [sequence]
  const unsigned base = shared_address(memory), barriers = shared_address(scales + SCALES);  // [sub-tile], [stage, sequence]

  const int warp = own_warp(), lane = threadIdx.x % 32, direction = blockIdx.y;
  const unsigned rank = rank_in_cluster();
  const int batch = (int)a.batch, clusters = gridDim.x / CLUSTER, share = (batch + clusters - 1) / clusters;
  const int first_place = blockIdx.x / CLUSTER * share, lines = max(0, min(share, batch - first_place));
  const int time = rank < BLOCKS && lines > 0 ? (int)a.time : 0;  // a block without units has nothing to wait for
  const Weight* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
  float unscale[SHARE][2];
#if HALVES
#pragma unroll
  for (int s = 0; s < SHARE; ++s) {
    const int column = (warp * SHARE + s) * 16 + lane / 4 * 2;
    const bool first = warp < MULTIPLYING && rank < BLOCKS && column < UNITS;
    const float2 its = load_wide_pair(scales_behind(weights) + rank * UNITS + column, first, first && column + 1 < UNITS);
    unscale[s][0] = its.x, unscale[s][1] = its.y;
  }
#endif
  const auto weights_of = [&](int depth) {
    const int own = (int)rank * 32 + depth % 32;
    return WeightRow{weights + ((long long)(depth / 32) * UNITS + own) * WEIGHT_PITCH, UNITS - own};
  };
  bring_columns<First<RESIDENT>, STRIPS, SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS, SLICE>(
      memory, warp, lane, UNITS, [](int s, int d) { return s * DEPTHS + d; }, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) {
        if (warp < MULTIPLYING) streamed[(warp * STREAMED + i) * 32 + lane] = words;
      });
  for (int i = threadIdx.x; i < GRADIENT_WORDS; i += THREADS) gradients[i] = 0;
  for (int i = threadIdx.x; i < SUM_WORDS; i += THREADS) sums_here[i] = 0.f;  // of the step before the first
  for (int i = threadIdx.x; i < SCALES; i += THREADS) scales[i] = 0.f;
  for (int i = threadIdx.x; i < VECTOR_WORDS; i += THREADS) {
    const int own = rank * 32 + i % 32;
    own_vectors[i] = own < UNITS ? wide(a.vectors[direction][i / 32][own]) : 0.f;
  }
  // What comes for a step: of two sequences at a time the block's strips, of a sequence what means are made of.
  const int own_strips = max(0, min(2, STRIPS - 2 * (int)rank));
  const auto lines_of = [&](int sub) { return TILES == 1 ? lines : (lines + 1 - sub) / 2; };
  const auto summing = [&](int sub) {
    const int last = lines_of(sub) % 2 == 0 ? 0 : COUPLED ? min(1, own_strips) : own_strips;
    return (unsigned)(BLOCKS * (own_strips * (lines_of(sub) / 2) + last) * 128);
  };
  const auto barrier_of = [&](int stage, int line) { return barriers + 8 * (TILES + stage * LINES + line); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < TILES + STAGES * LINES; ++i) start_barrier(barriers + 8 * i, 1);
    barriers_started();
    for (int sub = 0; sub < TILES; ++sub) expect(barriers + 8 * sub, summing(sub));
    for (int stage = 0; stage < STAGES; ++stage)
      for (int line = 0; line < LINES; ++line) expect(barrier_of(stage, line), BLOCKS * packs(stage) * 16);
  }
  cluster_barrier();

  // threads that a sub-tile's gradients pass from and to
  const auto together = [&](int sub) { return 32 * (MULTIPLYING + lines_of(sub)); };
  if (warp < MULTIPLYING) {
    const unsigned all_columns = shared_address(gradients) + (lane % 8 * STRIDE + lane / 8 * 4) * 4;
    const int used = TILES > 1 && lines > 1 ? 2 : 1;
    for (int turn = 0; turn < time * used; ++turn) {
      const int sub = turn & (used - 1), its_lines = lines_of(sub);
      const unsigned columns = all_columns + sub * 8 * STRIDE * 4;
      named_barrier(1 + sub, together(sub));
#pragma unroll
      for (int i0 = 0; i0 < SHARE; i0 += CHUNK) {
        float sums[CHUNK][CHAINS][4] = {};
#pragma unroll
        for (int d = 0; d < DEPTHS; d += 2) {
          const uint4 b = load_columns(columns + d * 8 * 4);
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < CHUNK; ++c)
              if (i0 + c < SHARE) {
                const int i = (i0 + c) * DEPTHS + d + half;
                const Left weight = left_of(i < RESIDENT ? resident[i < RESIDENT ? i : 0]
                                                         : streamed[(warp * STREAMED + i - RESIDENT) * 32 + lane]);
                multiply(sums[c][half % CHAINS], weight, right_of(half ? b.z : b.x, half ? b.w : b.y));
              }
        }
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
          const int strip = warp * SHARE + i0 + c;
          if (i0 + c >= SHARE || (SHARE * MULTIPLYING != STRIPS && strip >= STRIPS)) break;
          const unsigned target = at_rank(base, strip / 2);
          const int pair = lane % 4;
          const auto word = [&](int c, int e) {  // of an even unit that of one sequence, of the next, then of the odd unit
            float sum = sums[c][0][e];
            if constexpr (CHAINS > 1) sum += sums[c][CHAINS - 1][e];
            // in this order, which neither weights nor gradients of any size overflow
            if constexpr (HALVES) sum = sum * unscale[i0 + c < SHARE ? i0 + c : 0][e / 2] * scales[sub * 8 + pair * 2 + e % 2];
            return __float_as_uint(sum);
          };
          const bool last = COUPLED && pair * 2 + 1 == its_lines;
          if (pair * 2 < its_lines && !(last && strip % 2)) {
            const int to = (int)rank * SOURCE_WORDS + ((sub * PAIRS + pair) * 2 + strip % 2) * 32 + lane / 4 * 4;
            uint4 data = strip % 2 ? uint4{word(c, 1), word(c, 0), word(c, 3), word(c, 2)}
                                   : uint4{word(c, 0), word(c, 1), word(c, 2), word(c, 3)};
            if (last) data = {data.x, data.z, word(c + 1 < CHUNK ? c + 1 : c, 0), word(c + 1 < CHUNK ? c + 1 : c, 2)};
            send(target + shared_address(sums_here) - base + to * 4, target + barriers + 8 * sub - base, data);
          }
        }
      }
    }
  } else if (warp - MULTIPLYING < lines && rank < BLOCKS) {
    const int line = warp - MULTIPLYING, unit = (int)rank * 32 + lane, sequence = first_place + line, width = gridDim.y * UNITS;
    const bool there = UNITS % 32 == 0 || unit < UNITS, reverse = direction == 1;
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
    Read read;
    const auto load = [&](int t) {  // what is read of step t, the next after what was read last
      // a branch: where a zero is in the place of each load, the compiler makes these zeros before others may go on
      if (t >= time) {
        read.y_gradient = Element{};
        return;
      }
      const bool follows = there && t + 1 < time;
#pragma unroll
      for (int i = 0; i < LEVELS; ++i) read.levels[i] = levels_at[i];
#pragma unroll
      for (int g = 0; g < GATES; ++g) read.gates[g] = there ? gates_at[g * UNITS] : Gate{};
#pragma unroll
      for (int i = 0; i < APART; ++i) read.apart[i] = there ? apart_at[i * UNITS] : Gate{};
      read.y_gradient = there && has_output_gradient ? a.y_gradient[outputs] : Element{};
      read.before = follows ? a.y[outputs + row_step * width] : Element{};
#pragma unroll
      for (int s = 1; s < STATES; ++s) read.states[s - 1] = follows ? states_at[(s - 1) * state_stride] : 0.f;
      if (there && t + AHEAD < time) {
#pragma unroll
        for (int g = 0; g < GATES; ++g) prefetch(gates_at + (AHEAD * row_step * GATES + g) * UNITS);
#pragma unroll
        for (int i = 0; i < APART; ++i) prefetch(apart_at + (AHEAD * row_step * APART + i) * UNITS);
        if (has_output_gradient) prefetch(a.y_gradient + outputs + AHEAD * row_step * width);
        prefetch(a.y + outputs + AHEAD * row_step * width);
#pragma unroll
        for (int s = 1; s < STATES; ++s) prefetch(states_at + (s - 1) * state_stride + (AHEAD - 1) * row_step * UNITS);
      }
      gates_at += row_step * GATES * UNITS, apart_at += row_step * APART * UNITS, states_at += row_step * UNITS;
      levels_at += row_step * LEVELS, outputs += row_step * width;
    };
    float initial[STATES], carried[STATES], summed[MOST(SUMMED)] = {};
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      initial[s] = there && has_initial ? wide(a.initial[s][start]) : 0.f;
      carried[s] = there && a.final_gradients[s] != nullptr ? wide(a.final_gradients[s][start]) : 0.f;
    }
    const int sub = TILES > 1 && line >= lines_of(0), place = line - sub * lines_of(0);  // in the sub-tile
    const bool last = COUPLED && place % 2 == 0 && place + 1 == lines_of(sub);
    const int sum_at = last ? lane % 16 / 2 * 4 + lane / 16 * 2 + lane % 2 : lane / 16 * 32 + lane % 16 * 2 + (place % 2 ^ lane / 16);
    const float* const own_sums = sums_here + (sub * PAIRS + place / 2) * 64 + sum_at;
    unsigned short* const own_gradients = (unsigned short*)(gradients + (sub * 8 + place) * STRIDE) + lane;
    const auto slot_of = [&](int stage, int source) { return mean_offset(stage) + (source * BESIDE + line) * 4 * packs(stage); };
    const auto add_sums = [&](float start) {  // of all blocks
      float sum[4] = {start};
#pragma unroll
      for (int source = 0; source < BLOCKS; ++source) {
        const float its = own_sums[source * SOURCE_WORDS];
        sum[source % 4] = source % 4 == source && source > 0 ? its : sum[source % 4] + its;
      }
      return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    };
    load(0);
    for (int t = 0;; ++t) {
      const bool goes_on = t < time, last = t + 1 == time;
      float x[GATES], r[MOST(LINKS)] = {}, before[STATES], v[MOST(VECTORS)], m[MOST(MEANS)];
      float d[STATES];
      const float q[1] = {};
      Values values;
      float rows[STAGES][EIGHTS][2][4] = {};  // of sums that means are made of
      carried[0] += wide(read.y_gradient);  // nothing after the last step
      ready(carried[0]);
#pragma unroll
      for (int s = 1; s < STATES; ++s) d[s] = carried[s];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) v[i] = own_vectors[i * 32 + lane];
      if (goes_on) {
#pragma unroll
        for (int i = 0; i < LEVELS; ++i) m[i] = read.levels[i];
#pragma unroll
        for (int g = 0; g < GATES; ++g) x[g] = wide_gate(read.gates[g]);
#pragma unroll
        for (int i = 0; i < APART; ++i) r[apart(i)] = wide_gate(read.apart[i]);
        before[0] = last ? initial[0] : wide(read.before);
#pragma unroll
        for (int s = 1; s < STATES; ++s) before[s] = last ? initial[s] : read.states[s - 1];
        run_before(0, x, r, before, v, nullptr, m, values, d, q);
        // others wait for what comes behind the wait, where two such warps share a scheduler
        float to[MOST(VALUES)];
        run_known(x, r, before, v, nullptr, m, values, to);
        add_pairs(0, true, lane, [&](int k) { return there ? to[k] : 0.f; }, rows[0]);
      }
      if (t > 0) wait(barriers + 8 * sub, (t - 1) % 2);
      if (!goes_on) break;
      d[0] = add_sums(carried[0]);
      float dx[GATES], dr[MOST(LINKS)], ds[STATES], de[1], after[STATES];
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        float to[MOST(VALUES)], operand[1];
        run_stage(stage, x, r, before, v, nullptr, m, values, to, operand, d, q, there, dx, dr, ds, summed + SUMMED - VECTORS,
                  de, after);
        if (packs(stage) > 0) {
          add_pairs(stage, false, lane, [&](int k) { return there ? to[k] : 0.f; }, rows[stage]);
          // a thread sends two sums to every eighth block
          const unsigned to_slot = shared_address(slots + slot_of(stage, rank)) - base + lane % 4 * 8;
          const unsigned to_barrier = barrier_of(stage, line) - base;
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) {
            const float2 sums = sums_of_rows(rows[stage][e]);
#pragma unroll
            for (int first = 0; first < BLOCKS; first += 8)
              if (e * 2 + lane % 4 / 2 < packs(stage) && first + lane / 4 < BLOCKS) {
                const unsigned target = at_rank(base, first + lane / 4);
                send_pair(target + to_slot + e * 32, target + to_barrier, {__float_as_uint(sums.x), __float_as_uint(sums.y)});
              }
          }
          // what comes before is counted too
          if (stage == 0 && t > 0 && place == 0 && lane == 0) expect(barriers + 8 * sub, summing(sub));
          if (batch > 0) {  // always: the compiler puts behind a wait what stands before it without a condition
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) v[i] = own_vectors[i * 32 + lane];  // so no register keeps them over both waits
            run_rest(stage, x, r, before, v, nullptr, m, values, to, operand, d, q, there, dx, dr, ds, summed + SUMMED - VECTORS,
                     de, after);
            run_before(stage + 1, x, r, before, v, nullptr, m, values, d, q);
          }
          wait(barrier_of(stage, line), t % 2);
          means_of_sums<BLOCKS>(stage, lane, [&](int source, int at) { return slots[slot_of(stage, source) + at]; }, m);
        }
      }
      float scale = 1.f;
#if HALVES
      float most = 0.f;
#pragma unroll
      for (int l = 0; l < LEAVES; ++l) most = fmaxf(most, there ? fabsf(dr[l]) : 0.f);
      most = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(most)));  // as it is not negative
      scale = scale_of(unscale_of(most));
      if (lane == 0) scales[sub * 8 + place] = unscale_of(most);
#endif
#pragma unroll
      for (int l = 0; l < LEAVES; ++l)
        own_gradients[leaf_gate(l) * 32] = (unsigned short)operand_pair(there ? scale * dr[l] : 0.f, 0.f);
      __syncwarp();
      arrive_at_barrier(1 + sub, together(sub));
      // what nobody waits for
      load(t + 1);
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage)
        if (packs(stage) > 0 && lane == 0) expect(barrier_of(stage, line), BLOCKS * packs(stage) * 16);
      float to[MOST(VALUES)], operand[1];
      run_rest(STAGES - 1, x, r, before, v, nullptr, m, values, to, operand, d, q, there, dx, dr, ds, summed + SUMMED - VECTORS,
               de, after);
#pragma unroll
      for (int s = 0; s < STATES; ++s) carried[s] = ds[s];
      if constexpr (BIAS) {
#pragma unroll
        for (int g = 0; g < GATES; ++g) summed[g] += there ? dx[g] : 0.f;
#pragma unroll
        for (int i = 0; i < APART; ++i) summed[GATES + i] += there ? dr[apart(i)] : 0.f;
      }
      if (there) {
#pragma unroll
        for (int g = 0; g < GATES; ++g) gradients_at[g * UNITS] = narrow(dx[g]);
#pragma unroll
        for (int i = 0; i < APART; ++i) apart_gradients_at[i * UNITS] = narrow(dr[apart(i)]);
      }
      gradients_at += row_step * GATES * UNITS, apart_gradients_at += row_step * APART * UNITS;
    }
    carried[0] = add_sums(carried[0]);
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      if (there && a.initial_gradients[s] != nullptr) a.initial_gradients[s][start] = narrow(carried[s]);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i)
      if (there) a.sums[direction][((long long)sequence * SUMMED + i) * UNITS + unit] = summed[i];
  }
  cluster_barrier();  // a block that has ended must not be sent to
}
