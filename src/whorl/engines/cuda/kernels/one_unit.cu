// Where a thread computes the cell of one unit of a sequence (sliced_forward.cu, sliced_backward.cu).

struct Read {  // backward, at a step
  Gate gates[GATES], apart[MOST(APART)];
  Element y_gradient, before;
  float states[MOST(STATES - 1)], levels[MOST(LEVELS)];
};

#if WIDE_GATES
__device__ __forceinline__ float wide_gate(Gate value) { return value; }
__device__ __forceinline__ Gate narrow_gate(float value) { return value; }
#else
__device__ __forceinline__ float wide_gate(Gate value) { return wide(value); }
__device__ __forceinline__ Gate narrow_gate(float value) { return narrow(value); }
#endif
