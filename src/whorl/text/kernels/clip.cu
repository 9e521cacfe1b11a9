// The rate of a step, made smaller by as much as the gradients' norm is too large: one block.

// @numbers

struct Arguments {
  const float* squares[4];  // sums of squares, [counts]; or none of them
  long long counts[4];
  long long shares[4];  // what each of them is divided by
  float* rate;
  double most;  // the largest norm
};

#define THREADS 512

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned memory[];
  float sum = 0.f;
  for (int of = 0; of < 4; ++of) {
    float part = 0.f;
    for (long long at = threadIdx.x; at < a.counts[of]; at += THREADS) part += a.squares[of][at];
    sum += part / (float)a.shares[of];
  }
  sum = over_block<false>(sum, (float*)memory, THREADS);
  const float scale = (float)a.most / (sqrtf(sum) + 1e-6f);  // 1e-6 as in clip_grad_norm_
  if (threadIdx.x == 0 && !(scale >= 1.f)) *a.rate *= scale;  // by what is no number too
}
