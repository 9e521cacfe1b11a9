// Layer norm of the input projection, of all steps at once: a block takes row after row, a thread of it every
// THREADS-th column.  Forward gives what comes to the time loop; backward the gradient of the projection, and of biases,
// gains and shifts the sums over the rows of each block, which kernels/sums.cu adds up.

// @generated

constexpr int WIDTH = GATES * UNITS, EACH = (WIDTH + THREADS - 1) / THREADS, WARPS = THREADS / 32;
constexpr int COLUMNS = (2 + BIASED) * WIDTH;  // of a block's sums: bias, gains, shifts

__device__ __forceinline__ int column_of(int place) { return threadIdx.x + place * THREADS; }

// The sums of two numbers over the threads of the block.
__device__ __forceinline__ float2 over_block(float first, float second) {
  extern __shared__ __align__(16) unsigned memory[];
  float2* const sums = (float2*)memory;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    first += __shfl_xor_sync(0xffffffffu, first, apart);
    second += __shfl_xor_sync(0xffffffffu, second, apart);
  }
  __syncthreads();  // all have read the sums before these
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = {first, second};
  __syncthreads();
  float2 all = sums[0];
  for (int warp = 1; warp < WARPS; ++warp) {
    const float2 one = sums[warp];
    all.x += one.x;
    all.y += one.y;
  }
  return all;
}

#if FORWARD

struct Arguments {
  const float* x;                // [rows, WIDTH], without its bias
  const Element* bias;           // [WIDTH]
  const Element* gains[GATES];   // [UNITS]
  const Element* shifts[GATES];
  Gate* y;                       // [rows, WIDTH]
  float *means, *scales;         // [rows]: the mean, and what the distance from it is multiplied by
  long long rows;
};

__device__ __forceinline__ void put(float* to, float value) { *to = value; }
#if ELEMENT_BYTES == 2
__device__ __forceinline__ void put(Element* to, float value) { *to = narrow(value); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  float bias[EACH], gain[EACH], shift[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int column = column_of(i), there = column < WIDTH, gate = there ? column / UNITS : 0;
    const int unit = there ? column - gate * UNITS : 0;
    bias[i] = BIASED && there ? wide(a.bias[column]) : 0.f;
    gain[i] = wide(a.gains[gate][unit]);
    shift[i] = wide(a.shifts[gate][unit]);
  }
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float x[EACH], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      x[i] = column_of(i) < WIDTH ? a.x[row * WIDTH + column_of(i)] + bias[i] : 0.f;
      sum += x[i];
    }
    const float mean = over_block(sum, 0.f).x / WIDTH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float apart = column_of(i) < WIDTH ? x[i] - mean : 0.f;
      squares += apart * apart;
    }
    const float scale = 1.f / sqrtf(over_block(squares, 0.f).x / WIDTH + EPS);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (column_of(i) < WIDTH) put(a.y + row * WIDTH + column_of(i), (x[i] - mean) * scale * gain[i] + shift[i]);
    if (threadIdx.x == 0) {
      a.means[row] = mean;
      a.scales[row] = scale;
    }
  }
}

#else

struct Arguments {
  const float* x;              // [rows, WIDTH], without its bias
  const Element* bias;         // [WIDTH]
  const Element* gains[GATES];
  const float *means, *scales;  // [rows], as forward left them
  const Element* grad;         // [rows, WIDTH], of what forward gave
  Element* made;               // [rows, WIDTH], of x
  float* sums;                 // [blocks, COLUMNS]
  long long rows;
};

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  float to_bias[EACH] = {}, to_gain[EACH] = {}, to_shift[EACH] = {};
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float mean = a.means[row], scale = a.scales[row];
    float normal[EACH], to_normal[EACH], first = 0.f, second = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int column = column_of(i), there = column < WIDTH, gate = there ? column / UNITS : 0;
      const float grad = there ? wide(a.grad[row * WIDTH + column]) : 0.f;
      const float bias = BIASED && there ? wide(a.bias[column]) : 0.f;
      normal[i] = there ? (a.x[row * WIDTH + column] + bias - mean) * scale : 0.f;
      to_normal[i] = there ? grad * wide(a.gains[gate][column - gate * UNITS]) : 0.f;
      to_gain[i] += grad * normal[i];
      to_shift[i] += grad;
      first += to_normal[i];
      second += to_normal[i] * normal[i];
    }
    const float2 all = over_block(first, second);
    const float same = all.x / WIDTH, along = all.y / WIDTH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float to_x = scale * (to_normal[i] - same - normal[i] * along);
      if (column_of(i) < WIDTH) a.made[row * WIDTH + column_of(i)] = narrow(to_x);
      to_bias[i] += to_x;
    }
  }
  float* const sums = a.sums + (long long)blockIdx.x * COLUMNS;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (column_of(i) >= WIDTH) continue;
    if (BIASED) sums[column_of(i)] = to_bias[i];
    sums[BIASED * WIDTH + column_of(i)] = to_gain[i];
    sums[(BIASED + 1) * WIDTH + column_of(i)] = to_shift[i];
  }
}

#endif
