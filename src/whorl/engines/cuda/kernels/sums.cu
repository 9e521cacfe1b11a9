// The gradients of the biases and of the vectors of a layer, from the sums that blocks of its backward kernel left: a
// thread adds those of one unit, in the order of the blocks.  Of r's bias the gradient is x's where a cell uses nothing
// but x + r, and of its own where r is kept apart.

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

extern "C" __global__ void __launch_bounds__(128) KERNEL(const __grid_constant__ Arguments a) {
  const int mine = blockIdx.x * 128 + threadIdx.x, direction = blockIdx.y, units = (int)a.units;
  const int gate = mine / units, unit = mine % units, gates = (int)a.gates, recurrent = (int)a.recurrent;
  if (gate >= gates + recurrent + a.count) return;
  const bool of_x = gate < gates, of_r = !of_x && gate < gates + recurrent;
  const int place = of_x ? gate : of_r ? a.places[gate - gates] : gate - recurrent + (int)a.apart;
  const long long width = (gates + a.apart + a.count) * units;
  const float* const from = a.sums[direction] + (long long)place * units + unit;
  float sum = 0.f;
#pragma unroll 8
  for (int row = 0; row < a.rows; ++row) sum += from[row * width];
  Element* const to = of_x ? a.x_bias[direction] : of_r ? a.bias[direction] : a.vectors[direction];
  to[(of_x ? gate : of_r ? gate - gates : gate - gates - recurrent) * units + unit] = narrow(sum);
}
