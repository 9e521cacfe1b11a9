// A call of x, weights and initial states, with or without a mask, lengths, resets and noise: each pass of a layer and
// direction in one call, the products of all steps and the sums of gradients over rows too.  What its sizes decide stands
// in a Sweep that many calls share, and its tensors in a Plain.

namespace kernel {

struct Plain {
  const store* input;                // [outer rows, inputs]
  int64_t input_step, input_row;     // as a Sweep has them
  const store *ih, *hh;              // [gates x units, inputs], [recurrent gates x units, width]
  int64_t ih_turned, hh_turned;      // or the other way round
  const real *bias_ih, *bias_hh;     // of the same rows; null: zero
  const real* const* vectors;        // [units] each; null: they stand behind the Plain
  int64_t within;                    // the loop over time makes the input projection
  real* x;                           // it, [outer rows, x_stride]: room for it, and where steps read it backward; or null
  store* y;                          // [outer rows, y_stride]; null: not wanted
  real* saved;                       // [outer rows, saved x units + saved_means]; null: not kept
  const real* starts[MOST_STATES];   // initial states [batch, width]; null: zero
  real* finals[MOST_STATES];         // forward: final states
  const real* noise;                 // of the recurrent product: as a Sweep has it; null: none, or drawn
  uint64_t seed;
  store* entered;                    // what entered the recurrent product, [outer rows, width]; null: the output of the
                                     // step before times `noise`
  const uint8_t* mask;               // which steps count: then the rows that are kept or room are compact; null: all
  int64_t mask_step, mask_row;       // from one of its steps and sequences to the next
  const int64_t* lengths;            // of each sequence how many steps count, likewise; null: all
  int64_t lengths_row;
  const uint8_t* reset;              // before which steps states are reset; null: none
  int64_t reset_step, reset_row;
  const real* reset_to[MOST_STATES];  // [batch, width]; null: zero

  // What follows is backward's alone.
  const store* dy;                   // [outer rows, dy_stride]; null: zero
  int64_t dy_step, dy_row;           // as a Sweep has them
  const real* dfinals[MOST_STATES];  // gradients of the final states; null: zero
  real* dstarts[MOST_STATES];        // of the initial ones; null: not wanted
  const store* begin;                // the first state of `starts` as it enters products; null: zero
  store *dx, *dr;                    // of the projections, [outer rows, gates x units]; one where the cell has dr_is_dx
  real* to_input;                    // gradient of the input, [outer rows, inputs filled up to 64]; null: not wanted
  real *to_ih, *to_hh;               // of the weights
  real *to_bias_ih, *to_bias_hh;     // of the biases; null: not wanted
  real* dv;                          // of the vectors in each sequence, [batch, vectors, units]: room
  const int64_t* sums;               // of each vector the one whose gradient it has
  real* to_vectors;                  // of the vectors, [vectors, units]
  real* dreset[MOST_STATES];          // gradients of it; null: not wanted

