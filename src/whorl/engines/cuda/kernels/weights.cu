// How the recurrent weights come to a warp, as operands of the tensor cores: 16 rows x 8 words of depth each, of which a
// thread has 4 words.  All threads first ask for everything there is room for, 16 bytes at a time, and it goes to shared
// memory past the registers; then each takes its own words from there.  The asking is a loop and not unrolled, since code
// that runs once takes longer to arrive than the weights that it asks for.
//
// Some operands stay in registers; the others are streamed at each step from where they lie in shared memory for good,
// [operand, lane].  KEPT says which: streamed(i), before(i) of those streamed before it, resident(i) of those not.  On their
// way they take turns in shared memory that is used for other things later.

// Operands of a warp that shared memory has room for at a time, and bytes of a block in which it has it for all that stay
// in registers, as prepare.py says.
constexpr int LEAST_ROOM = 12, LEAST_SHARED = 96 << 10;

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

// Forward.  128 bytes of each of 4 rows come at a time: 256 KB of a block took 5.4 us so, by 32 bytes of 16 rows 13.1 (one
// H200).  So EACH operands of neighbouring depths make a square of 16 rows, in which the n-th 16 bytes of row m change
// places, so that neither who writes rows nor who takes operands meets others in a bank.
template <int EACH>
__device__ __forceinline__ int square_at(int m, int n) {
  return (m * 2 * EACH + (n ^ (m / 2 % (2 * EACH)))) * 4;
}
struct WeightRow {
  const Weight* from;
  int left;  // elements that are there
};
// All operands of a warp: of STRIPS x DEPTHS, each of the rows of a strip, of which the even ones are rows 0 to 7 of the
// operand, so that a thread has two neighbours.
//
//   memory  all of the block's shared memory, at whose begin streamed operands stay, in TAKEN bytes
//   index   (strip, depth): the operand's number
//   row     (strip, m): of the weights, from the warp's first depth on
//   keep    (place, words): the lane's of an operand that stays in registers
//   stream  (place, words): of one that is streamed
//
// All threads of the block have to come; after it, memory behind the streamed operands may be written.
template <class KEPT, int STRIPS, int DEPTHS, int STREAMED, int WARPS, int TAKEN, class Index, class Of, class Keep, class Stream>
__device__ __forceinline__ void bring_rows(unsigned* memory, int warp, int lane, Index index, Of row, Keep keep, Stream stream) {
  constexpr int ALL = SHARED + (STRIPS * DEPTHS - STREAMED) * WARPS * 512, LEAST = ALL < LEAST_SHARED ? ALL : LEAST_SHARED;
  constexpr int FREE = ((SHARED > LEAST ? SHARED : LEAST) - TAKEN) / WARPS;
  constexpr int EACH = FREE >= 2048 && DEPTHS > 2 ? 4 : FREE >= 1024 && DEPTHS > 1 ? 2 : 1, ROOM = FREE / (512 * EACH);
  constexpr int ALONG = (DEPTHS + EACH - 1) / EACH, SQUARES = STRIPS * ALONG, ACROSS = 2 * EACH, DOWN = 32 / ACROSS;
  static_assert(ROOM > 0 || SQUARES == 0, "no room for weights on their way");
  unsigned* const room = memory + TAKEN / 4 + warp * ROOM * EACH * 128;
#pragma unroll
  for (int first = 0; first < SQUARES; first += ROOM) {
    WeightRow rows[16 / DOWN];
#pragma unroll 1
    for (int q = first; q < first + ROOM && q < SQUARES; ++q) {
      const int depth = q % ALONG * EACH, column = (depth * 2 + lane % ACROSS) * 4 * WORD_ELEMENTS;
      if (q == first || depth == 0)
#pragma unroll
        for (int j = 0; j < 16 / DOWN; ++j) rows[j] = row(q / ALONG, j * DOWN + lane / ACROSS);
      if (depth + lane % ACROSS / 2 < DEPTHS)
#pragma unroll
        for (int j = 0; j < 16 / DOWN; ++j)
          bring(room + (q - first) * EACH * 128 + square_at<EACH>(j * DOWN + lane / ACROSS, lane % ACROSS),
                rows[j].from + column, rows[j].left - column);
    }
    copies_done();
    __syncwarp();
#pragma unroll
    for (int q = first; q < first + ROOM && q < SQUARES; ++q)
#pragma unroll
      for (int e = 0; e < EACH && q % ALONG * EACH + e < DEPTHS; ++e) {
        const int i = index(q / ALONG, q % ALONG * EACH + e);
        const unsigned* const square = room + (q - first) * EACH * 128 + lane % 4;
        const auto at = [&](int odd, int half) { return square[square_at<EACH>(lane / 4 * 2 + odd, e * 2 + half)]; };
        const uint4 words = as_operand(uint4{at(0, 0), at(1, 0), at(0, 1), at(1, 1)});
        if (KEPT::streamed(i))
          stream(KEPT::before(i), words);
        else
          keep(KEPT::resident(i), words);
      }
    __syncwarp();
  }
  __syncthreads();
}

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

