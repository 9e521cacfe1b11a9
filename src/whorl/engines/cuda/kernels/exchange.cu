// How blocks that are not of one cluster hand words to each other: through L2, without barriers and without flags.
//
// A word is its own flag.  Two-byte values go into a ring of buffers that is full of NOTHING, a pair of not-a-numbers
// which no rounding makes: a reader looks until a word is another.  PERIOD steps later, when all have long read a word, its
// writer makes it NOTHING again, and every PERIOD steps all threads fence; a buffer comes round again only two fences later,
// so what a reader then sees is NOTHING or new, never old.  Values and sums in float32 give their last bit away for the phase,
// which changes each time that a buffer comes round: two buffers are enough, without clearing or fences, since who
// writes at step t + 2 has read what all made of step t.  TF32 has not that bit.  All is filled with ones before a launch.

constexpr unsigned NOTHING = 0xffffffffu;
constexpr int PERIOD = 8;                                 // steps between fences
constexpr int RING = OPERAND_BYTES == 2 ? 4 * PERIOD : 2;  // buffers of values

__device__ __forceinline__ uint4 look(const unsigned* at) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at));
  return words;
}
__device__ __forceinline__ uint2 look_pair(const unsigned* at) {
  uint2 words;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(at));
  return words;
}
__device__ __forceinline__ unsigned ticks() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}
// Lets so many cycles go by from a tick on.
__device__ __forceinline__ void pause(unsigned begun, unsigned count) {
  unsigned now;
  do
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  while (now - begun < count);
}
__device__ __forceinline__ void put(unsigned* at, unsigned word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(word));
}
__device__ __forceinline__ void put_pair(unsigned* at, unsigned first, unsigned second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(first), "r"(second));
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// how many buffers on from that of a step the one lies which is made NOTHING then; in the first steps it is that already
__device__ __forceinline__ int freed(int step) { return step % RING < PERIOD ? RING - PERIOD : -PERIOD; }

__device__ __forceinline__ unsigned phase_of(int step) { return step / RING % 2; }
#if ELEMENT_BYTES == 2 || HALVES
// NOTHING is the largest of all words: one comparison tells of many.  One for each word, after the other, kept all waiting.
struct Missing {
  unsigned most = 0;
  __device__ __forceinline__ void add(const uint4& words, unsigned) {
    most = max(most, max(max(words.x, words.y), max(words.z, words.w)));
  }
  __device__ __forceinline__ bool any() const { return most == NOTHING; }
};
__device__ __forceinline__ unsigned something(unsigned word) { return min(word, NOTHING - 1); }
// two neighbouring values (scaled, with HALVES) to where others look for them, planes `apart` words apart
__device__ __forceinline__ void give(unsigned* at, int apart, float first, float second, unsigned) {
#if HALVES
  unsigned words[2];
  split_halves(first, second, words[0], words[1]);
#pragma unroll
  for (int p = 0; p < PLANES; ++p) put(at + p * apart, something(words[p]));
#else
  put(at, something(operand_pair(first, second)));
#endif
}
__device__ __forceinline__ unsigned absent(unsigned) { return 0; }  // a zero that nobody waits for
#else
struct Missing {
  unsigned other = 0;
  __device__ __forceinline__ void add(const uint4& words, unsigned phase) {
    other |= (words.x ^ phase) | (words.y ^ phase) | (words.z ^ phase) | (words.w ^ phase);
  }
  __device__ __forceinline__ bool any() const { return other & 1u; }
};
__device__ __forceinline__ void give(unsigned* at, int, float first, float second, unsigned phase) {
  put_pair(at, (operand(first) & ~1u) | phase, (operand(second) & ~1u) | phase);
}
__device__ __forceinline__ unsigned absent(unsigned phase) { return phase; }  // too small for a tensor core
#endif

__device__ __forceinline__ bool is_missing(const uint4& words, unsigned phase) {
  Missing missing;
  missing.add(words, phase);
  return missing.any();
}
template <int COUNT>
__device__ __forceinline__ bool is_missing(const uint4 (&words)[COUNT], unsigned phase) {  // any of them
  Missing missing;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) missing.add(words[i], phase);
  return missing.any();
}

