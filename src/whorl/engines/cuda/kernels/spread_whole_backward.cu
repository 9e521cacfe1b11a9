// All steps of a recurrent layer that one cluster cannot hold, backward, in one launch, for cells whose step has means over the
// units: spread_backward.cu where one block computes the cell of a whole sequence, as spread_whole_forward.cu does.
//
// BLOCKS = SOURCES x GATHERED blocks own ROWS sequences together, no more than there are blocks.  For the product with the
// recurrent weights, transposed, they are a rectangle as in spread_backward.cu: block (source, place) holds the weights from
// the gates of the `source`-th part of the units, to the units of the `place`-th part.  A step is
//
//   of a block with a sequence: sums for means that need no gradient | take the sums of all units from L2 | stage 0 | means |
//                               stage 1 | ... | put the gradients of the gates into L2
//   take the gradients of a part of the gates, of all sequences, out of L2 | product | put each sequence's sums into L2
//
//   registers  weights, sums of the products, gradients of the states, what the next step reads
//   shared     gradients of the gates twice (a warp without strips may still multiply), sums of each warp that means are made
//              of, vectors, what each thread adds up over all steps, more weights
//   global     as in spread_backward.cu; the ring of gradients, and sums, whose last bit is the phase
//
// Who puts sums of step t + 2 where those of step t were has taken the gradients of step t + 2 of all sequences: their blocks
// had taken the sums of step t + 1, and so of t, before.
//
// UNITS and the batch may be any number: what lies past them is computed as zero and never written.
// A block waits for all others that own the same sequences, so the launch must be cooperative.

// @generated

constexpr int BLOCKS = SOURCES * GATHERED;
constexpr int STRIPS = (UNITS + 16 * GATHERED - 1) / (16 * GATHERED), SHARE = (STRIPS + WARPS - 1) / WARPS;
constexpr int DEEP = GATHERED * SLICE, DEPTHS = RECURRENT * DEEP / 16;  // units of a source
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT, WEIGHT_WORDS = WARPS * STREAMED * 128;
typedef Operands<SHARE * DEPTHS, STREAMED> Weights;
constexpr int CHAINS = SHARE * TILES < 4 && DEPTHS > 1 ? 2 : 1;            // of products that wait for each other
constexpr int GRADIENT_WORDS = DEPTHS * 2 * STRIDE;
constexpr int OF_SOURCE = RECURRENT * DEEP / 2, PITCH = SOURCES * OF_SOURCE;  // words of a sequence's gradients in the ring
constexpr int SUM_PITCH = GATHERED * STRIPS * 16;                             // and of its sums of one source
constexpr int SUMMED = (BIAS ? GATES + APART : 0) + VECTORS, COUPLES = (GATES + APART + VECTORS + 1) / 2;
constexpr int AHEAD = 4;  // steps between asking L2 for what a step reads and reading it
static_assert(4 * (WEIGHT_WORDS + 2 * GRADIENT_WORDS + MEAN_WORDS + (2 * VECTORS + 4 * COUPLES) * THREADS) == SHARED,
              "tiling and kernel disagree");
static_assert(DEEP % 16 == 0, "depths are not whole");
static_assert(packs(STAGES - 1) == 0, "nobody waits for means of the last stage");
static_assert(ROUNDS == 0 && LEAVES == RECURRENT && REDUCTIONS > 0 && !OPTIONS && !CARRIED, "such steps have means alone");
static_assert(ROWS <= BLOCKS && WHOLE == WARPS && 64 * WARPS >= BLOCKS * SLICE, "a block has the cell of one sequence");
static_assert(BLOCKS * SLICE >= UNITS && (SOURCES - 1) * DEEP < UNITS, "the tile does not cover the layer");

typedef Arrival<ROWS, OF_SOURCE / 4, OF_SOURCE, PITCH, WARPS, word_at(WARPS, 0), word_at(0, 128), 1, false, 0, 0> Gathered;

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(128) unsigned memory[];
  // behind weights of four warps: [warps, strip and depth]
  unsigned* const gradients = memory + WEIGHT_WORDS;                  // [2, sequence, gate, unit of the source]
  float* const slots = (float*)(gradients + 2 * GRADIENT_WORDS);      // [stage, warp, number]
  float4* const aside = (float4*)(slots + MEAN_WORDS) + threadIdx.x;  // [two sums, thread]
  float2* const own_vectors = (float2*)(slots + MEAN_WORDS + 4 * COUPLES * THREADS) + threadIdx.x;  // [vector, thread]

  const int warp = own_warp(), lane = threadIdx.x % 32;
