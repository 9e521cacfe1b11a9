// Means backward, where a warp has units of one sequence (sliced_backward.cu, spread_whole_backward.cu): sums alone, of which
// those that need no gradient are made before one comes.

constexpr int EIGHTS = (PACKS + 1) / 2;  // of sums that means are made of
static_assert(sums_alone(), "backward needs no variance");

// Numbers of a stage, an even number, among which are all that need a gradient: they come first.
__device__ constexpr int unknown(int stage) {
  int count = 0;
  for (int i = 0; i < REDUCTIONS; ++i) count += reduction_stage(i) == stage && !reduction_known(i);
  return (count + 1) / 2 * 2;
}

// Of how many values of a unit the means of a stage are, where all are of as many; else 0.
__device__ constexpr int count_of(int stage) {
  int count = 0;
  for (int i = 0; i < REDUCTIONS; ++i)
    if (reduction_stage(i) == stage) count = reduction_count(i);
  for (int i = 0; i < REDUCTIONS; ++i)
    if (reduction_stage(i) == stage && reduction_count(i) != count) return 0;
  return count;
}

// Adds up pairs of what a stage's means are made of over a warp: those that need no gradient, or the others.  `value(k)`: the
// thread's.
template <class Value>
__device__ __forceinline__ void add_pairs(int stage, bool known, int lane, const Value& value, float (&rows)[EIGHTS][2][4]) {
  float own[EIGHTS][8] = {};
#pragma unroll
  for (int i = 0, at = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
#pragma unroll
    for (int k = 0; k < VALUES; ++k)
      if ((reduction_known(i) || !known) && k >= reduction_first(i) && k < reduction_first(i) + reduction_count(i))
        own[at / 8][at % 8] = k > reduction_first(i) ? own[at / 8][at % 8] + value(k) : value(k);
    ++at;
  }
#pragma unroll
  for (int i = 0; i < EIGHTS * 8; i += 2)
    if (i < numbers(stage) && (i >= unknown(stage)) == known)
      add_pair(rows[i / 8], i % 8, own[i / 8][i % 8], own[i / 8][i % 8 + 1], lane);
  if (!known) return;
  // one register keeps over the wait what `sums_of_rows` adds up
#pragma unroll
  for (int e = 0; e < EIGHTS; ++e) {
    float its = (rows[e][0][0] + rows[e][1][0]) + (rows[e][0][1] + rows[e][1][1]);
    ready(its);
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[e][i / 4][i % 4] = i == 0 ? its : 0.f;
  }
}

// The means of a stage, of sums that a number of sources have made: `from(source, number)`.
template <int SOURCES, class From>
__device__ __forceinline__ void means_of_sums(int stage, int lane, const From& from, float (&m)[MOST(MEANS)]) {
  float2 all[EIGHTS];
#pragma unroll
  for (int e = 0; e < EIGHTS; ++e) {
    float own[(SOURCES + 3) / 4];
#pragma unroll
    for (int i = 0; i < (SOURCES + 3) / 4; ++i) {
      const int source = lane % 4 + i * 4;
      own[i] = source < SOURCES && e * 8 + lane / 4 < 4 * packs(stage) ? from(source, e * 8 + lane / 4) : 0.f;
    }
    all[e] = sums_of_sources(own, lane);
    if (count_of(stage) > 0) all[e].x *= 1.f / (UNITS * count_of(stage)), all[e].y *= 1.f / (UNITS * count_of(stage));
  }
#pragma unroll
  for (int i = 0, at = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    const float its = at % 2 ? all[at / 8].y : all[at / 8].x;
    m[reduction_place(i)] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(its), at % 8 / 2)) *
                            (count_of(stage) > 0 ? 1.f : 1.f / (float)(UNITS * reduction_count(i)));
    ++at;
  }
}
