// Rows of a matrix to rows of another width, in words of WORD bytes: zero where there is nothing to copy.

// @generated

struct Arguments {
  const Word* from;
  Word* to;
  long long from_step, to_step;  // words from row to row
  long long rows, width;         // of what is copied
  long long to_width;            // of what is written, in as many rows as the grid has
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  const long long row = blockIdx.x;
  const Word* const from = a.from + row * a.from_step;
  Word* const to = a.to + row * a.to_step;
  const int left = row < a.rows ? (int)a.width : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < a.to_width; i += 256) to[i] = i < left ? from[i] : (Word)0;
}
