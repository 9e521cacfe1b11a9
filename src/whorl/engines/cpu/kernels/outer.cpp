// The gradients of weights: out = a' b (out += a' b) over the rows of all steps, and the sums of the columns of a.

namespace kernel {

// Rows are taken by blocks: each block's sum is made in registers and then added, so that rounding grows with the number
// of blocks, not of rows, and does not depend on threads.
struct Outer {
  real *out, *sums;
  const store *a, *b;
  int64_t rows, n, m, lda, ldb;
  bool add;  // to what `out` holds
  int64_t next, pieces;
  packed_t* packed;
  real* zeros;
  const real* factor;       // of b: of the sequence of each row a row of m; null: none
  const int64_t* sequence;  // of each row; null: row % batch
  int64_t batch;
  int64_t step;             // from the first row of a batch of b to that of the next; 0: as the rows of one

  // A block of DEEP rows and PANELS panels of b stays in the second cache of a core while the columns of a piece pass.
  static constexpr int64_t DEEP = 256, WIDE = 4 * ROWS, PANELS = 8, PIECE = 2 * WIDE;
  const store* row(int64_t r) const { return b + (step ? r / batch * step + r % batch * ldb : r * ldb); }
  int64_t place(int64_t piece) const { return piece < pieces ? up(n * piece / pieces, ROWS) : n; }
  Packed block(int64_t begin) const {
    Packed made = {m, rows - begin < DEEP ? rows - begin : DEEP, nullptr, zeros};
    made.data = packed + begin / STEP * up(m, LANES);
    return made;
  }
};

// Eight columns of a row side by side, as vectors: a compiler makes calls and rests of the loops over them.
typedef real eight __attribute__((vector_size(8 * sizeof(real)), aligned(sizeof(real)), may_alias));
#if WHORL_DTYPE == 16
typedef uint16_t eight_bits __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t eight_words __attribute__((vector_size(32), aligned(4), may_alias));
INLINE eight_words words(const store* from) { return __builtin_convertvector(*(const eight_bits*)from, eight_words); }
INLINE eight widened_eight(const store* from) { return (eight)(words(from) << 16); }
#else
INLINE eight widened_eight(const store* from) { return *(const eight*)from; }
#endif
INLINE void pair_eight(packed_t* to, const store* low, const store* high) {
#if PAIRS
  *(eight_words*)to = words(low) | words(high) << 16;
#else
  (void)high;
  *(eight*)to = widened_eight(low);
#endif
}

// WIDE columns of `a` from `column` on in one block of rows, side by side: in a they lie far apart.  The sums of the
// first `count` are added to `sums`, where wanted.
static void pack_columns(
    const Outer& o, int64_t begin, int64_t rows, int64_t column, int64_t count, packed_t* to, real* sums) {
  const store nothing[Outer::WIDE] = {};
  eight part[Outer::WIDE / 8] = {};
  for (int64_t k = 0; k < rows; k += STEP, to += Outer::WIDE) {
    const store* from = o.a + (begin + k) * o.lda + column;
    const store* second = STEP == 2 && k + 1 < rows ? from + o.lda : nothing;
    for (int64_t i = 0; i < Outer::WIDE / 8; ++i) {
      pair_eight(to + 8 * i, from + 8 * i, second + 8 * i);
      part[i] += widened_eight(from + 8 * i);
      if (STEP == 2) part[i] += widened_eight(second + 8 * i);
    }
  }
  for (int64_t i = 0; sums && i < count; ++i) sums[i] += part[i / 8][i % 8];
}

// The same of fewer: the last.
static void pack_last_columns(
    const Outer& o, int64_t begin, int64_t rows, int64_t column, int64_t count, packed_t* to, real* sums) {
  real part[Outer::WIDE] = {};
  for (int64_t k = 0; k < rows; k += STEP, to += Outer::WIDE)
    for (int64_t i = 0; i < count; ++i) {
      const store* from = o.a + (begin + k) * o.lda + column + i;
      const store second = STEP == 2 && k + 1 < rows ? from[o.lda] : store{};
      to[i] = pair(*from, second);
      part[i] += widened(*from);
      if (STEP == 2) part[i] += widened(second);
    }
  for (int64_t i = 0; sums && i < count; ++i) sums[i] += part[i];
}

// What is fetched beside the sums, one line a step: a part of what is packed next, which comes from far.
struct Ahead {
  const store* at;
  int64_t apart;  // from step to step; 0: nothing

