// One step of a recurrent layer in one direction, between two products: a thread has one unit of one sequence, or, of a
// cell with means, a block has a whole sequence.
//
// The order of a step, forward:  product | segment 0 | product | segment 1 | ... | last segment (| projection | commit)
// and backward:                  (projection |) segment 0 | product | ... | last segment | product
// The products are cuBLAS's, on operands and results that lie in a workspace.  The end of the last segment writes what
// the step gave and makes the operand of the next step's product.
//
// Every kernel finds its arguments in the workspace too, and counts steps from there: so a CUDA graph of some steps serves
// every call.  What a row gives depends on that row alone.

//: units

namespace kernel {

// --- noise ------------------------------------------------------------------------------------------------------------

// Philox-4x32-10, counted as whorl/noise.py counts: neighbouring units share what they do not use up alone.
__forceinline__ uint4 philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint64_t seed) {
  uint32_t key = uint32_t(seed), other = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(a) * 0xD2511F53u, second = uint64_t(c) * 0xCD9E8D57u;
    a = uint32_t(second >> 32) ^ b ^ key, b = uint32_t(second);
    c = uint32_t(first >> 32) ^ d ^ other, d = uint32_t(first);
    key += 0x9E3779B9u, other += 0xBB67AE85u;
  }
  return {a, b, c, d};
}

__forceinline__ uint32_t word_of(const uint4& words, int which) {
  return which == 0 ? words.x : which == 1 ? words.y : which == 2 ? words.z : words.w;
}

// --- arguments --------------------------------------------------------------------------------------------------------

struct Zoneout {
  int64_t kind;  // 0 none, 1 a share of the state before, 2 drawn, 3 given
  double share;
  uint64_t below;
  const real* given;  // [outer rows, width of the state]
  real* apart;        // the state before less what the step made, the same; null: not kept
  real* dgiven;       // gradient of `given`
};

// Fields of eight bytes each, in the order of stepwise.py.  "Outer" rows are the steps of sequences as x and y have them.
struct Arguments {
  int64_t base;  // steps that earlier launches of a graph have done
  int64_t time, batch, units, width, reverse, projected, by_gate;
  int64_t keeps;           // `saved` has every step; else it is room for one
  const int64_t* starts;   // outer row of (t, 0) of a PackedSequence; null: t * batch
  const int64_t* lengths;  // [batch]; null: all steps
  const uint8_t* mask;     // by outer row; null: all count
  const uint8_t* reset;    // by outer row; null: none
  const int64_t* ids;      // what noise counts a row as, [batch]; null: itself
  const int64_t* seed;
  int64_t noise_kind;  // of the recurrent product: 0 none, 1 held, 2 held by gate, 3 given by step, 4 drawn
  int64_t keep_plain;  // what entered is kept as it was before it was multiplied with noise
  const real* noise;   // 1: [batch, width]; 2: [recurrent gates, batch, width]; 3: [outer rows, width]
  uint64_t noise_below;
  double noise_scale;
  int64_t noise_tag, zoneout_tag;
  Zoneout zoneout[STATES];
  const real* x;  // [outer rows, gates x units]: the input projection
  const real* bias_hh;
  const real* vectors[MOST(VECTORS)];
  const real* extras[MOST(EXTRAS)];  // [outer rows, units]
  real* states[STATES];              // [batch, width]: initial, then final
  const real* reset_to[STATES];      // null: zero
  store* y;
  int64_t y_stride;
  store* sequences[STATES];  // each state at each step; null: not wanted
  int64_t sequence_strides[STATES];
  store* entered;                   // what entered the recurrent product, [outer rows, width]; null: not kept
  store* unprojected;               // what entered the projection, [outer rows, units]
  real* saved;                      // [outer rows, SAVED x units + SAVED_MEANS], or [batch, ...]
  store* operands[MOST(PRODUCTS)];  // what entered each product of the step, [outer rows, width]; null: not kept
  const store* dy;                  // null: zero
  int64_t dy_stride;
  const store* dsequences[STATES];
  int64_t dsequence_strides[STATES];
  real* dstates[STATES];  // of the final states, then of the initial ones
  real* dreset[STATES];   // of reset_to, added to; null: not wanted
  store* dx;              // [outer rows, gates x units]
  store* dr;              // [outer rows, recurrent gates x units]; where DR_IS_DX: dx
  store* dp[MOST(PRODUCTS)];  // of each product of the step, [outer rows, units]
  real* dv[MOST(VECTORS)];    // [batch, units], added to
  real* de[MOST(EXTRAS)];     // [outer rows, units], added to
  store* dprojected;          // [outer rows, width]
  // the workspace: one step of all rows
  store* entering;  // [recurrent gates where by_gate, batch, width]
  real* r;          // [batch, recurrent gates x units], or [recurrent gates, batch, units] where by_gate
  real* scratch;    // [slots, batch, units]
  real* made;       // [states, batch, larger of units and width]: the states after the step, or gradients before it
  real* given;      // the same: gradients after it
  store* second;    // [links, batch, larger]: operands of products inside the step, and of the projection
  real* narrow;     // [batch, larger]: what the projection gave
  real* held;       // [batch, width]: the output, or its gradient, of steps that do not count
  real* means;      // [batch, means]
  store* to_r;      // [batch, recurrent gates x units], or by gate: what dr is of this step
  real* through;    // [batch, width], or by gate: what that gives
};

