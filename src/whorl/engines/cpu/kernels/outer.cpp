// The gradients of weights: out = a' b (out += a' b) over the rows of all steps, of one b or of several, and the sums of
// the columns of a.

namespace kernel {

// What a is multiplied with: a row for each of its rows from `from` to before `to`, and zero for the others.
struct Operand {
  real* out;  // [n, m]: of the columns of a
  const store* b;
  int64_t m, ldb, from, to;
  const real* factor;       // of the sequence of each row a row of m; null: none
  const int64_t* sequence;  // of each row; null: row % batch
  int64_t batch;
  int64_t step;  // from the first row of a batch of b to that of the next; 0: as the rows of one
  packed_t* packed;
  int64_t first, last;  // the columns of a that it meets, and the rows of `out`
  const int64_t* at = nullptr;  // of each row where in b it begins; null: as `step` and `ldb` say
  // Set for a share of the rows: which they are, and the first row that b has one for.
  const int64_t* of = nullptr;
  int64_t origin = 0;

  // Of the columns from `begin` to before `end` those that it meets: from, to before, and whether there are any.
  int64_t from_column(int64_t begin) const { return first > begin ? first : begin; }
  int64_t to_column(int64_t end) const { return last < end ? last : end; }
  bool meets(int64_t begin, int64_t end) const { return from_column(begin) < to_column(end); }
  // Its rows are multiplied where they lie, which saves a tenth of the time with 64 columns and nothing from 512 on; else
  // they are packed.
  bool lies_ready() const {
    return STEP == 1 && sizeof(store) == sizeof(packed_t) && !factor && !step && !at && m % LANES == 0;
  }

  // Of `out` what it makes.
  real* begin() const { return out + first * m; }
  int64_t size() const { return (last - first) * m; }
  // Of its i-th row.
  int64_t place(int64_t i) const { return of[from + i] - origin; }
  const store* row(int64_t r) const { return b + (at ? at[r] : step ? r / batch * step + r % batch * ldb : r * ldb); }
};

// Rows are taken by blocks: each block's sum is made in registers and then added, so that rounding grows with the number
// of blocks, not of rows, and does not depend on threads.
struct Outer {
  real* sums;  // of the columns of a are added to it; null: not wanted
  const store* a;
  int64_t rows, n, lda;
  bool add;  // to what `out` holds
  int count;
  Operand operands[1 + MOST_GATES];
  int64_t next, pieces;
  const int64_t* of;     // the rows of a
  const store* nothing;  // as long as the longest m: zeros
  packed_t* columns;     // of each thread: of the columns of a those that it multiplies
  store* scaled;         // and of the rows of b, times their factor, those that it packs; null: there is none

  // A block of DEEP rows and PANELS panels of b stays in the second cache of a core while the columns of a piece pass.
  static constexpr int64_t DEEP = 256, WIDE = 4 * ROWS, PANELS = 8, PIECE = 2 * WIDE;
  static constexpr int64_t COLUMNS = WIDE * DEEP / STEP;
  int64_t place(int64_t piece) const { return piece < pieces ? up(n * piece / pieces, ROWS) : n; }
  // Where in a block the rows of an operand begin: where a step does.
  static int64_t low(const Operand& to, int64_t begin) { return within(to.from - begin) / STEP * STEP; }
  static int64_t within(int64_t row) { return row < 0 ? 0 : row < DEEP ? row : DEEP; }
  static Packed block(const Operand& to, int64_t begin) {
    const int64_t first = low(to, begin), last = within(to.to - begin), k = last > first ? last - first : 0;
    if (to.lies_ready()) return {to.m, k, (packed_t*)to.b - to.origin * to.ldb, nullptr};
    return {to.m, k, to.packed + (begin + first) / STEP * up(to.m, LANES), nullptr};
  }
  // Of all that these columns of a meet.
  int64_t panels(int64_t first, int64_t last) const {
    int64_t every = 0;
    for (int side = 0; side < count; ++side)
      if (operands[side].meets(first, last)) every += block(operands[side], 0).panels();
    return every;
  }
  int64_t most() const {
    int64_t found = 0;
    for (int side = 0; side < count; ++side) found = operands[side].m > found ? operands[side].m : found;
    return found;
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
    const store* from = o.a + o.of[begin + k] * o.lda + column;
    const store* second = STEP == 2 && k + 1 < rows ? o.a + o.of[begin + k + 1] * o.lda + column : nothing;
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
      const store* from = o.a + o.of[begin + k] * o.lda + column + i;
      const store second = STEP == 2 && k + 1 < rows ? o.a[o.of[begin + k + 1] * o.lda + column + i] : store{};
      to[i] = pair(*from, second);
      part[i] += widened(*from);
      if (STEP == 2) part[i] += widened(second);
    }
  for (int64_t i = 0; sums && i < count; ++i) sums[i] += part[i];
}

// What is fetched beside the sums, one line a step: a part of what is packed next, which comes from far.
struct Ahead {
  const store* at;
  const int64_t* of;  // its rows
  int64_t lda;        // 0: nothing