#if SIDED
  const unsigned own = own_place(a.places, memory);
  if (own == NO_PLACE) return;
#else
  const unsigned own = blockIdx.x;
#endif
  const int rank = own % BLOCKS, source = rank / GATHERED, place = rank % GATHERED;
  const int direction = (int)a.first_direction + blockIdx.y, batch = (int)a.batch, time = (int)a.time;
  const int row0 = (int)a.first_row + own / BLOCKS * ROWS, lines = min(ROWS, batch - row0), left = lines - warp;
  const Weight* const weights = a.weights[direction];

  uint4 resident[MOST(RESIDENT)];
  const int first_column = place * STRIPS * 16;
  const auto weights_of = [&](int depth) {
    const int own = source * DEEP + depth % DEEP;
    return WeightRow{weights + ((long long)(depth / DEEP) * UNITS + own) * WEIGHT_PITCH + first_column, UNITS - own};
  };
  bring_columns<Weights, STRIPS, SHARE, DEPTHS, STREAMED, WARPS, 4 * WEIGHT_WORDS, DEEP>(
      memory, warp, lane, UNITS - first_column, [](int s, int depth) { return depth * SHARE + s; }, weights_of,
      [&](int i, uint4 words) { resident[i] = words; },
      [&](int i, uint4 words) { put_square<512>(memory + (warp / 4 * STREAMED + i) * 512 + warp % 4 * 64, lane, words); });
  for (int i = threadIdx.x; i < 2 * GRADIENT_WORDS; i += THREADS) gradients[i] = 0;
#pragma unroll
  for (int i = 0; i < COUPLES; ++i) aside[i * THREADS] = {};

  const bool owns = rank < lines, reverse = direction == 1;  // the sequence that it has the cell of
  const int unit = threadIdx.x * 2, sequence = row0 + (owns ? rank : 0);
  const bool first = owns && unit < UNITS, second = owns && unit + 1 < UNITS;
  const bool has_output_gradient = a.y_gradient != nullptr, has_initial = a.initial[0] != nullptr;
  const bool wants_initial = a.initial_gradients[0] != nullptr;
  const long long row_step = reverse ? batch : -(long long)batch, width = a.directions * UNITS;
  const long long begin = (reverse ? 0 : (long long)(time - 1) * batch) + sequence;
  const long long start = ((long long)direction * batch + sequence) * UNITS + unit, state_stride = a.time * batch * UNITS;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    own_vectors[v * THREADS] = {first ? wide(a.vectors[direction][v][unit]) : 0.f,
                                second ? wide(a.vectors[direction][v][unit + 1]) : 0.f};  // which need not begin at 4 bytes
  show_products();  // weights, and zeros
  __syncthreads();

  const Gate *gates_at = a.gates[direction] + begin * GATES * UNITS + unit,
             *apart_at = a.apart[direction] + begin * APART * UNITS + unit;
  const float *states_at = a.states[direction] + (begin + row_step) * UNITS + unit, *levels_at = a.levels[direction] + begin * LEVELS;
  const Element *y_at = a.y + (begin + row_step) * width + direction * UNITS + unit,
                *y_gradient_at = a.y_gradient + begin * width + direction * UNITS + unit;
  Element *gradients_at = a.gate_gradients[direction] + begin * GATES * UNITS + unit,
          *apart_gradients_at = a.apart_gradients[direction] + begin * APART * UNITS + unit;
  const long long ahead = AHEAD * row_step;
  keep(gates_at), keep(apart_at), keep(states_at), keep(levels_at), keep(y_at), keep(y_gradient_at);
  keep(gradients_at), keep(apart_gradients_at);
  Read read;
  const auto load = [&](int t) {  // what is read of step t, the next after what was read last
    const bool there = first && t < time, beyond = second && t < time, also = first && t + 1 < time;
#pragma unroll
    for (int i = 0; i < LEVELS; i += 4) {
      if constexpr (LEVELS % 4 == 0) {
        const float4 four = owns && t < time ? *(const float4*)(levels_at + i) : float4{};
        read.levels[i] = four.x, read.levels[i + 1] = four.y, read.levels[i + 2] = four.z, read.levels[i + 3] = four.w;
      } else {
#pragma unroll
        for (int k = i; k < i + 4 && k < LEVELS; ++k) read.levels[k] = owns && t < time ? levels_at[k] : 0.f;
      }
    }
#pragma unroll
    for (int g = 0; g < GATES; ++g) read.gates[g] = load_gates(gates_at + g * UNITS, there, beyond);
#pragma unroll
    for (int i = 0; i < APART; ++i) read.apart[i] = load_gates(apart_at + i * UNITS, there, beyond);
    read.y_gradient = load_pair(y_gradient_at, there && has_output_gradient, beyond && has_output_gradient);
    read.before = load_pair(y_at, also, also && second);
#pragma unroll
    for (int s = 1; s < STATES; ++s)
      read.states[s - 1] = load_wide_pair(states_at + (s - 1) * state_stride, also, also && second);
    if (owns && t + AHEAD < time) {
      prefetch_row<GATES * UNITS * sizeof(Gate)>(gates_at - unit + ahead * GATES * UNITS, 0, warp, lane);
      prefetch_row<APART * UNITS * sizeof(Gate)>(apart_at - unit + ahead * APART * UNITS, 1, warp, lane);
      prefetch_row<UNITS * sizeof(Element)>(y_at - unit + (ahead - row_step) * width, 2, warp, lane);
      if (has_output_gradient) prefetch_row<UNITS * sizeof(Element)>(y_gradient_at - unit + ahead * width, 3, warp, lane);
#pragma unroll
      for (int s = 1; s < STATES; ++s)
        prefetch_row<UNITS * sizeof(float)>(states_at - unit + (s - 1) * state_stride + (ahead - row_step) * UNITS, 3 + s, warp, lane);
    }
    gates_at += row_step * GATES * UNITS, apart_at += row_step * APART * UNITS, states_at += row_step * UNITS;
    levels_at += row_step * LEVELS, y_at += row_step * width, y_gradient_at += row_step * width;
  };
  load(0);
  float2 carried[STATES];
