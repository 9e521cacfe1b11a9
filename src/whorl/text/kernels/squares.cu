// Sums of squares of several tensors: blockIdx.y is the tensor, and each of its blocks gives one sum.
//
// A tensor is rows of numbers, below 2^32 in all, which are read eight at a time where every row begins at a multiple of
// eight.

// @numbers

struct Tensor {
  const Half* data;
  long long rows, numbers, from_row;
};

struct Arguments {
  Tensor tensors[40];
  float* to;  // [tensors, blocks]
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned memory[];
  const Tensor& tensor = a.tensors[blockIdx.y];
  const bool packed = tensor.rows > 1 ? (tensor.numbers | tensor.from_row) % 8 == 0 : true;
  const bool aligned = packed && (unsigned long long)tensor.data % 16 == 0;
  const unsigned count = (unsigned)(tensor.rows * tensor.numbers), packs = aligned ? count / 8 : 0;  // 16 bytes
  const unsigned each = (unsigned)tensor.numbers, step = gridDim.x * THREADS;
  const auto at = [&](unsigned place) {
    return tensor.rows == 1 ? tensor.data + place : tensor.data + place / each * tensor.from_row + place % each;
  };
  float sum = 0.f, other = 0.f;
  for (unsigned pack = blockIdx.x * THREADS + threadIdx.x; pack < packs; pack += step) {
    const uint4 eight = *(const uint4*)at(8 * pack);
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    for (int i = 0; i < 4; ++i) sum += low(words[i]) * low(words[i]), other += high(words[i]) * high(words[i]);
  }
  for (unsigned place = 8 * packs + blockIdx.x * THREADS + threadIdx.x; place < count; place += step)
    sum += wide(*at(place)) * wide(*at(place));
  sum = over_block<false>(sum + other, (float*)memory, THREADS);
  if (threadIdx.x == 0) a.to[blockIdx.y * (long long)gridDim.x + blockIdx.x] = sum;
}
