// How the recurrent weights come to a warp, as operands of the tensor cores: 16 rows x 8 words of depth each, of which a
// thread has 4 words.  All threads first ask for everything there is room for, 16 bytes at a time, and it goes to shared
// memory past the registers; then each takes its own words from there.  The asking is a loop and not unrolled, since code
// that runs once takes longer to arrive than the weights that it asks for.
//
// Some operands stay in registers, which take turns in shared memory that is used for other things later; the others are
// streamed at each step from where they lie in it for good, [operand, lane].  KEPT says which: streamed(i), before(i) of
// those streamed before it, resident(i) of those not.

constexpr int LEAST_ROOM = 12;  // operands of a warp that shared memory has room for at a time, as prepare.py says

#if HALVES  // as halve.cu makes them: two matrices where there are two planes, behind them what scales are the inverse of
typedef unsigned short Weight;
constexpr int WEIGHT_BYTES = 2, WEIGHT_PITCH = (UNITS + 7) / 8 * 8;  // elements from row to row
__device__ __forceinline__ const float* scales_behind(const Weight* weights) {
  return (const float*)(weights + (long long)PLANES * RECURRENT * UNITS * WEIGHT_PITCH);
}
#else
typedef Element Weight;
constexpr int WEIGHT_BYTES = ELEMENT_BYTES, WEIGHT_PITCH = UNITS;
#endif
constexpr int ROW_BYTES = WEIGHT_PITCH * WEIGHT_BYTES, IN_4_BYTES = 4 / WEIGHT_BYTES;

// 16 bytes of a row of the weights to shared memory, of which `left` elements are there, and zero for the others
__device__ __forceinline__ void bring(unsigned* to, const Weight* from, int left) {
  const unsigned address = shared_address(to);
  if constexpr (ROW_BYTES % 16 == 0) {
    copy_16(address, from, left > 0);
  } else if constexpr (ROW_BYTES % 8 == 0) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
      copy_8(address + part * 8, from + part * 2 * IN_4_BYTES, left > part * 2 * IN_4_BYTES);
  } else if constexpr (ROW_BYTES % 4 == 0) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
      copy_4(address + part * 4, from + part * IN_4_BYTES, left > part * IN_4_BYTES);
  } else {
    unsigned short* const halves = (unsigned short*)to;
#pragma unroll
    for (int part = 0; part < 8; ++part) halves[part] = left > part ? ((const unsigned short*)from)[part] : 0;
  }
}

#if ELEMENT_BYTES == 2 || HALVES
__device__ __forceinline__ unsigned as_operand(unsigned word) { return word; }
#else
__device__ __forceinline__ unsigned as_operand(unsigned word) { return operand(__uint_as_float(word)); }
#endif
__device__ __forceinline__ uint4 as_operand(uint4 words) {
  return {as_operand(words.x), as_operand(words.y), as_operand(words.z), as_operand(words.w)};
}

// Forward: lane l brings 16 bytes of row `l % 8 * 2 + l / 8 % 2` from word `l / 16 * 4` on, so that rows 0 to 7 of the
// operand are the even ones and rows 8 to 15 the odd: a thread has two neighbours.
__device__ __forceinline__ int row_of_chunk(int lane) { return lane % 8 * 2 + lane / 8 % 2; }
__device__ __forceinline__ int column_of_chunk(int lane) { return lane / 16 * 4 * WORD_ELEMENTS; }
struct Rows {
  __device__ __forceinline__ static uint4 taken(const unsigned* operand, int lane) {
    const unsigned* const at = operand + lane;
    return as_operand(uint4{at[0], at[32], at[64], at[96]});
  }
};

// Backward, where the weights are transposed: lane l brings 16 bytes of the row of depth `l / WEIGHT_BYTES`, from element
// `l % WEIGHT_BYTES * 4 * WORD_ELEMENTS` on; rows of the operand are even and odd as above.
__device__ __forceinline__ int depth_of_chunk(int lane) { return lane / WEIGHT_BYTES; }
__device__ __forceinline__ int unit_of_chunk(int lane) { return lane % WEIGHT_BYTES * 4 * WORD_ELEMENTS; }
struct Columns {
  // `apart`: words between the first half of the depth and the other
  __device__ __forceinline__ static uint4 taken(const unsigned* operand, int lane, int apart = 64) {
#if ELEMENT_BYTES == 2 || HALVES
    const unsigned* const at = operand + lane % 4 * 16 + lane / 4;
    const unsigned upper = at[0], lower = at[8], far_upper = at[apart], far_lower = at[apart + 8];
    return {__byte_perm(upper, lower, 0x5410), __byte_perm(upper, lower, 0x7632),
            __byte_perm(far_upper, far_lower, 0x5410), __byte_perm(far_upper, far_lower, 0x7632)};
#else
    const uint2 *const at = (const uint2*)(operand + lane % 4 * 16 + lane / 4 * 2), near = at[0], far = at[32];
    return as_operand(uint4{near.x, near.y, far.x, far.y});
#endif
  }
};