#pragma unroll
  for (int s = 0; s < STATES; ++s) {
    const bool given = a.final_gradients[s] != nullptr;
    carried[s] = wide_pair(load_pair(a.final_gradients[s] + start, given && first, given && second));
  }

  // the ring of gradients, and sums of two steps
  const long long buffer = (long long)batch * PITCH, plane = (long long)batch * SOURCES * SUM_PITCH;
  unsigned* const ring = a.ring + direction * RING * buffer + (long long)row0 * PITCH;
  unsigned* const sums_at =
      a.ring + a.directions * RING * buffer + direction * 2 * plane + (long long)row0 * SOURCES * SUM_PITCH;
  const unsigned* gathered = ring + (long long)warp * PITCH + source * OF_SOURCE + lane * 4;
  unsigned* given = ring + (long long)rank * PITCH + unit / DEEP * OF_SOURCE + unit % DEEP / 2;
  const unsigned* arriving = sums_at + (long long)rank * SOURCES * SUM_PITCH + unit;
  unsigned* putting = sums_at + (long long)(lane % 4 * 2) * SOURCES * SUM_PITCH + source * SUM_PITCH +
                            (place * STRIPS + warp * SHARE) * 16 + lane / 4 * 2;
  keep(gathered), keep(given), keep(arriving), keep(putting);
  const bool comes_round = time > RING;
  long long ring_at = 0;

  // The sums of step t of all sources are asked for, and added when all have come: each word's last bit says whether it has.
  uint2 words[SOURCES];
  const auto sums_of = [&](int t, int source) { return look_pair(arriving + t % 2 * plane + source * SUM_PITCH); };
  const auto ask = [&](int t) {
#pragma unroll
    for (int p = 0; p < SOURCES; ++p) {
      words[p] = {t / 2 % 2u, t / 2 % 2u};
      if (first) words[p] = sums_of(t, p);
    }
  };
  const auto arrive = [&](int t) {
    const unsigned phase = t / 2 % 2;
    for (;;) {  // all threads of a warp leave together
      bool all = true;
#pragma unroll
      for (int p = 0; p < SOURCES; ++p)
        if (((words[p].x ^ phase) | (words[p].y ^ phase)) & 1u) words[p] = sums_of(t, p), all = false;
      if (__all_sync(0xffffffffu, all)) break;
    }
    float2 sum = {};
#pragma unroll
    for (int p = 0; p < SOURCES; ++p) {
      sum.x += __uint_as_float(words[p].x & ~1u);
      sum.y += __uint_as_float(words[p].y & ~1u);
    }
    return sum;
  };

  for (int t = 0; t < time; ++t) {
    const bool goes_on = t + 1 < time || wants_initial;
    Gathered arrival;
    const auto look = [&] {
      pause(ticks(), LULL);
      if (goes_on) arrival.look_at(gathered + ring_at, left, lane, 0);
    };
    if (!owns) look();
    if (owns) {
      const bool last = t + 1 == time;
      Given now[2];
      float m[MOST(MEANS)];
      Values values[2];
      float rows[STAGES][EIGHTS][2][4] = {};  // of sums that means are made of
      const float2 output = wide_pair(read.y_gradient);
#pragma unroll
      for (int i = 0; i < LEVELS; ++i) m[i] = read.levels[i];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) now[u].v[i] = half_of(own_vectors[i * THREADS], u);
#pragma unroll
        for (int g = 0; g < GATES; ++g) now[u].x[g] = half_of(wide_gates(read.gates[g]), u);
#pragma unroll
        for (int i = 0; i < APART; ++i) now[u].r[apart(i)] = half_of(wide_gates(read.apart[i]), u);
        now[u].before[0] = half_of(wide_pair(read.before), u);
#pragma unroll
        for (int s = 1; s < STATES; ++s) now[u].before[s] = half_of(read.states[s - 1], u);
        if (last)
#pragma unroll
          for (int s = 0; s < STATES; ++s)
            now[u].before[s] = half_of(wide_pair(load_pair(a.initial[s] + start, has_initial && first, has_initial && second)), u);
      }
      float d[2][STATES], dx[2][GATES], dr[2][MOST(LINKS)], ds[2][STATES], de[1], after[STATES], summed[2][MOST(SUMMED)] = {};
      const float q[1] = {};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int s = 0; s < STATES; ++s) d[u][s] = half_of(carried[s], u);
        d[u][0] += half_of(output, u);
      }
      {  // while the sums travel
        float to[2][MOST(VALUES)];
#pragma unroll
        for (int u = 0; u < 2; ++u)
          run_before(0, now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], d[u], q);
        if (t > 0) ask(t - 1);
