// What forward and backward share: a group of rows, the memory of those who compute it, noise and zoneout.

namespace kernel {

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

// Parts of rows, of what few calls have.
template <typename T>
APART static void clear(T* to, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; ++u) put(to + u, real(0));
}
template <typename To, typename From>
APART static void copy(To* to, const From* from, int64_t begin, int64_t end) {
  EACH_ALONE
  for (int64_t u = begin; u < end; ++u) put(to + u, widened(from[u]));
}
template <typename From>
APART static void add(real* to, const From* from, int64_t begin, int64_t end) {
  EACH_ALONE
  for (int64_t u = begin; u < end; ++u) to[u] += widened(from[u]);
}

struct Group {
  const Sweep& k;
  const Cell& cell;
  const Weights& w;
  const int64_t* rows;
  int64_t count;
  Team team;
  int64_t padded, wide, larger;  // units, width filled up to whole vectors, and the larger of them
  int64_t first, last, wfirst, wlast;
  bool own_columns;  // each member multiplies what its own units read, which then comes from no other's cache

  Group(const Sweep& k, const Weights& w, const int64_t* rows, int64_t count, Team team)
      : k(k), cell(*k.cell), w(w), rows(rows), count(count), team(team) {
    padded = up(k.units, LANES), wide = up(k.width, LANES), larger = padded > wide ? padded : wide;
    own_columns = team.members > 1 && k.units == k.width;
    for (int64_t member = 1; member <= team.members; ++member)
      own_columns = own_columns && team.part(k.units, 16, member) % (2 * WIDE_TILE) == 0;
    first = team.first(k.units), last = team.last(k.units), wfirst = team.first(k.width), wlast = team.last(k.width);
  }
  int64_t width_of(int state) const { return state == 0 ? k.width : k.units; }
  int64_t begin_of(int state) const { return state == 0 ? wfirst : first; }
  int64_t end_of(int state) const { return state == 0 ? wlast : last; }
  int64_t length(int64_t r) const { return k.lengths ? k.lengths[r] : k.time; }
  int64_t outer(int64_t t, int64_t r) const { return (k.starts ? k.starts[t] : t * k.batch) + r; }
  int64_t compact(int64_t o) const { return k.place ? k.place[o] : o; }
  // Rows of the caller's, which may have another order of steps and sequences.
  const store* input(int64_t t, int64_t r, int64_t o) const {
    return k.input + (k.input_step ? t * k.input_step + r * k.input_row : o * k.inputs);
  }
  const store* dy(int64_t t, int64_t r, int64_t o) const {
    return k.dy + (k.dy_step ? t * k.dy_step + r * k.dy_row : o * k.dy_stride);
  }
  bool counts(int64_t o) const { return !k.mask || k.mask[o]; }
  // Whether no state enters step t of r from the step that is processed before it.  The cut of a reset lies between a
  // step and the one before: backwards, it is the step before that the state does not enter.
  bool cut(int64_t t, int64_t r) const {
    const int64_t at = k.reverse ? t + 1 : t;
    return k.reset && at < length(r) && k.reset[outer(at, r)];
  }
  // Of a matrix of one gate or several beside each other: the columns of each that this member's units are.
  void by_units(const Packed& b, int64_t rows, const store* const* a, real* const* c, bool add, Fetch* fetch) const {
    const Columns own = {first, last, b.n / k.units, k.units};
    if (rows && first < last)
      product_of_parts((const char*)b.data, b.bias, b.n, b.k, *all_apart(b), rows, a, c, add, own, fetch);
  }
  void multiply(
      const Packed& b, int64_t rows, const store* const* a, real* const* c, bool add = false, Fetch* fetch = nullptr) const {
    if (b.in_parts && own_columns && b.n % k.units == 0) return by_units(b, rows, a, c, add, fetch);
    const int64_t from = shares(b) * team.member / team.members, to = shares(b) * (team.member + 1) / team.members;
    product(b, rows, a, c, add, from, to, fetch);
  }
  // Whether the rows of a step that count lie one after the other, wherever steps keep something.
  bool together() const {
    bool found = !k.starts;
    for (int64_t i = 1; i < count; ++i) found = found && rows[i] == rows[i - 1] + 1;
    return found;
  }
  // The first of them, compact, and how many they are.
  struct Counted {
    int64_t first, count;
  };
  Counted counted(int64_t t) const {
    Counted found = {0, 0};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t o = outer(t, rows[i]);
      if (t >= length(rows[i]) || !counts(o)) continue;
      if (!found.count) found.first = compact(o);
      ++found.count;
    }
    return found;
  }
  // How many rows the loops of a step take together: from a sum to a mean is a long way, which they go beside each other,
  // and what one row waits for from a cache that is far another does not.  Backward each row has more, with the gradients
  // of vectors: of an LSTM with layer norm a train step (32, 30, 128) takes 0.97 of the time with two and 0.97 of that with
  // four, (32, 30, 64) 0.98 and 1.00, with 160 and 512 units 0.98 with two, 256 units 1.00 (an AMD EPYC, one thread).
  int64_t beside() const { return cell.forward.means ? 4 : 1; }
  int64_t beside_backward() const { return !cell.backward.means ? 1 : k.units <= 128 ? 4 : 2; }
  // A row's scratch lives from segment to segment; where there is one, rows that are not together may have the same, which
  // is near.
  real* scratch_of(const Cell::Direction& way, real* scratch, int64_t j, int64_t beside) const {
    return scratch + (way.segments > 1 || team.members > 1 ? j : j % beside) * way.slots * padded;
  }
  // What the operand of the recurrent product of this row and gate is multiplied with; null: nothing.
  const real* noise(int64_t r, int64_t o, int64_t t, int gate, real* drawn) const {
    if (k.noise_kind == 1) return k.noise + r * k.width;
    if (k.noise_kind == 2) return k.noise + (gate * k.batch + r) * k.width;
    if (k.noise_kind == 3) return k.noise + o * k.width;
    return k.noise_kind == 4 ? drawn_noise(r, t, drawn) : nullptr;
  }
  APART const real* drawn_noise(int64_t r, int64_t t, real* drawn) const {
    const uint32_t row = uint32_t(k.ids ? k.ids[r] : r);
    const Choice choice = {real(0), real(k.noise_scale)};
    events(1, &drawn, &k.noise_below, choice, k.seed, uint32_t(t), row, uint32_t(k.noise_tag), wfirst, wlast);
    return drawn;
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
    const Choice choice = {real(1), real(0)};
    events(cell.states, kept, below, choice, k.seed, uint32_t(t), row, uint32_t(k.zoneout_tag), begin, end);
  }
  // The part of zoneout in unit u of a state, from what `draw_zoneout` drew.
  template <typename Body>
  APART void with_zoneout(int s, int64_t o, const real* kept, Body body) const {
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

// Steps whose input is projected at once: so many rows that the weights are read from far seldom.
INLINE int64_t steps_ahead(const Sweep& k, int64_t rows) { return k.input ? up(48, rows) / rows : 0; }

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
  const store** ahead_a;
  real** ahead_c;

  static Own take(Memory& memory, const Cell& cell, int64_t rows, int64_t larger, int64_t means, int64_t ahead = 0) {
    Own own;
    own.row = memory.take<Row>(rows), own.active = memory.take<int64_t>(rows), own.outer = memory.take<int64_t>(rows);
    own.last = memory.take<int64_t>(rows), own.a = memory.take<const store*>(rows), own.c = memory.take<real*>(rows);
    own.extras = memory.take<const real*>(rows * (cell.extras + 1));
    own.lists = memory.take<real*>(rows * (cell.vectors + cell.extras + cell.products + 1));
    own.means = memory.take<real>(rows * (means + 1)), own.drawn = memory.take<real>(larger * MOST_STATES);
    own.nowhere = memory.take<real>(cell.saved * larger + cell.saved_means + 1);
    own.ahead_a = memory.take<const store*>(ahead * rows + 1), own.ahead_c = memory.take<real*>(ahead * rows + 1);
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

}  // namespace kernel
