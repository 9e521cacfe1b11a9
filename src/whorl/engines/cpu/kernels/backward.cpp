// All steps of a group, backward: from the last that was processed to the first.

namespace kernel {

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
  // What the segments of some rows that lie one after the other read and write.
  auto soon = [&](Fetch& wanted, Group::Counted of) {
    const int64_t x_wide = cell.gates * k.units, r_wide = cell.recurrent * k.units;
    wanted.want(wanted.written, k.dx + of.first * x_wide, of.count * x_wide);
    if (!cell.dr_is_dx) wanted.want(wanted.written, k.dr + of.first * r_wide, of.count * r_wide);
    if (k.x) wanted.want(wanted.read, k.x + of.first * k.x_stride, of.count * k.x_stride);
    wanted.want(wanted.read, k.saved + of.first * row_saved, of.count * row_saved);
  };
  const int64_t beside = g.beside_backward();
  const bool together = g.together();
  bool fetched = false;
  for (int64_t i = 0; i < g.count; ++i)
    for (int v = 0; v < cell.vectors; ++v)
      memset(k.dv + (g.rows[i] * cell.vectors + v) * k.units + g.first, 0, size_t(g.last - g.first) * sizeof(real));

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
        add(to, from, g.begin_of(s), g.end_of(s));
      }
      if (g.counts(o)) {
        own.active[n] = i, own.outer[n] = o, ++n;
      } else {
        if (k.dy) add(k.dheld + r * k.width, g.dy(t, r, o), g.wfirst, g.wlast);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      const int64_t r = g.rows[own.active[j]], o = own.outer[j], c = g.compact(o);
      Row& row = own.row[j];
      if (!fetched) {  // of a whole group, before its segments begin
        Fetch wanted;
        soon(wanted, {c, 1});
        wanted.some(wanted.lines());
      }
      g.draw_zoneout(r, t, kept);
      for (int s = 0; s < cell.states; ++s) {
        real* state = k.dstates[s] + r * g.width_of(s);
        real* d = given + (j * cell.states + s) * larger;
        const int64_t begin = g.begin_of(s), end = g.end_of(s);
        if (s == 0 && k.dy) {
          const store* dy = g.dy(t, r, o);
          EACH_ALONE
          for (int64_t u = begin; u < end; ++u) state[u] += widened(dy[u]);
        }
        if (s == 0 && k.dheld) {
          real* held = k.dheld + r * k.width;
          add(state, held, begin, end), clear(held, begin, end);
        }
        if (k.zoneout[s].kind == 3)
          for (int64_t u = begin; u < end; ++u)
            k.zoneout[s].dgiven[o * g.width_of(s) + u] = state[u] * k.zoneout[s].apart[c * g.width_of(s) + u];
        if (k.zoneout[s].kind == 0)  // all of it goes through the step, and what the step gives takes its place
          d = state;
        else
          g.with_zoneout(s, o, kept[s], [=](int64_t u, real z) {
            const real whole = state[u];
            d[u] = z == real(1) ? real(0) : whole * (real(1) - z);
            state[u] = z == real(0) ? real(0) : whole * z;
          });
        row.d[s] = s == 0 && k.hr ? unprojected + j * g.padded : d;
        row.ds[s] = made + (j * cell.states + s) * larger;
      }
      row.scratch = g.scratch_of(cell.backward, scratch, j, beside), row.padded = g.padded;
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
      for (int v = 0; v < cell.vectors; ++v) list[v] = k.dv + (r * cell.vectors + v) * k.units;
      for (int e = 0; e < cell.extras; ++e) list[cell.vectors + e] = k.de[e] + o * k.units;
      for (int p = 0; p < cell.products; ++p) ((store**)list)[cell.vectors + cell.extras + p] = k.dp[p] + c * k.units;
      row.dv = list, row.de = list + cell.vectors, row.dp = (store**)list + cell.vectors + cell.extras;
      if (k.hr) {
        store* entered = entering + j * deep;
        const real* d = k.zoneout[0].kind == 0 ? k.dstates[0] + r * k.width : given + j * cell.states * larger;
        g.enter(entered, k.width, d, nullptr, g.wfirst, g.wlast);
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
      for (int64_t j = 0; j < n; ++j) {
        if (segment == 0 && k.dy && step > 0) {
          const int64_t before = k.reverse ? t + 1 : t - 1, r = g.rows[own.active[j]];
          fetch<0>(g.dy(before, r, g.outer(before, r)) + g.wfirst, g.wlast - g.wfirst);
        }
        if (j % beside == 0) cell.backward.segment(segment, own.row + j, n - j < beside ? n - j : beside, g.team);
      }
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
    Fetch wanted;
    fetched = false;
    if (n) g.team.wait();
    for (int m = 0; m < w.count && n && !(k.unread && step == 0); ++m) {
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
      if (!fetched && together && step > 0)
        soon(wanted, g.counted(k.reverse ? t + 1 : t - 1)), fetched = true;
      g.multiply(w.packed[m], n, own.a, own.c, begun && !apart, &wanted);
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
        real* to = k.dstates[s] + r * g.width_of(s);
        const real* from = own.row[j].ds[s];
        const bool added = k.zoneout[s].kind != 0;
        if (s == 0 && k.hr) {  // a step cannot read a state that is projected
          if (!added) memset(to + g.wfirst, 0, size_t(g.wlast - g.wfirst) * sizeof(real));
        } else if (added) {
          EACH_ALONE
          for (int64_t u = g.first; u < g.last; ++u) to[u] += from[u];
        } else if (s > 0 || !begun) {
          memcpy(to + g.first, from + g.first, size_t(g.last - g.first) * sizeof(real));
        }
      }
      if (!begun) continue;
      real* to = k.dstates[0] + r * k.width;
      const real* from = through + j * g.wide;
      const real* base = k.hr || k.zoneout[0].kind != 0 ? to : own.row[j].ds[0];
      const real* factor = k.noise_kind && k.noise_kind != 2 ? g.noise(r, o, t, 0, own.drawn) : nullptr;
      if (factor) {
        EACH_ALONE
        for (int64_t u = g.wfirst; u < g.wlast; ++u) to[u] = base[u] + factor[u] * from[u];
      } else {
        EACH_ALONE
        for (int64_t u = g.wfirst; u < g.wlast; ++u) to[u] = base[u] + from[u];
      }
    }
    for (int64_t i = 0; i < g.count && k.reset; ++i) {
      const int64_t r = g.rows[i];
      if (t >= g.length(r) || !g.cut(t, r)) continue;
      for (int s = 0; s < cell.states; ++s) {
        real* state = k.dstates[s] + r * g.width_of(s);
        real* to = k.dreset ? k.dreset[s] + r * g.width_of(s) : nullptr;
        if (to) add(to, state, g.begin_of(s), g.end_of(s));
        clear(state, g.begin_of(s), g.end_of(s));
      }
    }
  }
}

}  // namespace kernel