// A thread's place: its row, and of the row its units; `alone` one unit, which the compiler is to know.
struct Place {
  int64_t row, first, last;
  bool alone;
  __forceinline__ int64_t after(int64_t u) const { return alone ? int64_t(~uint64_t(0) >> 1) : u + 1; }
};

__forceinline__ Place place_of(const Arguments& a, bool whole_rows) {
  const int64_t larger = a.units > a.width ? a.units : a.width;
  if (whole_rows) {
    const int64_t each = (larger + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each;
    return {(int64_t)blockIdx.x, first, first + each, false};
  }
  const int64_t u = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
  return {(int64_t)blockIdx.x, u, u + 1, true};
}

// All of a block, to shared memory: in registers their addresses leave room for half as many threads.
__forceinline__ void bring(const Arguments* from, Arguments& to) {
  for (int i = threadIdx.x; i < int(sizeof(Arguments) / 4); i += blockDim.x) ((int*)&to)[i] = ((const int*)from)[i];
  __syncthreads();
}

__forceinline__ int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }
__forceinline__ int64_t width_of(const Arguments& a, int state) { return state == 0 ? a.width : a.units; }
__forceinline__ int64_t larger_of(const Arguments& a) { return a.units > a.width ? a.units : a.width; }
__forceinline__ int64_t length_of(const Arguments& a, int64_t r) { return a.lengths ? a.lengths[r] : a.time; }
__forceinline__ int64_t outer_of(const Arguments& a, int64_t t, int64_t r) {
  return (a.starts ? a.starts[t] : t * a.batch) + r;
}
__forceinline__ bool counts(const Arguments& a, int64_t o) { return !a.mask || a.mask[o]; }
__forceinline__ int64_t time_of(const Arguments& a, int64_t step) { return a.reverse ? a.time - 1 - step : step; }

// Whether no state enters step t of r from the step that is processed before it.  The cut of a reset lies between a step
// and the one before: backwards, it is the step before that the state does not enter.
__forceinline__ bool cut(const Arguments& a, int64_t t, int64_t r) {
  const int64_t at = a.reverse ? t + 1 : t;
  return a.reset && at < length_of(a, r) && a.reset[outer_of(a, at, r)];
}

// What the operand of the recurrent product of this row, gate and unit is multiplied with.
__forceinline__ real noise(const Arguments& a, int64_t r, int64_t o, int64_t t, int gate, int64_t u) {
  if (a.noise_kind == 1) return a.noise[r * a.width + u];
  if (a.noise_kind == 2) return a.noise[(gate * a.batch + r) * a.width + u];
  if (a.noise_kind == 3) return a.noise[o * a.width + u];
  if (a.noise_kind == 4) {
    const uint32_t row = uint32_t(a.ids ? a.ids[r] : r);
    const uint4 words = philox(uint32_t(u / 4), uint32_t(t), row, uint32_t(a.noise_tag), uint64_t(*a.seed));
    return word_of(words, int(u % 4)) < a.noise_below ? real(0) : real(a.noise_scale);
  }
  return real(1);
}

// How much of a state is kept, for each state of a unit.
struct Kept {
  real of[STATES];
};

