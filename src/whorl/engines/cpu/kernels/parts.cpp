// Products in float32 by the matrix unit of a processor (AMX), which multiplies bfloat16: each number is the sum of three.
//
// x = x1 + x2 + x3 to the bit, each of 8 bits and a sign, and so w; of the nine products the six down to 2^-16 of the first
// are made and summed in float32, in the unit's own order: what is left out is 2^-24 of the first, as much as a float32
// rounds away.  Sums are at least as exact as those of fused steps one after the other: 32 products are summed before they
// meet the others.  The unit takes what is below 2^-126 as zero: a number below 2^-103 is so good to 2^-126 only.
//
// A row of x with an infinity or a number from 2^127 on is multiplied without the unit, by the sums of the three parts of
// weights, and all rows are where the weights have one; of a NaN no more is known than that each sum has one.
//
// Weights lie in blocks of 16 columns and 32 k: for each part a tile of 16 pairs of k, each of all columns side by side.
//
// On 2 cores of an Intel Xeon of family 6, model 167, 16 rows of 128 by 512 columns take 4.9 us a core so, and 10.5 us by
// fused multiply-adds at the peak.

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__) && WHORL_DTYPE == 32
#define PARTS 3
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PARTS 0
#endif

namespace kernel {

// From so many sequences on: fewer rows take longer to bring six bytes of each weight than four.
constexpr int64_t IN_PARTS = 16;
constexpr int64_t DEEP_TILE = 32, WIDE_TILE = 16;
// Of so many bytes.
constexpr int64_t TILE = 1024;

#if PARTS

// A process asks the system for the unit once.
static bool asked() {
  constexpr long request = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return !syscall(SYS_arch_prctl, request, tiles);
}
static const bool GIVEN = asked();

// Whether a product of k and n with the rows of so many sequences is made so: where few of a tile's k are empty.
static bool in_parts(int64_t n, int64_t k, int64_t batch) {
  return GIVEN && batch >= IN_PARTS && n >= WIDE_TILE && 3 * up(k, DEEP_TILE) <= 5 * k;
}

constexpr uint32_t UPPER = 0xffff0000u, HALF = 0x8000u, WILD = 0x7f000000u, ENDLESS = 0x7f800000u, SIZE = 0x7fffffffu;

INLINE __m512i size_of(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(SIZE))); }
INLINE __mmask16 wild(__m512 x) { return _mm512_cmpge_epi32_mask(size_of(x), _mm512_set1_epi32(int(WILD))); }
// The first part of a number below 2^127: the nearest.
INLINE __m512 leading(__m512 x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(int(HALF)));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(int(UPPER))));
}

// --- weights ----------------------------------------------------------------------------------------------------------

// 32 k of 16 columns, as three tiles.  Whether one is infinite, or 2^127 and more: of it the first part is cut.
static bool split_weights(const real (&block)[DEEP_TILE][WIDE_TILE], char* to) {
  __mmask16 found = 0;
  for (int64_t pair = 0; pair < DEEP_TILE / 2; ++pair, to += TILE / 16) {
    __m512 rest[2], part[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 x = _mm512_loadu_ps(block[2 * pair + half]);
      const __mmask16 large = wild(x), nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      const __mmask16 endless = _mm512_cmpge_epi32_mask(size_of(x), _mm512_set1_epi32(int(ENDLESS)));
      const __m512 cut = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(UPPER))));
      part[half] = _mm512_mask_mov_ps(leading(x), large, cut);
      part[half] = _mm512_mask_mov_ps(part[half], nan, _mm512_set1_ps(__builtin_nanf("")));
      rest[half] = _mm512_maskz_sub_ps(__mmask16(~endless), x, part[half]);
      found |= large & __mmask16(~nan);
    }
    for (int which = 0; which < PARTS; ++which) {
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(part[0]), 16);
      _mm512_storeu_si512(to + which * TILE, _mm512_or_si512(low, _mm512_castps_si512(part[1])));
      for (int half = 0; half < 2; ++half)
        part[half] = leading(rest[half]), rest[half] = _mm512_sub_ps(rest[half], part[half]);
    }
  }
  return found;
}

