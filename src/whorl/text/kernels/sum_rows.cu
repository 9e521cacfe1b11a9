// Gradients of rows of a table, those of equal numbers added: at the first of them stands the sum, at the others zero.
//
// blockIdx.x is the row, blockIdx.y a part of its columns. The sum goes by the order of the rows, so that it is the
// same each time; several rows are on their way at once, for a frequent number has many.

// @numbers

struct Arguments {
  const Half* grads;  // [rows, wide_width]
  const int* order;   // [rows], and the others as `order_rows.cu` wrote them
  const int* starts;
  const int* counts;
  float* to;  // [rows, width]
  long long width, wide_width;
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  const long long row = blockIdx.x, column = blockIdx.y * (long long)THREADS + threadIdx.x;
  if (column >= a.width) return;
  const int* alike = a.order + a.starts[row];
  const int count = a.counts[row];
  float sum = 0.f;
#pragma unroll 8
  for (int at = 0; at < count; ++at) sum += wide(a.grads[alike[at] * a.wide_width + column]);
  a.to[row * a.width + column] = sum;
}
