// Products of a few rows with weights that were packed once.
//
// c[i][n] = bias[n] + sum over k of a[i][k] b[k][n].  The weights lie in panels: up to VECTORS vectors of columns side by
// side, then the next k; panels are as equal as can be, as those of one vector are slow, and the last vector is filled up
// with zeros.  A tile of ROWS rows and a panel has its sums in registers.  Each sum runs over k in order, one fused step
// each, in every tile: a row's result does not depend on the rows beside it, nor on who computes which panel.  Where there
// is no fused step, and each rounds twice, sums of RUN steps are summed: as exact as fused steps, over 65.
//
// On the processors measured (AMD EPYC of family 25, AVX-512) this runs at 104 to 117 GFLOP/s a core for 16 rows, where
// the sgemm of torch's MKL takes 65 to 81, packed or not; KERNELS and sizes in benchmarks/cpu.py.

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace kernel {

#if defined(__AVX512F__)
constexpr int64_t BYTES = 64;
constexpr int VECTORS = 4;  // of 32 registers, 24 hold sums
#elif defined(__AVX__)
constexpr int64_t BYTES = 32;
constexpr int VECTORS = 2;  // of 16 registers, 12 hold sums
#elif defined(__ARM_NEON)
constexpr int64_t BYTES = 16;
constexpr int VECTORS = 4;
#else
constexpr int64_t BYTES = 16;
constexpr int VECTORS = 2;
#endif
constexpr int64_t LANES = BYTES / int64_t(sizeof(real));
constexpr int ROWS = 6;
typedef real vector __attribute__((vector_size(BYTES)));
typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

#if defined(__x86_64__) && !defined(__FMA__)
constexpr bool ROUNDS_TWICE = true;
#else
constexpr bool ROUNDS_TWICE = false;
#endif
constexpr int64_t RUN = 16;

// sum + a b, one fused step where there is one.  GCC, tuned for some processors (AMD EPYC without AVX-512), makes two of it
// where one sum alone waits for itself, and so other bits of a row by itself than of the same row among others.
INLINE vector fused(vector a, vector b, vector sum) {
#if defined(__AVX512F__) && WHORL_DTYPE == 64
  return (vector)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
#elif defined(__AVX512F__)
  return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__) && WHORL_DTYPE == 64
  return (vector)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#elif defined(__FMA__)
  return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

#if WHORL_DTYPE == 16 && defined(__AVX512BF16__)
#define PAIRS 1  // two k at a time: an operand is a pair of bfloat16, and so is a weight
typedef uint32_t packed_t;
constexpr int64_t STEP = 2;
#else
#define PAIRS 0
typedef real packed_t;
constexpr int64_t STEP = 1;
#endif

// Weights that several rows are multiplied with, into a register.  GCC reads them anew for each of up to four rows, as an
// operand from memory, and so many reads of whole vectors take longer than the products: 128 by 512 weights in a loop of
// its own, of 2, 3 and 4 rows, take 3.5, 5.2 and 5.6 to 6.9 us so, and 2.4, 3.4 and 4.5 from registers (an AMD EPYC with
// AVX-512, one thread).
#if PAIRS
typedef __m512bh weight;
#else
typedef vector weight;
#endif
INLINE weight read_once(const packed_t* from) {
#if PAIRS
  weight read = (weight)_mm512_loadu_si512(from);
#else
  weight read = *(const loose*)from;
#endif
#if defined(__AVX512F__)
  __asm__("" : "+v"(read));
#elif defined(__x86_64__)
  __asm__("" : "+x"(read));
#elif defined(__ARM_NEON)
  __asm__("" : "+w"(read));
#endif
  return read;
}

// A row that is read or written soon, into the second cache, beside a step that computes: rows may lie too far apart for
// the processor to guess.
template <int WRITTEN, typename T>
INLINE void fetch(const T* row, int64_t size) {
  for (int64_t u = 0; u < size; u += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + u, WRITTEN, 2);
}

#define ALWAYS __attribute__((always_inline))
// body(i) for i from 0 to before COUNT, each a constant of its own.  GCC leaves the sums of a tile in memory where a loop
// over them is unrolled late, and brings them there and back before and after the loop over k.
template <int I>
struct Number {
  constexpr operator int() const { return I; }
};
template <int COUNT, int I = 0, typename Body>
INLINE void each(const Body& body) {
  if constexpr (I < COUNT) {
    body(Number<I>());
    each<COUNT, I + 1>(body);
  }
}
template <int M, int N, typename Body>
INLINE void each_of(const Body& body) {
  each<M * N>([&](auto place) ALWAYS { body(Number<place / N>(), Number<place % N>()); });
}

// One matrix, packed: k rows (filled up to a multiple of STEP), n columns.
struct Packed {
  int64_t n, k;
  packed_t* data;
  real* bias;  // [up(n, LANES)]
  bool in_parts = false;  // as parts.cpp lays it
  bool shared = false;    // by a team, whose members take panels: there are more of few vectors

  int64_t steps() const { return up(k, STEP) / STEP; }
  int64_t vectors() const { return (n + LANES - 1) / LANES; }
  int64_t panels() const { return vectors() / VECTORS + (shared ? vectors() % VECTORS : vectors() % VECTORS > 0); }
  int64_t column(int64_t panel) const { return vectors() * panel / panels() * LANES; }
  int64_t width(int64_t panel) const { return column(panel + 1) - column(panel); }
  // body(N, panel) of a panel of N vectors.
  template <typename Body>
  void each_panel(int64_t first, int64_t last, const Body& body) const {
    for (int64_t panel = first; panel < last; ++panel)
      each<VECTORS>([&](auto less) {
        if (width(panel) == (less + 1) * LANES) body(Number<less + 1>(), panel);
      });
  }
  int64_t bytes() const {
    return in_parts ? up(n, 16) * up(k, 32) * 2 * PARTS + 64 : up(n, LANES) * steps() * int64_t(sizeof(packed_t));
  }
};

INLINE packed_t pair(store low, store high) {
#if PAIRS
  return uint32_t(low.bits) | uint32_t(high.bits) << 16;
#else
  (void)high;
  return widened(low);
#endif
}

#if defined(__AVX512F__) && (WHORL_DTYPE == 32 || PAIRS)
// Of 16 words in each of 16 rows that lie `ld` elements apart their transpose, its rows `width` words apart.
INLINE void transpose(const store* from, int64_t ld, packed_t* to, int64_t width) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * ld);
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half) {
      a[4 * i + 2 * half] = _mm512_unpacklo_epi64(b[4 * i + half], b[4 * i + 2 + half]);
      a[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(b[4 * i + half], b[4 * i + 2 + half]);
    }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88), b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_si512(to + i * width, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
    _mm512_storeu_si512(to + (8 + i) * width, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
  }
}
constexpr bool TRANSPOSES = true;
#else
INLINE void transpose(const store*, int64_t, packed_t*, int64_t) {}
constexpr bool TRANSPOSES = false;
#endif

