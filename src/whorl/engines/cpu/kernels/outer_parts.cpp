// The gradients of weights by the matrix unit, in three parts as parts.cpp has them: out = a' b over the rows of all steps.
//
// The columns of b are the unit's rows and those of `a` its columns: so `a`, the larger, is never transposed.  As in
// outer.cpp each block of rows is summed in registers and then added, and no sum depends on threads.

namespace kernel {

#if PARTS

struct InParts {
  Outer* o;
  // The columns of b in blocks of 16: for each block of rows, or of each thread that of the rows that it multiplies.
  // To pack a block again takes less time than to bring what another packed from the third cache, while threads are few.
  bool shared;
  char* rows;
  int64_t apart;   // from one block of rows, or thread, to the next
  char* columns;   // of each thread, of one block of rows: those of `a` that it multiplies
  int32_t wild;    // a number that the unit cannot take was found

  static constexpr int64_t DEEP = Outer::DEEP, BLOCKS = DEEP / DEEP_TILE, BLOCK = BLOCKS * PARTS * TILE;
  static constexpr int64_t PIECE = 256, FEW = 4;
  void found(bool wild_one) {
    if (wild_one) __atomic_store_n(&wild, 1, __ATOMIC_RELAXED);
  }
};

// 32 rows of an operand, and of each the row of factors; null: zeros, and no factor.
struct Some {
  const store* row[DEEP_TILE];
  const real* factor[DEEP_TILE];

  Some(const Operand& from, int64_t begin) {
    for (int64_t i = 0; i < DEEP_TILE; ++i) {
      const int64_t r = begin + i - from.from;
      row[i] = nullptr, factor[i] = nullptr;
      if (r < 0 || r >= from.to - from.from) continue;
      row[i] = from.row(r);
      if (from.factor) factor[i] = from.factor + (from.sequence ? from.sequence[r] : r % from.batch) * from.m;
    }
  }
};

INLINE __mmask16 there(int64_t left) { return left < WIDE_TILE ? __mmask16((1u << left) - 1) : __mmask16(0xffff); }

// 16 columns of them from `column` on, the other way round.  Whether one is of HUGE.
static bool pack_turned(const Some& rows, int64_t column, int64_t m, char* to) {
  alignas(64) real block[DEEP_TILE][WIDE_TILE], turned[WIDE_TILE][DEEP_TILE];
  const __mmask16 wanted = there(m - column);
  for (int64_t i = 0; i < DEEP_TILE; ++i) {
    __m512 x = _mm512_setzero_ps();
    if (rows.row[i]) x = _mm512_maskz_loadu_ps(wanted, rows.row[i] + column);
    if (rows.factor[i]) x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(wanted, rows.factor[i] + column));
    _mm512_store_ps(block[i], x);
  }
  for (int64_t half = 0; half < DEEP_TILE; half += 16)
    transpose(block[half], WIDE_TILE, (packed_t*)&turned[0][half], DEEP_TILE);
  bool huge = false;
  for (int64_t i = 0; i < WIDE_TILE; ++i) huge |= split_row(turned[i], DEEP_TILE, to, i) == HUGE;
  return huge;
}

// The rows of all operands from `begin` on.
static bool pack_block(const Outer& o, int64_t begin, char* to) {
  bool huge = false;
  for (int side = 0; side < o.count; ++side) {
    const Operand& from = o.operands[side];
    const int64_t blocks = up(from.m, WIDE_TILE) / WIDE_TILE;
    for (int64_t k = 0; k < InParts::BLOCKS; ++k) {
      const Some rows(from, begin + k * DEEP_TILE), next(from, begin + (k + 1) * DEEP_TILE);
      for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t i = 0; i < DEEP_TILE; ++i) __builtin_prefetch(next.row[i] + block * WIDE_TILE);
        huge |= pack_turned(rows, block * WIDE_TILE, from.m, to + block * InParts::BLOCK + k * PARTS * TILE);
      }
    }
    to += blocks * InParts::BLOCK;
  }
  return huge;
}

static void pack_blocks(void* data, int thread, int threads) {
  InParts& p = *(InParts*)data;
  for (int64_t block = thread; block * InParts::DEEP < p.o->rows; block += threads)
    p.found(pack_block(*p.o, block * InParts::DEEP, p.rows + block * p.apart));
}

// Columns of `a` from `first` to before `last` in a block of rows, whose sums are added to those that are wanted.
static bool pack_columns_in_parts(const Outer& o, int64_t begin, int64_t first, int64_t last, char* to) {
  bool wild = false;
  const int64_t blocks = up(last - first, WIDE_TILE) / WIDE_TILE;
  for (int64_t k = 0; k < InParts::DEEP; k += DEEP_TILE)
    for (int64_t block = 0; block < blocks; ++block) {
      alignas(64) real x[DEEP_TILE][WIDE_TILE];
      const int64_t column = first + block * WIDE_TILE, count = o.rows - begin - k;
      const __mmask16 wanted = there(last - column);
      const real* from = o.a + (begin + k) * o.lda + column;
      __m512 sum = _mm512_setzero_ps();
      for (int64_t i = 0; i < DEEP_TILE; ++i, from += o.lda) {
        const __m512 row = i < count ? _mm512_maskz_loadu_ps(wanted, from) : _mm512_setzero_ps();
        __builtin_prefetch(from + DEEP_TILE * o.lda);
        _mm512_store_ps(x[i], row), sum = _mm512_add_ps(sum, row);
      }
      wild |= split_weights(x, to + block * InParts::BLOCK + k / DEEP_TILE * PARTS * TILE);
      if (!o.sums) continue;
      real* sums = o.sums + column;
      _mm512_mask_storeu_ps(sums, wanted, _mm512_add_ps(_mm512_maskz_loadu_ps(wanted, sums), sum));
    }
  return wild;
}

