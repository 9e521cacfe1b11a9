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
  extern __shared__ __align__(16) unsigned memory[];  // a byte for each row, in whole 4: whether it has our number
  const long long row = blockIdx.x, mine = a.tokens[row], words = (a.rows + 3) / 4;
  for (long long at = threadIdx.x; at < words; at += THREADS) {
    unsigned found = 0;
    for (int i = 0; i < 4; ++i)
      if (4 * at + i < a.rows && a.tokens[4 * at + i] == mine) found |= 1u << 8 * i;
    memory[at] = found;
  }
  __syncthreads();
  bool first = true;
  for (long long at = 0; at <= row / 4; ++at) {
    const unsigned before = at == row / 4 ? memory[at] & ((1u << 8 * (row % 4)) - 1u) : memory[at];
    if (before) first = false;
  }
  if (threadIdx.x == 0) a.first[row] = first;
  for (long long column = threadIdx.x; column < a.width; column += THREADS) {
    float sum = 0.f;
    if (first)
      for (long long at = row / 4; at < words; ++at)
        if (memory[at])
          for (int i = 0; i < 4; ++i)
            if (memory[at] >> 8 * i & 1u) sum += wide(a.grads[(4 * at + i) * a.wide_width + column]);
    a.to[row * a.width + column] = sum;
  }
}
