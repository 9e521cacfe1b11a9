// One layer in one direction: all of its steps, forward or backward.
//
// Rows are sequences.  A thread (or a team of threads, each with a part of the units) takes a group of rows through all
// steps, so nothing but weights is shared.  What a row gives depends on that row alone, to the bit: not on the rows or
// threads beside it.
//
// Three ways to count rows: r is a sequence, o the place of step t of r in x and y as the caller has them ("outer"), and
// c its place among the steps that count: what backward reads is kept for these alone.  Steps that do not count are
// skipped, never computed and thrown away.

namespace kernel {

constexpr int MOST_MATRICES = MOST_GATES;

struct Zoneout {
  int64_t kind;  // 0 none, 1 a share of the state before, 2 drawn, 3 given
  double share;
  chance below;
  const real* given;  // [outer rows, width of the state]
  real* apart;        // the state before less what the step made, [compact rows, width]; null: not kept
  real* dgiven;       // gradient of `given`, [outer rows, width]
};

struct Sweep {
  const Cell* cell;
  int64_t time, batch, units, width, reverse, threads, groups, team, largest;
  const int64_t* starts;   // outer row of (t, 0), [time]; null: t * batch
  const int64_t* lengths;  // [batch]; null: all steps
  const int64_t* place;    // compact row of each outer row; null: the same
  const uint8_t* mask;     // by outer row; null: all count
  const uint8_t* reset;    // by outer row; null: none
  const int64_t* ids;      // what noise counts a row as, [batch]; null: itself
  const int64_t* order;    // rows, group by group, [batch]
  const int64_t* ends;     // where each group begins in `order`, [groups + 1]
  const real* x;           // [compact rows, x_stride]: the input projection, gate by gate
  int64_t x_stride;
  const store* hh;         // [recurrent gates x units, width]
  const real* bias_hh;     // [recurrent gates x units]; null: zero
  const store* hr;         // [width, units]; null: no projection
  const real* const* vectors;      // [units] each
  const real* const* extras;       // [outer rows, units or 1] each
  const int64_t* extra_widths;
  real* const* states;             // [batch, width of the state]: initial, then final
  const real* const* reset_to;     // the same; null: zero
  int64_t noise_kind;              // of the recurrent product: 0 none, 1 held, 2 held by gate, 3 given by step, 4 drawn
  int64_t keep_plain;              // what entered is kept as it was before it was multiplied with noise
  const real* noise;               // 1: [batch, width]; 2: [recurrent gates, batch, width]; 3: [outer rows, width]
  chance noise_below;
  double noise_scale;
  uint64_t seed;
  int64_t noise_tag, zoneout_tag;
  Zoneout zoneout[MOST_STATES];
  store* y;  // [outer rows, y_stride]
  int64_t y_stride;
  store* const* sequences;  // each state at each step, [outer rows, strides]; null: not wanted
  const int64_t* sequence_strides;
  store* entered;            // what entered the recurrent product, [compact rows, width]; null: not kept
  store* unprojected;        // what entered the projection, [compact rows, units]; null: not kept
  real* saved;               // [compact rows, saved x units + saved_means]; null: not kept
  store* const* operands;    // what entered each product of the step, [compact rows, width]; null: not kept
  const store* dy;           // [outer rows, dy_stride]; null: zero
  int64_t dy_stride;
  const store* const* dsequences;  // null, or null for a state: zero
  const int64_t* dsequence_strides;
  real* const* dstates;   // of the final states, then of the initial ones
  real* const* dreset;    // of reset_to, added to; null: not wanted
  real* dheld;            // [batch, width], zero at first; null where there is no mask
  store* dx;              // [compact rows, gates x units]
  store* dr;              // [compact rows, recurrent gates x units]; not read where the cell has dr_is_dx
  store* const* dp;       // of each product of the step, [compact rows, units]
  real* const* dv;        // [batch, units], added to
  real* const* de;        // [outer rows, units], added to
  store* dprojected;      // [compact rows, width]
};

// --- weights ----------------------------------------------------------------------------------------------------------

struct Weights {
  int count;
  Packed packed[MOST_MATRICES];
  int first[MOST_MATRICES], gates[MOST_MATRICES];
  bool leaf[MOST_MATRICES];  // a part of r; else only multiplied inside the step
  int of_gate[MOST_GATES];
  int64_t r_offset[MOST_GATES], r_size;
  Packed projection;
  void* memory;
  bool across;
};

struct Packing {
  const Sweep* k;
  Weights* w;
};

static void pack_all(void* data, int thread, int threads) {
  const Packing& job = *(Packing*)data;
  const Sweep& k = *job.k;
  for (int index = 0; index <= job.w->count; ++index) {
    const bool is_hr = index == job.w->count;
    if (is_hr && !k.hr) break;
    const Packed& to = is_hr ? job.w->projection : job.w->packed[index];
    const int64_t first = to.panels() * thread / threads, last = to.panels() * (thread + 1) / threads;
    const store* from = is_hr ? k.hr : k.hh + int64_t(job.w->first[index]) * k.units * k.width;
    pack(to, from, is_hr ? k.units : k.width, job.w->across, first, last);
  }
}

// Gates side by side as one matrix, or each on its own where operands differ.
static Weights make_weights(const Sweep& k, bool across) {
  const Cell& cell = *k.cell;
  Weights w = {};
  w.across = across;
  const bool alone = k.noise_kind == 2;
  for (int gate = 0; gate < cell.recurrent; ++gate) {
    w.of_gate[gate] = -1;
    if (!cell.leaf[gate] && !cell.multiplied[gate]) continue;
    const int before = w.count - 1;
    const bool joined = gate > 0 && w.of_gate[gate - 1] == before && before >= 0 && !alone && !cell.multiplied[gate] &&
                        !cell.multiplied[gate - 1];
    if (!joined) {
      w.first[w.count] = gate, w.gates[w.count] = 0, w.leaf[w.count] = cell.leaf[gate];
      ++w.count;
    }
    w.of_gate[gate] = w.count - 1;
    ++w.gates[w.count - 1];
  }
  int64_t bytes = 0;
  auto measure = [&](Packed& to, int64_t n, int64_t reduced) {
    to.n = n, to.k = reduced;
    bytes += up(to.bytes(), 64) + up(up(n, LANES) * int64_t(sizeof(real)), 64);
  };
  for (int index = 0; index < w.count; ++index) {
    const int64_t rows = w.gates[index] * k.units;
    measure(w.packed[index], across ? rows : k.width, across ? k.width : rows);
  }
  if (k.hr) measure(w.projection, across ? k.width : k.units, across ? k.units : k.width);
  char* memory = (char*)(w.memory = aligned_alloc(64, size_t(bytes + 64)));
  auto lay = [&](Packed& to, const real* bias) {
    to.data = (packed_t*)memory, memory += up(to.bytes(), 64);
    to.bias = (real*)memory, memory += up(up(to.n, LANES) * int64_t(sizeof(real)), 64);
    for (int64_t n = 0; n < up(to.n, LANES); ++n) to.bias[n] = bias && n < to.n ? bias[n] : real(0);
  };
  for (int index = 0; index < w.count; ++index) {
    lay(w.packed[index], across && k.bias_hh ? k.bias_hh + w.first[index] * k.units : nullptr);
    for (int gate = w.first[index]; gate < w.first[index] + w.gates[index]; ++gate)
      w.r_offset[gate] = w.r_size + (gate - w.first[index]) * k.units;
    w.r_size += up(w.packed[index].n, LANES);
  }
  if (k.hr) lay(w.projection, nullptr);
  Packing job = {&k, &w};
  parallel(k.units * k.width < 4096 ? 1 : int(k.threads), pack_all, &job);
  return w;
}

// --- the input product ------------------------------------------------------------------------------------------------

struct Projection {
  real* y;
  const store* x;
  const store* w;
  const real* bias;
  int64_t rows, inputs, outputs, stride;
  bool across;  // w is [outputs, inputs]; else [inputs, outputs]
  int64_t next;
  Packed packed;
};

static void pack_projection(void* data, int thread, int threads) {
  const Projection& p = *(Projection*)data;
  const int64_t panels = p.packed.panels();
  pack(p.packed, p.w, p.across ? p.inputs : p.outputs, p.across, panels * thread / threads, panels * (thread + 1) / threads);
}

static void project_rows(void* data, int, int) {
  Projection& p = *(Projection*)data;
  constexpr int64_t block = 8 * ROWS;
  const int64_t deep = up(p.inputs, STEP);
  store* padded = deep > p.inputs ? (store*)malloc(size_t(block * deep) * sizeof(store)) : nullptr;
  for (;;) {
    const int64_t begin = __atomic_fetch_add(&p.next, block, __ATOMIC_RELAXED);
    if (begin >= p.rows) break;
    const int64_t count = p.rows - begin < block ? p.rows - begin : block;
    const store* a[block];
    real* c[block];
    for (int64_t i = 0; i < count; ++i) {
      a[i] = p.x + (begin + i) * p.inputs, c[i] = p.y + (begin + i) * p.stride;
      if (!padded) continue;
      store* row = padded + i * deep;
      memcpy(row, a[i], size_t(p.inputs) * sizeof(store));
      put(row + p.inputs, real(0));
      a[i] = row;
    }
    product(p.packed, count, a, c, false, 0, p.packed.panels());
  }
  free(padded);
}

static void project(Projection p, int threads) {
  p.packed.n = p.outputs, p.packed.k = p.inputs;
  const int64_t bytes = up(p.packed.bytes(), 64), bias = up(p.outputs, LANES);
  char* memory = (char*)aligned_alloc(64, size_t(bytes + up(bias * int64_t(sizeof(real)), 64)));
  p.packed.data = (packed_t*)memory, p.packed.bias = (real*)(memory + bytes);
  for (int64_t n = 0; n < bias; ++n) p.packed.bias[n] = p.bias && n < p.outputs ? p.bias[n] : real(0);
  parallel(p.inputs * p.outputs < 16384 ? 1 : threads, pack_projection, &p);
  parallel(p.rows * p.inputs * p.outputs < 200000 ? 1 : threads, project_rows, &p);
  free(memory);
}

// --- the weights' gradients -------------------------------------------------------------------------------------------

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

// --- what forward and backward share ----------------------------------------------------------------------------------

// Memory of a team for one group: a bump allocator that its members walk through alike.
struct Memory {
  char* next;
  template <typename T>
  T* take(int64_t count) {
    T* made = (T*)next;
    next += up(count * int64_t(sizeof(T)), 64);
    return made;
  }
};

struct Group {
  const Sweep& k;
  const Cell& cell;
  const Weights& w;
  const int64_t* rows;
  int64_t count;
  Team team;
  int64_t padded, wide, larger;  // units, width filled up to whole vectors, and the larger of them
  int64_t first, last, wfirst, wlast;