// All operands of a warp.
//
//   memory  all of the block's shared memory, at whose begin the streamed ones of each warp stay
//   ask     (i, to): the lane's 16 bytes of operand i to `to`
//   keep    (i, words): operand i is one that stays in registers
//
// All threads of the block have to come; after it, memory behind the streamed operands may be written.
template <class KEPT, class LAYOUT, int COUNT, int STREAMED, int WARPS, class Ask, class Keep>
__device__ __forceinline__ void bring_resident(unsigned* memory, int warp, int lane, Ask ask, Keep keep) {
  constexpr int RESIDENT = COUNT - STREAMED, HELD = SHARED / (512 * WARPS);
  constexpr int ROOM = HELD > LEAST_ROOM ? HELD : LEAST_ROOM;
  unsigned* const room = memory + warp * ROOM * 128;
#pragma unroll
  for (int first = 0; first < RESIDENT; first += ROOM) {
#pragma unroll 1
    for (int i = 0; i < COUNT; ++i) {
      const int place = KEPT::resident(i) - first;
      if (!KEPT::streamed(i) && place >= 0 && place < ROOM) ask(i, room + place * 128 + lane * 4);
    }
    copies_done();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (!KEPT::streamed(i) && KEPT::resident(i) >= first && KEPT::resident(i) < first + ROOM)
        keep(i, LAYOUT::taken(room + (KEPT::resident(i) - first) * 128, lane));
    __syncwarp();
  }
  __syncthreads();
}

// and those that are streamed
template <class KEPT, class LAYOUT, int COUNT, int STREAMED, int WARPS, class Ask, class Keep>
__device__ __forceinline__ void bring_operands(unsigned* memory, int warp, int lane, Ask ask, Keep keep) {
  bring_resident<KEPT, LAYOUT, COUNT, STREAMED, WARPS>(memory, warp, lane, ask, keep);
  unsigned* const streamed = memory + warp * STREAMED * 128;
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i)
    if (KEPT::streamed(i)) ask(i, streamed + KEPT::before(i) * 128 + lane * 4);
  copies_done();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < STREAMED; ++i) {
    const uint4 words = LAYOUT::taken(streamed + i * 128, lane);
    __syncwarp();
    *(uint4*)(streamed + i * 128 + lane * 4) = words;
  }
}

// Streamed operands of four warps together, where a product reads them itself: 64 rows, [16 bytes of depth, row].  Where
// there are fewer, those of the first TOGETHER warps.
template <class KEPT, int COUNT, int STREAMED, int TOGETHER = 4, class Ask>
__device__ __forceinline__ void bring_squares(unsigned* memory, int warp, int lane, Ask ask) {
  constexpr int WORDS_OF_ONE = TOGETHER * 128;
  unsigned* const to =
      memory + warp / 4 * STREAMED * WORDS_OF_ONE + lane / 16 * (WORDS_OF_ONE / 2) + warp % 4 * 64 + lane % 16 * 4;
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i)
    if (KEPT::streamed(i) && warp % 4 < TOGETHER) ask(i, to + KEPT::before(i) * WORDS_OF_ONE);
  copies_done();
}

// The same of what `Columns` takes: each warp turns its own 16 rows.
template <class KEPT, int COUNT, int STREAMED, class Ask>
__device__ __forceinline__ void bring_turned_squares(unsigned* memory, int warp, int lane, Ask ask) {
  bring_squares<KEPT, COUNT, STREAMED>(memory, warp, lane, ask);
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < STREAMED; ++i) {
    unsigned* const rows = memory + (warp / 4 * STREAMED + i) * 512 + warp % 4 * 64;
    const uint4 words = Columns::taken(rows, lane, 256);
    __syncwarp();
    rows[lane] = words.x, rows[32 + lane] = words.y, rows[256 + lane] = words.z, rows[288 + lane] = words.w;
  }
}

// The first RESIDENT operands stay in registers.
template <int RESIDENT>
struct First {
  __device__ static constexpr bool streamed(int i) { return i >= RESIDENT; }
  __device__ static constexpr int before(int i) { return i - RESIDENT; }
  __device__ static constexpr int resident(int i) { return i < RESIDENT ? i : 0; }
};
