// A step of gradient descent for the rows of a table that have a gradient: a block for each row of `sum_rows.cu`.

struct Arguments {
  float* table;             // [tokens, width]
  const long long* tokens;  // [rows]
  const float* grads;       // [rows, width]
  const int* counts;        // [rows]: 0 where a row is not the first of its number
  const float* rate;
  long long width;
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  const long long row = blockIdx.x;
  if (!a.counts[row]) return;
  const float rate = *a.rate;
  float* to = a.table + a.tokens[row] * a.width;
  for (long long at = threadIdx.x; at < a.width; at += THREADS) to[at] -= rate * a.grads[row * a.width + at];
}