  // Of `WIDE` columns from `at` on, each step of a tile fetches of STEP rows in one of them one line.
  Ahead part(int64_t tile) const {
    const int64_t line = tile / STEP * (64 / int64_t(sizeof(store)));
    return {at + (line < Outer::WIDE ? line : Outer::WIDE - 1), of + tile % STEP, lda};
  }
};

// The steps of a block that is packed.
struct Steps {
  int64_t of[Outer::DEEP];
  constexpr Steps() : of() {
    for (int64_t k = 0; k < Outer::DEEP; ++k) of[k] = k;
  }
};
static constexpr Steps STEPS;

// What is left of a row behind its whole panels.
APART static void put_part(real* to, const real* made, int64_t count, bool add) {
  EACH_ALONE
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = (add ? to[lane] : real(0)) + made[lane];
}

template <int M, int N>
static void outer_tile(
    const Operand& to, const Packed& b, const int64_t* rows, const packed_t* a, int64_t panel, int64_t column, bool add,
    Ahead ahead) {
  vector sum[M][N];
  each_of<M, N>([&](auto i, auto j) ALWAYS { sum[i][j] = vector{}; });
  const int64_t place = b.column(panel), steps = b.steps(), apart = to.lies_ready() ? to.ldb : N * LANES;
  const packed_t* const begin = to.lies_ready() ? b.data + place : b.data + place * steps;
  if (!to.lies_ready()) rows = STEPS.of;
  for (int64_t k = 0; k < steps; ++k, a += Outer::WIDE) {
    __builtin_prefetch(ahead.at + ahead.of[k * STEP] * ahead.lda, 0, 2);
    const packed_t* weights = begin + rows[k] * apart;
    weight w[N];
    each<N>([&](auto j) ALWAYS { w[j] = read_once(weights + j * LANES); });
#if PAIRS
    each<M>([&](auto i) ALWAYS {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(int32_t(a[i]));
      each<N>([&](auto j) ALWAYS { sum[i][j] = (vector)_mm512_dpbf16_ps((__m512)sum[i][j], x, w[j]); });
    });
#else
    each<M>([&](auto i) ALWAYS {
      const vector x = a[i] - vector{};
      each<N>([&](auto j) ALWAYS { sum[i][j] = fused(x, w[j], sum[i][j]); });
    });
#endif
  }
  const int64_t m = to.m, left = m - place;
  real* const out = to.out + column * m + place;
  if (left >= N * LANES) {
    if (add) each_of<M, N>([&](auto i, auto j) ALWAYS { sum[i][j] += *(loose*)(out + i * m + j * LANES); });
    each_of<M, N>([&](auto i, auto j) ALWAYS { *(loose*)(out + i * m + j * LANES) = sum[i][j]; });
  } else {  // the next row begins where this one ends
    real made[M][N * LANES];
    each_of<M, N>([&](auto i, auto j) ALWAYS { *(loose*)(made[i] + j * LANES) = sum[i][j]; });
    for (int64_t i = 0; i < M; ++i) put_part(out + i * m, made[i], left, add);
  }
}

template <int N>
static void outer_panel(
    const Operand& to, const Packed& b, const int64_t* rows, const packed_t* a, int64_t panel, int64_t column, int64_t end,
    bool add, Ahead next) {
  for (int64_t tile = 0; column < end; ++tile, column += ROWS, a += ROWS) {
    const Ahead ahead = next.part(tile);
    switch (end - column) {
      case 1: outer_tile<1, N>(to, b, rows, a, panel, column, add, ahead); break;
      case 2: outer_tile<2, N>(to, b, rows, a, panel, column, add, ahead); break;
      case 3: outer_tile<3, N>(to, b, rows, a, panel, column, add, ahead); break;
      case 4: outer_tile<4, N>(to, b, rows, a, panel, column, add, ahead); break;
      case 5: outer_tile<5, N>(to, b, rows, a, panel, column, add, ahead); break;
      default: outer_tile<ROWS, N>(to, b, rows, a, panel, column, add, ahead);
    }
  }
}

static void pack_share(const Outer& o, const Shares& shares, int64_t share, int thread, int threads) {
  store* const scaled = o.scaled ? o.scaled + thread * Outer::DEEP * o.most() : nullptr;
  int64_t turn = 0;
  for (int side = 0; side < o.count; ++side) {
    const Operand& from = o.operands[side];
    if (from.lies_ready()) continue;
    for (int64_t begin = 0; begin < o.rows; begin += Outer::DEEP, ++turn) {
      if (shares.owner(share, turn, threads) != thread) continue;
      const Packed block = Outer::block(from, begin);
      const int64_t first = begin + Outer::low(from, begin) - from.from;  // -1 where a step begins before the rows
      for (int64_t i = first < 0 ? 1 : 0; from.factor && i < block.k; ++i) {
        const int64_t r = from.place(first + i);
        const store* plain = from.row(r);
        const real* factor = from.factor + (from.sequence ? from.sequence[r] : r % from.batch) * from.m;
        EACH_ALONE
        for (int64_t u = 0; u < from.m; ++u) put(scaled + i * from.m + u, widened(plain[u]) * factor[u]);
      }
      auto row = [&](int64_t i) {
        return first + i < 0 ? o.nothing : from.factor ? scaled + i * from.m : from.row(from.place(first + i));
      };
      pack_rows(block, row, 0, block.panels());
    }
  }
}

// A sum over all rows, of which each share has its own.
struct Outers {
  const Shares* shares;
  Outer* of;  // of each share; the first is where all are added

