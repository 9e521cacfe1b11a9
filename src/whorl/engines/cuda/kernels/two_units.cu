// Where a thread computes the cell of two neighbouring units of a sequence (whole_forward.cu, whole_backward.cu and
// spread_whole_*.cu).

#if FORWARD
// The output of a step, and what backward reads of it, at their places.
__device__ __forceinline__ void store_step(
    Element* y, Gate* gates, Gate* apart_at, float* states, float* levels, long long state_stride, const float (&given)[2][GATES],
    const float (&r)[2][MOST(LINKS)], const float (&after)[2][STATES], const float (&m)[MOST(MEANS)], int unit, bool first,
    bool second) {
  store_pair(y, after[0][0], after[1][0], first, second);
  if constexpr (!SAVED) return;
#pragma unroll
  for (int g = 0; g < GATES; ++g) {
    const int sum = sum_of(g) >= 0 ? sum_of(g) : 0;
    const float add[2] = {sum_of(g) >= 0 ? r[0][sum] : 0.f, sum_of(g) >= 0 ? r[1][sum] : 0.f};
    store_gates(gates + g * UNITS, given[0][g] + add[0], given[1][g] + add[1], first, second);
  }
#pragma unroll
  for (int i = 0; i < APART; ++i) store_gates(apart_at + i * UNITS, r[0][apart(i)], r[1][apart(i)], first, second);
#pragma unroll
  for (int s = 1; s < STATES; ++s) store_wide_pair(states + (s - 1) * state_stride, after[0][s], after[1][s], first, second);
  if (MEANS > 0 && unit == 0)
#pragma unroll
    for (int i = 0; i < MEANS; ++i) levels[i] = m[i];
}
#else
struct Read {  // what one thread reads at a step
  GatePair gates[GATES], apart[MOST(APART)];
  Pair y_gradient, before;
  float2 states[MOST(STATES - 1)];
  float levels[MOST(LEVELS)];
};

struct Given {  // what the cell's gradient reads of one unit
  float x[GATES], r[MOST(LINKS)] = {}, before[STATES], v[MOST(VECTORS)];
};
#endif
