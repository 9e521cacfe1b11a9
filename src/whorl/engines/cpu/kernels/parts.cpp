// Products by the matrix unit of a processor (AMX), which multiplies bfloat16 and sums in float32.
//
// A bfloat16 is one part of its own.  A float32 is the sum of three: x = x1 + x2 + x3 to the bit, each of 8 bits and a
// sign, and so w; of the nine products the six down to 2^-16 of the first are made, in the unit's own order: what is left
// out is 2^-24 of the first, as much as a float32 rounds away.  Sums are at least as exact as those of fused steps one
// after the other: 32 products are summed before they meet the others.  The unit takes what is below 2^-126 as zero: a
// float32 below 2^-103 is so good to 2^-126 only.
//
// In float32 a row of x with an infinity or a number from 2^127 on is multiplied without the unit, by the sums of the
// three parts of weights, and all rows are where the weights have one; of a NaN no more is known than that each sum has one.
//
// Weights lie in blocks of 16 columns and 32 k: for each part a tile of 16 pairs of k, each of all columns side by side.
//
// On 2 cores of an Intel Xeon of family 6, model 167, 16 rows of 128 by 512 columns in float32 take 4.9 us a core so, and
// 10.5 us by fused multiply-adds at the peak.

namespace kernel {

// Of so many bytes.
constexpr int64_t TILE = 1024;

// From `first` to before `last`, and the same of further runs, each so far from the one before.
struct Columns {
  int64_t first, last, runs = 1, apart = 0;

  template <typename Body>
  void each(Body body) const {
    for (int64_t run = 0; run < runs; ++run) body(first + run * apart, last + run * apart);
  }
};

#if UNIT

// --- numbers in parts -------------------------------------------------------------------------------------------------

// Of a number that a row has: NaN, infinity or 2^127 and more.
enum Kind { TAME, HUGE, NOT_A_NUMBER };

// Of 16 columns, or of as many as there are.
INLINE __mmask16 there(int64_t left) { return left < WIDE_TILE ? __mmask16((1u << left) - 1) : __mmask16(0xffff); }

#if WHORL_DTYPE == 16

typedef __m256i numbers;
INLINE numbers numbers_at(const store* from, __mmask16 wanted) { return _mm256_maskz_loadu_epi16(wanted, from); }

// The numbers of two k in the same columns, side by side.
INLINE __m512i paired(__m256i low, __m256i high) {
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  alignas(64) static const uint16_t PLACES[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(PLACES), both);
}

// 32 k of 16 columns, as a tile.  The unit takes every number.
template <typename Row>
INLINE bool split_weights(const Row& row, char* to) {
  for (int64_t k = 0; k < DEEP_TILE; k += 2) _mm512_storeu_si512(to + k / 2 * (TILE / 16), paired(row(k), row(k + 1)));
  return false;
}

// Row `i` of tiles, its k from 0 to before `count`.
INLINE Kind split_row(const store* row, int64_t count, char* to, int64_t i) {
  for (int64_t k = 0; k < count; k += DEEP_TILE) {
    const __mmask32 there = count - k >= DEEP_TILE ? ~__mmask32(0) : (__mmask32(1) << (count - k)) - 1;
    _mm512_store_si512(to + k / DEEP_TILE * TILE + i * 64, _mm512_maskz_loadu_epi16(there, row + k));
  }
  return TAME;
}

#else

typedef __m512 numbers;
INLINE numbers numbers_at(const store* from, __mmask16 wanted) { return _mm512_maskz_loadu_ps(wanted, from); }

constexpr uint32_t UPPER = 0xffff0000u, HALF = 0x8000u, WILD = 0x7f000000u, ENDLESS = 0x7f800000u, SIZE = 0x7fffffffu;

INLINE __m512i size_of(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(SIZE))); }
INLINE __mmask16 wild(__m512 x) { return _mm512_cmpge_epi32_mask(size_of(x), _mm512_set1_epi32(int(WILD))); }
// The first part of a number below 2^127: the nearest.
INLINE __m512 leading(__m512 x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(int(HALF)));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(int(UPPER))));
}

