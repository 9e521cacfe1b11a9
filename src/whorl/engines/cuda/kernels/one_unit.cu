// Backward, where a thread computes the cell of one unit of a sequence (sliced_backward.cu): what it reads at a step.
struct Read {
  Gate gates[GATES], apart[MOST(APART)];
  Element y_gradient, before;
  float states[MOST(STATES - 1)], levels[MOST(LEVELS)];
};

#if WIDE_GATES
__device__ __forceinline__ float wide_gate(Gate value) { return value; }
#else
__device__ __forceinline__ float wide_gate(Gate value) { return wide(value); }
#endif