// Columns are those of rows: row(k) is where one begins.  WIDTH of them at a time: a number that is known makes of a copy a
// few vectors, and rows may lie too far apart for the processor to guess.
template <int64_t WIDTH, typename Row>
static void pack_panel(const Packed& to, Row row, int64_t begin) {
  constexpr int64_t SOON = 16;
  const store zero = {};
  packed_t* base = to.data + begin * to.steps();
  const int64_t full = to.n - begin < WIDTH ? to.n - begin : WIDTH;
  for (int64_t k = 0; k < to.steps(); ++k, base += WIDTH) {
    const store *low = row(k * STEP) + begin, *high = STEP == 2 && k * 2 + 1 < to.k ? row(k * 2 + 1) + begin : nullptr;
    for (int64_t next = (k + SOON) * STEP; next < (k + SOON + 1) * STEP && next < to.k; ++next)
      fetch<0>(row(next) + begin, WIDTH);
    if (full == WIDTH && (STEP == 1 || high)) {
      for (int64_t j = 0; j < WIDTH; ++j) base[j] = pair(low[j], high ? high[j] : zero);
      continue;
    }
    for (int64_t j = 0; j < full; ++j) base[j] = pair(low[j], high ? high[j] : zero);
    for (int64_t j = full; j < WIDTH; ++j) base[j] = packed_t(0);
  }
}

template <typename Row>
static void pack_rows(const Packed& to, Row row, int64_t first, int64_t last) {
  to.each_panel(first, last, [&](auto vectors, int64_t panel) { pack_panel<vectors * LANES>(to, row, to.column(panel)); });
}