// As `pack` has it.
static bool pack_parts(
    char* to, int64_t n, int64_t k, const store* weight, int64_t ld, bool across, int64_t first, int64_t last) {
  bool found = false;
  real block[DEEP_TILE][WIDE_TILE];
  for (int64_t column = first; column < last; column += WIDE_TILE)
    for (int64_t k0 = 0; k0 < k; k0 += DEEP_TILE) {
      const int64_t deep = k - k0 < DEEP_TILE ? k - k0 : DEEP_TILE, wide = n - column < WIDE_TILE ? n - column : WIDE_TILE;
      if (deep < DEEP_TILE || wide < WIDE_TILE) memset(block, 0, sizeof(block));
      if (!across) {
        for (int64_t i = 0; i < deep; ++i)
          memcpy(block[i], weight + (k0 + i) * ld + column, size_t(wide) * sizeof(real));
      } else if (deep == DEEP_TILE && wide == WIDE_TILE) {
        for (int64_t half = 0; half < DEEP_TILE; half += 16)
          transpose(weight + column * ld + k0 + half, ld, block[half], WIDE_TILE);
      } else {
        for (int64_t j = 0; j < wide; ++j)
          for (int64_t i = 0; i < deep; ++i) block[i][j] = weight[(column + j) * ld + k0 + i];
      }
      found |= split_weights(block, to + (column * up(k, DEEP_TILE) + k0 * WIDE_TILE) * 2 * PARTS);
    }
  return found;
}

// --- rows -------------------------------------------------------------------------------------------------------------

// Of a number that a row has: NaN, infinity or 2^127 and more.
enum Kind { TAME, HUGE, NOT_A_NUMBER };

// Row `i` of tiles, its k from 0 to before `count`: for each 32 three tiles.
INLINE Kind split_row(const real* row, int64_t count, char* to, int64_t i) {
  __mmask16 found = 0;
  for (int64_t k = 0; k < count; k += DEEP_TILE) {
    char* at = to + k / DEEP_TILE * PARTS * TILE + i * 64;
    __m512 low, high;
    if (count - k >= DEEP_TILE)
      low = _mm512_loadu_ps(row + k), high = _mm512_loadu_ps(row + k + 16);
    else {
      const uint32_t there = (1u << (count - k)) - 1;
      low = _mm512_maskz_loadu_ps(__mmask16(there), row + k);
      high = _mm512_maskz_loadu_ps(__mmask16(there >> 16), row + k + 16);
    }
    found |= wild(low) | wild(high);
    for (int which = 0; which < PARTS; ++which) {
      const __m512 first = leading(low), second = leading(high);
      _mm512_store_si512(at + which * TILE, (__m512i)_mm512_cvtne2ps_pbh(second, first));
      low = _mm512_sub_ps(low, first), high = _mm512_sub_ps(high, second);
    }
  }
  if (__builtin_expect(!found, 1)) return TAME;
  bool nan = false;
  for (int64_t k = 0; k < count; ++k) nan |= row[k] != row[k];
  for (int64_t k = 0; k < count; k += DEEP_TILE)
    for (int which = 0; which < PARTS; ++which) memset(to + (k / DEEP_TILE * PARTS + which) * TILE + i * 64, 0, 64);
  if (nan) *(uint16_t*)(to + i * 64) = 0x7fc0;  // it makes one of every sum
  return nan ? NOT_A_NUMBER : HUGE;
}

// c += a w without the unit, for k from `k0` on and columns from `first` to before `last`.
APART static void add_apart(
    const char* weights, int64_t deep, const real* a, int64_t k0, int64_t count, real* c, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; ++n) {
    real sum = 0;
    for (int64_t k = k0; k < k0 + count; ++k) {
      const char* block = weights + (n / WIDE_TILE * WIDE_TILE * deep + k / DEEP_TILE * DEEP_TILE * WIDE_TILE) * 2 * PARTS;
      const int64_t place = (k % DEEP_TILE / 2 * WIDE_TILE + n % WIDE_TILE) * 2 + k % 2;
      real w = 0;
      for (int which = PARTS - 1; which >= 0; --which)
        w += bits_of<float>(uint32_t(((const uint16_t*)(block + which * TILE))[place]) << 16);
      sum += a[k] * w;
    }
    c[n] += sum;
  }
}

