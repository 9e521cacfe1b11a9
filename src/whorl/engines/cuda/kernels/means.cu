// Means over the units of each sequence, which lie in several blocks.
//
// The LANES threads of a warp that share a sequence, each AWAY lanes from the next, make of the PART units that they have
// one sum, or a mean and the sum of squared distances from it, for the other blocks (cluster_means.cu, spread_means.cu,
// sliced_forward.cu); a reader merges what has come from all sources, in their order.  Sums are of distances from one of the
// values, or from one of the means: where a mean is large beside its deviation, nothing is lost.  (In whole_means.cu from the
// mean of the step before.)

// Whether no mean has a variance after it.
__device__ constexpr bool sums_alone() {
  for (int i = 0; i < REDUCTIONS; ++i)
    if (reduction_moments(i)) return false;
  return true;
}

// Units of a source that are there.
__device__ __forceinline__ int units_of(int source) {
  const int left = UNITS - source * PART;
  return left < 0 ? 0 : left < PART ? left : PART;
}

// the first lane of those that share a sequence with this
__device__ __forceinline__ int first_of(int lane) { return lane & ~((LANES - 1) * AWAY); }

// How many values a source with so many units has, of `count` for each.
__device__ __forceinline__ float amount(int units, int count) {
  return units == PART ? (float)(PART * count) : units > 0 ? (float)(UNITS % PART * count) : 0.f;
}

// Sums by the tensor cores, each of which is as good as 2^-17 of what is added: a number is two of bfloat16, which a product
// with ones adds to others.
constexpr unsigned TWO_ONES = 0x3f803f80;
constexpr float MOST_FLOAT = 3.4e38f;  // what is as large counts as infinite
__device__ __forceinline__ unsigned in_two(float value) {
  const float high = __uint_as_float(__float_as_uint(value) & 0xffff0000u);
  return two_bfloat16(high, value - high);
}
// Of two numbers over all threads of a warp, or over the eight of one sequence, lanes with the same lane % 4: then rows of the
// first product are of other sequences, and what is infinite or not a number must not meet their zeros.
__device__ __forceinline__ void add_up_both(float& first, float& second, int lane) {
  constexpr bool WARP = LANES == 32;
  unsigned lost = 0;
  if constexpr (!WARP) {
    const bool finite = fabsf(first) < MOST_FLOAT && fabsf(second) < MOST_FLOAT;
    lost = __ballot_sync(0xffffffffu, !finite) >> lane % 4 & 0x11111111;
    if (!finite) first = second = 0.f;
  }
  const int row = WARP ? lane / 4 % 2 : lane / 4, own = WARP ? 0 : lane % 4 * 2;
  const unsigned takes_first = row == own ? TWO_ONES : 0, takes_second = row == own + 1 ? TWO_ONES : 0;
  float rows[4] = {}, all[4] = {};  // over threads of two columns, which have the same lane / 4
  add_products(rows, {takes_first, 0, takes_second, 0}, {in_two(first), in_two(second)});
  add_products(all, {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES}, {in_two(rows[0] + rows[1]), 0});
  first = lost ? __uint_as_float(0x7fc00000) : all[0], second = lost ? __uint_as_float(0x7fc00000) : all[1];
}

