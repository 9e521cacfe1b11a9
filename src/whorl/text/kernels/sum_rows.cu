// Gradients of rows of a table, those of equal numbers added: at the first of them stands the sum, at the others zero.
//
// A block for each row. The sum goes by the order of the rows, so that it is the same each time.

// @numbers

struct Arguments {
  const Half* grads;        // [rows, wide_width]
  const long long* tokens;  // [rows]
  float* to;                // [rows, width]
  int* first;               // [rows]: whether a row is the first of its number
  long long rows, width, wide_width;
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  // a byte for each row, in whole 16: whether it has our number; behind them, whether one before us has
  extern __shared__ __align__(16) unsigned memory[];
  const long long row = blockIdx.x, mine = a.tokens[row], packs = (a.rows + 15) / 16;
  if (threadIdx.x == 0) memory[4 * packs] = 0;
  __syncthreads();
  for (long long at = threadIdx.x; at < 4 * packs; at += THREADS) {
    unsigned found = 0;
    for (int i = 0; i < 4; ++i)
      if (4 * at + i < a.rows && a.tokens[4 * at + i] == mine) {
        found |= 1u << 8 * i;
        if (4 * at + i < row) memory[4 * packs] = 1;
      }
    memory[at] = found;
  }
  __syncthreads();
  const bool first = memory[4 * packs] == 0;
  if (threadIdx.x == 0) a.first[row] = first;
  for (long long column = threadIdx.x; column < a.width; column += THREADS) {
    float sum = 0.f;
    for (long long at = row / 16; first && at < packs; ++at) {
      const uint4 sixteen = ((const uint4*)memory)[at];
      if ((sixteen.x | sixteen.y | sixteen.z | sixteen.w) == 0) continue;
      const unsigned words[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
      for (int i = 0; i < 16; ++i)
        if (words[i / 4] >> 8 * (i % 4) & 1u) sum += wide(a.grads[(16 * at + i) * a.wide_width + column]);
    }
    a.to[row * a.width + column] = sum;
  }
}
