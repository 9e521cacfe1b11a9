// The cross entropy of each row of logits in nats, and the logarithm of its sum of exponentials: a block for each row.
//
// A NaN or an infinity in a row makes its results NaN, as in torch; minus infinity is a chance of zero.

// @numbers

struct Arguments {
  const Half* logits;        // [rows, tokens]
  const long long* targets;  // [rows]
  float* nats;               // [rows]
  float* logs;               // [rows]
  long long tokens;
};

#define THREADS 512

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned memory[];
  float* space = (float*)memory;
  const long long row = blockIdx.x, tokens = a.tokens;
  const Half* mine = a.logits + row * tokens;
  const int first = threadIdx.x;
  // 16 bytes at a time where every row begins at such a place
  const long long packs = tokens % 8 == 0 ? tokens / 8 : 0;
  float most = -__uint_as_float(0x7f800000u), sum = 0.f;
  for (long long at = first; at < packs; at += THREADS) {
    const uint4 eight = ((const uint4*)mine)[at];
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    for (int i = 0; i < 4; ++i) {
      const float one = low(words[i]), two = high(words[i]);
      most = one > most ? one : most, most = two > most ? two : most;
    }
  }
  for (long long at = 8 * packs + first; at < tokens; at += THREADS) {
    const float one = wide(mine[at]);
    most = one > most ? one : most;
  }
  most = over_block<true>(most, space, THREADS);
  for (long long at = first; at < packs; at += THREADS) {
    const uint4 eight = ((const uint4*)mine)[at];
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    for (int i = 0; i < 4; ++i) sum += expf(low(words[i]) - most) + expf(high(words[i]) - most);
  }
  for (long long at = 8 * packs + first; at < tokens; at += THREADS) sum += expf(wide(mine[at]) - most);
  sum = over_block<false>(sum, space, THREADS);
  if (first == 0) {
    const float all = most + logf(sum);
    a.logs[row] = all;
    a.nats[row] = all - wide(mine[a.targets[row]]);
  }
}