INLINE __m512i interleaved(__m512 low, __m512 high) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}
INLINE __m512i one_after_the_other(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Two vectors of numbers below 2^127 in parts, each a TILE from the one before: what the first two leave is the third.
template <typename Joined>
INLINE void split(__m512 low, __m512 high, char* to, const Joined& joined) {
  for (int which = 0; which < PARTS - 1; ++which) {
    const __m512 first = leading(low), second = leading(high);
    _mm512_storeu_si512(to + which * TILE, joined(first, second));
    low = _mm512_sub_ps(low, first), high = _mm512_sub_ps(high, second);
  }
  _mm512_storeu_si512(to + (PARTS - 1) * TILE, joined(low, high));
}

// The same of any: what is infinite, or 2^127 and more, is cut to its first part.
APART static void split_wild(const __m512 (&x)[2], char* to) {
  __m512 rest[2], part[2];
  for (int half = 0; half < 2; ++half) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x[half], x[half], _CMP_UNORD_Q);
    const __mmask16 endless = _mm512_cmpge_epi32_mask(size_of(x[half]), _mm512_set1_epi32(int(ENDLESS)));
    const __m512 cut = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x[half]), _mm512_set1_epi32(int(UPPER))));
    part[half] = _mm512_mask_mov_ps(leading(x[half]), wild(x[half]), cut);
    part[half] = _mm512_mask_mov_ps(part[half], nan, _mm512_set1_ps(__builtin_nanf("")));
    rest[half] = _mm512_maskz_sub_ps(__mmask16(~endless), x[half], part[half]);
  }
  for (int which = 0; which < PARTS; ++which) {
    _mm512_storeu_si512(to + which * TILE, interleaved(part[0], part[1]));
    for (int half = 0; half < 2; ++half)
      part[half] = leading(rest[half]), rest[half] = _mm512_sub_ps(rest[half], part[half]);
  }
}

// 32 k of 16 columns, as three tiles.  Whether one is infinite, or 2^127 and more.
template <typename Row>
INLINE bool split_weights(const Row& row, char* to) {
  __mmask16 found = 0;
  for (int64_t k = 0; k < DEEP_TILE; k += 2) {
    const __m512 low = row(k), high = row(k + 1);
    split(low, high, to + k / 2 * (TILE / 16), interleaved);
    found |= wild(low) | wild(high);
  }
  if (__builtin_expect(!found, 1)) return false;
  bool more = false;
  for (int64_t k = 0; k < DEEP_TILE; k += 2) {
    const __m512 x[2] = {row(k), row(k + 1)};
    split_wild(x, to + k / 2 * (TILE / 16));
    for (const __m512 one : x) more |= (wild(one) & _mm512_cmp_ps_mask(one, one, _CMP_ORD_Q)) != 0;
  }
  return more;
}

// Row `i` of tiles, its k from 0 to before `count`: for each 32 three tiles.
INLINE Kind split_row(const real* row, int64_t count, char* to, int64_t i) {
  __mmask16 found = 0;
  for (int64_t k = 0; k < count; k += DEEP_TILE) {
    __m512 low, high;
    if (count - k >= DEEP_TILE)
      low = _mm512_loadu_ps(row + k), high = _mm512_loadu_ps(row + k + 16);
    else {
      const uint32_t there = (1u << (count - k)) - 1;
      low = _mm512_maskz_loadu_ps(__mmask16(there), row + k);
      high = _mm512_maskz_loadu_ps(__mmask16(there >> 16), row + k + 16);
    }
    found |= wild(low) | wild(high);
    split(low, high, to + k / DEEP_TILE * PARTS * TILE + i * 64, one_after_the_other);
  }
  if (__builtin_expect(!found, 1)) return TAME;
  bool nan = false;
  for (int64_t k = 0; k < count; ++k) nan |= row[k] != row[k];
  for (int64_t k = 0; k < count; k += DEEP_TILE)
    for (int which = 0; which < PARTS; ++which) memset(to + (k / DEEP_TILE * PARTS + which) * TILE + i * 64, 0, 64);
  if (nan) *(uint16_t*)(to + i * 64) = 0x7fc0;  // it makes one of every sum
  return nan ? NOT_A_NUMBER : HUGE;
}

#endif

// --- weights ----------------------------------------------------------------------------------------------------------