  // Also tells `k` of them.
  Places places(Sweep& k, Scratch& scratch) const {
    const Places made = {k.time, k.batch, mask, {mask_step, mask_row}, scratch, lengths, lengths_row};
    k.place = made.place, k.mask = mask ? made.mask : nullptr, k.lengths = made.lengths;
    if (made.counted && made.is_uneven(k.ends, k.groups)) k.order = made.dealt(k.ends, k.groups, scratch);
    if (!reset) return made;
    uint8_t* by_time = scratch.take<uint8_t>(k.time * k.batch);
    for (int64_t o = 0, t = 0; t < k.time; ++t)
      for (int64_t r = 0; r < k.batch; ++r, ++o) by_time[o] = reset[t * reset_step + r * reset_row];
    k.reset = by_time, k.reset_to = reset_to[0] ? reset_to : nullptr;
    return made;
  }
  const real* const* all_vectors() const { return vectors ? vectors : (const real* const*)(this + 1); }
  Apart input_apart(const Sweep& k) const {
    return input_step ? Apart{input_step, input_row} : Apart{k.batch * k.inputs, k.inputs};
  }
};

// The masks of the recurrent product that all steps share, where none are given; null: there are none.
static const real* held_masks(const Sweep& k, Scratch& scratch) {
  if (k.noise_kind != 1 && k.noise_kind != 2) return nullptr;
  const int64_t gates = k.noise_kind == 2 ? k.cell->recurrent : 1, each = k.batch * k.width;
  real* made = scratch.take<real>(gates * each);
  for (int64_t gate = 0; gate < gates; gate += 4)  // a counter has words for four, and the next four a purpose of their own
    draw_masks(made + gate * each, gates - gate < 4 ? gates - gate : 4, k.batch, k.width, nullptr, k.seed,
               k.noise_tag + gate / 4, k.noise_below, k.noise_scale);
  return made;
}

static void plain_forward(const Sweep& sizes, const Plain& p, int threads) {
  Sweep k = sizes;
  Scratch scratch;
  const Places places = p.places(k, scratch);
  k.input = p.input, k.input_step = p.input_step, k.input_row = p.input_row;
  k.ih = p.ih, k.bias_ih = p.bias_ih, k.hh = p.hh, k.bias_hh = p.bias_hh;
  k.ih_turned = p.ih_turned, k.hh_turned = p.hh_turned;
  k.vectors = p.all_vectors(), k.x = p.x, k.y = p.y, k.saved = p.saved, k.states = p.finals;
  k.seed = p.seed, k.entered = p.entered, k.noise = p.noise ? p.noise : held_masks(k, scratch);
  for (int s = 0; s < k.cell->states; ++s) set_or_zero(p.finals[s], p.starts[s], k.batch * (s ? k.units : k.width));
  if (!p.within) {
    const store* input = places.place ? places.gathered(p.input, p.input_apart(k), k.inputs, scratch) : p.input;
    const int64_t wide = k.cell->gates * k.units;
    project({p.x, input, p.ih, p.bias_ih, places.rows, k.inputs, wide, k.x_stride, k.batch, !p.ih_turned, {}, {}, {}, nullptr}, threads);
    k.input = nullptr;
  }
  run_all(k, false);
}

struct Vectors {
  const Plain* p;
  int64_t count, batch, units;
};

// The gradient of each vector, over sequences in an order that their number alone decides: in runs, so that no sum is long.
static void sum_vectors(void* data, int thread, int threads) {
  const Vectors& job = *(Vectors*)data;
  constexpr int64_t run = 32;
  const int64_t apart = job.count * job.units;
  for (int64_t v = thread; v < job.count; v += threads) {
    if (job.p->sums[v] != v) continue;
    real* rows = job.p->dv + v * job.units;
    auto add = [&](int64_t to, int64_t from) {
      EACH_ALONE
      for (int64_t u = 0; u < job.units; ++u) rows[to * apart + u] += rows[from * apart + u];
    };
    for (int64_t r = 0; r < job.batch; ++r)
      if (r % run) add(r - r % run, r);
    for (int64_t r = run; r < job.batch; r += run) add(0, r);
    for (int64_t same = v; same < job.count; ++same)
      if (job.p->sums[same] == v) set_or_zero(job.p->to_vectors + same * job.units, rows, job.units);
  }
}

static void plain_backward(const Sweep& sizes, const Plain& p, int threads) {
  Sweep k = sizes;
  const Cell& cell = *k.cell;
  Scratch scratch;
  const Places places = p.places(k, scratch);
  const int64_t rows = places.rows, later = rows - k.batch, each = k.batch * k.units;
  const int64_t x_wide = cell.gates * k.units, wide = cell.recurrent * k.units, inputs = up(k.inputs, 64);
  real* dstates[MOST_STATES];
  for (int s = 0; s < cell.states; ++s) {
    dstates[s] = p.dstarts[s] ? p.dstarts[s] : scratch.take<real>(each);
    set_or_zero(dstates[s], p.dfinals[s], each);
  }
  for (int s = 0; s < cell.states && p.dreset[0]; ++s) set_or_zero(p.dreset[s], nullptr, each);
  if (k.mask) k.dheld = scratch.take<real>(each), set_or_zero(k.dheld, nullptr, each);
  k.hh = p.hh, k.hh_turned = p.hh_turned, k.vectors = p.all_vectors(), k.x = p.x, k.y = p.y, k.saved = p.saved;
  k.dy = p.dy, k.dy_step = p.dy_step, k.dy_row = p.dy_row, k.dstates = dstates, k.dx = p.dx, k.dr = p.dr, k.dv = p.dv;
  k.dreset = p.dreset[0] ? p.dreset : nullptr, k.unread = !p.dstarts[0] && !k.dreset, k.seed = p.seed;
  k.noise = p.noise ? p.noise : held_masks(k, scratch);
  run_all(k, true);

  const Shares shares = Shares::of_batch(places, (x_wide * k.inputs + wide * k.width) * int64_t(sizeof(real)), scratch);
  if (p.to_input) {
    real* made = k.place ? scratch.take<real>(rows * inputs) : p.to_input;
    project({made, p.dx, p.ih, nullptr, rows, x_wide, k.inputs, inputs, k.batch, p.ih_turned != 0, {}, {}, {}, nullptr}, threads, &shares);
    if (k.place) {
      set_or_zero(p.to_input, nullptr, k.time * k.batch * inputs);
      places.spread(p.to_input, {k.batch * inputs, inputs}, made, inputs, inputs);
    }
  }
  if (p.to_bias_ih) set_or_zero(p.to_bias_ih, nullptr, x_wide);
  const Operand input = {p.to_ih, p.input, k.inputs, p.input_step ? p.input_row : k.inputs, 0, rows, nullptr, nullptr,
                         k.batch, p.input_step, nullptr, 0, x_wide, k.place ? places.at(p.input_apart(k), scratch) : nullptr};
  // Of the recurrent weights: one operand, or with a factor for each gate one that the gate's columns meet.  What entered,
  // but for its factor, is the output of the step before, and at first the initial state.
  Operand gates[MOST_GATES];
  const int count = k.noise_kind == 2 ? cell.recurrent : 1;
  for (int gate = 0; gate < count; ++gate) {
    const int64_t columns = wide / count, first = gate * columns, from = k.reverse ? 0 : k.batch;
    const real* factor = k.noise && k.keep_plain ? k.noise + gate * each : nullptr;
    const store* y = k.reverse ? p.y + k.batch * k.y_stride : p.y;
    const Operand outputs = {p.to_hh, y, k.width, k.y_stride, from, from + later, factor, nullptr, k.batch, 0, nullptr, first,
                             first + columns};
    const Operand kept = {p.to_hh, p.entered, k.width, k.width, 0, rows, factor, places.sequence, k.batch, 0, nullptr, first,
                          first + columns};
    gates[gate] = p.entered ? kept : outputs;
  }
  auto outer_with = [&](Outer o, int sides) {
    for (int gate = 0; gate < sides; ++gate) o.operands[o.count++] = gates[gate];
    outer(o, threads, o.rows == rows ? &shares : nullptr);
  };
  const store* dr = cell.dr_is_dx ? p.dx : p.dr;
  real* sums = cell.dr_is_dx ? nullptr : p.to_bias_hh;
  if (sums) set_or_zero(sums, nullptr, wide);
  // one pass over the gradient makes both where both projections have the same
  outer_with({p.to_bias_ih, p.dx, rows, x_wide, x_wide, false, 1, {input}, 0, 0}, cell.dr_is_dx ? count : 0);
  if (!cell.dr_is_dx) outer_with({sums, dr, rows, wide, wide, false, 0, {}, 0, 0}, count);
  if (!p.entered && p.begin) {
    for (int gate = 0; gate < count; ++gate) {
      Operand& of = gates[gate];
      of.b = p.begin, of.ldb = k.width, of.from = 0, of.to = k.batch;
    }
    outer_with({nullptr, dr + (k.reverse ? later * wide : 0), k.batch, wide, wide, true, 0, {}, 0, 0}, count);
  }
  if (cell.dr_is_dx && p.to_bias_hh) memcpy(p.to_bias_hh, p.to_bias_ih, size_t(wide) * sizeof(real));
  Vectors vectors = {&p, cell.vectors, k.batch, k.units};
  if (cell.vectors) parallel(cell.vectors * k.batch * k.units < 200000 ? 1 : threads, sum_vectors, &vectors);
}

}  // namespace kernel

extern "C" {

int64_t whorl_plain_size() { return int64_t(sizeof(kernel::Plain)); }
int64_t whorl_plain_forward(const kernel::Sweep* sizes, const kernel::Plain* p, int64_t threads) {
  return kernel::missing([&] { kernel::plain_forward(*sizes, *p, int(threads)); });
}
int64_t whorl_plain_backward(const kernel::Sweep* sizes, const kernel::Plain* p, int64_t threads) {
  return kernel::missing([&] { kernel::plain_backward(*sizes, *p, int(threads)); });
}
}
