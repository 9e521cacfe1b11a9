// A layer's recurrent weights in float32 to the float16 that kernels with HALVES multiply (ptx.cu says how), in one plane
// or two, before such a kernel; and ones to the ring through which its blocks exchange, where they do.
//
// A warp makes a row: it looks for the largest of it, which decides the row's scale, and writes the row multiplied with it.
// A row stays in registers meanwhile, all of it on its way at once; of more than 2,048 units the rest is read twice.
// What is made has rows of whole 16 bytes, zeros past their end.

// @generated

struct Arguments {
  const float* from[2];  // of each direction, [rows, UNITS]
  uint2* to[2];          // [PLANES, rows, QUADS]; behind them what scales are the inverse of, [rows]
  uint4* ring;
  long long ring_size;   // in 16 bytes
  long long rows;
};

constexpr int QUADS = (UNITS + 7) / 8 * 2;  // four neighbours each, the last of them zeros
constexpr int EACH = (QUADS + 31) / 32, HELD = EACH < 16 ? EACH : 16;  // of a lane, and those of them in registers

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, direction = blockIdx.y;
  const long long rows = a.rows, row = blockIdx.x * (THREADS / 32ll) + threadIdx.x / 32;
  const float* const from = a.from[direction] + row * UNITS;
  const int units = row < rows ? UNITS : 0;
  const auto read = [&](int i) {
    const int column = (lane + i * 32) * 4;
    if constexpr (UNITS % 4 == 0) return column < units ? *(const float4*)(from + column) : float4{};
    const float2 first = load_wide_pair(from + column, column < units, column + 1 < units);
    const float2 second = load_wide_pair(from + column + 2, column + 2 < units, column + 3 < units);
    return float4{first.x, first.y, second.x, second.y};
  };
  float4 held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = read(i);
  const long long thread = (blockIdx.y * gridDim.x + blockIdx.x) * (long long)THREADS + threadIdx.x;
#pragma unroll 1
  for (long long i = thread; i < a.ring_size; i += gridDim.x * gridDim.y * (long long)THREADS)
    a.ring[i] = {~0u, ~0u, ~0u, ~0u};
  if (row >= rows) return;

  float most = 0.f;
  const auto look = [&](const float4& four) {
    most = fmaxf(fmaxf(most, fmaxf(fabsf(four.x), fabsf(four.y))), fmaxf(fabsf(four.z), fabsf(four.w)));
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) look(held[i]);
#pragma unroll 4
  for (int i = HELD; i < EACH; ++i) look(read(i));
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
  const float unscale = unscale_of(most), scale = scale_of(unscale);

  uint2* const to = a.to[direction];
  const auto write = [&](int i, const float4& four) {
    unsigned first[2], second[2];
    split_halves(four.x * scale, four.y * scale, first[0], first[1]);
    split_halves(four.z * scale, four.w * scale, second[0], second[1]);
    if (lane + i * 32 < QUADS)
#pragma unroll
      for (int p = 0; p < PLANES; ++p) to[(p * rows + row) * QUADS + lane + i * 32] = {first[p], second[p]};
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) write(i, held[i]);
#pragma unroll 4
  for (int i = HELD; i < EACH; ++i) write(i, read(i));
  if (lane == 0) ((float*)(to + PLANES * rows * QUADS))[row] = unscale;
}