// As `pack` has it.
static bool pack_parts(
    char* to, int64_t n, int64_t k, const store* weight, int64_t ld, bool across, int64_t first, int64_t last) {
  bool found = false;
  store block[DEEP_TILE][WIDE_TILE];
  for (int64_t column = first; column < last; column += WIDE_TILE)
    for (int64_t k0 = 0; k0 < k; k0 += DEEP_TILE) {
      char* const tiles = to + (column * up(k, DEEP_TILE) + k0 * WIDE_TILE) * 2 * PARTS;
      const int64_t deep = k - k0 < DEEP_TILE ? k - k0 : DEEP_TILE, wide = n - column < WIDE_TILE ? n - column : WIDE_TILE;
      if (!across) {
        const store* const begin = weight + k0 * ld + column;
        found |= split_weights(
            [&](int64_t i) ALWAYS { return i < deep ? numbers_at(begin + i * ld, there(wide)) : numbers{}; }, tiles);
        continue;
      }
      if (deep == DEEP_TILE && wide == WIDE_TILE) {
#if WHORL_DTYPE == 16
        transpose(weight + column * ld + k0, ld, (packed_t*)tiles, WIDE_TILE);
        continue;
#else
        for (int64_t half = 0; half < DEEP_TILE; half += 16)
          transpose(weight + column * ld + k0 + half, ld, block[half], WIDE_TILE);
#endif
      } else {
        memset(block, 0, sizeof(block));
        for (int64_t j = 0; j < wide; ++j)
          for (int64_t i = 0; i < deep; ++i) block[i][j] = weight[(column + j) * ld + k0 + i];
      }
      found |= split_weights([&](int64_t i) ALWAYS { return numbers_at(block[i], there(WIDE_TILE)); }, tiles);
    }
  return found;
}

// c += a w without the unit, for k from `k0` on and columns from `first` to before `last`.
APART static void add_apart(
    const char* weights, int64_t deep, const store* a, int64_t k0, int64_t count, real* c, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; ++n) {
    real sum = 0;
    for (int64_t k = k0; k < k0 + count; ++k) {
      const char* block = weights + (n / WIDE_TILE * WIDE_TILE * deep + k / DEEP_TILE * DEEP_TILE * WIDE_TILE) * 2 * PARTS;
      const int64_t place = (k % DEEP_TILE / 2 * WIDE_TILE + n % WIDE_TILE) * 2 + k % 2;
      real w = 0;
      for (int which = PARTS - 1; which >= 0; --which)
        w += bits_of<float>(uint32_t(((const uint16_t*)(block + which * TILE))[place]) << 16);
      sum += widened(a[k]) * w;
    }
    c[n] += sum;
  }
}

// --- tiles ------------------------------------------------------------------------------------------------------------

// The unit's registers: 0 to 3 for sums, 4 and 5 for blocks of so many rows, 6 and 7 for columns.
INLINE void configure(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) shape.bytes[tile] = 64, shape.rows[tile] = uint8_t(tile < 6 ? rows : 16);
  asm volatile("" ::"r"(&shape) : "memory");  // GCC takes the unit to read its first 8 bytes alone
  _tile_loadconfig(&shape);
}

#define EVERYTHING_WRITTEN asm volatile("" ::: "memory")  // GCC does not know what the unit reads

// The six products in one order, whatever blocks are beside each other: x3 w1, x1 w1, x2 w1, x2 w2, x1 w2, x1 w3.

// Sums over `deep` k of blocks of rows with two of columns: of the first, `a`, in 0 and 1, and of `other`, where there are
// two, in 2 and 3; `b` and `c` are the columns' tiles.  `beside()` runs with every 32 k.
template <bool TWO, typename Beside>
INLINE void sum_tiles(const char* a, const char* other, const char* b, const char* c, int64_t deep, const Beside& beside) {
#define ROWS_OF(part) \
  _tile_loadd(4, a + part * TILE, 64); \
  if constexpr (TWO) _tile_loadd(5, other + part * TILE, 64)
#define COLUMNS_OF(part) \
  _tile_loadd(6, b + part * TILE, 64); \
  _tile_loadd(7, c + part * TILE, 64)
#define MULTIPLIED \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  if constexpr (TWO) { \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7); \
  }
  for (int64_t k = 0; k < deep; k += DEEP_TILE) {
    COLUMNS_OF(0);
    if constexpr (PARTS == 3) {
      ROWS_OF(2);
      MULTIPLIED;
    }
    ROWS_OF(0);
    MULTIPLIED;
    if constexpr (PARTS == 3) {
      ROWS_OF(1);
      MULTIPLIED;
      COLUMNS_OF(1);
      MULTIPLIED;
      ROWS_OF(0);
      MULTIPLIED;
      COLUMNS_OF(2);
      MULTIPLIED;
    }
    beside();
    a += PARTS * TILE, other += PARTS * TILE, b += PARTS * TILE, c += PARTS * TILE;
  }
#undef ROWS_OF
#undef COLUMNS_OF
#undef MULTIPLIED
}