// --- tiles ------------------------------------------------------------------------------------------------------------

// The unit's registers: weights in those from `weights` on, of 16 pairs of k; rows in the others.
INLINE void configure(int64_t rows, int weights) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) shape.bytes[tile] = 64, shape.rows[tile] = uint8_t(tile < weights ? rows : 16);
  _tile_loadconfig(&shape);
}
constexpr int OF_ONE_BLOCK = 5, OF_TWO_BLOCKS = 6;  // where weights begin

#define EVERYTHING_WRITTEN asm volatile("" ::: "memory")  // GCC does not know what the unit reads

// The six products in one order, whatever blocks are beside each other: x3 w1, x1 w1, x2 w1, x2 w2, x1 w2, x1 w3.

// Sums of one block of rows, in 0 and 1, with two of columns, over `deep` k; `b` and `c` are the columns' tiles.  `beside()`
// runs with every 32 of them.
template <typename Beside>
INLINE void tiles_of_one_block(const char* a, const char* b, const char* c, int64_t deep, const Beside& beside) {
  for (int64_t k = 0; k < deep; k += DEEP_TILE, a += PARTS * TILE, b += PARTS * TILE, c += PARTS * TILE) {
    _tile_loadd(4, a + 2 * TILE, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, c, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(2, a, 64);
    _tile_dpbf16ps(0, 2, 5);
    _tile_dpbf16ps(1, 2, 6);
    _tile_loadd(3, a + TILE, 64);
    _tile_dpbf16ps(0, 3, 5);
    _tile_dpbf16ps(1, 3, 6);
    _tile_loadd(5, b + TILE, 64);
    _tile_dpbf16ps(0, 3, 5);
    _tile_loadd(6, c + TILE, 64);
    _tile_dpbf16ps(1, 3, 6);
    _tile_dpbf16ps(0, 2, 5);
    _tile_dpbf16ps(1, 2, 6);
    _tile_loadd(7, b + 2 * TILE, 64);
    _tile_dpbf16ps(0, 2, 7);
    _tile_loadd(7, c + 2 * TILE, 64);
    _tile_dpbf16ps(1, 2, 7);
    beside();
  }
}
// The same of two blocks of rows, `a` and `other`: of the first in 0 and 1, of the second in 2 and 3.
template <typename Beside>
INLINE void tiles_of_two_blocks(
    const char* a, const char* other, const char* b, const char* c, int64_t deep, const Beside& beside) {
#define FOUR_TILES \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7)
  for (int64_t k = 0; k < deep; k += DEEP_TILE) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a + 2 * TILE, 64);
    _tile_loadd(7, c, 64);
    _tile_loadd(5, other + 2 * TILE, 64);
    FOUR_TILES;
    _tile_loadd(4, a, 64);
    _tile_loadd(5, other, 64);
    FOUR_TILES;
    _tile_loadd(4, a + TILE, 64);
    _tile_loadd(5, other + TILE, 64);
    FOUR_TILES;
    _tile_loadd(6, b + TILE, 64);
    _tile_loadd(7, c + TILE, 64);
    FOUR_TILES;
    _tile_loadd(4, a, 64);
    _tile_loadd(5, other, 64);
    FOUR_TILES;
    _tile_loadd(6, b + 2 * TILE, 64);
    _tile_loadd(7, c + 2 * TILE, 64);
    FOUR_TILES;
    beside();
    a += PARTS * TILE, other += PARTS * TILE, b += PARTS * TILE, c += PARTS * TILE;
  }
#undef FOUR_TILES
}

