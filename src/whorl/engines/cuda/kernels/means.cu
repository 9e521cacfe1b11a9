// Means over the units of each sequence, which lie in several blocks.
//
// The LANES threads of a warp that share a sequence, each AWAY lanes from the next, make of the PART units that they have
// one sum, or a mean and the sum of squared distances from it, for the other blocks (cluster_means.cu, spread_means.cu); a
// reader merges what has come from all sources, in their order.  Sums are of distances from one of the values, or from one
// of the means: where a mean is large beside its deviation, nothing is lost.

// Units of a source that are there.
__device__ __forceinline__ int units_of(int source) {
  const int left = UNITS - source * PART;
  return left < 0 ? 0 : left < PART ? left : PART;
}

// the first lane of those that share a sequence with this
__device__ __forceinline__ int first_of(int lane) { return lane & ~((LANES - 1) * AWAY); }

__device__ __forceinline__ float over_units(float value) {
#pragma unroll
  for (int away = AWAY; away < LANES * AWAY; away *= 2) value += __shfl_xor_sync(0xffffffffu, value, away);
  return value;
}

// What is sent of one sequence after a stage.  `to`: a thread's values of its two units; `there`: units of the source.
__device__ __forceinline__ void summarise(
    int stage, const float (&to)[2][MOST(VALUES)], bool first, bool second, int there, int lane,
    float (&data)[4 * MOST(PACKS)]) {
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    // from one of the values on: their mean is not much farther away than they are from each other
    const float start =
        reduction_moments(i) ? __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(to[0][reduction_first(i)]), first_of(lane)))
                             : 0.f;
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int k = 0; k < VALUES; ++k)
      if (k >= reduction_first(i) && k < reduction_first(i) + reduction_count(i)) {
        const float low = first ? to[0][k] - start : 0.f, high = second ? to[1][k] - start : 0.f;
        sum += low + high;
        squares += low * low + high * high;
      }
    sum = over_units(sum);
    if (reduction_moments(i)) {
      const float apart = there > 0 ? sum / (float)(there * reduction_count(i)) : 0.f;
      data[at++] = start + apart, data[at++] = over_units(squares) - sum * apart;
    } else {
      data[at++] = sum;
    }
  }
}

// The means of one sequence, of what has come for it after a stage: for the thread's sources, how many `units` they have
// and `value(i, at)`, number `at` of source i; `first(at)` is that of the first source of all.
template <int COUNT, class Value, class First>
__device__ __forceinline__ void merge(
    int stage, const int (&units)[COUNT], const Value& value, const First& first, float (&m)[MOST(MEANS)]) {
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    const float all = 1.f / (float)(UNITS * reduction_count(i));
    // from the mean of the first source on, which is there
    const float start = reduction_moments(i) ? first(at) : 0.f;
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
      const float values = (float)(units[s] * reduction_count(i)), apart = value(s, at) - start;
      sum += reduction_moments(i) ? values * apart : value(s, at);
      if (reduction_moments(i)) squares += units[s] > 0 ? value(s, at + 1) + values * apart * apart : 0.f;
    }
    sum = over_units(sum) * all;
    m[reduction_place(i)] = start + sum;
    if (reduction_moments(i)) {
      const float variance = over_units(squares) * all - sum * sum;
      m[reduction_place(i) + 1] = variance < 0.f ? 0.f : variance;
    }
    at += reduction_moments(i) ? 2 : 1;
  }
}
