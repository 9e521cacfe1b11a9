// How long a word takes through L2 from one multiprocessor to each other and back.  All blocks run at once, one on each:
// the first sends words to the others, one block after another.

// @generated

struct Arguments {
  unsigned* words;    // zeros: [blocks, LINES, PITCH]
  unsigned* times;    // of each block but the first: cycles, the sum of the LINES words' shortest trips
  unsigned* numbers;  // the multiprocessor of each block
};

constexpr int LINES = 8, TRIPS = 6, PITCH = 256;

__device__ __forceinline__ void put(unsigned* at, unsigned word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void await(const unsigned* at, unsigned word) {
  unsigned now;
  do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
  while (now != word);
}
__device__ __forceinline__ unsigned cycles() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  return now;
}

extern "C" __global__ void __launch_bounds__(32, 1) KERNEL(const __grid_constant__ Arguments a) {
  if (threadIdx.x > 0) return;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(a.numbers[blockIdx.x]));
  const bool first = blockIdx.x == 0;
  for (unsigned block = first ? 1 : blockIdx.x; block < (first ? gridDim.x : blockIdx.x + 1); ++block) {
    unsigned sum = 0;
    for (int line = 0; line < LINES; ++line) {
      unsigned* const at = a.words + (block * LINES + line) * PITCH;
      unsigned shortest = ~0u;
      for (unsigned word = 1; word < 2 * TRIPS; word += 2) {
        const unsigned begun = cycles();
        if (first) put(at, word), await(at, word + 1);
        else await(at, word), put(at, word + 1);
        shortest = min(shortest, cycles() - begun);
      }
      sum += shortest;
    }
    if (first) a.times[block] = sum;
  }
}