// All operands of a warp, where they are `Columns`.
//
//   memory  all of the block's shared memory, at whose begin the streamed ones of each warp stay
//   ask     (i, to): the lane's 16 bytes of operand i to `to`
//   keep    (i, words): operand i is one that stays in registers
//
// All threads of the block have to come; after it, memory behind the streamed operands may be written.
template <class KEPT, int COUNT, int STREAMED, int WARPS, class Ask, class Keep>
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
        keep(i, Columns::taken(room + (KEPT::resident(i) - first) * 128, lane));
    __syncwarp();
  }
  __syncthreads();
}

// and those that are streamed
template <class KEPT, int COUNT, int STREAMED, int WARPS, class Ask, class Keep>
__device__ __forceinline__ void bring_operands(unsigned* memory, int warp, int lane, Ask ask, Keep keep) {
  bring_resident<KEPT, COUNT, STREAMED, WARPS>(memory, warp, lane, ask, keep);
  unsigned* const streamed = memory + warp * STREAMED * 128;
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i)
    if (KEPT::streamed(i)) ask(i, streamed + KEPT::before(i) * 128 + lane * 4);
  copies_done();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < STREAMED; ++i) {
    const uint4 words = Columns::taken(streamed + i * 128, lane);
    __syncwarp();
    *(uint4*)(streamed + i * 128 + lane * 4) = words;
  }
}

// Of an operand of so many WORDS of 64 rows or fewer, [16 bytes of depth, row], a lane's words of one warp's 16 rows.
template <int WORDS>
__device__ __forceinline__ void put_square(unsigned* rows, int lane, uint4 words) {
  rows[lane] = words.x, rows[32 + lane] = words.y;
  rows[WORDS / 2 + lane] = words.z, rows[WORDS / 2 + 32 + lane] = words.w;
}

// Streamed operands of four warps together, where a product reads them itself: 64 rows, [16 bytes of depth, row].  Each warp
// turns its own 16 rows.
template <class KEPT, int COUNT, int STREAMED, class Ask>
__device__ __forceinline__ void bring_squares(unsigned* memory, int warp, int lane, Ask ask) {
  unsigned* const own = memory + warp / 4 * STREAMED * 512 + warp % 4 * 64;
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i)
    if (KEPT::streamed(i)) ask(i, own + KEPT::before(i) * 512 + lane / 16 * 256 + lane % 16 * 4);
  copies_done();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < STREAMED; ++i) {
    const uint4 words = Columns::taken(own + i * 512, lane, 256);
    __syncwarp();
    put_square<512>(own + i * 512, lane, words);
  }
}

// The first RESIDENT operands stay in registers.
template <int RESIDENT>
struct First {
  __device__ static constexpr bool streamed(int i) { return i >= RESIDENT; }
  __device__ static constexpr int before(int i) { return i - RESIDENT; }
  __device__ static constexpr int resident(int i) { return i < RESIDENT ? i : 0; }
};
