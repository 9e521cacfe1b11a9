// Sums of squares of several tensors: blockIdx.y is the tensor, and each of its blocks gives one sum.

// @numbers

struct Arguments {
  const Half* tensors[16];
  long long counts[16];
  float* to;  // [tensors, blocks]
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned memory[];
  const Half* tensor = a.tensors[blockIdx.y];
  const long long count = a.counts[blockIdx.y], step = gridDim.x * (long long)THREADS;
  const long long packs = (unsigned long long)tensor % 16 == 0 ? count / 8 : 0;  // 16 bytes at a time
  const long long first = blockIdx.x * (long long)THREADS + threadIdx.x;
  float sum = 0.f, other = 0.f;
  for (long long at = first; at < packs; at += step) {
    const uint4 eight = ((const uint4*)tensor)[at];
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    for (int i = 0; i < 4; ++i) sum += low(words[i]) * low(words[i]), other += high(words[i]) * high(words[i]);
  }
  for (long long at = 8 * packs + first; at < count; at += step) sum += wide(tensor[at]) * wide(tensor[at]);
  sum = over_block<false>(sum + other, (float*)memory, THREADS);
  if (threadIdx.x == 0) a.to[blockIdx.y * (long long)gridDim.x + blockIdx.x] = sum;
}