  Group(const Sweep& k, const Weights& w, const int64_t* rows, int64_t count, Team team)
      : k(k), cell(*k.cell), w(w), rows(rows), count(count), team(team) {
    padded = up(k.units, LANES), wide = up(k.width, LANES), larger = padded > wide ? padded : wide;
    first = team.first(k.units), last = team.last(k.units), wfirst = team.first(k.width), wlast = team.last(k.width);
  }
  int64_t width_of(int state) const { return state == 0 ? k.width : k.units; }
  int64_t begin_of(int state) const { return state == 0 ? wfirst : first; }
  int64_t end_of(int state) const { return state == 0 ? wlast : last; }
  int64_t length(int64_t r) const { return k.lengths ? k.lengths[r] : k.time; }
  int64_t outer(int64_t t, int64_t r) const { return (k.starts ? k.starts[t] : t * k.batch) + r; }
  int64_t compact(int64_t o) const { return k.place ? k.place[o] : o; }
  bool counts(int64_t o) const { return !k.mask || k.mask[o]; }
  // Whether no state enters step t of r from the step that is processed before it.  The cut of a reset lies between a
  // step and the one before: backwards, it is the step before that the state does not enter.
  bool cut(int64_t t, int64_t r) const {
    const int64_t at = k.reverse ? t + 1 : t;
    return k.reset && at < length(r) && k.reset[outer(at, r)];
  }
  void multiply(const Packed& b, int64_t rows, const store* const* a, real* const* c, bool add = false) const {
    product(b, rows, a, c, add, b.panels() * team.member / team.members, b.panels() * (team.member + 1) / team.members);
  }
  // What the operand of the recurrent product of this row and gate is multiplied with; null: nothing.
  const real* noise(int64_t r, int64_t o, int64_t t, int gate, real* drawn) const {
    if (k.noise_kind == 1) return k.noise + r * k.width;
    if (k.noise_kind == 2) return k.noise + (gate * k.batch + r) * k.width;
    if (k.noise_kind == 3) return k.noise + o * k.width;
    if (k.noise_kind == 4) {
      const uint32_t row = uint32_t(k.ids ? k.ids[r] : r);
      events(1, &drawn, &k.noise_below, k.seed, uint32_t(t), row, uint32_t(k.noise_tag), wfirst, wlast);
      EACH_ALONE
      for (int64_t u = wfirst; u < wlast; ++u) drawn[u] = (real(1) - drawn[u]) * real(k.noise_scale);
      return drawn;
    }
    return nullptr;
  }
  // How much of each state is kept, of this row: drawn ones into `kept`.
  void draw_zoneout(int64_t r, int64_t t, real* const* kept) const {
    chance below[MOST_STATES] = {};
    bool any = false;
    for (int s = 0; s < cell.states; ++s)
      if (k.zoneout[s].kind == 2) below[s] = k.zoneout[s].below, any = true;
    if (!any) return;
    const uint32_t row = uint32_t(k.ids ? k.ids[r] : r);
    const int64_t begin = wfirst < first ? wfirst : first, end = wlast > last ? wlast : last;
    events(cell.states, kept, below, k.seed, uint32_t(t), row, uint32_t(k.zoneout_tag), begin, end);
  }
  // The part of zoneout in unit u of a state, from what `draw_zoneout` drew.
  template <typename Body>
  void with_zoneout(int s, int64_t o, const real* kept, Body body) const {
    const Zoneout& z = k.zoneout[s];
    const int64_t begin = begin_of(s), end = end_of(s);
    const real* given = z.kind == 3 ? z.given + o * width_of(s) : kept;
    const real share = real(z.share);
    if (z.kind == 1) {
      EACH_ALONE
      for (int64_t u = begin; u < end; ++u) body(u, share);
    } else if (z.kind == 0) {
      EACH_ALONE
      for (int64_t u = begin; u < end; ++u) body(u, real(0));
    } else {
      EACH_ALONE
      for (int64_t u = begin; u < end; ++u) body(u, given[u]);
    }
  }
  // An operand in a row of its own, filled up with zeros to a multiple of STEP.
  void enter(store* to, int64_t size, const real* value, const real* factor, int64_t begin, int64_t end) const {
    if (factor) {
      EACH_ALONE
      for (int64_t u = begin; u < end; ++u) put(to + u, value[u] * factor[u]);
    } else {
      EACH_ALONE
      for (int64_t u = begin; u < end; ++u) put(to + u, value[u]);
    }
    if (end == size)
      for (int64_t u = size; u < up(size, STEP); ++u) put(to + u, real(0));
  }
  void keep(store* to, const store* from, int64_t begin, int64_t end) const {
    if (to && end > begin) memcpy(to + begin, from + begin, size_t(end - begin) * sizeof(store));
  }
};

struct Own {  // of one member, so that nothing is written by two
  Row* row;
  int64_t *active, *outer, *last;
  const store** a;
  real** c;
  const real** extras;
  real** lists;
  real* means;
  real* drawn;
  real* nowhere;