// Adds what tiles made, [columns of b, columns of a], to the rows of `out` from `first` on.
INLINE void add_turned(
    const real (&made)[16][WIDE_TILE], const Operand& to, int64_t first, int64_t last, int64_t column, bool add) {
  alignas(64) real turned[16][WIDE_TILE];
  transpose(made[0], WIDE_TILE, (packed_t*)turned, WIDE_TILE);
  const int64_t count = last - first < 16 ? last - first : 16;
  const __mmask16 wanted = there(to.m - column);
  for (int64_t i = 0; i < count; ++i) {
    real* out = to.out + (first + i) * to.m + column;
    const __m512 x = _mm512_load_ps(turned[i]);
    _mm512_mask_storeu_ps(out, wanted, add ? _mm512_add_ps(_mm512_maskz_loadu_ps(wanted, out), x) : x);
  }
}

// Columns of `a` from `first` to before `last` in a block of rows, of which both are packed.
static void multiply_block(
    const Outer& o, int64_t begin, int64_t first, int64_t last, const char* rows, const char* columns) {
  alignas(64) real sums[4][16][WIDE_TILE];
  for (int side = 0; side < o.count; ++side) {
    const Operand& to = o.operands[side];
    const int64_t blocks = up(to.m, WIDE_TILE) / WIDE_TILE;
    for (int64_t column = first; column < last; column += 2 * WIDE_TILE) {
      // the last of either may be alone: it is made twice
      const char* one = columns + (column - first) / WIDE_TILE * InParts::BLOCK;
      const int64_t wide = column + WIDE_TILE < last ? 2 : 1;
      for (int64_t block = 0; block < blocks; block += 2) {
        const int64_t tall = block + 1 < blocks ? 2 : 1;
        const char* a = rows + block * InParts::BLOCK;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const char *b = a + (tall - 1) * InParts::BLOCK, *other = one + (wide - 1) * InParts::BLOCK;
        tiles_of_two_blocks(a, b, one, other, InParts::DEEP, [] {});
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int64_t i = 0; i < tall; ++i)
          for (int64_t j = 0; j < wide; ++j)
            add_turned(sums[2 * i + j], to, column + j * WIDE_TILE, last, (block + i) * WIDE_TILE, begin > 0);
      }
    }
    rows += blocks * InParts::BLOCK;
  }
}

// Each thread has a share of the columns of `a`.
static void multiply_in_parts(void* data, int thread, int threads) {
  InParts& p = *(InParts*)data;
  const Outer& o = *p.o;
  const int64_t pairs = (o.n + 2 * WIDE_TILE - 1) / (2 * WIDE_TILE);
  const int64_t from = pairs * thread / threads * 2 * WIDE_TILE, end = pairs * (thread + 1) / threads * 2 * WIDE_TILE;
  const int64_t to = end < o.n ? end : o.n;
  char* const columns = p.columns + thread * InParts::PIECE / WIDE_TILE * InParts::BLOCK;
  if (from >= to) return;
  for (int64_t begin = 0; begin < o.rows; begin += InParts::DEEP) {
    char* const rows = p.rows + (p.shared ? begin / InParts::DEEP : thread) * p.apart;
    if (!p.shared) p.found(pack_block(o, begin, rows));
    for (int64_t first = from; first < to; first += InParts::PIECE) {
      const int64_t last = first + InParts::PIECE < to ? first + InParts::PIECE : to;
      p.found(pack_columns_in_parts(o, begin, first, last, columns));
      EVERYTHING_WRITTEN;
      configure(16, OF_TWO_BLOCKS);
      multiply_block(o, begin, first, last, rows, columns);
      _tile_release();
    }
  }
}

// Whether the product is made; else `out` holds anything, and sums that are made are no longer wanted.
static bool outer_in_parts(Outer& o, int threads) {
  bool fits = GIVEN && !o.add && o.rows >= InParts::DEEP && 3 * up(o.n, WIDE_TILE) <= 5 * o.n;
  int64_t every = 0;
  for (int side = 0; side < o.count; ++side) {
    const int64_t m = o.operands[side].m;
    fits = fits && 3 * up(m, WIDE_TILE) <= 5 * m;
    every += up(m, WIDE_TILE);
  }
  if (!fits) return false;
  Scratch scratch;
  InParts p = {};
  p.o = &o, p.shared = threads > InParts::FEW, p.apart = every / WIDE_TILE * InParts::BLOCK;
  p.rows = scratch.take<char>((p.shared ? up(o.rows, InParts::DEEP) / InParts::DEEP : threads) * p.apart);
  p.columns = scratch.take<char>(threads * InParts::PIECE / WIDE_TILE * InParts::BLOCK);
  if (p.shared) parallel(threads, pack_blocks, &p);
  if (p.wild) return false;
  parallel(threads, multiply_in_parts, &p);
  if (p.wild) o.sums = nullptr;  // they are made
  return !p.wild;
}

#else

static bool outer_in_parts(Outer&, int) { return false; }

#endif

static void outer(Outer o, int threads) {
  if (!outer_in_parts(o, threads)) outer_of_panels(o, threads);
}

}  // namespace kernel
