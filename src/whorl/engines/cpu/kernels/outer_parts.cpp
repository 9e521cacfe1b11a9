// The gradients of weights by the matrix unit, in parts as parts.cpp has them: out = a' b over the rows of all steps.
//
// The columns of `a` are the unit's rows, those of b its columns.  As in outer.cpp blocks of rows are summed in registers,
// in float32 from zero and then added, and no sum depends on threads.

namespace kernel {

#if UNIT

struct InParts {
  Outer* o;
  // The columns of b in blocks of 16: for each block of rows, or of each thread that of the rows that it multiplies.
  // To pack a block of float32 again takes less time than to bring what another packed from the third cache, while threads
  // are few.
  bool shared;
  char* columns;
  int64_t apart;  // from one block of rows, or thread, to the next
  char* rows;     // of each thread, of one block of rows: the columns of `a` that it multiplies
  int32_t wild;   // a number that the unit cannot take was found

  static constexpr int64_t DEEP = 512, BLOCKS = DEEP / DEEP_TILE, BLOCK = BLOCKS * PARTS * TILE;
  static constexpr int64_t PIECE = 256, FEW = 4, LEAST = PARTS == 1 ? 16 : 64;
  // How many rows from `begin` on are multiplied at once.
  static int64_t deep(const Outer& o, int64_t begin) { return o.rows - begin < DEEP ? up(o.rows - begin, DEEP_TILE) : DEEP; }
  void found(bool wild_one) {
    if (wild_one) __atomic_store_n(&wild, 1, __ATOMIC_RELAXED);
  }
};

// 32 rows of an operand, and of each the row of factors; null: zeros, and no factor.
struct Some {
  const store* row[DEEP_TILE];
  const real* factor[DEEP_TILE];
  bool plain;  // every row is there, and none has a factor

  Some(const Operand& from, int64_t begin) : plain(!from.factor && begin >= from.from && begin + DEEP_TILE <= from.to) {
    for (int64_t i = 0; i < DEEP_TILE; ++i) {
      const int64_t r = begin + i - from.from;
      row[i] = nullptr, factor[i] = nullptr;
      if (r < 0 || r >= from.to - from.from) continue;
      row[i] = from.row(r);
      if (from.factor) factor[i] = from.factor + (from.sequence ? from.sequence[r] : r % from.batch) * from.m;
    }
  }
};

#if WHORL_DTYPE == 16
INLINE numbers times(numbers x, __m512 factor) {
  const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  return (numbers)_mm512_cvtneps_pbh(_mm512_mul_ps(wide, factor));
}
#else
INLINE numbers times(numbers x, __m512 factor) { return _mm512_mul_ps(x, factor); }
#endif

// 16 columns of some rows of an operand from `column` on, in parts.  Whether one is wild.
static bool pack_some(const Some& rows, int64_t column, int64_t m, char* to) {
  const __mmask16 wanted = there(m - column);
  if (rows.plain) return split_weights([&](int64_t i) ALWAYS { return numbers_at(rows.row[i] + column, wanted); }, to);
  return split_weights([&](int64_t i) ALWAYS {
    numbers row = {};
    if (rows.row[i]) row = numbers_at(rows.row[i] + column, wanted);
    if (rows.factor[i]) row = times(row, _mm512_maskz_loadu_ps(wanted, rows.factor[i] + column));
    return row;
  }, to);
}

// The rows from `begin` on of all operands that the columns of `a` from `first` to before `last` meet.
static bool pack_block(const Outer& o, int64_t begin, int64_t first, int64_t last, char* to) {
  bool wild = false;
  for (int side = 0; side < o.count; ++side) {
    const Operand& from = o.operands[side];
    const int64_t blocks = up(from.m, WIDE_TILE) / WIDE_TILE;
    for (int64_t k = 0; k < InParts::deep(o, begin) / DEEP_TILE && from.meets(first, last); ++k) {
      const Some rows(from, begin + k * DEEP_TILE), next(from, begin + (k + 1) * DEEP_TILE);
      for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t i = 0; i < DEEP_TILE; ++i) __builtin_prefetch(next.row[i] + block * WIDE_TILE);
        wild |= pack_some(rows, block * WIDE_TILE, from.m, to + block * InParts::BLOCK + k * PARTS * TILE);
      }
    }
    to += blocks * InParts::BLOCK;
  }
  return wild;
}

static void pack_blocks(void* data, int thread, int threads) {
  InParts& p = *(InParts*)data;
  for (int64_t block = thread; block * InParts::DEEP < p.o->rows; block += threads)
    p.found(pack_block(*p.o, block * InParts::DEEP, 0, p.o->n, p.columns + block * p.apart));
}