__forceinline__ Kept kept_of(const Arguments& a, int64_t r, int64_t o, int64_t t, int64_t u) {
  Kept kept;
  constexpr int TOGETHER = 4 / STATES;
  bool drawn = false;
#pragma unroll
  for (int s = 0; s < STATES; ++s) drawn = drawn || a.zoneout[s].kind == 2;
  uint4 words = {0, 0, 0, 0};
  if (drawn) {
    const uint32_t row = uint32_t(a.ids ? a.ids[r] : r);
    words = philox(uint32_t(u / TOGETHER), uint32_t(t), row, uint32_t(a.zoneout_tag), uint64_t(*a.seed));
  }
#pragma unroll
  for (int s = 0; s < STATES; ++s) {
    const Zoneout& z = a.zoneout[s];
    const uint32_t word = word_of(words, int(u % TOGETHER) * STATES + s);
    kept.of[s] = z.kind == 1 ? real(z.share) : z.kind == 2 ? real(word < z.below) : real(0);
    if (z.kind == 3 && u < width_of(a, s)) kept.of[s] = z.given[o * width_of(a, s) + u];
  }
  return kept;
}

__forceinline__ void row_of(const Arguments& a, Row& row, const Place& p, int64_t o) {
  row.units = a.units, row.first = at_most(p.first, a.units);
  row.last = p.alone ? row.first + (p.first < a.units) : at_most(p.last, a.units);
  row.x = a.x + o * GATES * a.units;
  row.r = a.r + p.row * (a.by_gate ? a.units : RECURRENT * a.units);
#pragma unroll
  for (int g = 0; g < RECURRENT; ++g) row.r_offset[g] = g * (a.by_gate ? a.batch * a.units : a.units);
  row.scratch = a.scratch + p.row * a.units, row.padded = a.batch * a.units;
  row.saved = a.saved + (a.keeps ? o : p.row) * (SAVED * a.units + SAVED_MEANS);
  row.means_at = SAVED * a.units;
  row.v = a.vectors;
}

__forceinline__ const real** extras_of(const Arguments& a, const real** to, int64_t o) {
#pragma unroll
  for (int e = 0; e < EXTRAS; ++e) to[e] = a.extras[e] + o * a.units;
  return to;
}

// --- forward ----------------------------------------------------------------------------------------------------------

// The operand of a step's recurrent product, from the states before it.
__forceinline__ void enter(const Arguments& a, const Place& p, int64_t step) {
  if (step >= a.time) return;
  const int64_t r = p.row, t = time_of(a, step), o = outer_of(a, t, r);
  if (t >= length_of(a, r)) {
    if (a.entered && !a.starts)
      for (int64_t u = p.first; u < at_most(p.last, a.width); u = p.after(u)) put(a.entered + o * a.width + u, real(0));
    return;
  }
  if (cut(a, t, r))
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      for (int64_t u = p.first, i = r * width_of(a, s) + u; u < at_most(p.last, width_of(a, s)); u = p.after(u), ++i)
        a.states[s][i] = a.reset_to[s] ? a.reset_to[s][i] : real(0);
  if (RECURRENT == 0) return;
  const bool now = counts(a, o);
  for (int64_t u = p.first; u < at_most(p.last, a.width); u = p.after(u)) {
    const real h = now ? a.states[0][r * a.width + u] : real(0);
    store* const to = a.entering + r * a.width + u;
    for (int kind = 0; kind < (a.by_gate ? RECURRENT : 1); ++kind)
      put(to + kind * a.batch * a.width, h * (now ? noise(a, r, o, t, kind, u) : real(1)));
    if (!a.entered) continue;
    if (a.keep_plain)
      put(a.entered + o * a.width + u, h);
    else
      a.entered[o * a.width + u] = *to;
  }
}

