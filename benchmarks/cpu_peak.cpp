// Nothing but fused multiply-adds of vectors in registers: what a core multiplies at most.

#include <stdint.h>

#if defined(__AVX512F__)
constexpr int BYTES = 64, SUMS = 24;
#elif defined(__AVX__)
constexpr int BYTES = 32, SUMS = 12;
#else
constexpr int BYTES = 16, SUMS = 24;
#endif
typedef float vector __attribute__((vector_size(BYTES)));

// Multiply-adds of one step, each of which counts as two operations.
extern "C" int64_t peak_step() { return SUMS * BYTES / 4; }

extern "C" float peak_run(int64_t steps) {
  vector sum[SUMS], x = vector{} + 0.999f, y = vector{} + 0.001f, all = {};
#pragma GCC unroll 24
  for (int i = 0; i < SUMS; ++i) sum[i] = vector{} + float(i);
  for (int64_t step = 0; step < steps; ++step) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(x), "+v"(y));
#else
    asm volatile("" : "+w"(x), "+w"(y));
#endif
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; ++i) sum[i] = sum[i] * x + y;
  }
#pragma GCC unroll 24
  for (int i = 0; i < SUMS; ++i) all += sum[i];
  return all[0];
}
