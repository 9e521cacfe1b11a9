// How blocks that are not of one cluster hand words to each other: through L2, without barriers and without flags.
//
// A word is its own flag.  Two-byte values go into a ring of buffers that is full of NOTHING, a pair of not-a-numbers
// which no rounding makes: a reader looks until a word is another.  Once all have read a word its writer makes it
// NOTHING again, and every PERIOD steps all threads fence; a buffer comes round again only two fences later, so what a
// reader then sees is NOTHING or new, never old.  Sums in float32 give their last bit away for the phase, which changes
// each time that a buffer comes round: they need no clearing and no fence.  Both are filled with ones before a launch.

constexpr unsigned NOTHING = 0xffffffffu;
constexpr int PERIOD = 4, RING = 4 * PERIOD;  // steps between fences; buffers of two-byte values

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
__device__ __forceinline__ void put(unsigned* at, unsigned word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(word));
}
__device__ __forceinline__ void put_pair(unsigned* at, unsigned first, unsigned second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(first), "r"(second));
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ bool is_missing(const uint4& words) {
  return words.x == NOTHING || words.y == NOTHING || words.z == NOTHING || words.w == NOTHING;
}
__device__ __forceinline__ unsigned something(unsigned word) { return min(word, NOTHING - 1); }

__device__ __forceinline__ void add(float (&sum)[4], const float (&other)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += other[e];
}

// Rows of CHUNKS x 16 bytes on their way from L2 to shared memory: row `warp`, row `warp` + WARPS, ...
template <int ROWS, int CHUNKS, int WORDS, int WARPS>
struct Arrival {
  static constexpr int ACROSS = (CHUNKS + 31) / 32, DOWN = (ROWS + WARPS - 1) / WARPS;
  static constexpr int LAST = WORDS - (CHUNKS - 1) * 4;  // words of the last chunk that anybody writes
  uint4 data[DOWN][ACROSS];

  // `from`: this warp's first row and this lane's chunk; `pitch`: words from row to row; `rows`: that are there
  __device__ __forceinline__ void look_at(const unsigned* from, long long pitch, int rows, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) data[i][j] = one(from, pitch, rows, warp, lane, i, j);
  }

  __device__ __forceinline__ uint4 one(const unsigned* from, long long pitch, int rows, int warp, int lane, int i,
                                       int j) const {
    uint4 words = {0, 0, 0, 0};
    if (warp + i * WARPS < rows && lane + j * 32 < CHUNKS) words = look(from + i * WARPS * pitch + j * 128);
    if (LAST < 4 && lane + j * 32 == CHUNKS - 1) {
      if (LAST < 2) words.y = 0;
      if (LAST < 3) words.z = 0;
      words.w = 0;
    }
    return words;
  }

  __device__ __forceinline__ void settle(const unsigned* from, long long pitch, int rows, int warp, int lane) {
    for (;;) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j)
          if (is_missing(data[i][j])) {
            data[i][j] = one(from, pitch, rows, warp, lane, i, j);
            all = false;
          }
      if (all) break;
    }
  }

  __device__ __forceinline__ void place(unsigned* to, int stride, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int j = 0; j < ACROSS; ++j)
        if (warp + i * WARPS < ROWS && lane + j * 32 < CHUNKS)
          *(uint4*)(to + (warp + i * WARPS) * stride + (lane + j * 32) * 4) = data[i][j];
  }
};