// What a step gave: y, states and sequences; then the operand of the next.
__forceinline__ void commit(const Arguments& a, const Place& p, int64_t step) {
  const int64_t r = p.row, t = time_of(a, step), o = outer_of(a, t, r), larger = larger_of(a);
  if (t >= length_of(a, r)) {
    if (!a.starts) {
      for (int64_t u = p.first; u < at_most(p.last, a.width); u = p.after(u)) put(a.y + o * a.y_stride + u, real(0));
#pragma unroll
      for (int s = 0; s < STATES; ++s)
        for (int64_t u = p.first; u < at_most(p.last, width_of(a, s)) && a.sequences[s]; u = p.after(u))
          put(a.sequences[s] + o * a.sequence_strides[s] + u, real(0));
    }
  } else {
    const bool now = counts(a, o);
    for (int64_t u = p.first; u < at_most(p.last, larger); u = p.after(u)) {
      Kept kept;
      if (now) kept = kept_of(a, r, o, t, u);
#pragma unroll
      for (int s = 0; s < STATES; ++s) {
        if (u >= width_of(a, s)) continue;
        real* const state = a.states[s] + r * width_of(a, s) + u;
        if (now) {
          const real made = s == 0 && a.projected ? a.narrow[r * a.width + u] : a.made[(s * a.batch + r) * larger + u];
          const Zoneout& z = a.zoneout[s];
          const real before = *state;
          if (z.kind == 3 && z.apart) z.apart[o * width_of(a, s) + u] = before - made;
          *state = z.kind == 0   ? made
                   : z.kind == 1 ? kept.of[s] * before + (real(1) - kept.of[s]) * made
                   : z.kind == 2 ? (kept.of[s] > real(0) ? before : made)  // to the bit, also beside a NaN
                                 : made + kept.of[s] * (before - made);
        }
        if (a.sequences[s]) put(a.sequences[s] + o * a.sequence_strides[s] + u, *state);
        if (s > 0) continue;
        real* const held = a.held + r * a.width + u;
        if (a.mask && now) *held = *state;
        put(a.y + o * a.y_stride + u, now ? *state : *held);
      }
    }
  }
  enter(a, p, step + 1);
}

// An operand of a product inside the step: kept for backward, and rounded as a product takes it.
__forceinline__ void operand(const Arguments& a, const Place& p, int64_t o, int64_t t, const Link& link, int place) {
  const real* const value = a.scratch + (link.operand * a.batch + p.row) * a.units;
  store* const to = a.second + (place * a.batch + p.row) * a.units;
  for (int64_t u = p.first; u < at_most(p.last, a.units); u = p.after(u)) {
    put(to + u, value[u] * noise(a, p.row, o, t, link.gate, u));
    store* const kept = a.operands[link.product];
    if (!kept) continue;
    if (a.keep_plain)
      put(kept + o * a.units + u, value[u]);
    else
      kept[o * a.units + u] = to[u];
  }
}

template <int SEGMENT>
__forceinline__ void forward_part(const Arguments& a, int64_t step) {
  const Place p = place_of(a, FORWARD_MEANS > 0);
  const int64_t r = p.row, t = time_of(a, step), o = outer_of(a, t, r);
  if (t < length_of(a, r) && counts(a, o)) {
    Row row;
    row_of(a, row, p, o);
    const real* extras[MOST(EXTRAS)];
    row.e = extras_of(a, extras, o);
    row.means = a.means + r * MOST(FORWARD_MEANS);
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      row.before[s] = a.states[s] + r * width_of(a, s);
      row.after[s] = a.made + (s * a.batch + r) * larger_of(a);
    }
    if (a.bias_hh && SEGMENT == 0)
#pragma unroll
      for (int g = 0; g < RECURRENT; ++g)
        for (int64_t u = row.first; u < row.last; u = p.after(u))
          ((real*)row.r)[row.r_offset[g] + u] += a.bias_hh[g * a.units + u];
#pragma unroll
    for (int l = 0; l < FORWARD_LINK_COUNT; ++l)
      if (FORWARD_LINKS[l].segment == SEGMENT - 1 && a.bias_hh)
        for (int64_t u = row.first; u < row.last; u = p.after(u))
          row.scratch[FORWARD_LINKS[l].result * row.padded + u] += a.bias_hh[FORWARD_LINKS[l].gate * a.units + u];
    forward_segment(SEGMENT, row, {threadIdx.x});
    if (FORWARD_MEANS > 0) __syncthreads();
    int place = 0;
#pragma unroll
    for (int l = 0; l < FORWARD_LINK_COUNT; ++l)
      if (FORWARD_LINKS[l].segment == SEGMENT) operand(a, p, o, t, FORWARD_LINKS[l], place++);
    if (SEGMENT == FORWARD_SEGMENTS - 1 && a.projected)
      for (int64_t u = row.first; u < row.last; u = p.after(u)) {
        put(a.second + r * a.units + u, row.after[0][u]);
        if (a.unprojected) a.unprojected[o * a.units + u] = a.second[r * a.units + u];
      }
  } else if (!a.starts || t < length_of(a, r)) {
    for (int64_t u = p.first; u < at_most(p.last, a.units); u = p.after(u)) {
#pragma unroll
      for (int l = 0; l < FORWARD_LINK_COUNT; ++l)
        if (FORWARD_LINKS[l].segment == SEGMENT && a.operands[FORWARD_LINKS[l].product])
          put(a.operands[FORWARD_LINKS[l].product] + o * a.units + u, real(0));
      if (SEGMENT == FORWARD_SEGMENTS - 1 && a.unprojected) put(a.unprojected + o * a.units + u, real(0));
    }
  }
  if (SEGMENT == FORWARD_SEGMENTS - 1 && !a.projected) commit(a, p, step);
}