// Where what tiles 0 to 3 sum lies: of 16 columns, rows so many bytes apart.
struct Sums {
  real* at[4];
  int64_t apart[4];
};
#define EACH_SUM(doing, two) \
  doing(0); \
  doing(1); \
  if (two) { \
    doing(2); \
    doing(3); \
  }
#define OF_ZERO(tile) _tile_zero(tile)
#define OF_BIAS(tile) _tile_loadd(tile, bias + (tile % 2 ? second : column), 0)
#define LOADED(tile) _tile_loadd(tile, sums.at[tile], sums.apart[tile])
#define STORED(tile) _tile_stored(tile, sums.at[tile], sums.apart[tile])

// Whether sums go on where they are, and not from zero, to be added: of one part nothing small meets them.
constexpr bool GOES_ON = PARTS == 1;

// As `product` has it; columns are whole blocks.
static void product_of_parts(
    const char* weights, const real* bias, int64_t n, int64_t k, bool apart, int64_t rows, const store* const* a,
    real* const* c, bool add, Columns columns, Fetch* fetch) {
  constexpr int64_t MOST = PARTS == 1 ? 512 : 256, MANY = 4;  // k, and blocks of rows, that are near at once
  alignas(64) char near[MANY][MOST / DEEP_TILE * PARTS * TILE];
  alignas(64) real held[4][16][WIDE_TILE];
  Kind kind[MANY][16];
  const int64_t blocks = (rows + 15) / 16, tall = (rows + blocks - 1) / blocks, deep = up(k, DEEP_TILE);
  const int64_t in_run = (columns.last - columns.first + 2 * WIDE_TILE - 1) / (2 * WIDE_TILE), pairs = columns.runs * in_run;
  const int64_t passes = (blocks + 1) / 2 * pairs * deep / DEEP_TILE;
  const int64_t lines = fetch ? fetch->lines() / passes + 1 : 0;
  auto beside = [&]() ALWAYS {
    if (lines) fetch->some(lines);
  };
  if (apart) {
    for (int64_t i = 0; i < rows; ++i) {
      columns.each([&](int64_t first, int64_t last) {
        for (int64_t u = first; u < last && !add; ++u) c[i][u] = bias[u];
        add_apart(weights, deep, a[i], 0, k, c[i], first, last < n ? last : n);
      });
    }
    return;
  }
  configure(tall);
  for (int64_t begin = 0; begin < rows; begin += MANY * tall) {
    int64_t count[MANY] = {}, even[MANY] = {};  // rows of a block; how far those of c are apart, 0: not all as far, or too few
    for (int64_t block = 0; block < MANY && begin + block * tall < rows; ++block) {
      const int64_t from = begin + block * tall;
      count[block] = rows - from < tall ? rows - from : tall;
      even[block] = count[block] < tall ? 0 : tall > 1 ? c[from + 1] - c[from] : WIDE_TILE;
      for (int64_t i = 2; i < count[block]; ++i)
        if (c[from + i] - c[from + i - 1] != even[block]) even[block] = 0;
    }
    for (int64_t k0 = 0; k0 < k; k0 += MOST) {
      const int64_t some = k - k0 < MOST ? k - k0 : MOST;
      bool huge = false;
      for (int64_t block = 0; block < MANY; ++block)
        for (int64_t i = 0; i < count[block]; ++i) {
          kind[block][i] = split_row(a[begin + block * tall + i] + k0, some, near[block], i);
          huge |= kind[block][i] == HUGE;
        }
      const bool more = add || k0 > 0, goes_on = more && GOES_ON;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t run = pair / in_run * columns.apart, column = columns.first + run + pair % in_run * 2 * WIDE_TILE;
        // the last of a run may be alone: it is made twice
        const int64_t second = column + WIDE_TILE < columns.last + run ? column + WIDE_TILE : column;
        const char* b = weights + (column * deep + k0 * WIDE_TILE) * 2 * PARTS;
        const char* other = weights + (second * deep + k0 * WIDE_TILE) * 2 * PARTS;
        for (int64_t block = 0; block < MANY && count[block]; block += 2) {
          const bool two = count[block + 1] > 0;
          Sums sums;
          bool direct[2];
          for (int64_t which = 0; which < 4; ++which) {
            const int64_t of = which / 2, now = block + of, at = which % 2 ? second : column;
            direct[of] = even[now] && (GOES_ON || !more);
            sums.at[which] = direct[of] ? c[begin + now * tall] + at : held[which][0];
            sums.apart[which] = direct[of] ? even[now] * int64_t(sizeof(real)) : 64;
          }
          // of rows whose sums do not lie so body(what is held, where it belongs)
          auto each_held = [&](auto body) ALWAYS {
            for (int64_t of = 0; of < 2; ++of)
              for (int64_t i = 0; i < count[block + of] && !direct[of]; ++i)
                for (int64_t half = 0; half < (second > column ? 2 : 1); ++half)
                  body(held[2 * of + half][i], c[begin + (block + of) * tall + i] + (half ? second : column));
          };
          if (goes_on) each_held([](real* made, const real* to) { _mm512_store_ps(made, _mm512_loadu_ps(to)); });
          EVERYTHING_WRITTEN;
          if (!more) {
            EACH_SUM(OF_BIAS, two);
          } else if (goes_on) {
            EACH_SUM(LOADED, two);
          } else {
            EACH_SUM(OF_ZERO, two);
          }
          if (two)
            sum_tiles<true>(near[block], near[block + 1], b, other, some, beside);
          else
            sum_tiles<false>(near[block], near[block], b, other, some, beside);
          EACH_SUM(STORED, two);
          EVERYTHING_WRITTEN;
          each_held([&](const real* made, real* to) ALWAYS {
            const __m512 sum = _mm512_load_ps(made);
            _mm512_storeu_ps(to, more && !GOES_ON ? _mm512_add_ps(_mm512_loadu_ps(to), sum) : sum);
          });
        }
      }
      for (int64_t block = 0; block < MANY && huge; ++block)
        for (int64_t i = 0; i < count[block]; ++i) {
          const int64_t row = begin + block * tall + i;
          if (kind[block][i] != HUGE) continue;
          columns.each([&](int64_t first, int64_t last) {
            add_apart(weights, deep, a[row], k0, some, c[row], first, last < n ? last : n);
          });
        }
    }
  }
  _tile_release();
}

