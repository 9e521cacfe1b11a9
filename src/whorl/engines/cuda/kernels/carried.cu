// States and gradients at the ends of a launch: tensors of the call, or (CARRIED) what the launch of the steps before,
// or backward after it, has left in float32 [directions, batch, UNITS], and what this one leaves for the next.
//
// The argument of such a kernel has two fields more: come[STATES] and left[STATES], all or null.

// Whether there are states before the first step.
template <class Arguments>
__device__ __forceinline__ bool has_initial(const Arguments& a) {
#if CARRIED
  if (a.come[0] != nullptr) return true;
#endif
  return a.initial[0] != nullptr;
}

// Two neighbours of a state before the first step.
template <class Arguments>
__device__ __forceinline__ float2 initial_pair(const Arguments& a, int s, long long at, bool first, bool second) {
#if CARRIED
  if (a.come[s] != nullptr) return load_wide_pair(a.come[s] + at, first, second);
#endif
  const bool given = a.initial[s] != nullptr;
  return wide_pair(load_pair(a.initial[s] + at, given && first, given && second));
}

// The first state before the first step, where elements are float32 and it is there.
template <class Arguments>
__device__ __forceinline__ const Element* first_state(const Arguments& a) {
#if CARRIED && ELEMENT_BYTES == 4
  if (a.come[0] != nullptr) return a.come[0];
#endif
  return a.initial[0];
}

// Two neighbours of a state after the last step.
template <class Arguments>
__device__ __forceinline__ void leave_pair(
    const Arguments& a, int s, long long at, float low, float high, bool first, bool second) {
#if CARRIED
  if (a.left[s] != nullptr) return store_wide_pair(a.left[s] + at, low, high, first, second);
#endif
  store_pair(a.finals[s] + at, low, high, first, second);
}

// Backward: whether other launches compute what was before the first step; it lies before what this one reads.
template <class Arguments>
__device__ __forceinline__ bool goes_on_before(const Arguments& a) {
#if CARRIED
  return a.left[0] != nullptr;
#else
  return false;
#endif
}

// Backward: two neighbours of the gradient of a state after the last step.
template <class Arguments>
__device__ __forceinline__ float2 final_gradient_pair(const Arguments& a, int s, long long at, bool first, bool second) {
#if CARRIED
  if (a.come[s] != nullptr) return load_wide_pair(a.come[s] + at, first, second);
#endif
  const bool given = a.final_gradients[s] != nullptr;
  return wide_pair(load_pair(a.final_gradients[s] + at, given && first, given && second));
}

// Backward: two neighbours of the gradient of a state before the first step.
template <class Arguments>
__device__ __forceinline__ void leave_gradient_pair(
    const Arguments& a, int s, long long at, float low, float high, bool first, bool second) {
#if CARRIED
  if (a.left[s] != nullptr) return store_wide_pair(a.left[s] + at, low, high, first, second);
#endif
  const bool given = a.initial_gradients[s] != nullptr;
  store_pair(a.initial_gradients[s] + at, low, high, given && first, given && second);
}