// Over so many threads AWAY lanes from each other, of all that a stage makes at once: none waits for the shuffles of another.
// Tensor cores take 96 cycles for what takes 166 with shuffles, over 32 threads (H100).
__device__ __forceinline__ void add_up(
    int stage, int threads, int lane, float (&sum)[MOST(REDUCTIONS)], float (&squares)[MOST(REDUCTIONS)]) {
  if constexpr (!SHUFFLED && !EXACT) {  // of 32 lanes, or of 8 that are 4 apart; SHUFFLED of any power of two
    if (threads == 1) return;
    float own[MOST(2 * REDUCTIONS)] = {};
    int count = 0, at = 0;
#pragma unroll
    for (int i = 0; i < REDUCTIONS; ++i) {
      if (reduction_stage(i) != stage) continue;
      own[count++] = sum[i];
      if (reduction_moments(i)) own[count++] = squares[i];
    }
#pragma unroll
    for (int i = 0; i < 2 * REDUCTIONS; i += 2)
      if (i < count) add_up_both(own[i], own[i + 1], lane);
#pragma unroll
    for (int i = 0; i < REDUCTIONS; ++i) {
      if (reduction_stage(i) != stage) continue;
      sum[i] = own[at++];
      if (reduction_moments(i)) squares[i] = own[at++];
    }
  } else {
#pragma unroll
    for (int away = AWAY; away < 32; away *= 2)
#pragma unroll
      for (int i = 0; i < REDUCTIONS; ++i) {
        if (reduction_stage(i) != stage || away >= threads * AWAY) continue;
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], away);
        if (reduction_moments(i)) squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], away);
      }
  }
}

// What is sent of one sequence after a stage.  `to`: a thread's values of its two units; `there`: units of the source.
__device__ __forceinline__ void summarise(
    int stage, const float (&to)[2][MOST(VALUES)], bool first, bool second, int there, int lane,
    float (&data)[4 * MOST(PACKS)]) {
  float start[MOST(REDUCTIONS)], sum[MOST(REDUCTIONS)], squares[MOST(REDUCTIONS)];
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    // from one of the values on: their mean is not much farther away than they are from each other
    start[i] =
        reduction_moments(i) ? __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(to[0][reduction_first(i)]), first_of(lane)))
                             : 0.f;
    sum[i] = squares[i] = 0.f;
#pragma unroll
    for (int k = 0; k < VALUES; ++k)
      if (k >= reduction_first(i) && k < reduction_first(i) + reduction_count(i)) {
        const float low = first ? to[0][k] - start[i] : 0.f, high = second ? to[1][k] - start[i] : 0.f;
        sum[i] += low + high;
        squares[i] += low * low + high * high;
      }
  }
  add_up(stage, LANES, lane, sum, squares);
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    if (reduction_moments(i)) {
      const float all = 1.f / (PART * reduction_count(i)), last = 1.f / (MOST(UNITS % PART) * reduction_count(i));
      const float apart = sum[i] * (there == PART ? all : last);
      data[at++] = start[i] + apart, data[at++] = squares[i] - sum[i] * apart;
    } else {
      data[at++] = sum[i];
    }
  }
}

// The means of one sequence, of what has come for it after a stage: for the thread's sources `amount_of(i, count)`, how
// many values they have at `count` for each unit, and `value(i, at)`, number `at` of source i; `first(at)` is that of the
// first source of all.  So many threads have them.
template <int COUNT, class Amount, class Value, class First>
__device__ __forceinline__ void merge(
    int stage, int threads, int lane, const Amount& amount_of, const Value& value, const First& first, float (&m)[MOST(MEANS)]) {
  float start[MOST(REDUCTIONS)], sum[MOST(REDUCTIONS)], squares[MOST(REDUCTIONS)];
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    start[i] = reduction_moments(i) ? first(at) : 0.f;  // the mean of the first source, which is there
    sum[i] = squares[i] = 0.f;
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
      const float values = amount_of(s, reduction_count(i)), apart = value(s, at) - start[i];
      sum[i] += reduction_moments(i) ? values * apart : value(s, at);
      if (reduction_moments(i)) squares[i] += values > 0.f ? value(s, at + 1) + values * apart * apart : 0.f;
    }
    at += reduction_moments(i) ? 2 : 1;
  }
  add_up(stage, threads, lane, sum, squares);
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    const float all = 1.f / (float)(UNITS * reduction_count(i)), mean = sum[i] * all;
    m[reduction_place(i)] = start[i] + mean;
    if (reduction_moments(i)) {
      const float variance = squares[i] * all - mean * mean;
      m[reduction_place(i) + 1] = variance < 0.f ? 0.f : variance;
    }
  }
}

