// The places of sequences from the longest to the shortest, those of a length as they came: a warp finds one's place.
//
// The places are those of `parts` clusters, which share the batch evenly: to each in turn the longest that is left, so
// that all have fewer and fewer to compute.  Within a cluster, and of one part, they are from the longest to the shortest.
// Backward has its own parts of the same order.

// @generated

struct Arguments {
  long long *to, *to_back;   // [batch]: the sequence in each place; of backward, or null
  const long long* lengths;  // [batch]
  long long batch, parts, parts_back;
};

__device__ __forceinline__ long long place_of(unsigned place, long long batch, long long parts) {
  const long long share = (batch + parts - 1) / parts;
  const long long all = (batch - (parts - 1) * share) * parts;  // places in rounds of all parts: the last may have fewer
  const long long beyond = place - all, dealt = beyond < 0 ? parts : parts - 1;
  const long long at = beyond < 0 ? place : beyond;
  return at % dealt * share + at / dealt + (beyond < 0 ? 0 : all / parts);
}

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
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
  const int lane = threadIdx.x % 32;
  if (lane == 0) a.to[place_of(place, a.batch, a.parts)] = mine;
  if (lane == 1 && a.to_back != nullptr) a.to_back[place_of(place, a.batch, a.parts_back)] = mine;
}
