// The places of sequences from the longest to the shortest, those of a length as they came: a warp finds one's place.

// @generated

struct Arguments {
  long long* to;             // [batch]: the sequence in each place
  const long long* lengths;  // [batch]
  long long batch;
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  const long long mine = blockIdx.x * 8ll + threadIdx.x / 32;
  if (mine >= a.batch) return;
  const long long length = a.lengths[mine];
  unsigned place = 0;
  for (long long other = threadIdx.x % 32; other < a.batch; other += 32) {
    const long long its = a.lengths[other];
    place += its > length || (its == length && other < mine);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) place += __shfl_xor_sync(0xffffffffu, place, apart);
  if (threadIdx.x % 32 == 0) a.to[place] = mine;
}