// Over a warp of each of eight numbers of a thread.  Pairs of them, i and the next, are added to `rows`, in any order: number
// lane / 4, over 4 threads of two columns.
__device__ __forceinline__ void add_pair(float (&rows)[2][4], int i, float first, float second, int lane) {
  add_products(rows[i / 2 % 2], {lane / 4 == i ? TWO_ONES : 0, 0, lane / 4 == i + 1 ? TWO_ONES : 0, 0},
               {in_two(first), in_two(second)});
}
// Number 2 x (lane % 4) and the next.
__device__ __forceinline__ float2 sums_of_rows(const float (&rows)[2][4]) {
  float all[4] = {};
  add_products(all, {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES}, {in_two((rows[0][0] + rows[1][0]) + (rows[0][1] + rows[1][1])), 0});
  return {all[0], all[1]};
}
__device__ __forceinline__ float2 sums_of_warp(const float (&own)[8], int lane) {
  float rows[2][4] = {};
#pragma unroll
  for (int i = 0; i < 8; i += 2) add_pair(rows, i, own[i], own[i + 1], lane);
  return sums_of_rows(rows);
}
// Of number lane / 4, from four threads, each with two of several sources: number 2 x (lane % 4) and the next.
template <int COUNT>
__device__ __forceinline__ float2 sums_of_sources(const float (&from)[COUNT], int lane) {
  float all[2][4] = {};
#pragma unroll
  for (int i = 0; i < COUNT; i += 2)
    add_products(all[i / 2 % 2], {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES},
                 {in_two(from[i]), i + 1 < COUNT ? in_two(from[i + 1 < COUNT ? i + 1 : i]) : 0});
  return {all[0][0] + all[1][0], all[0][1] + all[1][1]};
}

// The means of one sequence, as `merge` makes them, in a cluster of so many BLOCKS, each with what a warp sent, of a stage with
// no more than 8 numbers: all threads of a warp have them.  `slot(source)`: where its numbers lie.
template <int BLOCKS, class Slot>
__device__ __forceinline__ void merge_at_once(int stage, int lane, const Slot& slot, float (&m)[MOST(MEANS)]) {
  const bool few = numbers(stage) <= 2;
  const int own = few ? lane / 4 % 2 : lane / 4;  // the number that the thread adds up, of every fourth source
  float from[(BLOCKS + 3) / 4];
#pragma unroll
  for (int i = 0; i < (BLOCKS + 3) / 4; ++i) {
    const int source = lane % 4 + i * 4, units = source < BLOCKS ? units_of(source) : 0;
    from[i] = 0.f;
    int at = 0;
#pragma unroll
    for (int k = 0; k < REDUCTIONS; ++k) {
      if (reduction_stage(k) != stage) continue;
      const float* const its = slot(units > 0 ? source : 0) + at;
      if (reduction_moments(k)) {
        const float values = amount(units, reduction_count(k)), apart = its[0] - slot(0)[at];
        if (units > 0 && own == at) from[i] = values * apart;
        if (units > 0 && own == at + 1) from[i] = its[1] + values * apart * apart;
      } else if (units > 0 && own == at) {
        from[i] = its[0];
      }
      at += reduction_moments(k) ? 2 : 1;
    }
  }
  const float2 sums = sums_of_sources(from, lane);
  const auto total = [&](int at) {
    const float its = at % 2 ? sums.y : sums.x;
    return few ? its : __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(its), at / 2));
  };
  int at = 0;
#pragma unroll
  for (int k = 0; k < REDUCTIONS; ++k) {
    if (reduction_stage(k) != stage) continue;
    const float all = 1.f / (float)(UNITS * reduction_count(k)), mean = total(at) * all;
    m[reduction_place(k)] = reduction_moments(k) ? slot(0)[at] + mean : mean;
    if (reduction_moments(k)) {
      const float variance = total(at + 1) * all - mean * mean;
      m[reduction_place(k) + 1] = variance < 0.f ? 0.f : variance;
    }
    at += reduction_moments(k) ? 2 : 1;
  }
}