// --- backward ---------------------------------------------------------------------------------------------------------

// The gradients of the states before a step, all of it: what its product gave, and where a reset cut.
__forceinline__ void finish(const Arguments& a, const Place& p, int64_t step) {
  if (step >= a.time) return;
  const int64_t r = p.row, t = time_of(a, step), o = outer_of(a, t, r), larger = larger_of(a);
  if (t >= length_of(a, r)) return;
  if (counts(a, o)) {
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      for (int64_t u = p.first; u < at_most(p.last, a.units) && !(s == 0 && a.projected); u = p.after(u))
        a.dstates[s][r * width_of(a, s) + u] += a.made[(s * a.batch + r) * larger + u];
    if (LEAVES > 0)
      for (int64_t u = p.first; u < at_most(p.last, a.width); u = p.after(u)) {
        real sum = 0;
        if (a.by_gate) {
#pragma unroll
          for (int g = 0; g < RECURRENT; ++g)
            if (LEAF[g]) sum += noise(a, r, o, t, g, u) * a.through[(g * a.batch + r) * a.width + u];
        } else {
          sum = noise(a, r, o, t, 0, u) * a.through[r * a.width + u];
        }
        a.dstates[0][r * a.width + u] += sum;
      }
  }
  if (cut(a, t, r))
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      for (int64_t u = p.first, i = r * width_of(a, s) + u; u < at_most(p.last, width_of(a, s)); u = p.after(u), ++i) {
        if (a.dreset[s]) a.dreset[s][i] += a.dstates[s][i];
        a.dstates[s][i] = real(0);
      }
}

// What reaches a step from above and from after it.
__forceinline__ void begin(const Arguments& a, const Place& p, int64_t step) {
  finish(a, p, step + 1);
  const int64_t r = p.row, t = time_of(a, step), o = outer_of(a, t, r), larger = larger_of(a);
  const bool inside = t < length_of(a, r), now = inside && counts(a, o);
  if (!now && a.projected && (inside || !a.starts))
    for (int64_t u = p.first; u < at_most(p.last, a.width); u = p.after(u)) put(a.dprojected + o * a.width + u, real(0));
  if (!inside) return;
  for (int64_t u = p.first; u < at_most(p.last, larger); u = p.after(u)) {
    Kept kept;
    if (now) kept = kept_of(a, r, o, t, u);
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      const int64_t width = width_of(a, s);
      if (u >= width) continue;
      real* const state = a.dstates[s] + r * width + u;
      real whole = *state;
      if (a.dsequences[s]) whole += widened(a.dsequences[s][o * a.dsequence_strides[s] + u]);
      if (s == 0 && a.dy) {
        const real dy = widened(a.dy[o * a.dy_stride + u]);
        real* const held = a.held + r * a.width + u;
        if (now)
          whole += dy;
        else
          *held += dy;
      }
      if (s == 0 && a.mask && now) {
        real* const held = a.held + r * a.width + u;
        whole += *held, *held = real(0);
      }
      if (now) {
        const Zoneout& z = a.zoneout[s];
        if (z.kind == 3 && z.dgiven) z.dgiven[o * width + u] = whole * z.apart[o * width + u];
        const real d = kept.of[s] == real(1) ? real(0) : whole * (real(1) - kept.of[s]);
        a.given[(s * a.batch + r) * larger + u] = d;
        whole = kept.of[s] == real(0) ? real(0) : whole * kept.of[s];
        if (s == 0 && a.projected) {
          put(a.second + r * a.width + u, d);
          a.dprojected[o * a.width + u] = a.second[r * a.width + u];
        }
      }
      *state = whole;
    }
  }
}

