// bfloat16 in the two bytes that it has in memory, and sums over the threads of a block.

typedef unsigned short Half;

__device__ __forceinline__ float wide(Half value) { return __uint_as_float((unsigned)value << 16); }
__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ unsigned narrow(float value) {  // to the nearest, ties to even; a NaN stays one
  const unsigned bits = __float_as_uint(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return value != value ? 0x7fc0u : rounded;
}
__device__ __forceinline__ unsigned narrow_pair(float first, float second) { return narrow(first) | narrow(second) << 16; }

// The sum, or the largest, of what the threads of a block bring, in the same order each time; all get it.
template <bool largest>
__device__ __forceinline__ float over_block(float value, float* space, int threads) {
  const int mine = threadIdx.x;
  space[mine] = value;
  __syncthreads();
  for (int apart = threads / 2; apart > 0; apart /= 2) {
    if (mine < apart) {
      const float other = space[mine + apart];
      space[mine] = largest ? (other > space[mine] ? other : space[mine]) : space[mine] + other;
    }
    __syncthreads();
  }
  const float result = space[0];
  __syncthreads();
  return result;
}