// 16 columns of 32 rows, `ld` apart, the other way round, in parts; their sums are added to `sum`.  Whether one is of HUGE.
static bool pack_turned(const store* x, int64_t ld, char* to, __m512& sum) {
#if WHORL_DTYPE == 16
  alignas(64) packed_t pairs[WIDE_TILE][WIDE_TILE];
  split_weights([&](int64_t i) ALWAYS { return numbers_at(x + i * ld, there(WIDE_TILE)); }, (char*)pairs);
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t i = 0; i < WIDE_TILE; ++i)
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(pairs[i]), one);
  transpose((const store*)pairs, DEEP_TILE, (packed_t*)to, WIDE_TILE);
  return false;
#else
  alignas(64) real turned[WIDE_TILE][DEEP_TILE];
  for (int64_t i = 0; i < DEEP_TILE; ++i) sum = _mm512_add_ps(sum, _mm512_loadu_ps(x + i * ld));
  for (int64_t half = 0; half < DEEP_TILE; half += 16) transpose(x + half * ld, ld, &turned[0][half], DEEP_TILE);
  bool huge = false;
  for (int64_t i = 0; i < WIDE_TILE; ++i) huge |= split_row(turned[i], DEEP_TILE, to, i) == HUGE;
  return huge;
#endif
}

// Columns of `a` from `first` to before `last` in a block of rows, whose sums are added to those that are wanted.
static bool pack_columns_in_parts(const Outer& o, int64_t begin, int64_t first, int64_t last, char* to) {
  bool wild = false;
  const int64_t blocks = up(last - first, WIDE_TILE) / WIDE_TILE;
  for (int64_t k = 0; k < InParts::deep(o, begin); k += DEEP_TILE)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t column = first + block * WIDE_TILE, count = o.rows - begin - k;
      const __mmask16 wanted = there(last - column);
      const store* from = o.a + (begin + k) * o.lda + column;
      char* const tiles = to + block * InParts::BLOCK + k / DEEP_TILE * PARTS * TILE;
      __m512 sum = _mm512_setzero_ps();
      if (count >= DEEP_TILE && last - column >= WIDE_TILE) {
        wild |= pack_turned(from, o.lda, tiles, sum);
      } else {
        store some[DEEP_TILE][WIDE_TILE] = {};
        for (int64_t i = 0; i < count && i < DEEP_TILE; ++i) {
          const numbers row = numbers_at(from + i * o.lda, wanted);
          memcpy(some[i], &row, sizeof(row));
        }
        wild |= pack_turned(some[0], WIDE_TILE, tiles, sum);
      }
      if (!o.sums) continue;
      real* sums = o.sums + column;
      _mm512_mask_storeu_ps(sums, wanted, _mm512_add_ps(_mm512_maskz_loadu_ps(wanted, sums), sum));
    }
  return wild;
}

// Columns of `a` from `first` to before `last` in a block of rows, of which both are packed.
static void multiply_block(
    const Outer& o, int64_t begin, int64_t first, int64_t last, const char* rows, const char* columns) {
  alignas(64) real held[4][16][WIDE_TILE];
  const bool add = begin > 0;
  for (int side = 0; side < o.count; ++side) {
    const Operand& to = o.operands[side];
    const int64_t blocks = up(to.m, WIDE_TILE) / WIDE_TILE, low = to.from_column(first), high = to.to_column(last);
    for (int64_t block = 0; block < blocks && low < high; block += 2) {
      // the last of either may be alone: it is made twice
      const int64_t wide = block + 1 < blocks ? 2 : 1;
      const char *b = columns + block * InParts::BLOCK, *other = b + (wide - 1) * InParts::BLOCK;
      for (int64_t row = first + (low - first) / WIDE_TILE * WIDE_TILE; row < high; row += 2 * WIDE_TILE) {
        const char* one = rows + (row - first) / WIDE_TILE * InParts::BLOCK;
        const int64_t tall = row + WIDE_TILE < high ? 2 : 1;
        const bool own = row >= low && row + tall * WIDE_TILE <= high && (block + wide) * WIDE_TILE <= to.m;
        const bool direct = (GOES_ON || !add) && own;
        Sums sums;
        for (int which = 0; which < 4; ++which) {
          const int64_t i = which < 2 ? 0 : tall - 1, j = which % 2 ? wide - 1 : 0;
          sums.at[which] = held[which][0], sums.apart[which] = 64;
          if (direct) {
            sums.at[which] = to.out + (row + i * WIDE_TILE) * to.m + (block + j) * WIDE_TILE;
            sums.apart[which] = to.m * int64_t(sizeof(real));
          }
        }
        auto each_held = [&](auto body) ALWAYS {
          for (int64_t which = 0; which < 4 && !direct; ++which) {
            const int64_t begun = row + which / 2 * WIDE_TILE, column = (block + which % 2) * WIDE_TILE;
            if (which / 2 >= tall || which % 2 >= wide) continue;
            const __mmask16 wanted = there(to.m - column);
            for (int64_t i = begun < low ? low - begun : 0; i < 16 && begun + i < high; ++i)
              body(held[which][i], to.out + (begun + i) * to.m + column, wanted);
          }
        };
        if (add && GOES_ON)
          each_held([](real* made, const real* out, __mmask16 wanted) ALWAYS {
            _mm512_store_ps(made, _mm512_maskz_loadu_ps(wanted, out));
          });
        EVERYTHING_WRITTEN;
        if (add && GOES_ON) {
          EACH_SUM(LOADED, true);
        } else {
          EACH_SUM(OF_ZERO, true);
        }
        sum_tiles<true>(one, one + (tall - 1) * InParts::BLOCK, b, other, InParts::deep(o, begin), [] {});
        EACH_SUM(STORED, true);
        EVERYTHING_WRITTEN;
        each_held([&](const real* made, real* out, __mmask16 wanted) ALWAYS {
          __m512 sum = _mm512_load_ps(made);
          if (add && !GOES_ON) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(wanted, out), sum);
          _mm512_mask_storeu_ps(out, wanted, sum);
        });
      }
    }
    columns += blocks * InParts::BLOCK;
  }
}

