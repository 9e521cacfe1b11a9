// The places of sequences from the longest to the shortest, those of a length as they came: a thread finds one's place.

// @generated

struct Arguments {
  long long* to;             // [batch]: the sequence in each place
  const long long* lengths;  // [batch]
  long long batch;
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  const long long mine = blockIdx.x * 256ll + threadIdx.x;
  if (mine >= a.batch) return;
  const long long length = a.lengths[mine];
  long long place = 0;
  for (long long other = 0; other < a.batch; ++other) {
    const long long its = a.lengths[other];
    place += its > length || (its == length && other < mine);
  }
  a.to[place] = mine;
}