// Columns are rows of `weight` [n, ld] (`across` false: columns are columns of [k, ld]).
static void pack_panels(const Packed& to, const store* weight, int64_t ld, bool across, int64_t first, int64_t last) {
  if (!across) return pack_rows(to, [=](int64_t k) { return weight + k * ld; }, first, last);
  const store zero = {};
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t width = to.width(panel), begin = to.column(panel);
    packed_t* base = to.data + begin * to.steps();
    const int64_t full = to.n - begin < width ? to.n - begin : width;
    for (int64_t k0 = 0; k0 < to.steps(); k0 += 16) {
      const int64_t k1 = k0 + 16 < to.steps() ? k0 + 16 : to.steps();
      int64_t j = 0;
      for (; TRANSPOSES && (k0 + 16) * STEP <= to.k && j + 16 <= full; j += 16) {
        const store* from = weight + (begin + j) * ld + k0 * STEP;
        for (int64_t i = 0; i < 16; ++i) __builtin_prefetch(from + i * ld + 64 * STEP);  // rows lie too far apart to be guessed
        transpose(from, ld, base + k0 * width + j, width);
      }
      for (; j < full; ++j)
        for (int64_t k = k0; k < k1; ++k) {
          const store* from = weight + (begin + j) * ld + k * STEP;
          base[k * width + j] = pair(from[0], STEP == 2 && k * 2 + 1 < to.k ? from[STEP - 1] : zero);
        }
      for (int64_t k = k0; k < k1; ++k)
        for (int64_t j = full; j < width; ++j) base[k * width + j] = packed_t(0);
    }
  }
}

// Memory that is used soon, fetched into the second cache beside the sums of a product, a line of each of two pieces at
// each step.  What is read is fetched by its last tiles, as weights that are larger than that cache would drive it out
// again.  What is written is fetched to be written, by all tiles alike: other threads have read it since, and to take it
// from their caches takes long.
struct Fetch {
  static constexpr int64_t MOST = 4, LINE = 64;
  // Bytes one after the other, so many of them at each step of a tile, no more than a line; of none the same again.
  struct Piece {
    const char* at;
    int64_t step;
  };
  struct Range {
    const char* at;
    int64_t lines;
  };
  struct List {
    Range ranges[MOST];
    int64_t count = 0, pieces = 0;

    void begin(int64_t steps) {
      pieces = 0;
      for (int64_t i = 0; i < count; ++i) pieces += (ranges[i].lines + steps - 1) / steps;
    }
    // With so many tiles behind the one that begins.
    bool is_due(int64_t tiles) const { return count && pieces > tiles; }
    int64_t lines() const {
      int64_t every = 0;
      for (int64_t i = 0; i < count; ++i) every += ranges[i].lines;
      return every;
    }
    const char* line() {
      Range& range = ranges[count - 1];
      const char* at = range.at;
      range.at += LINE;
      if (--range.lines <= 0) --count;
      return at;
    }
    Piece piece(int64_t most, int64_t steps) {
      Range& range = ranges[count - 1];
      const int64_t lines = range.lines < most ? range.lines : most;
      const Piece made = {range.at, (lines * LINE + steps - 1) / steps};
      range.at += lines * LINE, range.lines -= lines, --pieces;
      if (!range.lines) --count;
      return made;
    }
  } read, written;
  int64_t tiles = 0, steps = 0;

  // What is wanted last is fetched first, and where not all can be it alone.
  template <typename T>
  static void want(List& list, const T* at, int64_t size) {
    if (at && size > 0) list.ranges[list.count++] = {(const char*)at, (size * int64_t(sizeof(T)) + LINE - 1) / LINE};
  }
  int64_t lines() const { return read.lines() + written.lines(); }
  // So many lines of those that are left.
  void some(int64_t lines) {
    for (; lines > 0 && written.count > 0; --lines) __builtin_prefetch(written.line(), 1, 2);
    for (; lines > 0 && read.count > 0; --lines) __builtin_prefetch(read.line(), 0, 2);
  }
  // A product of so many tiles, each of so many steps.
  void begin(int64_t of_tiles, int64_t of_steps) {
    tiles = of_tiles, steps = of_steps;
    read.begin(steps), written.begin(steps);
  }
  // What a tile fetches that begins: a piece that is read, and one that is written or where there is none another to read.
  // `none` and `own`, which no other thread has, are where it fetches for lack of something.
  struct Pieces {
    Piece read, second;
  };
  Pieces take(const void* none, const void* own) {
    --tiles;
    Pieces made = {{(const char*)none, 0}, {(const char*)own, 0}};
    if (read.is_due(tiles)) made.read = read.piece(steps, steps);
    if (written.count) {
      const int64_t share = (written.lines() + tiles) / (tiles + 1);
      made.second = written.piece(share < steps ? share : steps, steps);
    } else if (read.is_due(tiles))
      made.second = read.piece(steps, steps);
    return made;
  }
};

