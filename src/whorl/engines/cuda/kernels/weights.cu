// How the recurrent weights come to a warp, as operands of the tensor cores: 16 rows x 8 words of depth each, of which a
// thread has 4 words.  All threads first ask for everything there is room for, 16 bytes at a time, and it goes to shared
// memory past the registers; then each takes its own words from there.  Little of the asking is unrolled, since code
// that runs once takes longer to arrive than the weights that it asks for.
//
// Some operands stay in registers; the others are streamed at each step from where they lie in shared memory for good,
// [operand, lane].  KEPT says which: streamed(i), before(i) of those streamed before it, resident(i) of those not.  On their
// way they take turns in shared memory that is used for other things later.

// Bytes of a block's shared memory in which weights come, with room for all that stay in registers where these are enough,
// and for one operand of each warp where none stays.  As prepare.py has it, which says it to the launch.
constexpr int LEAST_SHARED = 96 << 10, LEAST_OPERANDS = 16;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int MOST_SHARED = 227 << 10;
#else
constexpr int MOST_SHARED = LEAST_SHARED;
#endif
__device__ constexpr int shared_bytes(int resident, int most) {  // of so many operands of all warps
  const int all = SHARED + (resident > LEAST_OPERANDS ? resident : LEAST_OPERANDS) * 512, enough = all < most ? all : most;
  return SHARED > enough ? SHARED : enough;
}

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
constexpr int ROW_BYTES = WEIGHT_PITCH * WEIGHT_BYTES;

// A piece of a row of the weights to shared memory, or zero: all rows begin at a multiple of PIECE bytes.
constexpr int PIECE = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 8 == 0 ? 8 : ROW_BYTES % 4 == 0 ? 4 : 2;
constexpr int PIECE_ELEMENTS = PIECE / WEIGHT_BYTES;
__device__ __forceinline__ void bring_piece(char* to, const Weight* from, bool there) {
  if constexpr (PIECE == 16)
    copy_16(shared_address(to), from, there);
  else if constexpr (PIECE == 8)
    copy_8(shared_address(to), from, there);
  else if constexpr (PIECE == 4)
    copy_4(shared_address(to), from, there);
  else
    *(unsigned short*)to = there ? *(const unsigned short*)from : 0;
}