  // Those of all operands, and of the columns of a: one share after the other.
  void add(int64_t thread, int64_t threads) const {
    auto add = [&](auto to, int64_t size) {
      const int64_t first = size * thread / threads, last = size * (thread + 1) / threads;
      for (int64_t share = 1; share < shares->count; ++share) {
        real *sum = to(of[0]), *from = to(of[share]);
        EACH_ALONE
        for (int64_t i = first; i < last; ++i) sum[i] += from[i];
      }
    };
    for (int side = 0; side < of->count; ++side)
      add([&](Outer& o) { return o.operands[side].begin(); }, of->operands[side].size());
    if (of->sums) add([](Outer& o) { return o.sums; }, of->n);
  }
};

static void pack_outer(void* data, int thread, int threads) {
  const Outers& job = *(Outers*)data;
  job.shares->each(thread, threads, [&](int64_t share) { pack_share(job.of[share], *job.shares, share, thread, threads); });
}

// What one block of rows adds to a few columns of `a`, of the piece from `first` to before `last`, and a few panels of
// what the piece meets; `next` is where the next one's `a` begins.
static void outer_block(
    const Outer& o, int64_t begin, int64_t panels, int64_t first, int64_t last, int64_t column, int64_t end,
    packed_t* a, Ahead ahead) {
  const int64_t rows = o.rows - begin < Outer::DEEP ? o.rows - begin : Outer::DEEP;
  real* sums = o.sums && panels == 0 ? o.sums + column : nullptr;
  if (column + Outer::WIDE <= o.n)  // those of the next piece too, where a piece ends
    pack_columns(o, begin, rows, column, end - column, a, sums);
  else
    pack_last_columns(o, begin, rows, column, end - column, a, sums);
  int64_t before = 0;
  for (int side = 0; side < o.count; ++side) {
    const Operand& to = o.operands[side];
    if (!to.meets(first, last)) continue;
    const Packed block = Outer::block(to, begin);
    const int64_t every = block.panels(), past = panels + Outer::PANELS - before, low = Outer::low(to, begin);
    const int64_t from_column = to.from_column(column), to_column = to.to_column(end);
    const int64_t begun = to.to > to.from ? to.from / Outer::DEEP * Outer::DEEP : 0;  // with the block that writes first
    const int64_t first_panel = panels > before ? panels - before : 0;
    const bool none = begin < begun || (begin > begun && !block.k) || from_column >= to_column;
    block.each_panel(first_panel, none ? 0 : every < past ? every : past, [&](auto vectors, int64_t panel) {
      const packed_t* from = a + low / STEP * Outer::WIDE + (from_column - column);
      outer_panel<vectors>(
          to, block, o.of + begin + low, from, panel, from_column, to_column, o.add || begin > begun, ahead);
      ahead.lda = 0;  // all of it is fetched
    });
    before += every;
  }
}

static void multiply_share(Outer& o, packed_t* a) {
  for (;;) {
    const int64_t piece = __atomic_fetch_add(&o.next, 1, __ATOMIC_RELAXED);
    if (piece >= o.pieces) break;
    const int64_t first = o.place(piece), last = o.place(piece + 1);
    for (int64_t panels = 0; panels < o.panels(first, last); panels += Outer::PANELS)
      for (int64_t begin = 0; begin < o.rows; begin += Outer::DEEP)
        for (int64_t column = first; column < last; column += Outer::WIDE) {
          const int64_t end = column + Outer::WIDE < last ? column + Outer::WIDE : last;
          const int64_t after = begin + Outer::DEEP < o.rows ? begin + Outer::DEEP : 0;
          const Ahead next = {o.a + (end < last ? end : first), o.of + (end < last ? begin : after), o.lda};
          outer_block(o, begin, panels, first, last, column, end, a, next);
        }
  }
}

static void outer_columns(void* data, int thread, int threads) {
  const Outers& job = *(Outers*)data;
  packed_t* const a = job.of->columns + thread * Outer::COLUMNS;
  job.shares->each(thread, threads, [&](int64_t share) { multiply_share(job.of[share], a); });
}

static void add_shares(void* data, int thread, int threads) { ((Outers*)data)->add(thread, threads); }

// The share of `o` whose rows are the next in `o.of`; but for the first it has sums of its own.
static Outer share_of(const Outer& o, int64_t rows, bool first, Scratch& scratch) {
  Outer made = o;
  made.rows = rows;
  if (!first) made.add = false, made.sums = o.sums ? scratch.zeros<real>(o.n) : nullptr;
  auto before = [&](int64_t row) {
    int64_t none = 0, all = rows;
    while (none < all) made.of[(none + all) / 2] < row ? none = (none + all) / 2 + 1 : all = (none + all) / 2;
    return none;
  };
  for (int side = 0; side < o.count; ++side) {
    Operand& to = made.operands[side];
    to.of = made.of, to.origin = to.from, to.from = before(to.from), to.to = before(to.to);
    if (!first) to.out = scratch.take<real>(to.size()) - to.first * to.m;
    if (!to.lies_ready()) to.packed = scratch.take<packed_t>(up(to.m, LANES) * (up(rows, Outer::DEEP) / STEP));
    if (!rows && !made.add) memset(to.begin(), 0, size_t(to.size()) * sizeof(real));
  }
  return made;
}

static void outer_of_panels(Outer o, const Shares& shares, int threads) {
  Scratch scratch;
  int64_t work = 0;
  bool factors = false, packs = false;
  for (int side = 0; side < o.count; ++side) {
    const Operand& to = o.operands[side];
    work += o.rows * to.size(), factors = factors || to.factor, packs = packs || !to.lies_ready();
  }
  const int now = work < 200000 ? 1 : threads;
  o.nothing = scratch.zeros<store>(o.most()), o.columns = scratch.take<packed_t>(now * Outer::COLUMNS);
  o.scaled = factors ? scratch.take<store>(now * Outer::DEEP * o.most()) : nullptr;
  const int64_t sharing = shares.count > 1 ? 1 : now;
  o.pieces = sharing * ((o.n + sharing * Outer::PIECE - 1) / (sharing * Outer::PIECE));
  int64_t* of = scratch.zeros<int64_t>(o.rows + Outer::DEEP + 1);  // tiles fetch ahead as if each block had all of its rows
  for (int64_t place = 0; place < o.rows; ++place) of[place] = shares.row(place);
  Outer parts[Shares::MOST];
  for (int64_t share = 0; share < shares.count; ++share) {
    const int64_t begin = shares.begin(share);
    o.of = of + begin, parts[share] = share_of(o, shares.ends[share] - begin, share == 0, scratch);
  }
  Outers job = {&shares, parts};
  if (packs) parallel(now, pack_outer, &job);
  parallel(now, outer_columns, &job);
  if (shares.count > 1) parallel(now, add_shares, &job);
}

}  // namespace kernel
