// What the lines of a cell are made of, for kernels in which a thread has units of its own: numbers, functions and rows.

typedef long long int64_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;

#define EACH_ALONE
#define MOST(count) ((count) > 0 ? (count) : 1)

namespace kernel {

// --- numbers ----------------------------------------------------------------------------------------------------------

// WHORL_DTYPE is 64, 32, 16 (bfloat16) or 17 (float16).  `real` is what states and sums are held in, `store` what x, y,
// weights and the operands of products are.
#if WHORL_DTYPE == 64
typedef double real;
typedef double store;
#else
typedef float real;
#if WHORL_DTYPE == 32
typedef float store;
#else
struct store {
  uint16_t bits;
};
#endif
#endif

__forceinline__ float widened(float value) { return value; }
__forceinline__ double widened(double value) { return value; }
__forceinline__ void put(float* at, float value) { *at = value; }
__forceinline__ void put(double* at, double value) { *at = value; }
#if WHORL_DTYPE == 16
__forceinline__ float widened(store value) { return __uint_as_float(uint32_t(value.bits) << 16); }
__forceinline__ void put(store* at, float value) {  // to the nearest, ties to even; a NaN stays one
  const uint32_t bits = __float_as_uint(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  at->bits = uint16_t(value != value ? 0x7fc0u : rounded);
}
#elif WHORL_DTYPE == 17
__forceinline__ float widened(store value) {
  float made;
  asm("cvt.f32.f16 %0, %1;" : "=f"(made) : "h"(value.bits));
  return made;
}
__forceinline__ void put(store* at, float value) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(at->bits) : "f"(value));
}
#endif

namespace std {
__forceinline__ float exp(float x) { return expf(x); }
__forceinline__ float expm1(float x) { return expm1f(x); }
__forceinline__ float log(float x) { return logf(x); }
__forceinline__ float log1p(float x) { return log1pf(x); }
__forceinline__ float erf(float x) { return erff(x); }
__forceinline__ float sin(float x) { return sinf(x); }
__forceinline__ float cos(float x) { return cosf(x); }
__forceinline__ float tanh(float x) { return tanhf(x); }
__forceinline__ float pow(float x, float y) { return powf(x, y); }
__forceinline__ float sqrt(float x) { return sqrtf(x); }
__forceinline__ float fabs(float x) { return fabsf(x); }
__forceinline__ double exp(double x) { return ::exp(x); }
__forceinline__ double expm1(double x) { return ::expm1(x); }
__forceinline__ double log(double x) { return ::log(x); }
__forceinline__ double log1p(double x) { return ::log1p(x); }
__forceinline__ double erf(double x) { return ::erf(x); }
__forceinline__ double sin(double x) { return ::sin(x); }
__forceinline__ double cos(double x) { return ::cos(x); }
__forceinline__ double tanh(double x) { return ::tanh(x); }
__forceinline__ double pow(double x, double y) { return ::pow(x, y); }
__forceinline__ double sqrt(double x) { return ::sqrt(x); }
__forceinline__ double fabs(double x) { return ::fabs(x); }
}  // namespace std

__forceinline__ real sigmoid(real x) {
  const real z = std::exp(-std::fabs(x));
  return (x < real(0) ? z : real(1)) / (real(1) + z);
}

// --- what the generated lines see -------------------------------------------------------------------------------------

constexpr int MOST_STATES = 4, MOST_GATES = 8;

struct Team {
  unsigned member;
  __forceinline__ void wait() const { __syncthreads(); }
};

// One sequence at one step; a thread has its units [first, last).
struct Row {
  int64_t units, first, last;
  const real* x;
  const real* r;
  int64_t r_offset[MOST_GATES];
  const real* before[MOST_STATES];
  real* after[MOST_STATES];
  const real* const* v;
  const real* const* e;
  real* means;
  real* scratch;
  int64_t padded;
  real* saved;
  const real* d[MOST_STATES];
  store* dx;
  store* dr;
  real* ds[MOST_STATES];
  real* const* dv;
  real* const* de;
  store* const* dp;
  int64_t means_at;
};

struct Link {
  int segment, gate, operand, result, product;
};

// The sum of a row by the whole block, in an order that its length and the block's alone decide.
static real sum_of(const real* values, int64_t count) {
  __shared__ real parts[32];
  real sum = 0;
  for (int64_t u = threadIdx.x; u < count; u += blockDim.x) sum += values[u];
#pragma unroll
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(~0u, sum, away);
  __syncthreads();  // the last sum was read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < (blockDim.x + 31) / 32; ++warp) sum += parts[warp];
  return sum;
}

//: generated

}  // namespace kernel
