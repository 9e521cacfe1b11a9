// Rows of a table by their numbers, rounded to bfloat16, zeros past their end: a block for each row.

// @numbers

struct Arguments {
  const float* table;       // [tokens, width]
  const long long* tokens;  // [rows]
  Half* to;                 // [rows, wide_width]
  long long width, wide_width;
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  const float* from = a.table + a.tokens[blockIdx.x] * a.width;
  Half* to = a.to + blockIdx.x * a.wide_width;
  for (long long at = threadIdx.x; at < a.wide_width; at += THREADS)
    to[at] = (Half)narrow(at < a.width ? from[at] : 0.f);
}
