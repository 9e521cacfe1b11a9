// All steps of a group, forward.

namespace kernel {

// The input projection of the rows that count from `step` to before step + ahead, into row.x of `at`.
template <typename At>
static void project_ahead(const Group& g, const Own& own, int64_t step, int64_t ahead, At at) {
  const Sweep& k = g.k;
  int64_t n = 0;
  for (int64_t next = step; next < step + ahead && next < k.time; ++next)
    for (int64_t i = 0; i < g.count; ++i) {
      const int64_t r = g.rows[i], t = k.reverse ? k.time - 1 - next : next;
      if (t >= g.length(r) || !g.counts(g.outer(t, r))) continue;
      const int64_t o = g.outer(t, r);
      own.ahead_a[n] = g.input(t, r, o), own.ahead_c[n] = at(next, i, o), ++n;
    }
  g.team.wait();
  g.multiply(g.w.input, n, own.ahead_a, own.ahead_c);
  g.team.wait();
}

static void forward_group(const Group& g, Memory own_memory, Memory memory) {
  const Sweep& k = g.k;
  const Cell& cell = g.cell;
  const Weights& w = g.w;
  const int64_t slots = cell.forward.slots * g.padded, deep = up(up(k.width, STEP), 32), larger = g.larger;
  const int64_t ahead = steps_ahead(k, g.count), x_wide = up(cell.gates * k.units, LANES);
  Own own = Own::take(own_memory, cell, g.count, larger, cell.forward.means, ahead);
  const int kinds = k.noise_kind == 2 ? cell.recurrent : 1;
  real* r_rows = memory.take<real>(g.count * w.r_size);
  real* scratch = memory.take<real>(g.count * slots);
  real* after = memory.take<real>(g.count * cell.states * larger);
  real* narrow = memory.take<real>(g.count * g.wide);
  real* room = memory.take<real>(g.count * cell.extras * g.padded);
  store* entering = memory.take<store>(g.count * kinds * deep);
  store* second = memory.take<store>(g.count * up(up(larger, STEP), 32));
  real* x_rows = memory.take<real>(k.x ? 0 : ahead * g.count * x_wide);
  auto x_of = [&](int64_t step, int64_t i, int64_t o) {
    return k.x ? k.x + g.compact(o) * k.x_stride : x_rows + (step % ahead * g.count + i) * x_wide;
  };
  real* kept[MOST_STATES];
  for (int s = 0; s < MOST_STATES; ++s) kept[s] = own.drawn + s * larger;
  const bool direct = WHORL_DTYPE != 16 && k.noise_kind == 0;
  const bool into_kept = !direct && k.entered && !k.keep_plain && kinds == 1 && k.width == deep;  // the product reads it there
  auto entering_of = [&](int64_t j, int kind, int64_t c) {
    return into_kept ? k.entered + c * k.width : entering + (j * kinds + kind) * deep;
  };
  const int64_t row_saved = cell.saved * k.units + cell.saved_means, beside = g.beside();
  const bool together = g.together();
  for (int64_t i = 0; i < g.count; ++i) own.last[i] = -1;

  for (int64_t step = 0; step < k.time; ++step) {
    const int64_t t = k.reverse ? k.time - 1 - step : step;
    int64_t n = 0;
    if (ahead && step % ahead == 0) project_ahead(g, own, step, ahead, x_of);
    for (int64_t i = 0; i < g.count; ++i) {
      const int64_t r = g.rows[i];
      if (t >= g.length(r)) {
        if (k.starts) continue;  // a PackedSequence has no such rows
        const int64_t o = g.outer(t, r);
        if (k.y) clear(k.y + o * k.y_stride, g.wfirst, g.wlast);
        for (int s = 0; s < cell.states && k.sequences; ++s)
          clear(k.sequences[s] + o * k.sequence_strides[s], g.begin_of(s), g.end_of(s));
        continue;
      }
      const int64_t o = g.outer(t, r);
      if (g.cut(t, r))
        for (int s = 0; s < cell.states; ++s) {
          real* state = k.states[s] + r * g.width_of(s);
          const real* to = k.reset_to ? k.reset_to[s] + r * g.width_of(s) : nullptr;
          to ? copy(state, to, g.begin_of(s), g.end_of(s)) : clear(state, g.begin_of(s), g.end_of(s));
        }
      if (g.counts(o)) {
        own.active[n] = i, own.outer[n] = o, ++n;
        continue;
      }
      if (k.y) {
        store* y = k.y + o * k.y_stride;
        const store* held = own.last[i] < 0 ? nullptr : k.y + own.last[i] * k.y_stride;
        held ? g.keep(y, held, g.wfirst, g.wlast) : clear(y, g.wfirst, g.wlast);
      }
      for (int s = 0; s < cell.states && k.sequences; ++s)
        copy(k.sequences[s] + o * k.sequence_strides[s], k.states[s] + r * g.width_of(s), g.begin_of(s), g.end_of(s));
    }
    if (n == 0) continue;

    for (int64_t j = 0; j < n; ++j) {
      const int64_t i = own.active[j], r = g.rows[i], o = own.outer[j], c = g.compact(o);
      Row& row = own.row[j];
      row.units = k.units, row.first = g.first, row.last = g.last, row.means_at = cell.saved * k.units;
      row.x = x_of(step, i, o);
      row.r = r_rows + j * w.r_size, row.r_offset = w.r_offset;
      row.scratch = g.scratch_of(cell.forward, scratch, j, beside), row.padded = g.padded;
      row.saved = k.saved ? k.saved + c * row_saved : own.nowhere;
      if (k.saved && !(together && cell.recurrent)) {
        Fetch wanted;
        wanted.want(wanted.written, row.saved, row_saved);
        wanted.some(wanted.lines());
      }
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
          g.enter(entering_of(j, kind, c), k.width, h, g.noise(r, o, t, kind, own.drawn), g.wfirst, g.wlast);
      if (into_kept) continue;
      if (k.entered && !k.keep_plain && !direct)
        g.keep(k.entered + c * k.width, entering + j * deep, g.wfirst, g.wlast);
      else if (k.entered)
        for (int64_t u = g.wfirst; u < g.wlast; ++u) put(k.entered + c * k.width + u, h[u]);
    }
    Fetch wanted;  // what later steps read and where their projection goes, and where this step keeps what backward reads
    if (const int64_t later = step + (ahead ? ahead : 1); together && later < k.time) {
      const int64_t at = k.reverse ? k.time - 1 - later : later;
      const Group::Counted next = g.counted(at);
      if (k.x) wanted.want(wanted.read, k.x + next.first * k.x_stride, next.count * k.x_stride);
      if (ahead && !k.input_step)
        wanted.want(wanted.read, k.input + g.outer(at, g.rows[0]) * k.inputs, g.count * k.inputs);
    }
    if (together && k.saved) wanted.want(wanted.read, own.row[0].saved, n * row_saved);
    g.team.wait();
    for (int m = 0; m < w.count; ++m) {
      if (!w.leaf[m]) continue;
      for (int64_t j = 0; j < n; ++j) {
        own.a[j] = direct ? (const store*)own.row[j].before[0]
                          : entering_of(j, kinds > 1 ? w.first[m] : 0, g.compact(own.outer[j]));
        own.c[j] = (real*)own.row[j].r + w.r_offset[w.first[m]];
      }
      g.multiply(w.packed[m], n, own.a, own.c, false, &wanted);
    }
    g.team.wait();
    for (int segment = 0; segment < cell.forward.segments; ++segment) {
      for (int64_t j = 0; j < n; ++j) {
        if (segment == 0 && k.y) fetch<1>(k.y + own.outer[j] * k.y_stride + g.wfirst, g.wlast - g.wfirst);
        if (j % beside == 0) cell.forward.segment(segment, own.row + j, n - j < beside ? n - j : beside, g.team);
      }
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
              copy(operand, value, g.wfirst, g.wlast);
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
        if (k.sequences) copy(k.sequences[s] + o * k.sequence_strides[s], state, begin, end);
        if (s > 0 || !k.y) continue;
        store* y = k.y + o * k.y_stride;
        EACH_ALONE
        for (int64_t u = begin; u < end; ++u) put(y + u, state[u]);
        own.last[i] = o;
      }
    }
  }
}

}  // namespace kernel