#else

static bool pack_parts(char*, int64_t, int64_t, const store*, int64_t, bool, int64_t, int64_t) { return false; }
static void product_of_parts(
    const char*, const real*, int64_t, int64_t, bool, int64_t, const store* const*, real* const*, bool, Columns, Fetch*) {}

#endif

// --- either way -------------------------------------------------------------------------------------------------------

// Where a matrix in parts tells that all rows are multiplied without the unit.
INLINE int32_t* all_apart(const Packed& b) { return (int32_t*)((char*)b.data + b.bytes() - 64); }

// The shares in which several pack or multiply: blocks of two tiles, or panels.
INLINE int64_t shares(const Packed& b) { return b.in_parts ? (b.n + 2 * WIDE_TILE - 1) / (2 * WIDE_TILE) : b.panels(); }
INLINE int64_t whole(int64_t n, int64_t share) {
  const int64_t column = share * 2 * WIDE_TILE, every = up(n, WIDE_TILE);
  return column < every ? column : every;
}

// Of a matrix of these sizes that the rows of so many sequences meet.
INLINE Packed unpacked(int64_t n, int64_t k, int64_t batch) {
  return {n, k, nullptr, nullptr, unit_makes(PARTS, n, k, batch)};
}
// Where it lies: then it can be packed.
INLINE void place(Packed& b, char* memory) {
  b.data = (packed_t*)memory;
  if (b.in_parts) *all_apart(b) = 0;
}

// Columns are rows of `weight` [n, ld] (`across` false: columns are columns of [k, ld]); the shares from `first` to before
// `last`.
static void pack(const Packed& to, const store* weight, int64_t ld, bool across, int64_t first, int64_t last) {
  if (!to.in_parts) return pack_panels(to, weight, ld, across, first, last);
  if (pack_parts((char*)to.data, to.n, to.k, weight, ld, across, whole(to.n, first), whole(to.n, last)))
    __atomic_store_n(all_apart(to), 1, __ATOMIC_RELAXED);
}

// The shares from `first` to before `last` of rows a[0], a[1], ... times b, into c (`add`: in place of the bias, to c).
static void product(
    const Packed& b, int64_t rows, const store* const* a, real* const* c, bool add, int64_t first, int64_t last,
    Fetch* fetch = nullptr) {
  if (!b.in_parts) return product_of_panels(b, rows, a, c, add, first, last, fetch);
  if (rows && first < last)
    product_of_parts((const char*)b.data, b.bias, b.n, b.k, *all_apart(b), rows, a, c, add,
                     {whole(b.n, first), whole(b.n, last)}, fetch);
}

}  // namespace kernel
