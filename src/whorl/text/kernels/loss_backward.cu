// The gradient of the logits under the mean of `loss.cu` over all rows: a block for each row.

// @numbers

struct Arguments {
  const Half* logits;        // [rows, tokens]
  const long long* targets;  // [rows]
  const float* logs;         // [rows], of loss.cu
  const float* grad;         // of the mean
  Half* to_logits;           // [rows, tokens]
  long long tokens, rows;
};

#define THREADS 512

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  const long long row = blockIdx.x, tokens = a.tokens, target = a.targets[row];
  const Half* mine = a.logits + row * tokens;
  Half* to = a.to_logits + row * tokens;
  const float all = a.logs[row], scale = *a.grad / (float)a.rows;
  const long long packs = tokens % 8 == 0 ? tokens / 8 : 0;
  for (long long at = threadIdx.x; at < packs; at += THREADS) {
    const uint4 eight = ((const uint4*)mine)[at];
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    unsigned made[4];
    for (int i = 0; i < 4; ++i) {
      const long long place = 8 * at + 2 * i;
      const float one = expf(low(words[i]) - all) - (place == target ? 1.f : 0.f);
      const float two = expf(high(words[i]) - all) - (place + 1 == target ? 1.f : 0.f);
      made[i] = narrow_pair(one * scale, two * scale);
    }
    ((uint4*)to)[at] = {made[0], made[1], made[2], made[3]};
  }
  for (long long at = 8 * packs + threadIdx.x; at < tokens; at += THREADS)
    to[at] = (Half)narrow((expf(wide(mine[at]) - all) - (at == target ? 1.f : 0.f)) * scale);
}