  static Own take(Memory& memory, const Cell& cell, int64_t rows, int64_t larger, int64_t means) {
    Own own;
    own.row = memory.take<Row>(rows), own.active = memory.take<int64_t>(rows), own.outer = memory.take<int64_t>(rows);
    own.last = memory.take<int64_t>(rows), own.a = memory.take<const store*>(rows), own.c = memory.take<real*>(rows);
    own.extras = memory.take<const real*>(rows * (cell.extras + 1));
    own.lists = memory.take<real*>(rows * (cell.vectors + cell.extras + cell.products + 1));
    own.means = memory.take<real>(rows * (means + 1)), own.drawn = memory.take<real>(larger * MOST_STATES);
    own.nowhere = memory.take<real>(cell.saved * larger + cell.saved_means + 1);
    return own;
  }
};

// Extra inputs of a row, each as `units` values.
static void extras_of(const Group& g, int64_t o, real* room, const real** to) {
  const Cell& cell = g.cell;
  for (int e = 0; e < cell.extras; ++e) {
    const int64_t width = g.k.extra_widths[e];
    const real* from = g.k.extras[e] + o * width;
    if (width == 1 && g.k.units > 1) {
      real* filled = room + e * g.padded;
      for (int64_t u = g.first; u < g.last; ++u) filled[u] = from[0];
      from = filled;
    }
    to[e] = from;
  }
}

// --- forward ----------------------------------------------------------------------------------------------------------

static void forward_group(const Group& g, Memory own_memory, Memory memory) {
  const Sweep& k = g.k;
  const Cell& cell = g.cell;
  const Weights& w = g.w;
  const int64_t slots = cell.forward.slots * g.padded, deep = up(up(k.width, STEP), 32), larger = g.larger;
  Own own = Own::take(own_memory, cell, g.count, larger, cell.forward.means);
  const int kinds = k.noise_kind == 2 ? cell.recurrent : 1;
  real* r_rows = memory.take<real>(g.count * w.r_size);
  real* scratch = memory.take<real>(g.count * slots);
  real* after = memory.take<real>(g.count * cell.states * larger);
  real* narrow = memory.take<real>(g.count * g.wide);
  real* room = memory.take<real>(g.count * cell.extras * g.padded);
  store* entering = memory.take<store>(g.count * kinds * deep);
  store* second = memory.take<store>(g.count * up(up(larger, STEP), 32));
  real* kept[MOST_STATES];
  for (int s = 0; s < MOST_STATES; ++s) kept[s] = own.drawn + s * larger;
  const bool direct = WHORL_DTYPE != 16 && k.noise_kind == 0;
  const int64_t row_saved = cell.saved * k.units + cell.saved_means;
  for (int64_t i = 0; i < g.count; ++i) own.last[i] = -1;

  for (int64_t step = 0; step < k.time; ++step) {
    const int64_t t = k.reverse ? k.time - 1 - step : step;
    int64_t n = 0;
    for (int64_t i = 0; i < g.count; ++i) {
      const int64_t r = g.rows[i];
      if (t >= g.length(r)) {
        if (k.starts) continue;  // a PackedSequence has no such rows
        const int64_t o = g.outer(t, r);
        for (int64_t u = g.wfirst; u < g.wlast; ++u) put(k.y + o * k.y_stride + u, real(0));
        for (int s = 0; s < cell.states && k.sequences; ++s)
          for (int64_t u = g.begin_of(s); u < g.end_of(s); ++u)
            put(k.sequences[s] + o * k.sequence_strides[s] + u, real(0));
        continue;
      }
      const int64_t o = g.outer(t, r);
      if (g.cut(t, r))
        for (int s = 0; s < cell.states; ++s) {
          real* state = k.states[s] + r * g.width_of(s);
          const real* to = k.reset_to ? k.reset_to[s] + r * g.width_of(s) : nullptr;
          for (int64_t u = g.begin_of(s); u < g.end_of(s); ++u) state[u] = to ? to[u] : real(0);
        }
      if (g.counts(o)) {
        own.active[n] = i, own.outer[n] = o, ++n;
        continue;
      }
      store* y = k.y + o * k.y_stride;
      const store* held = own.last[i] < 0 ? nullptr : k.y + own.last[i] * k.y_stride;
      for (int64_t u = g.wfirst; u < g.wlast; ++u) held ? (void)(y[u] = held[u]) : put(y + u, real(0));
      for (int s = 0; s < cell.states && k.sequences; ++s)
        for (int64_t u = g.begin_of(s); u < g.end_of(s); ++u)
          put(k.sequences[s] + o * k.sequence_strides[s] + u, k.states[s][r * g.width_of(s) + u]);
    }
    if (n == 0) continue;

    for (int64_t j = 0; j < n; ++j) {
      const int64_t i = own.active[j], r = g.rows[i], o = own.outer[j], c = g.compact(o);
      Row& row = own.row[j];
      row.units = k.units, row.first = g.first, row.last = g.last, row.means_at = cell.saved * k.units;
      row.x = k.x + c * k.x_stride;
      row.r = r_rows + j * w.r_size, row.r_offset = w.r_offset;
      row.scratch = scratch + j * slots, row.padded = g.padded;
      row.saved = k.saved ? k.saved + c * row_saved : own.nowhere;
      row.means = own.means + j * cell.forward.means;
      row.v = k.vectors;
      extras_of(g, o, room + j * cell.extras * g.padded, own.extras + j * cell.extras);
      row.e = own.extras + j * cell.extras;
      for (int s = 0; s < cell.states; ++s) {
        row.before[s] = k.states[s] + r * g.width_of(s);
        row.after[s] = after + (j * cell.states + s) * larger;
      }
      if (cell.recurrent == 0) continue;
      const real* h = row.before[0];
      if (!direct)
        for (int kind = 0; kind < kinds; ++kind)
          g.enter(entering + (j * kinds + kind) * deep, k.width, h, g.noise(r, o, t, kind, own.drawn), g.wfirst,
                  g.wlast);
      if (k.entered && !k.keep_plain && !direct)
        g.keep(k.entered + c * k.width, entering + j * deep, g.wfirst, g.wlast);
      else if (k.entered)
        for (int64_t u = g.wfirst; u < g.wlast; ++u) put(k.entered + c * k.width + u, h[u]);
    }
    g.team.wait();
    for (int m = 0; m < w.count; ++m) {
      if (!w.leaf[m]) continue;
      for (int64_t j = 0; j < n; ++j) {
        own.a[j] = direct ? (const store*)own.row[j].before[0]
                          : entering + (j * kinds + (kinds > 1 ? w.first[m] : 0)) * deep;
        own.c[j] = (real*)own.row[j].r + w.r_offset[w.first[m]];
      }
      g.multiply(w.packed[m], n, own.a, own.c);
    }
    g.team.wait();
    for (int segment = 0; segment < cell.forward.segments; ++segment) {
      for (int64_t j = 0; j < n; ++j) cell.forward.segment(segment, own.row[j], g.team);
      for (int l = 0; l < cell.forward.links; ++l) {
        const Link& link = cell.forward.link[l];
        if (link.segment != segment) continue;
        for (int64_t j = 0; j < n; ++j) {
          const int64_t r = g.rows[own.active[j]], o = own.outer[j];
          store* entered = second + j * up(up(larger, STEP), 32);
          const real* value = own.row[j].scratch + link.operand * g.padded;
          g.enter(entered, k.width, value, g.noise(r, o, t, link.gate, own.drawn), g.wfirst, g.wlast);
          if (k.operands) {
            store* operand = k.operands[link.product] + g.compact(o) * k.width;
            if (k.keep_plain)
              for (int64_t u = g.wfirst; u < g.wlast; ++u) put(operand + u, value[u]);
            else
              g.keep(operand, entered, g.wfirst, g.wlast);
          }
          own.a[j] = entered, own.c[j] = own.row[j].scratch + link.result * g.padded;
        }
        g.team.wait();
        g.multiply(w.packed[w.of_gate[link.gate]], n, own.a, own.c);
        g.team.wait();
      }
    }
    if (k.hr) {
      for (int64_t j = 0; j < n; ++j) {
        store* entered = second + j * up(up(larger, STEP), 32);
        g.enter(entered, k.units, own.row[j].after[0], nullptr, g.first, g.last);
        if (k.unprojected) g.keep(k.unprojected + g.compact(own.outer[j]) * k.units, entered, g.first, g.last);
        own.a[j] = entered, own.c[j] = narrow + j * g.wide;
      }
      g.team.wait();
      g.multiply(w.projection, n, own.a, own.c);
      g.team.wait();
    }
    for (int64_t j = 0; j < n; ++j) {
      const int64_t i = own.active[j], r = g.rows[i], o = own.outer[j];
      g.draw_zoneout(r, t, kept);
      for (int s = 0; s < cell.states; ++s) {
        real* state = k.states[s] + r * g.width_of(s);
        const real* made = s == 0 && k.hr ? narrow + j * g.wide : own.row[j].after[s];
        const int64_t begin = g.begin_of(s), end = g.end_of(s);
        if (k.zoneout[s].kind == 0)
          memcpy(state + begin, made + begin, size_t(end - begin) * sizeof(real));
        else if (k.zoneout[s].kind == 2)  // what is kept is kept to the bit, also beside a NaN
          g.with_zoneout(s, o, kept[s], [=](int64_t u, real z) { state[u] = z > real(0) ? state[u] : made[u]; });
        else if (k.zoneout[s].kind == 3) {
          if (real* apart = k.zoneout[s].apart)
            for (int64_t u = begin; u < end; ++u) apart[g.compact(o) * g.width_of(s) + u] = state[u] - made[u];
          g.with_zoneout(s, o, kept[s], [=](int64_t u, real z) { state[u] = made[u] + z * (state[u] - made[u]); });
        } else
          g.with_zoneout(s, o, kept[s], [=](int64_t u, real z) { state[u] = z * state[u] + (real(1) - z) * made[u]; });
        if (k.sequences) {
          store* to = k.sequences[s] + o * k.sequence_strides[s];
          EACH_ALONE
          for (int64_t u = begin; u < end; ++u) put(to + u, state[u]);
        }
        if (s > 0) continue;
        store* y = k.y + o * k.y_stride;
        EACH_ALONE
        for (int64_t u = begin; u < end; ++u) put(y + u, state[u]);
        own.last[i] = o;
      }
    }
  }
}

// --- backward ---------------------------------------------------------------------------------------------------------

static void backward_group(const Group& g, Memory own_memory, Memory memory) {
  const Sweep& k = g.k;
  const Cell& cell = g.cell;
  const Weights& w = g.w;
  const int64_t slots = cell.backward.slots * g.padded, larger = g.larger;
  Own own = Own::take(own_memory, cell, g.count, larger, cell.backward.means);
  const int64_t deep = up(up((cell.recurrent > 1 ? cell.recurrent : 1) * larger, STEP), 32);
  real* scratch = memory.take<real>(g.count * slots);
  real* given = memory.take<real>(g.count * cell.states * larger);
  real* unprojected = memory.take<real>(g.count * g.padded);
  real* made = memory.take<real>(g.count * cell.states * larger);
  real* through = memory.take<real>(g.count * g.wide);
  real* gate_wise = memory.take<real>(g.count * g.wide);
  real* room = memory.take<real>(g.count * cell.extras * g.padded);
  store* entering = memory.take<store>(g.count * deep);
  real* kept[MOST_STATES];
  for (int s = 0; s < MOST_STATES; ++s) kept[s] = own.drawn + s * larger;
  const int64_t row_saved = cell.saved * k.units + cell.saved_means;
  const int lists = cell.vectors + cell.extras + cell.products;

  for (int64_t step = k.time - 1; step >= 0; --step) {
    const int64_t t = k.reverse ? k.time - 1 - step : step;
    int64_t n = 0;
    for (int64_t i = 0; i < g.count; ++i) {
      const int64_t r = g.rows[i];
      if (t >= g.length(r)) continue;
      const int64_t o = g.outer(t, r);
      for (int s = 0; s < cell.states && k.dsequences; ++s) {
        if (!k.dsequences[s]) continue;
        const store* from = k.dsequences[s] + o * k.dsequence_strides[s];
        real* to = k.dstates[s] + r * g.width_of(s);
        for (int64_t u = g.begin_of(s); u < g.end_of(s); ++u) to[u] += widened(from[u]);
      }
      if (g.counts(o)) {
        own.active[n] = i, own.outer[n] = o, ++n;
      } else {
        if (k.dy)
          for (int64_t u = g.wfirst; u < g.wlast; ++u) k.dheld[r * k.width + u] += widened(k.dy[o * k.dy_stride + u]);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      const int64_t r = g.rows[own.active[j]], o = own.outer[j], c = g.compact(o);
      Row& row = own.row[j];
      g.draw_zoneout(r, t, kept);
      for (int s = 0; s < cell.states; ++s) {
        real* state = k.dstates[s] + r * g.width_of(s);
        real* d = given + (j * cell.states + s) * larger;
        const int64_t begin = g.begin_of(s), end = g.end_of(s);
        if (s == 0 && k.dy) {
          const store* dy = k.dy + o * k.dy_stride;
          EACH_ALONE
          for (int64_t u = begin; u < end; ++u) state[u] += widened(dy[u]);
        }
        if (s == 0 && k.dheld) {
          real* held = k.dheld + r * k.width;
          EACH_ALONE
          for (int64_t u = begin; u < end; ++u) state[u] += held[u], held[u] = real(0);
        }
        if (k.zoneout[s].kind == 3)
          for (int64_t u = begin; u < end; ++u)
            k.zoneout[s].dgiven[o * g.width_of(s) + u] = state[u] * k.zoneout[s].apart[c * g.width_of(s) + u];
        if (k.zoneout[s].kind == 0) {
          memcpy(d + begin, state + begin, size_t(end - begin) * sizeof(real));
          EACH_ALONE
          for (int64_t u = begin; u < end; ++u) state[u] = real(0);
        } else {
          g.with_zoneout(s, o, kept[s], [=](int64_t u, real z) {
            const real whole = state[u];
            d[u] = z == real(1) ? real(0) : whole * (real(1) - z);
            state[u] = z == real(0) ? real(0) : whole * z;
          });
        }
        row.d[s] = s == 0 && k.hr ? unprojected + j * g.padded : d;
        row.ds[s] = made + (j * cell.states + s) * larger;
      }
      row.scratch = scratch + j * slots, row.padded = g.padded;
      row.saved = k.saved + c * row_saved;
      row.means = own.means + j * cell.backward.means;
      row.v = k.vectors;
      extras_of(g, o, room + j * cell.extras * g.padded, own.extras + j * cell.extras);
      row.e = own.extras + j * cell.extras;
      row.units = k.units, row.first = g.first, row.last = g.last, row.means_at = cell.saved * k.units;
      row.x = k.x ? k.x + c * k.x_stride : nullptr;
      row.dx = k.dx + c * cell.gates * k.units;
      row.dr = cell.dr_is_dx ? row.dx : k.dr + c * cell.recurrent * k.units;
      real** list = own.lists + j * lists;
      for (int v = 0; v < cell.vectors; ++v) list[v] = k.dv[v] + r * k.units;
      for (int e = 0; e < cell.extras; ++e) list[cell.vectors + e] = k.de[e] + o * k.units;
      for (int p = 0; p < cell.products; ++p) ((store**)list)[cell.vectors + cell.extras + p] = k.dp[p] + c * k.units;
      row.dv = list, row.de = list + cell.vectors, row.dp = (store**)list + cell.vectors + cell.extras;
      if (k.hr) {
        store* entered = entering + j * deep;
        g.enter(entered, k.width, given + j * cell.states * larger, nullptr, g.wfirst, g.wlast);
        g.keep(k.dprojected + c * k.width, entered, g.wfirst, g.wlast);
        own.a[j] = entered, own.c[j] = unprojected + j * g.padded;
      }
    }
    if (k.hr && n) {
      g.team.wait();
      g.multiply(w.projection, n, own.a, own.c);
      g.team.wait();
    }
    for (int segment = 0; segment < cell.backward.segments && n; ++segment) {
      for (int64_t j = 0; j < n; ++j) cell.backward.segment(segment, own.row[j], g.team);
      for (int l = 0; l < cell.backward.links; ++l) {
        const Link& link = cell.backward.link[l];
        if (link.segment != segment) continue;
        for (int64_t j = 0; j < n; ++j) {
          store* entered = entering + j * deep;
          g.enter(entered, k.units, own.row[j].scratch + link.operand * g.padded, nullptr, g.first, g.last);
          own.a[j] = entered, own.c[j] = own.row[j].scratch + link.result * g.padded;
        }
        g.team.wait();
        g.multiply(w.packed[w.of_gate[link.gate]], n, own.a, own.c);
        g.team.wait();
        for (int64_t j = 0; j < n && k.noise_kind; ++j) {
          const real* factor = g.noise(g.rows[own.active[j]], own.outer[j], t, link.gate, own.drawn);
          real* result = own.c[j];
          EACH_ALONE
          for (int64_t u = g.wfirst; u < g.wlast; ++u) result[u] *= factor[u];
        }
      }
    }
    bool begun = false;
    if (n) g.team.wait();
    for (int m = 0; m < w.count && n; ++m) {
      if (!w.leaf[m]) continue;
      const bool apart = k.noise_kind == 2;
      for (int64_t j = 0; j < n; ++j) {
        const store* from = own.row[j].dr + w.first[m] * k.units;
        const int64_t size = w.gates[m] * k.units;
        if (STEP > 1 && size % STEP) {  // the operand's last pair would reach past its end
          store* entered = entering + j * deep;
          if (g.team.member == 0) memcpy(entered, from, size_t(size) * sizeof(store)), put(entered + size, real(0));
          from = entered;
        }
        own.a[j] = from, own.c[j] = (apart ? gate_wise : through) + j * g.wide;
      }
      if (STEP > 1) g.team.wait();
      g.multiply(w.packed[m], n, own.a, own.c, begun && !apart);
      if (apart) {
        g.team.wait();
        for (int64_t j = 0; j < n; ++j) {
          const real* factor = g.noise(g.rows[own.active[j]], own.outer[j], t, w.first[m], own.drawn);
          real* to = through + j * g.wide;
          const real* from = gate_wise + j * g.wide;
          for (int64_t u = g.wfirst; u < g.wlast; ++u) to[u] = (begun ? to[u] : real(0)) + factor[u] * from[u];
        }
      }
      if (apart || STEP > 1) g.team.wait();
      begun = true;
    }
    if (n) g.team.wait();
    for (int64_t j = 0; j < n; ++j) {
      const int64_t r = g.rows[own.active[j]], o = own.outer[j];
      for (int s = 0; s < cell.states; ++s) {
        if (s == 0 && k.hr) continue;  // a step cannot read a state that is projected
        real* to = k.dstates[s] + r * g.width_of(s);
        const real* from = own.row[j].ds[s];
        EACH_ALONE
        for (int64_t u = g.first; u < g.last; ++u) to[u] += from[u];
      }
      if (!begun) continue;
      real* to = k.dstates[0] + r * k.width;
      const real* from = through + j * g.wide;
      const real* factor = k.noise_kind && k.noise_kind != 2 ? g.noise(r, o, t, 0, own.drawn) : nullptr;
      if (factor) {
        for (int64_t u = g.wfirst; u < g.wlast; ++u) to[u] += factor[u] * from[u];
      } else {
        EACH_ALONE
        for (int64_t u = g.wfirst; u < g.wlast; ++u) to[u] += from[u];
      }
    }
    for (int64_t i = 0; i < g.count && k.reset; ++i) {
      const int64_t r = g.rows[i];
      if (t >= g.length(r) || !g.cut(t, r)) continue;
      for (int s = 0; s < cell.states; ++s) {
        real* state = k.dstates[s] + r * g.width_of(s);
        real* to = k.dreset ? k.dreset[s] + r * g.width_of(s) : nullptr;
        for (int64_t u = g.begin_of(s); u < g.end_of(s); ++u) {
          if (to) to[u] += state[u];
          state[u] = real(0);
        }
      }
    }
  }
}

// --- all groups -------------------------------------------------------------------------------------------------------

struct Run {
  const Sweep* k;
  const Weights* w;
  void (*group)(const Group&, Memory, Memory);
  char *memory, *own;
  int64_t bytes, own_bytes, next;
  Barrier* barriers;
};

static void run_groups(void* data, int thread, int threads) {
  Run& run = *(Run*)data;
  const Sweep& k = *run.k;
  const int64_t team = threads < k.threads ? 1 : k.team;  // fewer threads than asked for: no team is whole
  const int64_t slot = thread / team;
  if (team > 1 && slot >= k.groups) return;
  Team mine = {&run.barriers[slot], team, thread % team};
  if (team == 1) mine.barrier->size = 1;
  for (;;) {
    const int64_t group = team > 1 ? slot : __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED);
    if (group >= k.groups) return;
    const int64_t begin = k.ends[group];
    run.group(Group(k, *run.w, k.order + begin, k.ends[group + 1] - begin, mine), {run.own + thread * run.own_bytes},
              {run.memory + slot * run.bytes});
    if (team > 1) return;
  }
}

static void run_all(const Sweep& k, bool backward) {
  const Cell& cell = *k.cell;
  const Cell::Direction& way = backward ? cell.backward : cell.forward;
  Weights w = make_weights(k, !backward);
  const int64_t larger = up(k.units > k.width ? k.units : k.width, 64), gates = cell.recurrent > 1 ? cell.recurrent : 1;
  const int64_t row = w.r_size + (way.slots + 2 * cell.states + cell.extras + gates + 8) * (larger + 64);
  Run run = {};
  run.k = &k, run.w = &w, run.group = backward ? backward_group : forward_group;
  run.bytes = up(k.largest * row * int64_t(sizeof(real)) + 4096, 4096);
  const int64_t pointers = cell.vectors + 2 * cell.extras + cell.products + 16;
  const int64_t own = k.largest * (int64_t(sizeof(Row)) + (pointers + way.means) * 8) +
                      (cell.saved + MOST_STATES) * (larger + 64) * 8;
  run.own_bytes = up(own + 2 * cell.saved_means * 8 + 8192, 4096);
  const int64_t teams = k.threads / k.team;
  run.memory = (char*)aligned_alloc(64, size_t(run.bytes * k.threads));
  run.own = (char*)aligned_alloc(64, size_t(run.own_bytes * k.threads));
  run.barriers = (Barrier*)calloc(size_t(k.threads), sizeof(Barrier));
  for (int64_t slot = 0; slot < k.threads; ++slot) run.barriers[slot].size = int32_t(slot < teams ? k.team : 1);
  parallel(int(k.threads), run_groups, &run);
  free(run.barriers), free(run.own), free(run.memory), free(w.memory);
}

}  // namespace kernel