  // Of `WIDE` columns from `at` on, each step of a tile fetches of STEP rows in one of them one line.
  Ahead part(int64_t tile, int64_t lda) const {
    const int64_t line = tile / STEP * (64 / int64_t(sizeof(store)));
    return {at + tile % STEP * lda + (line < Outer::WIDE ? line : Outer::WIDE - 1), apart};
  }
};

template <int M, int N>
static void outer_tile(
    const Outer& o, const Packed& b, const packed_t* a, int64_t panel, int64_t column, bool add, Ahead ahead) {
  vector sum[M][N];
  each_of<M, N>([&](auto i, auto j) ALWAYS { sum[i][j] = vector{}; });
  const int64_t place = b.column(panel), steps = b.steps();
  const packed_t* weights = b.data + place * steps;
  for (int64_t k = 0; k < steps; ++k, weights += N * LANES, a += Outer::WIDE, ahead.at += ahead.apart) {
    __builtin_prefetch(ahead.at, 0, 2);
#if PAIRS
    __m512bh w[N];
    each<N>([&](auto j) ALWAYS { w[j] = (__m512bh)_mm512_loadu_si512(weights + j * LANES); });
    each<M>([&](auto i) ALWAYS {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(int32_t(a[i]));
      each<N>([&](auto j) ALWAYS { sum[i][j] = (vector)_mm512_dpbf16_ps((__m512)sum[i][j], x, w[j]); });
    });
#else
    vector w[N];
    each<N>([&](auto j) ALWAYS { w[j] = *(const loose*)(weights + j * LANES); });
    each<M>([&](auto i) ALWAYS {
      const vector x = a[i] - vector{};
      each<N>([&](auto j) ALWAYS { sum[i][j] += x * w[j]; });
    });
#endif
  }
  const int64_t left = o.m - place;
  real* const out = o.out + column * o.m + place;
  if (N > 1 || left >= LANES) {
    if (add) each_of<M, N>([&](auto i, auto j) ALWAYS { sum[i][j] += *(loose*)(out + i * o.m + j * LANES); });
    each_of<M, N>([&](auto i, auto j) ALWAYS { *(loose*)(out + i * o.m + j * LANES) = sum[i][j]; });
  } else {  // the next row begins where this one ends
    each<M>([&](auto i) ALWAYS {
      for (int64_t lane = 0; lane < left; ++lane) out[i * o.m + lane] = (add ? out[i * o.m + lane] : real(0)) + sum[i][0][lane];
    });
  }
}

template <int N>
static void outer_panel(
    const Outer& o, const Packed& b, const packed_t* a, int64_t panel, int64_t column, int64_t end, bool add, Ahead next) {
  for (int64_t tile = 0; column < end; ++tile, column += ROWS, a += ROWS) {
    const Ahead ahead = next.part(tile, o.lda);
    switch (end - column) {
      case 1: outer_tile<1, N>(o, b, a, panel, column, add, ahead); break;
      case 2: outer_tile<2, N>(o, b, a, panel, column, add, ahead); break;
      case 3: outer_tile<3, N>(o, b, a, panel, column, add, ahead); break;
      case 4: outer_tile<4, N>(o, b, a, panel, column, add, ahead); break;
      case 5: outer_tile<5, N>(o, b, a, panel, column, add, ahead); break;
      default: outer_tile<ROWS, N>(o, b, a, panel, column, add, ahead);
    }
  }
}

static void pack_outer(void* data, int thread, int threads) {
  const Outer& o = *(Outer*)data;
  store* scaled = o.factor ? (store*)malloc(size_t(Outer::DEEP * o.m) * sizeof(store)) : nullptr;
  for (int64_t begin = thread * Outer::DEEP; begin < o.rows; begin += threads * Outer::DEEP) {
    const Packed block = o.block(begin);
    for (int64_t i = 0; o.factor && i < block.k; ++i) {
      const store* from = o.row(begin + i);
      const real* factor = o.factor + (o.sequence ? o.sequence[begin + i] : (begin + i) % o.batch) * o.m;
      EACH_ALONE
      for (int64_t u = 0; u < o.m; ++u) put(scaled + i * o.m + u, widened(from[u]) * factor[u]);
    }
    pack_rows(block, [&](int64_t r) { return scaled ? scaled + r * o.m : o.row(begin + r); }, 0, block.panels());
  }
  free(scaled);
}

// What one block of rows adds to a few columns of `a` and a few panels of b; `next` is where the next one's `a` begins.
static void outer_block(
    const Outer& o, int64_t begin, int64_t panels, int64_t column, int64_t end, packed_t* a, const store* next) {
  const Packed block = o.block(begin);
  const int64_t every = block.panels(), last = panels + Outer::PANELS < every ? panels + Outer::PANELS : every;
  real* sums = o.sums && panels == 0 ? o.sums + column : nullptr;
  if (column + Outer::WIDE <= o.n)  // those of the next piece too, where a piece ends
    pack_columns(o, begin, block.k, column, end - column, a, sums);
  else
    pack_last_columns(o, begin, block.k, column, end - column, a, sums);
  const bool add = o.add || begin > 0;
  for (int64_t panel = panels; panel < last; ++panel) {
    const Ahead ahead = {next, panel == panels ? o.lda * STEP : 0};
    if (panel < block.wide())
      outer_panel<VECTORS>(o, block, a, panel, column, end, add, ahead);
    else
      outer_panel<1>(o, block, a, panel, column, end, add, ahead);
  }
}

static void outer_columns(void* data, int, int) {
  Outer& o = *(Outer*)data;
  packed_t* a = (packed_t*)aligned_alloc(64, sizeof(packed_t) * Outer::WIDE * Outer::DEEP / STEP);
  for (;;) {
    const int64_t piece = __atomic_fetch_add(&o.next, 1, __ATOMIC_RELAXED);
    if (piece >= o.pieces) break;
    const int64_t first = o.place(piece), last = o.place(piece + 1);
    for (int64_t panels = 0; panels < o.block(0).panels(); panels += Outer::PANELS)
      for (int64_t begin = 0; begin < o.rows; begin += Outer::DEEP)
        for (int64_t column = first; column < last; column += Outer::WIDE) {
          const int64_t end = column + Outer::WIDE < last ? column + Outer::WIDE : last;
          const store* next = end < last ? o.a + begin * o.lda + end : o.a + (begin + Outer::DEEP) * o.lda + first;
          outer_block(o, begin, panels, column, end, a, next);
        }
  }
  free(a);
}

static void outer(Outer o, int threads) {
  if (!o.rows && !o.add) memset(o.out, 0, size_t(o.n * o.m) * sizeof(real));
  if (!o.rows) return;
  const int64_t blocks = up(o.rows, Outer::DEEP);
  o.packed = (packed_t*)aligned_alloc(64, size_t(up(up(o.m, LANES) * (blocks / STEP) * int64_t(sizeof(packed_t)), 64) + 64));
  const int now = o.rows * o.n * o.m < 200000 ? 1 : threads;
  o.pieces = now * ((o.n + now * Outer::PIECE - 1) / (now * Outer::PIECE));
  parallel(now, pack_outer, &o);
  parallel(now, outer_columns, &o);
  free(o.packed);
}

}  // namespace kernel