#pragma unroll
        for (int u = 0; u < 2; ++u)
          run_known(now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], to[u]);
        add_pairs(0, true, lane, [&](int k) { return (first ? to[0][k] : 0.f) + (second ? to[1][k] : 0.f); }, rows[0]);
      }
      if (t > 0) {
        const float2 sum = arrive(t - 1);
        d[0][0] += sum.x, d[1][0] += sum.y;
      }
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        float to[2][MOST(VALUES)], operand[1];
#pragma unroll
        for (int u = 0; u < 2; ++u)
          run_stage(stage, now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], to[u], operand, d[u], q,
                    u == 0 ? first : second, dx[u], dr[u], ds[u], summed[u] + SUMMED - VECTORS, de, after);
        if (packs(stage) > 0) {
          add_pairs(stage, false, lane, [&](int k) { return (first ? to[0][k] : 0.f) + (second ? to[1][k] : 0.f); }, rows[stage]);
          float* const at = slots + mean_offset(stage);
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) {
            const float2 sums = sums_of_rows(rows[stage][e]);
            if (lane < 4 && e * 2 + lane / 2 < packs(stage)) *(float2*)(at + warp * 4 * packs(stage) + e * 8 + lane * 2) = sums;
          }
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            run_rest(stage, now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], to[u], operand, d[u], q,
                     u == 0 ? first : second, dx[u], dr[u], ds[u], summed[u] + SUMMED - VECTORS, de, after);
            run_before(stage + 1, now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], d[u], q);
          }
          __syncthreads();
          means_of_sums<WARPS>(stage, lane, [&](int warp, int number) { return at[warp * 4 * packs(stage) + number]; }, m);
        }
      }