extern "C" {

void whorl_start(void* parallel, void* thread, void* threads) {
  if (parallel && thread && threads)
    kernel::runtime = {(void (*)(void (*)(void*), void*, unsigned, unsigned))parallel, (int (*)())thread,
                       (int (*)())threads};
  pthread_atfork(nullptr, nullptr, kernel::after_fork);
}

int64_t whorl_size() { return int64_t(sizeof(kernel::Sweep)); }
void whorl_forward(const kernel::Sweep* k) { kernel::run_all(*k, false); }
void whorl_backward(const kernel::Sweep* k) { kernel::run_all(*k, true); }

// y = x w' + bias of many rows: x [rows, inputs], y [rows, stride], the stride in whole vectors; w is [outputs, inputs]
// where `across`, else [inputs, outputs].
void whorl_project(
    kernel::real* y, const kernel::store* x, const kernel::store* w, const kernel::real* bias, int64_t rows,
    int64_t inputs, int64_t outputs, int64_t stride, int64_t across, int64_t threads) {
  kernel::project({y, x, w, bias, rows, inputs, outputs, stride, across != 0, 0, {}}, int(threads));
}

// out [n, stride] += a' b over rows: a [rows, lda] of n columns, b [rows, ldb] of m columns; sums [n] += those of a, where
// wanted.
void whorl_outer(
    kernel::real* out, kernel::real* sums, const kernel::store* a, const kernel::store* b, int64_t rows, int64_t n,
    int64_t m, int64_t lda, int64_t ldb, int64_t stride, int64_t threads) {
  kernel::outer({out, sums, a, b, rows, n, m, lda, ldb, stride, 0, nullptr, nullptr}, int(threads));
}

// Masks of dropout for each row: 0 where a word is below, else scale; `count` words, [count, rows, width].
void whorl_draw(
    kernel::real* to, int64_t count, int64_t rows, int64_t width, const int64_t* ids, uint64_t seed, int64_t tag,
    uint64_t below, double scale) {
  const kernel::chance all[4] = {below, below, below, below};
  for (int64_t r = 0; r < rows; ++r) {
    kernel::real* out[4] = {};
    for (int64_t word = 0; word < count; ++word) out[word] = to + (word * rows + r) * width;
    const uint32_t row = uint32_t(ids ? ids[r] : r);
    kernel::events(int(count), out, all, seed, 0, row, uint32_t(tag), 0, width);
    for (int64_t word = 0; word < count; ++word)
      for (int64_t u = 0; u < width; ++u) out[word][u] = (kernel::real(1) - out[word][u]) * kernel::real(scale);
  }
}
}