// As `product` has it; columns from `first` to before `last`, whole blocks of them.
static void product_of_parts(
    const char* weights, const real* bias, int64_t n, int64_t k, bool apart, int64_t rows, const store* const* a,
    real* const* c, bool add, int64_t first, int64_t last, Fetch* fetch) {
  constexpr int64_t MOST = 256;  // k of rows that are near at once
  alignas(64) char near[2][MOST / DEEP_TILE * PARTS * TILE];
  alignas(64) real sums[4][16][WIDE_TILE];
  Kind kind[2][16];
  const int64_t blocks = (rows + 15) / 16, tall = (rows + blocks - 1) / blocks, deep = up(k, DEEP_TILE);
  const int64_t pairs = (last - first + 2 * WIDE_TILE - 1) / (2 * WIDE_TILE);
  const int64_t passes = (blocks + 1) / 2 * pairs * deep / DEEP_TILE;
  const int64_t lines = fetch ? fetch->lines() / passes + 1 : 0;
  auto beside = [&]() ALWAYS {
    if (lines) fetch->some(lines);
  };
  if (apart) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t u = first; u < last && !add; ++u) c[i][u] = bias[u];
      add_apart(weights, deep, a[i], 0, k, c[i], first, last < n ? last : n);
    }
    return;
  }
  for (int64_t begin = 0; begin < rows; begin += 2 * tall) {
    const int64_t left = rows - begin;
    const int64_t count[2] = {left < tall ? left : tall, left <= tall ? 0 : left < 2 * tall ? left - tall : tall};
    configure(tall, count[1] ? OF_TWO_BLOCKS : OF_ONE_BLOCK);
    for (int64_t k0 = 0; k0 < k; k0 += MOST) {
      const int64_t some = k - k0 < MOST ? k - k0 : MOST;
      bool huge = false;
      for (int block = 0; block < 2; ++block)
        for (int64_t i = 0; i < count[block]; ++i) {
          kind[block][i] = split_row(a[begin + block * tall + i] + k0, some, near[block], i);
          huge |= kind[block][i] == HUGE;
        }
      EVERYTHING_WRITTEN;
      const bool more = add || k0 > 0;
      for (int64_t column = first; column < last; column += 2 * WIDE_TILE) {
        // the last may be alone: it is made twice
        const int64_t second = column + WIDE_TILE < last ? column + WIDE_TILE : column;
        const char* b = weights + (column * deep + k0 * WIDE_TILE) * 2 * PARTS;
        const char* other = weights + (second * deep + k0 * WIDE_TILE) * 2 * PARTS;
        if (more) {
          _tile_zero(0);
          _tile_zero(1);
        } else {
          _tile_loadd(0, bias + column, 0);
          _tile_loadd(1, bias + second, 0);
        }
        if (!count[1]) {
          tiles_of_one_block(near[0], b, other, some, beside);
        } else {
          if (more) {
            _tile_zero(2);
            _tile_zero(3);
          } else {
            _tile_loadd(2, bias + column, 0);
            _tile_loadd(3, bias + second, 0);
          }
          tiles_of_two_blocks(near[0], near[1], b, other, some, beside);
          _tile_stored(2, sums[2], 64);
          _tile_stored(3, sums[3], 64);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        for (int block = 0; block < 2; ++block)
          for (int64_t i = 0; i < count[block]; ++i)
            for (int64_t at = column, which = 2 * block; at <= second; at += WIDE_TILE, ++which) {
              real* to = c[begin + block * tall + i] + at;
              const __m512 made = _mm512_load_ps(sums[which][i]);
              _mm512_storeu_ps(to, more ? _mm512_add_ps(_mm512_loadu_ps(to), made) : made);
            }
      }
      for (int block = 0; block < 2 && huge; ++block)
        for (int64_t i = 0; i < count[block]; ++i) {
          const int64_t row = begin + block * tall + i;
          if (kind[block][i] == HUGE) add_apart(weights, deep, a[row], k0, some, c[row], first, last < n ? last : n);
        }
    }
  }
  _tile_release();
}

#else

static bool in_parts(int64_t, int64_t, int64_t) { return false; }
static bool pack_parts(char*, int64_t, int64_t, const store*, int64_t, bool, int64_t, int64_t) { return false; }
static void product_of_parts(
    const char*, const real*, int64_t, int64_t, bool, int64_t, const store* const*, real* const*, bool, int64_t, int64_t,
    Fetch*) {}

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
INLINE Packed unpacked(int64_t n, int64_t k, int64_t batch) { return {n, k, nullptr, nullptr, in_parts(n, k, batch)}; }
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
    product_of_parts((const char*)b.data, b.bias, b.n, b.k, *all_apart(b), rows, a, c, add, whole(b.n, first),
                     whole(b.n, last), fetch);
}

}  // namespace kernel