// 16 bytes, of which `left` elements are there
__device__ __forceinline__ void bring(unsigned* to, const Weight* from, int left) {
#pragma unroll
  for (int part = 0; part < 16 / PIECE; ++part)
    bring_piece((char*)to + part * PIECE, from + part * PIECE_ELEMENTS, left > part * PIECE_ELEMENTS);
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
  int left;  // elements that are there; backward, rows from it on
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
  constexpr int FREE = (shared_bytes((STRIPS * DEPTHS - STREAMED) * WARPS, LEAST_SHARED) - TAKEN) / WARPS;
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

// Backward, where the weights are transposed: an operand is DEPTH_ROWS rows of depth of a strip of 16 units, beside whose
// bytes those of other strips lie, of other warps too.  So all warps bring rows of depth together, 512 bytes of one at a
// time where the block has so many, and each then takes its own operands.  An operand is a square of 512 bytes on its way,
// whose 16 bytes change places: by the strip, so that who writes a row meets no others in a bank, and by the row, so that
// who takes an operand does not.
constexpr int DEPTH_ROWS = 32 / WEIGHT_BYTES;
__device__ __forceinline__ int column_at(int strip, int row, int n) {  // words before the n-th 16 bytes of a row
  const int chunk = row * WEIGHT_BYTES + n;
  return (chunk ^ (chunk / 8 % 2 * 2) ^ (strip * WEIGHT_BYTES % 8)) * 4;
}
// a lane's words of an operand, of which even rows are rows 0 to 7 as above
__device__ __forceinline__ uint4 columns_taken(const unsigned* square, int strip, int lane) {
#if ELEMENT_BYTES == 2 || HALVES
  const unsigned* const even = square + column_at(strip, lane % 4 * 2, lane / 16) + lane / 4 % 4;
  const unsigned* const odd = square + column_at(strip, lane % 4 * 2 + 1, lane / 16) + lane / 4 % 4;
  const unsigned upper = even[0], lower = odd[0], far_upper = even[64], far_lower = odd[64];
  return {__byte_perm(upper, lower, 0x5410), __byte_perm(upper, lower, 0x7632),
          __byte_perm(far_upper, far_lower, 0x5410), __byte_perm(far_upper, far_lower, 0x7632)};
#else
  const uint2* const at = (const uint2*)(square + column_at(strip, lane % 4, lane / 8) + lane / 4 % 2 * 2);
  const uint2 near = at[0], far = at[32];
  return as_operand(uint4{near.x, near.y, far.x, far.y});
#endif
}

__device__ constexpr int power_from(int least) {  // the least power of two that is no less
  int power = 1;
  while (power < least) power *= 2;
  return power;
}
__device__ constexpr int power_in(int count, int most) {  // the largest power of two that divides both
  int power = 1;
  while (count % (2 * power) == 0 && most % (2 * power) == 0) power *= 2;
  return power;
}

// All operands of a block: of STRIPS x DEPTHS, of which a warp has SHARE neighbouring strips; what it has past the last is
// the last again.  RUN rows of depth lie beside each other in the weights.
//
//   memory   all of the block's shared memory, at whose begin streamed operands stay, in TAKEN bytes
//   columns  elements of a row that are there, from the block's first on
//   index    (strip, depth): the number of the warp's operand
//   row      (n): the n-th row of depth, from the block's first column on
//   keep     (place, words): the lane's of an operand that stays in registers
//   stream   (place, words): of one that is streamed
//
// All threads of the block have to come; after it, memory behind the streamed operands may be written.
template <class KEPT, int STRIPS, int SHARE, int DEPTHS, int STREAMED, int WARPS, int TAKEN, int RUN, class Index, class Of,
          class Keep, class Stream>
__device__ __forceinline__ void bring_columns(unsigned* memory, int warp, int lane, int columns, Index index, Of row,
                                              Keep keep, Stream stream) {
  constexpr int FREE = (shared_bytes((SHARE * DEPTHS - STREAMED) * WARPS, MOST_SHARED) - TAKEN) / 512;
  static_assert(FREE > 0 || DEPTHS == 0, "no room for weights on their way");
  // strips and depths of a round: some of the strips where not even one depth of all has room
  constexpr int WIDE = FREE < 1 ? 1 : FREE < STRIPS ? FREE : STRIPS, MOST_DEEP = FREE < STRIPS ? 1 : FREE / STRIPS;
  constexpr int ROUNDS = (DEPTHS + MOST_DEEP - 1) / MOST_DEEP, DEEP = (DEPTHS + ROUNDS - 1) / MOST(ROUNDS);
  constexpr int PIECES = WIDE * 16 / PIECE_ELEMENTS, ACROSS = PIECES < 32 ? power_from(PIECES) : 32;  // lanes of a row
  constexpr int TIMES = (PIECES - 1) / ACROSS + 1, DOWN = 32 / ACROSS;          // rows of a warp at a time
  constexpr int BESIDE = power_in(WARPS, DEPTH_ROWS / DOWN), EACH = DEPTH_ROWS / (DOWN * BESIDE);  // warps of a depth
  // Four copies together, or as many as rows come together: with the instructions of one address the others are asked for.
  constexpr int DEPTHS_AT_ONCE = EACH * TIMES < 4 ? 4 / (EACH * TIMES) : 1, TIMES_AT_ONCE = EACH < 4 ? 4 / EACH : 1;
  unsigned* const room = memory + TAKEN / 4;
#pragma unroll
  for (int first = 0; first < DEPTHS; first += DEEP)
#pragma unroll 1
    for (int begin = 0; begin < STRIPS; begin += WIDE) {
#pragma unroll DEPTHS_AT_ONCE
      for (int d = BESIDE == WARPS ? 0 : warp / BESIDE; d < DEEP && d < DEPTHS - first; d += WARPS / BESIDE)
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const int m = (j * BESIDE + warp % BESIDE) * DOWN + lane / ACROSS, beyond = RUN % DEPTH_ROWS == 0 ? m : 0;
          const WeightRow its = row((first + d) * DEPTH_ROWS + m - beyond);
          const Weight* const from = its.from + beyond * WEIGHT_PITCH + begin * 16;
#pragma unroll TIMES_AT_ONCE
          for (int k = 0; k < TIMES; ++k) {
            const int piece = k * ACROSS + lane % ACROSS, column = piece * PIECE_ELEMENTS, strip = column / 16;
            unsigned* const to = room + (d * WIDE + strip) * 128 + column_at(strip, m, column % 16 * WEIGHT_BYTES / 16);
            if (PIECES % ACROSS == 0 || piece < PIECES)
              bring_piece((char*)to + piece * PIECE % 16, from + column, beyond < its.left && begin * 16 + column < columns);
          }
        }
      copies_done();
      __syncthreads();
#pragma unroll
      for (int s = 0; s < SHARE; ++s) {
        const int own = warp * SHARE + s, strip = (SHARE * WARPS == STRIPS ? own : min(own, STRIPS - 1)) - begin;
        if (WIDE == STRIPS || (strip >= 0 && strip < WIDE))
#pragma unroll
          for (int d0 = 0; d0 < DEEP && d0 < DEPTHS - first; d0 += 4) {  // some at a time, before one is written
            uint4 words[4];
#pragma unroll
            for (int d = d0; d < d0 + 4 && d < DEEP && d < DEPTHS - first; ++d)
              words[d - d0] = columns_taken(room + (d * WIDE + strip) * 128, strip, lane);
#pragma unroll
            for (int d = d0; d < d0 + 4 && d < DEEP && d < DEPTHS - first; ++d) {
              const int i = index(s, first + d);
              if (KEPT::streamed(i))
                stream(KEPT::before(i), words[d - d0]);
              else
                keep(KEPT::resident(i), words[d - d0]);
            }
          }
      }
      __syncthreads();
    }
}

// Of an operand of so many WORDS of 64 rows or fewer, [16 bytes of depth, row], a lane's words of one warp's 16 rows.
template <int WORDS>
__device__ __forceinline__ void put_square(unsigned* rows, int lane, uint4 words) {
  rows[lane] = words.x, rows[32 + lane] = words.y;
  rows[WORDS / 2 + lane] = words.z, rows[WORDS / 2 + 32 + lane] = words.w;
}

// The first RESIDENT operands stay in registers.
template <int RESIDENT>
struct First {
  __device__ static constexpr bool streamed(int i) { return i >= RESIDENT; }
  __device__ static constexpr int before(int i) { return i - RESIDENT; }
  __device__ static constexpr int resident(int i) { return i < RESIDENT ? i : 0; }
};

// Of COUNT operands of weights, used one after another, those that do not stay in registers are spread evenly, so that
// shared memory has time to bring them.
template <int COUNT, int STREAMED>
struct Operands {
  __device__ static constexpr int before(int i) { return i * STREAMED / COUNT; }  // streamed ones before this one
  __device__ static constexpr bool streamed(int i) { return before(i + 1) != before(i); }
  __device__ static constexpr int resident(int i) { return streamed(i) ? 0 : i - before(i); }  // its place in registers
};
