// One step of a stack of layers, prepared: its weights are packed and its memory is taken when it is opened, so that a
// step allocates nothing and reads each weight once.
//
// All sequences are one group.  Its team is as many threads as it was opened for, each with a part of the units of every
// layer: of one sequence too.  What a row gives is to the bit what `whorl_forward` gives, with any number of threads.
// One step of one stream at a time: states and memory are its own.

namespace kernel {

// A layer as its caller describes it.
struct StepLayer {
  Sweep sweep;     // of one step; x, y and what a call gives are set here
  const store* ih;      // [gates x units, inputs]
  const real* bias_ih;  // [gates x units]; null: zero
  int64_t inputs;
};

struct Prepared {
  Sweep sweep;
  Weights weights;
  Packed input;
  int64_t inputs;
  store* padded;  // x, each row filled up with zeros to a multiple of STEP; null where a row is one
  const store** a;
  real** c;
  store* y;  // [batch, y_stride]; null for the last layer, whose y is the caller's
};

struct Stream {
  int64_t count, batch, threads, own_bytes, larger_y;
  Prepared* layer;
  char *memory, *own;
  Barrier together, alone;
  Scratch::Block* taken;  // all of its memory, this struct's too
};

static void stream_step(void* data, int thread, int threads) {
  Stream& s = *(Stream*)data;
  const bool whole = threads == s.threads;  // with fewer than asked for, one does it all
  if (!whole && thread > 0) return;
  Team team = {whole ? &s.together : &s.alone, whole ? s.threads : 1, whole ? thread : 0};
  for (int64_t index = 0; index < s.count; ++index) {
    Prepared& f = s.layer[index];
    const int64_t every = shares(f.input);
    product(f.input, s.batch, f.a, f.c, false, every * team.member / team.members,
            every * (team.member + 1) / team.members);
    team.wait();
    forward_group(Group(f.sweep, f.weights, f.sweep.order, s.batch, team), {s.own + team.member * s.own_bytes}, {s.memory});
    team.wait();
  }
}

static Stream* open_stream(const StepLayer* layers, int64_t count, int64_t threads) {
  Scratch scratch;
  Stream& s = *scratch.zeros<Stream>(1);
  s.count = count, s.threads = threads, s.batch = layers[0].sweep.batch;
  s.together.size = int32_t(threads), s.alone.size = 1;
  s.layer = scratch.zeros<Prepared>(count);
  int64_t bytes = 0;
  for (int64_t index = 0; index < count; ++index) {
    const StepLayer& from = layers[index];
    Prepared& f = s.layer[index];
    f.sweep = from.sweep, f.inputs = from.inputs;
    Sweep& k = f.sweep;
    k.time = k.groups = 1, k.threads = k.team = threads, k.largest = s.batch;
    f.weights = make_weights(k, true, scratch);
    const int64_t gates = k.cell->gates * k.units, stride = up(gates, LANES);
    f.input = unpacked(gates, f.inputs, s.batch);
    place(f.input, scratch.zeros<char>(f.input.bytes()));
    f.input.bias = scratch.zeros<real>(stride);
    for (int64_t n = 0; n < gates; ++n) f.input.bias[n] = from.bias_ih ? from.bias_ih[n] : real(0);
    pack(f.input, from.ih, f.inputs, true, 0, shares(f.input));
    real* x = scratch.zeros<real>(s.batch * stride);
    k.x = x, k.x_stride = stride;
    f.a = scratch.zeros<const store*>(s.batch), f.c = scratch.zeros<real*>(s.batch);
    for (int64_t i = 0; i < s.batch; ++i) f.c[i] = x + i * stride;
    if (index > 0) {
      const Prepared& below = s.layer[index - 1];
      for (int64_t i = 0; i < s.batch; ++i) f.a[i] = below.y + i * below.sweep.y_stride;
    } else if (f.inputs % STEP)
      f.padded = scratch.zeros<store>(s.batch * up(f.inputs, STEP));
    k.y_stride = index + 1 < count ? up(k.width, 32) : k.width;
    if (index + 1 < count) k.y = f.y = scratch.zeros<store>(s.batch * k.y_stride);
    const Room room = room_of(k, f.weights, false);
    bytes = room.bytes > bytes ? room.bytes : bytes;
    s.own_bytes = room.own_bytes > s.own_bytes ? room.own_bytes : s.own_bytes;
  }
  s.memory = scratch.zeros<char>(bytes), s.own = scratch.zeros<char>(threads * s.own_bytes);
  s.taken = scratch.keep();
  return &s;
}

}  // namespace kernel

extern "C" {

int64_t whorl_step_layer_size() { return int64_t(sizeof(kernel::StepLayer)); }

// The stream of `count` layers; weights are copied, what the sweeps point to otherwise must stay.
int64_t whorl_open(const kernel::StepLayer* layers, int64_t count, int64_t threads, kernel::Stream** opened) {
  return kernel::missing([&] { *opened = kernel::open_stream(layers, count, threads); });
}

// y [batch, width] of x [batch, inputs]; the states move on.  reset [batch]: rows whose states are zero before; null: none.
// extras: [batch, width of each] of each extra input of the cell.
int64_t whorl_stream(
    kernel::Stream* s, const kernel::store* x, kernel::store* y, const uint8_t* reset, const kernel::real* const* extras,
    const int64_t* widths) {
  using namespace kernel;
  for (int64_t index = 0; index < s->count; ++index) {
    Sweep& k = s->layer[index].sweep;
    k.reset = reset, k.extras = extras, k.extra_widths = widths;
  }
  Prepared& first = s->layer[0];
  s->layer[s->count - 1].sweep.y = y;
  const int64_t deep = first.padded ? up(first.inputs, STEP) : first.inputs;
  for (int64_t i = 0; i < s->batch; ++i) {
    const store* row = x + i * first.inputs;
    if (first.padded) memcpy(first.padded + i * deep, row, size_t(first.inputs) * sizeof(store));
    first.a[i] = first.padded ? first.padded + i * deep : row;
  }
  return missing([&] { parallel(int(s->threads), stream_step, s); });
}

void whorl_close(kernel::Stream* s) {
  kernel::Scratch all;
  all.last = s->taken;
}
}
