// Which of the blocks that exchange through L2 work together.
//
// Half of a large GPU's multiprocessors lie at each half of its L2, and a word takes longer from one side to the other.
// Which multiprocessor a block runs on nobody knows beforehand: so where sides are known as many blocks are launched as
// there are multiprocessors, and each takes a place among those of its side.  Who finds them taken waits until all have
// come, as they will since all of a launch run at once, and takes one that is left, or ends.

struct Places {
  unsigned* taken;              // ones: [2] blocks of each side that came, then those that came too late; null: in their order
  long long count;              // places
  long long near[2];            // of them for each side, in their order; the others are for whoever finds none
  unsigned long long sides[8];  // of each multiprocessor a bit, 32 in each
};
constexpr unsigned NO_PLACE = ~0u;

// how many counted there before; ones are none
__device__ __forceinline__ unsigned count_up(unsigned* at) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before + 1;
}
__device__ __forceinline__ unsigned counted(const unsigned* at) {
  unsigned last;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(last) : "l"(at) : "memory");
  return last + 1;
}
__device__ __forceinline__ unsigned multiprocessor() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// by one thread
__device__ __forceinline__ unsigned take_place(const Places& places) {
  const unsigned number = multiprocessor() % 256, side = (unsigned)(places.sides[number / 32] >> number % 32) & 1;
  const unsigned first = (unsigned)places.near[0], second = (unsigned)places.near[1];
  const unsigned turn = count_up(places.taken + side);
  if (turn < (side ? second : first)) return side * first + turn;
  const unsigned late = count_up(places.taken + 2);
  unsigned of_first, of_second;  // that came
  do
    of_first = counted(places.taken), of_second = counted(places.taken + 1);
  while (of_first + of_second < gridDim.x);
  // places near a side that nobody of it took are the first, then come those near none
  const unsigned left = first - min(first, of_first), left_then = second - min(second, of_second);
  if (late < left) return of_first + late;
  if (late < left + left_then) return first + of_second + late - left;
  const unsigned place = first + second + late - left - left_then;
  return place < places.count ? place : NO_PLACE;
}

// by all threads of a block, through a word of shared memory
__device__ __forceinline__ unsigned own_place(const Places& places, unsigned* word) {
  if (places.taken == nullptr) return blockIdx.x;
  if (threadIdx.x == 0) *word = take_place(places);
  __syncthreads();
  const unsigned place = *word;
  __syncthreads();
  return place;
}
