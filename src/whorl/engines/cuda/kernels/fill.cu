// Ones to the words through which blocks exchange: nothing has come yet.

// @generated

struct Arguments {
  uint4* to;
  long long count;
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < a.count; i += gridDim.x * 256ll) a.to[i] = {~0u, ~0u, ~0u, ~0u};
}