template <int SEGMENT>
__forceinline__ void backward_part(const Arguments& a, int64_t step) {
  const Place p = place_of(a, BACKWARD_MEANS > 0);
  const int64_t r = p.row, t = time_of(a, step), o = outer_of(a, t, r);
  if (SEGMENT == 0 && !a.projected) begin(a, p, step);
  const bool inside = t < length_of(a, r), now = inside && counts(a, o);
  const int64_t there = inside || !a.starts;
  if (now) {
    Row row;
    row_of(a, row, p, o);
    const real* extras[MOST(EXTRAS)];
    row.e = extras_of(a, extras, o);
    row.means = a.means + r * MOST(BACKWARD_MEANS);
    real *dv[MOST(VECTORS)], *de[MOST(EXTRAS)];
    store* dp[MOST(PRODUCTS)];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) dv[v] = a.dv[v] + r * a.units;
#pragma unroll
    for (int e = 0; e < EXTRAS; ++e) de[e] = a.de[e] + o * a.units;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) dp[i] = a.dp[i] + o * a.units;
    row.dv = dv, row.de = de, row.dp = dp;
    row.dx = a.dx + o * GATES * a.units;
    row.dr = a.dr + o * RECURRENT * a.units;
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      row.d[s] = s == 0 && a.projected ? a.narrow + r * a.units : a.given + (s * a.batch + r) * larger_of(a);
      row.ds[s] = a.made + (s * a.batch + r) * larger_of(a);
    }
#pragma unroll
    for (int l = 0; l < BACKWARD_LINK_COUNT; ++l)
      if (BACKWARD_LINKS[l].segment == SEGMENT - 1 && a.noise_kind)
        for (int64_t u = row.first; u < row.last; u = p.after(u))
          row.scratch[BACKWARD_LINKS[l].result * row.padded + u] *= noise(a, r, o, t, BACKWARD_LINKS[l].gate, u);
    if (BACKWARD_MEANS > 0) __syncthreads();
    backward_segment(SEGMENT, row, {threadIdx.x});
    if (BACKWARD_MEANS > 0) __syncthreads();
    int place = 0;
#pragma unroll
    for (int l = 0; l < BACKWARD_LINK_COUNT; ++l)
      if (BACKWARD_LINKS[l].segment == SEGMENT) {
        const real* const value = row.scratch + BACKWARD_LINKS[l].operand * row.padded;
        for (int64_t u = row.first; u < row.last; u = p.after(u))
          put(a.second + (place * a.batch + r) * a.units + u, value[u]);
        ++place;
      }
  }
  if (SEGMENT < BACKWARD_SEGMENTS - 1) return;
  for (int64_t u = p.first; u < at_most(p.last, a.units); u = p.after(u)) {
    if (!now && there) {
#pragma unroll
      for (int g = 0; g < GATES; ++g) put(a.dx + (o * GATES + g) * a.units + u, real(0));
#pragma unroll
      for (int i = 0; i < PRODUCTS; ++i) put(a.dp[i] + o * a.units + u, real(0));
    }
#pragma unroll
    for (int g = 0; g < RECURRENT; ++g) {
      store* const dr = a.dr + (o * RECURRENT + g) * a.units + u;
      if (!now && there) put(dr, real(0));
      store* const to = a.to_r + (a.by_gate ? (g * a.batch + r) * a.units : (r * RECURRENT + g) * a.units) + u;
      if (now)
        *to = *dr;
      else
        put(to, real(0));
    }
  }
}

}  // namespace kernel

// --- the kernels ------------------------------------------------------------------------------------------------------

using kernel::Arguments;

struct Start {
  Arguments arguments;
  Arguments* to;
};
struct Step {
  Arguments* a;
  long long offset;  // of the steps of a graph
};

extern "C" __global__ void NAME(start)(const __grid_constant__ Start s) {
  const int* const from = (const int*)&s.arguments;
  for (int i = threadIdx.x; i < sizeof(Arguments) / 4; i += blockDim.x) ((int*)s.to)[i] = from[i];
}
extern "C" __global__ void NAME(advance)(const Step s) { s.a->base += s.offset; }
extern "C" __global__ void NAME(enter)(const Step s) {
  __shared__ Arguments a;
  kernel::bring(s.a, a);
  kernel::enter(a, kernel::place_of(a, false), 0);
}
extern "C" __global__ void NAME(commit)(const Step s) {
  __shared__ Arguments a;
  kernel::bring(s.a, a);
  kernel::commit(a, kernel::place_of(a, false), a.base + s.offset);
}
extern "C" __global__ void NAME(begin)(const Step s) {
  __shared__ Arguments a;
  kernel::bring(s.a, a);
  kernel::begin(a, kernel::place_of(a, false), a.time - 1 - a.base - s.offset);
}
extern "C" __global__ void NAME(finish)(const Step s) {
  __shared__ Arguments a;
  kernel::bring(s.a, a);
  kernel::finish(a, kernel::place_of(a, false), 0);
}

//: segments
