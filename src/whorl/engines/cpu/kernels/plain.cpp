// A call of x, weights and initial states alone: each pass of a layer and direction in one call, the products of all
// steps and the sums of gradients over rows too.  What its sizes decide stands in a Sweep that many calls share, and its
// tensors in a Plain.

namespace kernel {

struct Plain {
  const store* input;                // [outer rows, inputs]
  const store *ih, *hh;              // [gates x units, inputs], [recurrent gates x units, width]
  const real *bias_ih, *bias_hh;     // of the same rows; null: zero
  const real* const* vectors;        // [units] each
  int64_t within;                    // the loop over time makes the input projection
  real* x;                           // it, [outer rows, x_stride]: room for it, and where steps read it backward; or null
  store* y;                          // [outer rows, y_stride]
  real* saved;                       // [outer rows, saved x units + saved_means]; null: not kept
  const real* starts[MOST_STATES];   // initial states [batch, width]; null: zero
  real* finals[MOST_STATES];         // forward: final states
  const store* dy;                   // [outer rows, dy_stride]; null: zero
  const real* dfinals[MOST_STATES];  // gradients of the final states; null: zero
  real* dstarts[MOST_STATES];        // of the initial ones; null: not wanted
  const store* begin;                // the first state of `starts` as it enters products; null: zero
  store *dx, *dr;                    // of the projections, [outer rows, gates x units]; one where the cell has dr_is_dx
  real* to_input;                    // gradient of the input, [outer rows, inputs filled up to 64]; null: not wanted
  real *to_ih, *to_hh;               // of the weights
  real *to_bias_ih, *to_bias_hh;     // of the biases; null: not wanted
  real* const* dv;                   // of the vectors in each sequence, [batch, units] each: room
  const int64_t* sums;               // of each vector the one whose gradient it has
  real* const* to_vectors;           // of the vectors, [units] each
};

static void set_or_zero(real* to, const real* from, int64_t count) {
  from ? memcpy(to, from, size_t(count) * sizeof(real)) : memset(to, 0, size_t(count) * sizeof(real));
}

static void plain_forward(const Sweep& sizes, const Plain& p, int threads) {
  Sweep k = sizes;
  k.input = p.input, k.ih = p.ih, k.bias_ih = p.bias_ih, k.hh = p.hh, k.bias_hh = p.bias_hh;
  k.vectors = p.vectors, k.x = p.x, k.y = p.y, k.saved = p.saved, k.states = p.finals;
  for (int s = 0; s < k.cell->states; ++s) set_or_zero(p.finals[s], p.starts[s], k.batch * (s ? k.units : k.width));
  if (!p.within) {
    project({p.x, p.input, p.ih, p.bias_ih, k.time * k.batch, k.inputs, k.cell->gates * k.units, k.x_stride, true, 0, {}},
            threads);
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
  for (int64_t v = thread; v < job.count; v += threads) {
    if (job.p->sums[v] != v) continue;
    real* rows = job.p->dv[v];
    auto add = [&](int64_t to, int64_t from) {
      EACH_ALONE
      for (int64_t u = 0; u < job.units; ++u) rows[to * job.units + u] += rows[from * job.units + u];
    };
    for (int64_t r = 0; r < job.batch; ++r)
      if (r % run) add(r - r % run, r);
    for (int64_t r = run; r < job.batch; r += run) add(0, r);
    for (int64_t same = v; same < job.count; ++same)
      if (job.p->sums[same] == v) set_or_zero(job.p->to_vectors[same], rows, job.units);
  }
}

static void plain_backward(const Sweep& sizes, const Plain& p, int threads) {
  Sweep k = sizes;
  const Cell& cell = *k.cell;
  const int64_t rows = k.time * k.batch, later = rows - k.batch;
  const int64_t x_wide = cell.gates * k.units, wide = cell.recurrent * k.units, inputs = up(k.inputs, 64);
  real* dstates[MOST_STATES];
  real* room = (real*)aligned_alloc(64, size_t(MOST_STATES * k.batch * up(k.units, 64)) * sizeof(real));
  for (int s = 0; s < cell.states; ++s) {
    dstates[s] = p.dstarts[s] ? p.dstarts[s] : room + s * k.batch * up(k.units, 64);
    set_or_zero(dstates[s], p.dfinals[s], k.batch * k.units);
  }
  k.hh = p.hh, k.vectors = p.vectors, k.x = p.x, k.y = p.y, k.saved = p.saved;
  k.dy = p.dy, k.dstates = dstates, k.dx = p.dx, k.dr = p.dr, k.dv = p.dv, k.unread = !p.dstarts[0];
  run_all(k, true);
  free(room);

  if (p.to_input)
    project({p.to_input, p.dx, p.ih, nullptr, rows, x_wide, k.inputs, inputs, false, 0, {}}, threads);
  if (p.to_bias_ih) set_or_zero(p.to_bias_ih, nullptr, x_wide);
  outer({p.to_ih, p.to_bias_ih, p.dx, p.input, rows, x_wide, k.inputs, x_wide, k.inputs, false, 0, 0, nullptr, nullptr}, threads);
  // What entered the recurrent product of a step is the output of the step before, and at first the initial state.
  const store* dr = cell.dr_is_dx ? p.dx : p.dr;
  real* sums = cell.dr_is_dx ? nullptr : p.to_bias_hh;
  if (sums) set_or_zero(sums, nullptr, wide);
  const store *others = k.reverse ? dr : dr + k.batch * wide, *first = k.reverse ? dr + later * wide : dr;
  const store* before = k.reverse ? p.y + k.batch * k.y_stride : p.y;
  if (later)
    outer({p.to_hh, sums, others, before, later, wide, k.width, wide, k.y_stride, false, 0, 0, nullptr, nullptr}, threads);
  else
    set_or_zero(p.to_hh, nullptr, wide * k.width);
  if (p.begin)
    outer({p.to_hh, sums, first, p.begin, k.batch, wide, k.width, wide, k.width, true, 0, 0, nullptr, nullptr}, threads);
  else if (sums)
    for (int64_t r = 0; r < k.batch; ++r)
      for (int64_t u = 0; u < wide; ++u) sums[u] += widened(first[r * wide + u]);
  if (cell.dr_is_dx && p.to_bias_hh) memcpy(p.to_bias_hh, p.to_bias_ih, size_t(wide) * sizeof(real));
  Vectors vectors = {&p, cell.vectors, k.batch, k.units};
  if (cell.vectors) parallel(cell.vectors * k.batch * k.units < 200000 ? 1 : threads, sum_vectors, &vectors);
}

}  // namespace kernel

extern "C" {

int64_t whorl_plain_size() { return int64_t(sizeof(kernel::Plain)); }
void whorl_plain_forward(const kernel::Sweep* sizes, const kernel::Plain* p, int64_t threads) {
  kernel::plain_forward(*sizes, *p, int(threads));
}
void whorl_plain_backward(const kernel::Sweep* sizes, const kernel::Plain* p, int64_t threads) {
  kernel::plain_backward(*sizes, *p, int(threads));
}
}