// The compiler, short of registers, would compute an address anew at each use; what has been kept it cannot.
template <class T>
__device__ __forceinline__ void keep(T*& pointer) {  // to global memory
  unsigned long long address = __cvta_generic_to_global(pointer);
  asm volatile("" : "+l"(address));
  pointer = (T*)__cvta_global_to_generic(address);
}
__device__ __forceinline__ void keep(int& offset) { asm volatile("" : "+r"(offset)); }
__device__ __forceinline__ void keep(float& number) { asm volatile("" : "+f"(number)); }

// Of COUNT operands in two planes, first those of the first: of the others as many as can be stay in registers, since what
// comes from shared memory is multiplied as fast with both planes of the states as with one (see warpgroup.cu).
template <int COUNT, int STREAMED>
struct PlanedOperands {
  static constexpr int RESIDENT = 2 * COUNT - STREAMED, LOW = RESIDENT < COUNT ? RESIDENT : COUNT, HIGH = RESIDENT - LOW;
  typedef Operands<COUNT, COUNT - HIGH> First;
  typedef Operands<COUNT, COUNT - LOW> Second;
  __device__ static constexpr int before(int i) {
    return i < COUNT ? First::before(i) : COUNT - HIGH + Second::before(i - COUNT);
  }
  __device__ static constexpr bool streamed(int i) { return i < COUNT ? First::streamed(i) : Second::streamed(i - COUNT); }
  __device__ static constexpr int resident(int i) {
    if (streamed(i)) return 0;
    return i < COUNT ? First::resident(i) : HIGH + Second::resident(i - COUNT);
  }
};

__device__ __forceinline__ void add(float (&sum)[4], const float (&other)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += other[e];
}

// What comes is kept as it is; or as levels.cu says.
struct AsItIs {
  __device__ __forceinline__ uint4 made(int, int, const uint4& words) const { return words; }
};

// Rows of CHUNKS x 16 bytes, PITCH words apart in L2, on their way to shared memory, where DOWNWARDS words lie between
// those of one warp, and SIDEWARDS between what is 32 chunks apart in one: row `warp`, row `warp` + WARPS, ...  `from`
// and `to` are of the warp's first row and the lane's chunk, `left` is how many rows there are from it on, `phase` that of
// the step.  What is of a second plane lies PLANE_PITCH words behind in L2, and PLANEWARDS in shared memory.  They travel
// in PARTS, the first of which is asked for beforehand; more than one take more time and fewer registers.  Where rows are
// SIDES times SIDE chunks, a part is neighbouring chunks of each side of all rows: a product may begin with the first.  AFTERWARDS,
// where a lane has more than 2 chunks, the rest of the first part is asked for when the first words of a warp have come:
// where nobody can have written yet, what is asked for in vain keeps the rest waiting.  LSTM, 1,500 units at batch 20,
// took 3.77 us a step forward and not 4.06, with TF32 products a train step 668 us and not 723; with layer norm 6.8 and
// not 8.2 forward; with 2 chunks, 512 units at 128, 4.0 and 3.9.
template <int ROWS, int CHUNKS, int WORDS, int PITCH, int WARPS, int DOWNWARDS, int SIDEWARDS, int PARTS, bool AFTERWARDS,
          int PLANE_PITCH, int PLANEWARDS, int SIDES = 0, int SIDE = CHUNKS>
struct Arrival {
  static constexpr bool BY_SIDES = SIDES > 0;
  static constexpr int ACROSS = (SIDE + 31) / 32, DOWN = (ROWS + WARPS - 1) / WARPS;
  static constexpr int COUNT = DOWN * MOST(SIDES) * ACROSS * PLANES;
  static constexpr int OF_PART = (ACROSS + PARTS - 1) / PARTS;  // times 32 chunks of each side
  static constexpr int WIDE = BY_SIDES ? OF_PART * SIDES * DOWN * PLANES : (COUNT + PARTS - 1) / PARTS;
  static constexpr bool AFTER_ONE = AFTERWARDS && COUNT > 2;
  static constexpr int AT_FIRST = AFTER_ONE ? 1 : WIDE;  // of the first part
  static constexpr int LAST = WORDS - (CHUNKS - 1) * 4;  // words of the last chunk that anybody writes
  // Lanes look until all of the warp's words are there, and go on as one: where each goes on alone LSTM with 1,024 units
  // at batch 128 takes 3.48 us a step and not 3.41, with 768 at 16 1.12 and 1.06.  With scales of more than 16 sequences
  // (TF32, 1,024 units at batch 128) there are no registers for it: 8 words are spilled.
  static constexpr bool ALONE = HALVES && ROWS > 16;
  uint4 data[WIDE];

