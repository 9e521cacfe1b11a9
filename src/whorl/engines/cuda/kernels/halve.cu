// A layer's recurrent weights in float32 to the float16 that kernels with HALVES multiply (ptx.cu says how), in one plane
// or two, before such a kernel; and ones to the ring through which its blocks exchange, where they do.
//
// Forward a warp makes a row, whose largest decides its scale.  Backward, where the weights are transposed, a block makes
// 16 columns of the rows of RANGE units' gates, whose gradients a block of that kernel multiplies: each column has a scale.
// What is made stays in registers until its scale is known, all of it on its way at once; of what is more than HELD the
// rest is read twice.  Rows of the result are whole 16 bytes, zeros past their end.

// @generated

struct Arguments {
  const float* from[2];  // of each direction, [RECURRENT x UNITS, UNITS]
  uint2* to[2];          // [PLANES, RECURRENT x UNITS, QUADS], then what scales are the inverse of, of each row or [range, UNITS]
  uint4* ring;
  long long ring_size;   // in 16 bytes
};

constexpr int QUADS = (UNITS + 7) / 8 * 2;  // four neighbours each, the last of them zeros
constexpr int ROWS = RECURRENT * UNITS, RANGES = (UNITS + RANGE - 1) / RANGE, LINES = THREADS / 4;
constexpr int EACH = FORWARD ? (QUADS + 31) / 32 : (RECURRENT * RANGE + LINES - 1) / LINES;  // of a thread
constexpr int HELD = EACH < 16 ? EACH : 16;  // and those of them in registers

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, direction = blockIdx.y;
  // where the thread's i-th four neighbours are; a row below 0: nowhere
#if FORWARD
  const int row = blockIdx.x * (THREADS / 32) + warp;
  const auto row_of = [&](int i) { return row < ROWS ? row : -1; };
  const auto quad_of = [&](int i) { return lane + i * 32; };
#else
  extern __shared__ __align__(128) unsigned memory[];
  const int range = blockIdx.x % RANGES, quad = blockIdx.x / RANGES * 4 + lane % 4;
  const auto row_of = [&](int i) {
    const int line = threadIdx.x / 4 + i * LINES, unit = range * RANGE + line % RANGE;
    return line < RECURRENT * RANGE && unit < UNITS ? line / RANGE * UNITS + unit : -1;
  };
  const auto quad_of = [&](int i) { return quad; };
#endif
  const auto read = [&](int i) {
    const int column = quad_of(i) * 4, left = row_of(i) < 0 ? 0 : UNITS - column;
    const float* const from = a.from[direction] + (long long)row_of(i) * UNITS + column;
    if constexpr (UNITS % 4 == 0) return left > 0 ? *(const float4*)from : float4{};
    const float2 first = load_wide_pair(from, left > 0, left > 1), second = load_wide_pair(from + 2, left > 2, left > 3);
    return float4{first.x, first.y, second.x, second.y};
  };
  float4 held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = read(i);
  const long long thread = (blockIdx.y * gridDim.x + blockIdx.x) * (long long)THREADS + threadIdx.x;
#pragma unroll 1
  for (long long i = thread; i < a.ring_size; i += gridDim.x * gridDim.y * (long long)THREADS)
    a.ring[i] = {~0u, ~0u, ~0u, ~0u};

  float most[4] = {};
  const auto look = [&](const float4& four) {
    most[0] = fmaxf(most[0], fabsf(four.x)), most[1] = fmaxf(most[1], fabsf(four.y));
    most[2] = fmaxf(most[2], fabsf(four.z)), most[3] = fmaxf(most[3], fabsf(four.w));
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) look(held[i]);
#pragma unroll 4
  for (int i = HELD; i < EACH; ++i) look(read(i));
#if FORWARD
  most[0] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) most[0] = fmaxf(most[0], __shfl_xor_sync(0xffffffffu, most[0], apart));
  most[1] = most[2] = most[3] = most[0];
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int apart = 16; apart > 2; apart /= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(0xffffffffu, most[e], apart));
  }
  float4* const found = (float4*)memory;  // [warp, quad]
  if (lane < 4) found[warp * 4 + lane] = {most[0], most[1], most[2], most[3]};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) look(found[i * 4 + lane % 4]);
#endif
  float unscale[4], scale[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) unscale[e] = unscale_of(most[e]), scale[e] = scale_of(unscale[e]);

  uint2* const to = a.to[direction];
  const auto write = [&](int i, const float4& four) {
    unsigned first[2], second[2];
    split_halves(four.x * scale[0], four.y * scale[1], first[0], first[1]);
    split_halves(four.z * scale[2], four.w * scale[3], second[0], second[1]);
    if (row_of(i) >= 0 && quad_of(i) < QUADS)
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        to[((long long)p * ROWS + row_of(i)) * QUADS + quad_of(i)] = {first[p], second[p]};
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) write(i, held[i]);
#pragma unroll 4
  for (int i = HELD; i < EACH; ++i) write(i, read(i));
  float* const unscales = (float*)(to + (long long)PLANES * ROWS * QUADS);
#if FORWARD
  if (lane == 0 && row < ROWS) unscales[row] = unscale[0];
#else
  if (threadIdx.x < 4)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (quad * 4 + e < UNITS) unscales[range * UNITS + quad * 4 + e] = unscale[e];
#endif
}
