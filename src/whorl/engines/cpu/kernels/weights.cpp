// The recurrent weights and those of the projection, packed for a sweep: gates side by side as one matrix, or each on its
// own where operands differ.

namespace kernel {

struct Weights {
  int count;
  Packed packed[MOST_MATRICES];
  int first[MOST_MATRICES], gates[MOST_MATRICES];
  bool leaf[MOST_MATRICES];  // a part of r; else only multiplied inside the step
  int of_gate[MOST_GATES];
  int64_t r_offset[MOST_GATES], r_size;
  Packed projection, input;
  bool across;
};

struct Packing {
  const Sweep* k;
  Weights* w;
};

static void pack_all(void* data, int thread, int threads) {
  const Packing& job = *(Packing*)data;
  const Sweep& k = *job.k;
  const Weights& w = *job.w;
  auto share = [&](const Packed& to, const store* from, int64_t ld, bool across) {
    pack(to, from, ld, across, shares(to) * thread / threads, shares(to) * (thread + 1) / threads);
  };
  for (int index = 0; index < w.count; ++index) {
    const int64_t first = w.first[index] * k.units;
    if (k.hh_turned)
      share(w.packed[index], k.hh + first, k.cell->recurrent * k.units, !w.across);
    else
      share(w.packed[index], k.hh + first * k.width, k.width, w.across);
  }
  if (k.hr) share(w.projection, k.hr, k.units, w.across);
  if (w.input.data) share(w.input, k.ih, k.ih_turned ? k.cell->gates * k.units : k.inputs, !k.ih_turned);
}

// Gates side by side as one matrix, or each on its own where operands differ.
static Weights make_weights(const Sweep& k, bool across, Scratch& scratch) {
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
    to = unpacked(n, reduced, k.batch), to.shared = k.team > 1;
    bytes += up(to.bytes(), 64) + up(up(n, LANES) * int64_t(sizeof(real)), 64);
  };
  for (int index = 0; index < w.count; ++index) {
    const int64_t rows = w.gates[index] * k.units;
    measure(w.packed[index], across ? rows : k.width, across ? k.width : rows);
  }
  if (k.hr) measure(w.projection, across ? k.width : k.units, across ? k.units : k.width);
  const bool projects = across && k.input;
  if (projects) measure(w.input, cell.gates * k.units, k.inputs);
  char* memory = scratch.take<char>(bytes);
  auto lay = [&](Packed& to, const real* bias) {
    place(to, memory), memory += up(to.bytes(), 64);
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
  if (projects) lay(w.input, k.bias_ih);
  Packing job = {&k, &w};
  parallel(k.units * (k.width + (projects ? k.inputs : 0)) < 4096 ? 1 : int(k.threads), pack_all, &job);
  return w;
}

}  // namespace kernel
