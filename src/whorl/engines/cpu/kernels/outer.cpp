// The gradients of weights: out += a' b over the rows of all steps, and the sums of the columns of a.

namespace kernel {

// Rows are taken by blocks: each block's sum is made in registers and then added, so that rounding grows with the number
// of blocks, not of rows, and does not depend on threads.
struct Outer {
  real *out, *sums;
  const store *a, *b;
  int64_t rows, n, m, lda, ldb, stride, next;
  packed_t* packed;
  real* zeros;

  static constexpr int64_t DEEP = 256, WIDE = 8 * ROWS;
  Packed block(int64_t begin) const {
    Packed made = {m, rows - begin < DEEP ? rows - begin : DEEP, nullptr, zeros};
    made.data = packed + begin / STEP * up(m, LANES);
    return made;
  }
};

template <int M, int N>
static void outer_tile(const Outer& o, const Packed& b, int64_t panel, int64_t begin, int64_t column) {
  vector sum[M][N] = {};
  const int64_t place = b.column(panel), steps = b.steps();
  const packed_t* weights = b.data + place * steps;
  const store* from = o.a + begin * o.lda + column;
  for (int64_t k = 0; k < steps; ++k, weights += N * LANES, from += STEP * o.lda) {
#if PAIRS
    const int64_t second = 2 * k + 1 < b.k ? o.lda : 0;  // past the end its weight is zero
    __m512bh w[N];
    for (int j = 0; j < N; ++j) w[j] = (__m512bh)_mm512_loadu_si512(weights + j * LANES);
    for (int i = 0; i < M; ++i) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(int32_t(pair(from[i], from[second + i])));
      for (int j = 0; j < N; ++j) sum[i][j] = (vector)_mm512_dpbf16_ps((__m512)sum[i][j], x, w[j]);
    }
#else
    vector w[N];
    for (int j = 0; j < N; ++j) w[j] = *(const loose*)(weights + j * LANES);
    for (int i = 0; i < M; ++i) {
      const vector x = widened(from[i]) - vector{};
      for (int j = 0; j < N; ++j) sum[i][j] += x * w[j];
    }
#endif
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) *(loose*)(o.out + (column + i) * o.stride + place + j * LANES) += sum[i][j];
}

template <int N>
static void outer_panel(const Outer& o, const Packed& b, int64_t panel, int64_t begin, int64_t column, int64_t end) {
  for (; column + ROWS <= end; column += ROWS) outer_tile<ROWS, N>(o, b, panel, begin, column);
  for (; column < end; ++column) outer_tile<1, N>(o, b, panel, begin, column);
}

static void pack_outer(void* data, int thread, int threads) {
  const Outer& o = *(Outer*)data;
  for (int64_t begin = thread * Outer::DEEP; begin < o.rows; begin += threads * Outer::DEEP) {
    const Packed block = o.block(begin);
    pack(block, o.b + begin * o.ldb, o.ldb, false, 0, block.panels());
  }
}

static void outer_columns(void* data, int, int) {
  Outer& o = *(Outer*)data;
  for (;;) {
    const int64_t column = __atomic_fetch_add(&o.next, Outer::WIDE, __ATOMIC_RELAXED);
    if (column >= o.n) return;
    const int64_t end = column + Outer::WIDE < o.n ? column + Outer::WIDE : o.n;
    for (int64_t begin = 0; begin < o.rows; begin += Outer::DEEP) {
      const Packed block = o.block(begin);
      for (int64_t panel = 0; panel < block.panels(); ++panel)
        if (panel < block.wide())
          outer_panel<VECTORS>(o, block, panel, begin, column, end);
        else
          outer_panel<1>(o, block, panel, begin, column, end);
      if (!o.sums) continue;
      real part[Outer::WIDE] = {};
      for (int64_t k = begin; k < begin + block.k; ++k)
        for (int64_t i = column; i < end; ++i) part[i - column] += widened(o.a[k * o.lda + i]);
      for (int64_t i = column; i < end; ++i) o.sums[i] += part[i - column];
    }
  }
}

static void outer(Outer o, int threads) {
  const int64_t blocks = up(o.rows, Outer::DEEP);
  o.packed = (packed_t*)aligned_alloc(64, size_t(up(up(o.m, LANES) * (blocks / STEP) * int64_t(sizeof(packed_t)), 64) + 64));
  const int now = o.rows * o.n * o.m < 200000 ? 1 : threads;
  parallel(now, pack_outer, &o);
  parallel(now, outer_columns, &o);
  free(o.packed);
}

}  // namespace kernel