template <int M, int N>
static void tile(const Packed& b, int64_t panel, const store* const* a, real* const* c, bool add, Fetch* fetch) {
  vector sum[M][N], total[M][N];
  const int64_t column = b.column(panel), steps = b.steps();
  each_of<M, N>([&](auto i, auto j) ALWAYS {
    sum[i][j] = *(const loose*)((add ? c[i] : b.bias) + column + j * LANES);
    if (ROUNDS_TWICE) total[i][j] = vector{};
  });
  const packed_t* weights = b.data + column * steps;
  const store* row[M];
  each<M>([&](auto i) ALWAYS { row[i] = a[i]; });
  Fetch::Pieces ahead = fetch ? fetch->take(weights, c[0]) : Fetch().take(weights, c[0]);
  for (int64_t k = 0; k < steps; ++k, weights += N * LANES) {
    __builtin_prefetch(ahead.read.at, 0, 2), ahead.read.at += ahead.read.step;
    __builtin_prefetch(ahead.second.at, 1, 2), ahead.second.at += ahead.second.step;
    weight w[N];
    each<N>([&](auto j) ALWAYS { w[j] = read_once(weights + j * LANES); });
#if PAIRS
    each<M>([&](auto i) ALWAYS {
      int32_t both;
      __builtin_memcpy(&both, row[i] + 2 * k, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(both);
      each<N>([&](auto j) ALWAYS { sum[i][j] = (vector)_mm512_dpbf16_ps((__m512)sum[i][j], x, w[j]); });
    });
#else
    each<M>([&](auto i) ALWAYS {
      const vector x = widened(row[i][k]) - vector{};
      each<N>([&](auto j) ALWAYS { sum[i][j] = fused(x, w[j], sum[i][j]); });
    });
    if (ROUNDS_TWICE && k % RUN == RUN - 1)
      each_of<M, N>([&](auto i, auto j) ALWAYS { total[i][j] += sum[i][j], sum[i][j] = vector{}; });
#endif
  }
  each_of<M, N>([&](auto i, auto j) ALWAYS {
    *(loose*)(c[i] + column + j * LANES) = ROUNDS_TWICE ? total[i][j] + sum[i][j] : sum[i][j];
  });
}

template <int N>
static void panel_of_rows(
    const Packed& b, int64_t panel, int64_t rows, const store* const* a, real* const* c, bool add, Fetch* fetch) {
  while (rows > 0) {
    // 7 rows are 4 and 3, not 6 and 1
    const int64_t now = rows <= ROWS ? rows : (rows < 2 * ROWS ? (rows + 1) / 2 : ROWS);
    switch (now) {
      case 1: tile<1, N>(b, panel, a, c, add, fetch); break;
      case 2: tile<2, N>(b, panel, a, c, add, fetch); break;
      case 3: tile<3, N>(b, panel, a, c, add, fetch); break;
      case 4: tile<4, N>(b, panel, a, c, add, fetch); break;
      case 5: tile<5, N>(b, panel, a, c, add, fetch); break;
      default: tile<6, N>(b, panel, a, c, add, fetch);
    }
    a += now, c += now, rows -= now;
  }
}

// The panels from `first` to before `last` of rows a[0], a[1], ... times b, into c (`add`: in place of the bias, to c).
static void product_of_panels(
    const Packed& b, int64_t rows, const store* const* a, real* const* c, bool add, int64_t first, int64_t last,
    Fetch* fetch) {
  if (fetch) fetch->begin((last - first) * ((rows + ROWS - 1) / ROWS), b.steps());
  b.each_panel(first, last, [&](auto vectors, int64_t panel) { panel_of_rows<vectors>(b, panel, rows, a, c, add, fetch); });
}

}  // namespace kernel
