// The gradients of the biases and of the vectors of a layer, from the sums that blocks of its backward kernel left: a
// block makes COLUMNS of them.  Each of PARTS threads adds every PARTS-th sum of a column, in the order of the blocks;
// one of them adds what they found, which is in shared memory, in the order of the threads.  Of r's bias the gradient is
// x's where a cell uses nothing but x + r, and of its own where r is kept apart.

// @generated

#if ELEMENT_BYTES == 2
typedef unsigned short Element;
#if BFLOAT16
__device__ __forceinline__ Element narrow(float value) {
  Element result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
#else
__device__ __forceinline__ Element narrow(float value) {
  Element result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
#endif
#else
typedef float Element;
__device__ __forceinline__ Element narrow(float value) { return value; }
#endif

struct Arguments {
  const float* sums[2];  // for each direction [rows, gates + apart + vectors, units]
  Element* x_bias[2];    // [gates, units]
  Element* bias[2];      // [recurrent, units]
  Element* vectors[2];   // [vectors, units]
  long long rows, units, gates, recurrent, apart, count;  // gates, recurrent and apart are 0 without biases
  unsigned char places[64];  // of each recurrent gate: where its sum lies
};

constexpr int AT_ONCE = 8;  // sums that a thread reads before it adds them

extern "C" __global__ void __launch_bounds__(COLUMNS * PARTS) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  extern __shared__ __align__(16) unsigned memory[];
  float(*const found)[COLUMNS] = (float(*)[COLUMNS])memory;  // [PARTS, COLUMNS]
  const int column = threadIdx.x % COLUMNS, part = threadIdx.x / COLUMNS, units = (int)a.units, rows = (int)a.rows;
  const int mine = blockIdx.x * COLUMNS + column, direction = blockIdx.y;
  const int gate = mine / units, unit = mine % units, gates = (int)a.gates, recurrent = (int)a.recurrent;
  const bool there = gate < gates + recurrent + a.count;
  const bool of_x = gate < gates, of_r = !of_x && gate < gates + recurrent;
  const int place = of_x ? gate : of_r ? a.places[gate - gates] : gate - recurrent + (int)a.apart;
  const long long width = (gates + a.apart + a.count) * units;
  float sum = 0.f;
  if (there) {
    const float* const from = a.sums[direction] + (long long)place * units + unit;
    const float* at[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) at[i] = from + (part + i * PARTS) * width;
    for (int first = part; first < rows; first += PARTS * AT_ONCE) {
      float read[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        read[i] = first + i * PARTS < rows ? *at[i] : 0.f;
        at[i] += PARTS * AT_ONCE * width;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) sum += read[i];
    }
  }
  found[part][column] = sum;
  __syncthreads();
  if (part > 0 || !there) return;
#pragma unroll
  for (int i = 1; i < PARTS; ++i) sum += found[i][column];
  Element* const to = of_x ? a.x_bias[direction] : of_r ? a.bias[direction] : a.vectors[direction];
  to[(of_x ? gate : of_r ? gate - gates : gate - gates - recurrent) * units + unit] = narrow(sum);
}
