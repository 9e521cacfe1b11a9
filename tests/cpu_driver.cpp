// Drives the kernels of engine `cpu` without Python, so that a sanitizer sees all of their memory and threads.
//
// After denied.cpp and the text of the loop (kernels/types.cpp to the last of them) stand these lines; CELLS names the
// functions that give each cell.  Every buffer is exactly as long as kernels/sweep.cpp says.  All that a sweep makes must
// be the same to the bit with any number of threads and teams, where threads cannot be made, and after memory was denied.

#include <stdio.h>

#define CELL(name) extern "C" const kernel::Cell* name();
CELLS
#undef CELL

using namespace kernel;

namespace {

uint32_t seed = 1;
double uniform() { return (seed = seed * 1664525u + 1013904223u) / 4294967296.0; }

int wrong = 0;
bool denying = false;

// A call of a function that takes memory; where `denying`, first with each piece of it denied: each time it says how much
// that was, holds nothing more than before, and the next call is as if it had not been.
template <typename Body>
void call(Body body) {
  int64_t missing = 1;
  for (int64_t count = denying ? 1 : 0; missing; ++count) {
    const int64_t before = denied_held();
    denied_next(count);
    missing = body();
    if (missing == denied_bytes() && (!missing || denied_held() == before) && (missing || denied::next || !denying)) continue;
    printf("denied %d bytes at %d, said %d, kept %d\n", int(denied_bytes()), int(count), int(missing), int(denied_held() - before));
    ++wrong;
    break;
  }
  denied_next(0);
}

struct Bytes {
  char* data;
  size_t size;
};
Bytes held[1000];
int held_count = 0;

template <typename T>
T* make(int64_t count) {  // zeros, exactly as long as asked for
  const size_t size = size_t(count) * sizeof(T);
  char* made = (char*)malloc(size ? size : 1);
  memset(made, 0, size);
  held[held_count++] = {made, size};
  return (T*)made;
}
template <typename T>
T* draw(int64_t count, double scale = 0.3) {
  T* made = make<T>(count);
  for (int64_t i = 0; i < count; ++i) put(made + i, real((2 * uniform() - 1) * scale));
  return made;
}
void release() {
  while (held_count) free(held[--held_count].data);
}

uint64_t digest(uint64_t before, const void* data, size_t size) {  // FNV-1a
  for (size_t i = 0; i < size; ++i) before = (before ^ ((const uint8_t*)data)[i]) * 1099511628211u;
  return before;
}

struct Case {
  const char* name;
  bool marks, sequences, initial;
  int64_t noise, zoneout, projection, reverse;
};
const Case CASES[] = {
    {"plain", false, false, true, 0, 0, 0, 0},
    {"marks", true, true, true, 0, 1, 0, 1},
    {"noise by gate", true, false, false, 2, 2, 0, 0},
    {"noise by step, projection", false, true, true, 4, 2, 21, 1},
    {"held noise, projection", true, false, true, 1, 0, 21, 0},
};

struct Threads {
  int64_t threads, team;
  bool memory_denied, threads_denied;
};
const Threads WAYS[] = {{1, 1}, {3, 1}, {2, 2}, {4, 2}, {3, 3}, {2, 2, true}, {4, 2, false, true}};

// A digest of everything that forward and backward make.
uint64_t sweep(const Cell& cell, const Case& form, Threads way) {
  seed = 7;
  Sweep k = {};
  k.cell = &cell;
  k.time = 5, k.batch = 6, k.units = 37, k.width = form.projection ? form.projection : k.units;
  k.reverse = form.reverse, k.threads = way.threads, k.team = way.team;
  k.groups = way.threads / way.team;
  const int64_t rows = k.time * k.batch;
  int64_t* order = make<int64_t>(k.batch);
  int64_t* ends = make<int64_t>(k.groups + 1);
  int64_t placed = 0;
  for (int64_t group = 0; group < k.groups; ++group) {
    for (int64_t r = group; r < k.batch; r += k.groups) order[placed++] = r;
    ends[group + 1] = placed;
    const int64_t size = placed - ends[group];
    k.largest = size > k.largest ? size : k.largest;
  }
  k.order = order, k.ends = ends;
  int64_t compact = rows;
  if (form.marks) {
    int64_t *lengths = make<int64_t>(k.batch), *place = make<int64_t>(rows);
    uint8_t *mask = make<uint8_t>(rows), *reset = make<uint8_t>(rows);
    compact = 0;
    for (int64_t r = 0; r < k.batch; ++r) lengths[r] = r;
    for (int64_t o = 0; o < rows; ++o) {
      mask[o] = uniform() < 0.7, reset[o] = uniform() < 0.3, place[o] = compact;
      compact += mask[o] && o / k.batch < lengths[o % k.batch];
    }
    k.lengths = lengths, k.place = place, k.mask = mask, k.reset = reset;
    k.dheld = make<real>(k.batch * k.width);
  }
  auto width_of = [&](int state) { return state == 0 ? k.width : k.units; };
  k.x_stride = up(cell.gates * k.units, 64);
  if (form.initial) {
    k.inputs = 6, k.input = draw<store>(rows * k.inputs), k.x = make<real>(compact * k.x_stride);
    k.ih = draw<store>(cell.gates * k.units * k.inputs), k.bias_ih = draw<real>(cell.gates * k.units);
  } else {
    k.x = draw<real>(compact * k.x_stride, 1.0);
  }
  k.hh = draw<store>(cell.recurrent * k.units * k.width), k.bias_hh = draw<real>(cell.recurrent * k.units);
  k.hr = form.projection ? draw<store>(k.width * k.units) : nullptr;
  real** vectors = make<real*>(cell.vectors);
  for (int v = 0; v < cell.vectors; ++v) vectors[v] = draw<real>(k.units);
  real** extras = make<real*>(cell.extras);
  int64_t* widths = make<int64_t>(cell.extras);
  for (int e = 0; e < cell.extras; ++e) widths[e] = e % 2 ? 1 : k.units, extras[e] = draw<real>(rows * widths[e]);
  k.vectors = vectors, k.extras = extras, k.extra_widths = widths;
  real** states = make<real*>(cell.states);
  for (int s = 0; s < cell.states; ++s)
    states[s] = form.initial ? draw<real>(k.batch * width_of(s)) : make<real>(k.batch * width_of(s));
  k.states = states;
  k.noise_kind = cell.recurrent ? form.noise : 0;
  k.noise_below = 1u << 30, k.noise_scale = 4.0 / 3, k.seed = 99, k.noise_tag = 1, k.zoneout_tag = 2;
  if (k.noise_kind == 1) k.noise = draw<real>(k.batch * k.width), k.keep_plain = 1;
  if (k.noise_kind == 2) k.noise = draw<real>(cell.recurrent * k.batch * k.width), k.keep_plain = 1;
  for (int s = 0; s < cell.states; ++s) k.zoneout[s].kind = form.zoneout, k.zoneout[s].share = 0.25, k.zoneout[s].below = 1u << 30;
  k.y_stride = k.width, k.y = make<store>(rows * k.width);
  const bool leaves = [&] {
    for (int gate = 0; gate < cell.recurrent; ++gate)
      if (cell.leaf[gate]) return true;
    return false;
  }();
  k.entered = leaves ? make<store>(compact * k.width) : nullptr;
  k.unprojected = form.projection ? make<store>(compact * k.units) : nullptr;
  k.saved = make<real>(compact * (cell.saved * k.units + cell.saved_means));
  store** operands = make<store*>(cell.products);
  for (int p = 0; p < cell.products; ++p) operands[p] = make<store>(compact * k.width);
  k.operands = operands;
  store** sequences = make<store*>(cell.states);
  int64_t* strides = make<int64_t>(cell.states);
  for (int s = 0; s < cell.states; ++s) strides[s] = width_of(s), sequences[s] = make<store>(rows * width_of(s));
  if (form.sequences) k.sequences = sequences, k.sequence_strides = strides;
  call([&] { return whorl_forward(&k); });

  k.dy = draw<store>(rows * k.width), k.dy_stride = k.width;
  if (form.sequences) {
    store** dsequences = make<store*>(cell.states);
    for (int s = 0; s < cell.states; ++s) dsequences[s] = draw<store>(rows * width_of(s));
    k.dsequences = dsequences, k.dsequence_strides = strides;
  }
  real **dstates = make<real*>(cell.states), **dreset = make<real*>(cell.states);
  for (int s = 0; s < cell.states; ++s)
    dstates[s] = draw<real>(k.batch * width_of(s)), dreset[s] = make<real>(k.batch * width_of(s));
  k.dstates = dstates, k.dreset = form.marks ? dreset : nullptr;
  k.dx = make<store>(compact * cell.gates * k.units);
  k.dr = cell.dr_is_dx ? k.dx : make<store>(compact * cell.recurrent * k.units);
  store** dp = make<store*>(cell.products);
  for (int p = 0; p < cell.products; ++p) dp[p] = make<store>(compact * k.units);
  const int64_t of_vectors = k.batch * cell.vectors * k.units;
  real* dv = make<real>(of_vectors);
  real** de = make<real*>(cell.extras);
  for (int e = 0; e < cell.extras; ++e) de[e] = make<real>(rows * k.units);
  k.dp = dp, k.dv = dv, k.de = de;
  k.dprojected = form.projection ? make<store>(compact * k.width) : nullptr;
  call([&] { return whorl_backward(&k); });

  uint64_t made = 14695981039346656037u;
  auto count = [&](const void* data, size_t size) { made = digest(made, data, size); };
  count(k.y, size_t(rows * k.width) * sizeof(store)), count(k.dx, size_t(compact * cell.gates * k.units) * sizeof(store));
  for (int s = 0; s < cell.states; ++s) {
    count(states[s], size_t(k.batch * width_of(s)) * sizeof(real));
    count(dstates[s], size_t(k.batch * width_of(s)) * sizeof(real));
    count(sequences[s], size_t(rows * width_of(s)) * sizeof(store));
  }
  count(dv, size_t(of_vectors) * sizeof(real));
  for (int e = 0; e < cell.extras; ++e) count(de[e], size_t(rows * k.units) * sizeof(real));
  release();
  return made;
}

// A digest of everything that a call of x, weights, initial states, marks and drawn noise makes, forward and backward.
uint64_t plain(const Cell& cell, bool reverse, bool initial, bool within, bool marks, int64_t noise, Threads way) {
  seed = 17;
  Sweep k = {};
  k.cell = &cell, k.time = 31, k.batch = 8, k.units = k.width = 37, k.inputs = 6, k.reverse = reverse;  // two shares
  k.threads = way.threads, k.team = way.team, k.groups = way.threads / way.team, k.largest = 8;
  const int64_t rows = k.time * k.batch, all = k.batch * k.units, x_wide = cell.gates * k.units;
  const int64_t wide = cell.recurrent * k.units, columns = up(k.inputs, 64);
  int64_t *order = make<int64_t>(k.batch), *ends = make<int64_t>(k.groups + 1);
  for (int64_t r = 0; r < k.batch; ++r) order[r] = r;
  for (int64_t group = 0; group < k.groups; ++group)  // as rows.py has it: the first are the larger ones
    ends[group + 1] = ends[group] + (k.batch - group + k.groups - 1) / k.groups;
  k.order = order, k.ends = ends, k.y_stride = k.dy_stride = k.units, k.x_stride = up(x_wide, 64);
  Plain p = {};
  p.input = draw<store>(rows * k.inputs), p.ih = draw<store>(x_wide * k.inputs), p.hh = draw<store>(wide * k.units);
  p.bias_ih = draw<real>(x_wide), p.bias_hh = draw<real>(wide), p.y = make<store>(rows * k.units);
  p.saved = make<real>(rows * (cell.saved * k.units + cell.saved_means));
  p.within = within, p.x = within && !cell.vectors ? nullptr : make<real>(rows * k.x_stride);  // with vectors steps may read x
  real **vectors = make<real*>(cell.vectors), *to_vectors = make<real>(cell.vectors * k.units);
  int64_t* sums = make<int64_t>(cell.vectors);
  for (int v = 0; v < cell.vectors; ++v) {
    vectors[v] = draw<real>(k.units), sums[v] = v - v % 2;
  }
  k.noise_kind = noise, k.noise_below = 1u << 30, k.noise_scale = 4.0 / 3, p.seed = 99, k.noise_tag = 1, k.zoneout_tag = 2;
  k.keep_plain = noise == 1 || noise == 2;
  if (k.keep_plain) p.noise = draw<real>((noise == 2 ? cell.recurrent : 1) * all);
  if (noise == 4 || marks) p.entered = make<store>(rows * k.units);
  if (marks) {
    int64_t* lengths = make<int64_t>(k.batch);
    uint8_t *mask = make<uint8_t>(rows), *reset = make<uint8_t>(rows);
    for (int64_t r = 0; r < k.batch; ++r) lengths[r] = r;
    for (int64_t o = 0; o < rows; ++o) mask[o] = uniform() < 0.7, reset[o] = uniform() < 0.3;
    p.lengths = lengths, p.lengths_row = 1, p.reset = reset, p.reset_step = 1, p.reset_row = k.time;
    if (!initial) p.mask = mask, p.mask_step = k.batch, p.mask_row = 1;
  }
  for (int s = 0; s < cell.states && marks && initial; ++s) p.reset_to[s] = draw<real>(all), p.dreset[s] = make<real>(all);
  for (int s = 0; s < cell.states && noise == 4; ++s) k.zoneout[s].kind = 2, k.zoneout[s].share = 0.25, k.zoneout[s].below = 1u << 30;
  p.vectors = vectors, p.dv = make<real>(cell.vectors * all), p.sums = sums, p.to_vectors = to_vectors;
  for (int s = 0; s < cell.states; ++s) p.finals[s] = make<real>(all);
  for (int s = 0; s < cell.states && initial; ++s) p.starts[s] = draw<real>(all);
  call([&] { return whorl_plain_forward(&k, &p, way.threads); });

  p.dy = draw<store>(rows * k.units), p.begin = initial ? draw<store>(all) : nullptr;
  for (int s = 0; s < cell.states && initial; ++s) p.dfinals[s] = draw<real>(all), p.dstarts[s] = make<real>(all);
  p.dx = make<store>(rows * x_wide), p.dr = cell.dr_is_dx ? nullptr : make<store>(rows * wide);
  p.to_input = make<real>(rows * columns), p.to_ih = make<real>(x_wide * k.inputs), p.to_hh = make<real>(wide * k.units);
  p.to_bias_ih = make<real>(x_wide), p.to_bias_hh = make<real>(wide);
  call([&] { return whorl_plain_backward(&k, &p, way.threads); });

  uint64_t made = digest(14695981039346656037u, p.y, size_t(rows * k.units) * sizeof(store));
  auto count = [&](const real* data, int64_t size) { made = digest(made, data, size_t(size) * sizeof(real)); };
  count(p.to_input, rows * columns), count(p.to_ih, x_wide * k.inputs), count(p.to_hh, wide * k.units);
  count(p.to_bias_ih, x_wide), count(p.to_bias_hh, wide);
  count(to_vectors, cell.vectors * k.units);
  for (int s = 0; s < cell.states; ++s) count(p.finals[s], all);
  for (int s = 0; s < cell.states && initial; ++s) count(p.dstarts[s], all);
  for (int s = 0; s < cell.states && p.dreset[0]; ++s) count(p.dreset[s], all);
  release();
  return made;
}

// A digest of a prepared step's outputs and states after a few steps.
uint64_t stream(const Cell& cell, int64_t threads) {
  seed = 11;
  const int64_t batch = 3, units = 37, inputs = 5, layers = 2, order[] = {0, 1, 2}, ends[] = {0, batch};
  StepLayer described[layers] = {};
  real* states[layers][MOST_STATES] = {};
  for (int64_t layer = 0; layer < layers; ++layer) {
    StepLayer& d = described[layer];
    Sweep& k = d.sweep;
    d.inputs = layer ? units : inputs;
    d.ih = draw<store>(cell.gates * units * d.inputs), d.bias_ih = draw<real>(cell.gates * units);
    k.cell = &cell, k.time = 1, k.batch = batch, k.units = k.width = units, k.order = order, k.ends = ends;
    k.hh = draw<store>(cell.recurrent * units * units);
    real** vectors = make<real*>(cell.vectors);
    for (int v = 0; v < cell.vectors; ++v) vectors[v] = draw<real>(units);
    k.vectors = vectors, k.states = states[layer];
    for (int s = 0; s < cell.states; ++s) states[layer][s] = draw<real>(batch * units);
  }
  real** extras = make<real*>(cell.extras);
  int64_t* widths = make<int64_t>(cell.extras);
  for (int e = 0; e < cell.extras; ++e) widths[e] = 1, extras[e] = draw<real>(batch);
  Stream* opened = nullptr;
  call([&] { return whorl_open(described, layers, threads, &opened); });
  uint64_t made = 14695981039346656037u;
  const uint8_t reset[] = {0, 1, 0};
  store *x = draw<store>(batch * inputs), *y = make<store>(batch * units);
  for (int step = 0; step < 4; ++step) {
    call([&] { return whorl_stream(opened, x, y, step == 2 ? reset : nullptr, extras, widths); });
    made = digest(made, y, size_t(batch * units) * sizeof(store));
  }
  whorl_close(opened);
  for (auto& layer : states)
    for (int s = 0; s < cell.states; ++s) made = digest(made, layer[s], size_t(batch * units) * sizeof(real));
  release();
  return made;
}

// A digest of the products of many rows.
uint64_t products(int64_t threads) {
  seed = 13;
  const int64_t rows = 261, inputs = 131, outputs = 130, stride = up(outputs, LANES);
  store *x = draw<store>(rows * inputs), *w = draw<store>(outputs * inputs);
  real *bias = draw<real>(outputs), *y = make<real>(rows * stride), *out = make<real>(outputs * inputs);
  real* sums = make<real>(outputs);
  store* d = draw<store>(rows * outputs);
  call([&] { return whorl_project(y, x, w, bias, rows, inputs, outputs, stride, 1, 1, threads); });
  const uint64_t alone = digest(14695981039346656037u, y, size_t(rows * stride) * sizeof(real));
  call([&] { return whorl_project(y, x, w, bias, rows, inputs, outputs, stride, 87, 1, threads); });  // of many sequences
  for (int64_t add = 0; add < 2; ++add)
    call([&] { return whorl_outer(out, sums, d, x, rows, outputs, inputs, outputs, inputs, add, nullptr, nullptr, 0, threads); });
  uint64_t made = digest(alone, y, size_t(rows * stride) * sizeof(real));
  made = digest(made, out, size_t(outputs * inputs) * sizeof(real));
  made = digest(made, sums, size_t(outputs) * sizeof(real));
  release();
  return made;
}

// Whether a digest is the same with any number of threads: with all, after memory was denied, and where threads are.
template <typename Body>
void same(const char* what, const char* name, Body digest_of, bool with_denials = true) {
  uint64_t alone = 0;
  for (const Threads& way : WAYS) {
    if (way.memory_denied && !with_denials) continue;
    denying = way.memory_denied, denied::every_other_thread = way.threads_denied;
    const uint64_t made = digest_of(way);
    if (&way == WAYS) alone = made;
    if (made == alone) continue;
    const char* trouble = denying ? ", memory denied" : denied::every_other_thread ? ", threads denied" : "";
    printf("%s of %s: other bits with %d threads%s\n", what, name, int(way.threads), trouble);
    ++wrong;
  }
}

}  // namespace