  // of the k-th piece of a lane the row, in turns of the warps, and the first lane's chunk
  __device__ __forceinline__ static constexpr int row(int k) {
    return BY_SIDES ? k / (PLANES * SIDES) % DOWN : k / (PLANES * ACROSS);
  }
  __device__ __forceinline__ static constexpr int across(int k) {  // of its side, in 32 chunks
    return BY_SIDES ? k / (PLANES * SIDES * DOWN) : k / PLANES % ACROSS;
  }
  __device__ __forceinline__ static constexpr int chunk(int k) {
    return (BY_SIDES ? k / PLANES % SIDES * SIDE : 0) + across(k) * 32;
  }
  __device__ __forceinline__ static bool is_there(int left, int lane, int k) {
    const int j = across(k), of_side = SIDE - j * 32, of_row = CHUNKS - chunk(k), most = of_side < of_row ? of_side : of_row;
    return k < COUNT && left > row(k) * WARPS &&
           (BY_SIDES ? most >= 32 || lane < most : CHUNKS % 32 == 0 || j + 1 < ACROSS || lane < CHUNKS - j * 32);
  }
  __device__ __forceinline__ static uint4 one(const unsigned* from, int lane, unsigned phase, int k) {
    const unsigned zero = absent(phase);
    uint4 words = look(from + row(k) * WARPS * PITCH + chunk(k) * 4 + k % PLANES * PLANE_PITCH);
    if (LAST < 4 && chunk(k) + 32 >= CHUNKS && lane == CHUNKS - 1 - chunk(k)) {
      if (LAST < 2) words.y = zero;
      if (LAST < 3) words.z = zero;
      words.w = zero;
    }
    return words;
  }

  __device__ __forceinline__ void ask(const unsigned* from, int left, int lane, unsigned phase, int k, int part) {
    const unsigned zero = absent(phase);
    data[k] = {zero, zero, zero, zero};
    if (is_there(left, lane, part * WIDE + k)) data[k] = one(from, lane, phase, part * WIDE + k);
  }
  __device__ __forceinline__ void look_at(const unsigned* from, int left, int lane, unsigned phase, int part = 0) {
#pragma unroll
    for (int k = 0; k < (part == 0 ? AT_FIRST : WIDE); ++k) ask(from, left, lane, phase, k, part);
  }
  // what is asked for of the first part has come of all lanes
  __device__ __forceinline__ void await_the_first(const unsigned* from, int lane, unsigned phase) {
    if (AFTER_ONE)
      while (!__all_sync(0xffffffffu, !is_missing(data[0], phase)))
        if (is_missing(data[0], phase)) data[0] = one(from, lane, phase, 0);
  }
  __device__ __forceinline__ void look_on(const unsigned* from, int left, int lane, unsigned phase) {
#pragma unroll
    for (int k = AT_FIRST; k < WIDE; ++k) ask(from, left, lane, phase, k, 0);
  }

  __device__ __forceinline__ static bool lacks(const uint4& words, unsigned phase) {
    if (!ALONE) return is_missing(words, phase);
    return words.x == NOTHING || words.y == NOTHING || words.z == NOTHING || words.w == NOTHING;
  }
  // a part that has been asked for; then the next one is
  template <class Kept>
  __device__ __forceinline__ void settle(
      unsigned* to, const unsigned* from, int left, int lane, unsigned phase, int part, const Kept& kept) {
    while (ALONE ? is_missing(data, phase) : __any_sync(0xffffffffu, is_missing(data, phase)))
#pragma unroll
      for (int k = 0; k < WIDE; ++k)
        if (lacks(data[k], phase)) data[k] = one(from, lane, phase, part * WIDE + k);
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
      const int all = part * WIDE + k;
      if (is_there(left, lane, all))
        *(uint4*)(to + row(all) * DOWNWARDS + chunk(all) * (SIDEWARDS / 32) + all % PLANES * PLANEWARDS) =
            kept.made(row(all), chunk(all) + lane, data[k]);
    }
    if (part + 1 < PARTS) look_at(from, left, lane, phase, part + 1);
  }
  __device__ __forceinline__ void settle(unsigned* to, const unsigned* from, int left, int lane, unsigned phase, int part) {
    if (part == 0) await_the_first(from, lane, phase), look_on(from, left, lane, phase);
    settle(to, from, left, lane, phase, part, AsItIs{});
  }
};