#pragma unroll
      for (int l = 0; l < LEAVES; ++l)
        if (unit < BLOCKS * SLICE)
          give(given + ring_at + leaf_gate(l) * (DEEP / 2), 0, first ? dr[0][l] : 0.f, second ? dr[1][l] : 0.f, 0);
      // what nobody waits for
      float to[MOST(VALUES)], operand[1];
#pragma unroll
      for (int u = 0; u < 2; ++u)
        run_rest(STAGES - 1, now[u].x, now[u].r, now[u].before, now[u].v, nullptr, m, values[u], to, operand, d[u], q,
                 u == 0 ? first : second, dx[u], dr[u], ds[u], summed[u] + SUMMED - VECTORS, de, after);
#pragma unroll
      for (int s = 0; s < STATES; ++s) carried[s] = {ds[0][s], ds[1][s]};
#pragma unroll
      for (int g = 0; g < GATES; ++g) store_pair(gradients_at + g * UNITS, dx[0][g], dx[1][g], first, second);
#pragma unroll
      for (int i = 0; i < APART; ++i)
        store_pair(apart_gradients_at + i * UNITS, dr[0][apart(i)], dr[1][apart(i)], first, second);
      if (comes_round && unit < BLOCKS * SLICE)  // everyone has read these
#pragma unroll
        for (int g = 0; g < RECURRENT; ++g) put(given + ring_at + freed(t) * buffer + g * (DEEP / 2), NOTHING);
      look();
      // while all is on its way
      if constexpr (BIAS)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
          for (int g = 0; g < GATES; ++g) summed[u][g] = dx[u][g];
#pragma unroll
          for (int i = 0; i < APART; ++i) summed[u][GATES + i] = dr[u][apart(i)];
        }
#pragma unroll
      for (int i = 0; i < SUMMED; i += 2) {
        const int next = i + 1 < SUMMED ? i + 1 : i;
        float4& both = aside[i / 2 * THREADS];
        const float4 before = both;
        both = {before.x + summed[0][i], before.y + summed[1][i], before.z + summed[0][next], before.w + summed[1][next]};
      }
    }
    if (comes_round && t % PERIOD == 0) fence();
    if (goes_on) {
      arrival.settle(gradients + t % 2 * GRADIENT_WORDS + word_at(warp, lane * 4), gathered + ring_at, left, lane, 0, 0, AsItIs{});
      show_products();
      __syncthreads();
      float sums[CHAINS][SHARE][TILES][4];
      multiply_sequences<Weights, SHARE, DEPTHS, STREAMED, CHAINS>(
          sums, resident, memory, gradients + t % 2 * GRADIENT_WORDS, 0, warp, [&] { load(t + 1); });
      put_sums<SOURCES * SUM_PITCH>(sums, lines, lane, t / 2 % 2, [&](int s) {
        const int strip = warp * SHARE + s, unit = (place * STRIPS + strip) * 16 + lane / 4 * 2;
        const bool there = (STRIPS % WARPS == 0 || strip < STRIPS) && (UNITS == SUM_PITCH || unit < UNITS);
        return there ? putting + t % 2 * plane + s * 16 : nullptr;
      });
    }
    ring_at = (t + 1) % RING == 0 ? 0 : ring_at + buffer;
    gradients_at += row_step * GATES * UNITS, apart_gradients_at += row_step * APART * UNITS;
  }
  if (!owns) return;
  if (wants_initial) {
    ask(time - 1);
    const float2 sum = arrive(time - 1);
    carried[0].x += sum.x, carried[0].y += sum.y;
#pragma unroll
    for (int s = 0; s < STATES; ++s) store_pair(a.initial_gradients[s] + start, carried[s].x, carried[s].y, first, second);
  }
#pragma unroll
  for (int i = 0; i < SUMMED; ++i) {
    const float4 both = aside[i / 2 * THREADS];
    store_wide_pair(a.sums[direction] + ((long long)sequence * SUMMED + i) * UNITS + unit, i % 2 ? both.z : both.x,
                    i % 2 ? both.w : both.y, first, second);
  }
}