int main() {
  const Cell* cells[] = {
#define CELL(name) name(),
      CELLS
#undef CELL
  };
  const char* names[] = {
#define CELL(name) #name,
      CELLS
#undef CELL
  };
  for (size_t index = 0; index < sizeof(cells) / sizeof(*cells); ++index) {
    const Cell& cell = *cells[index];
    for (const Case& form : CASES) {
      // what a step multiplies with, and a state that it reads, is as wide as its units
      if (form.projection && (cell.products || cell.states == 1)) continue;
      same(form.name, names[index], [&](Threads way) { return sweep(cell, form, way); });
    }
    bool takes = !cell.extras && !cell.products && cell.recurrent;
    for (int gate = 0; gate < cell.recurrent; ++gate) takes = takes && cell.leaf[gate];
    for (int which = 0; which < 8 && takes; ++which) {
      const bool reverse = which & 1, initial = which & 2, within = which & 4;
      const int64_t noise = which % 2 ? 4 : 1 + which / 2 % 2;
      // memory is denied in half of them, of each two of the three in all four ways: such calls take the most time
      const bool with_denials = reverse ^ initial ^ within ^ 1;
      auto call = [&](bool marks, int64_t kind) {
        same("plain", names[index],
             [&](Threads way) { return plain(cell, reverse, initial, within, marks, kind, way); }, with_denials);
      };
      call(false, 0), call(false, noise), call(true, which & 4 ? noise : 0);
    }
    same("a stream", names[index], [&](Threads way) { return stream(cell, way.threads); });
  }
  same("products", "many rows", [](Threads way) { return products(way.threads); });
  puts(wrong ? "wrong" : "clean");
  return wrong;
}