// Each thread has a share of the columns of `a`.
static void multiply_in_parts(void* data, int thread, int threads) {
  InParts& p = *(InParts*)data;
  const Outer& o = *p.o;
  const int64_t pairs = (o.n + 2 * WIDE_TILE - 1) / (2 * WIDE_TILE);
  const int64_t from = pairs * thread / threads * 2 * WIDE_TILE, end = pairs * (thread + 1) / threads * 2 * WIDE_TILE;
  const int64_t to = end < o.n ? end : o.n;
  if (from >= to) return;
  char* const rows = p.rows + thread * InParts::PIECE / WIDE_TILE * InParts::BLOCK;
  const int64_t pieces = (to - from + InParts::PIECE - 1) / InParts::PIECE;
  const int64_t blocks = up(o.rows, InParts::DEEP) / InParts::DEEP;
  for (int64_t turn = 0; turn < pieces * blocks; ++turn) {
    // what a piece adds to stays near where all blocks of rows are packed
    const int64_t piece = p.shared ? turn / blocks : turn % pieces;
    const int64_t begin = (p.shared ? turn % blocks : turn / pieces) * InParts::DEEP;
    char* const columns = p.columns + (p.shared ? begin / InParts::DEEP : thread) * p.apart;
    if (!p.shared && piece == 0) p.found(pack_block(o, begin, from, to, columns));
    const int64_t first = from + piece * InParts::PIECE;
    const int64_t last = first + InParts::PIECE < to ? first + InParts::PIECE : to;
    p.found(pack_columns_in_parts(o, begin, first, last, rows));
    EVERYTHING_WRITTEN;
    configure(16);
    multiply_block(o, begin, first, last, rows, columns);
    _tile_release();
  }
}

// Whether the product is made; else `out` holds anything, and sums that are made are no longer wanted.
static bool outer_in_parts(Outer& o, int threads) {
  bool fits = unit_is_given() && !o.add && o.rows >= InParts::LEAST && 3 * up(o.n, WIDE_TILE) <= 5 * o.n;
  int64_t every = 0;
  for (int side = 0; side < o.count; ++side) {
    const int64_t m = o.operands[side].m;
    fits = fits && 3 * up(m, WIDE_TILE) <= 5 * m;
    every += up(m, WIDE_TILE);
  }
  if (!fits) return false;
  Scratch scratch;
  InParts p = {};
  p.o = &o, p.shared = PARTS == 1 || threads > InParts::FEW, p.apart = every / WIDE_TILE * InParts::BLOCK;
  p.columns = scratch.take<char>((p.shared ? up(o.rows, InParts::DEEP) / InParts::DEEP : threads) * p.apart);
  p.rows = scratch.take<char>(threads * InParts::PIECE / WIDE_TILE * InParts::BLOCK);
  if (p.shared) parallel(threads, pack_blocks, &p);
  if (p.wild) return false;
  parallel(threads, multiply_in_parts, &p);
  if (p.wild) o.sums = nullptr;  // they are made
  return !p.wild;
}

#else

static bool outer_in_parts(Outer&, int) { return false; }

#endif

// The rows are those of `shares`; null: all.
static void outer(Outer o, int threads, const Shares* shares = nullptr) {
  if (!outer_in_parts(o, threads)) outer_of_panels(o, shares ? *shares : Shares::of_one(o.rows), threads);
}

}  // namespace kernel
