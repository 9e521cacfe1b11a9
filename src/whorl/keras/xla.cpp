// One layer in one direction as XLA's programs on a CPU call it: the loop over time of engine `cpu` and the products
// around it, without Python.
//
// The text of engine `cpu`'s sweep.cpp stands before this, with what it needs; its loops and products are those of the
// library that the engine has loaded, by address.  `Numbers` says what the plan decides, buffers come in the order in
// which `forward` and `backward` take them.  x, its gradient and masks lie as Keras has them, [batch, time, ...]; outputs
// of all steps and what is kept for backward [time, batch, ...], in float32.  Steps that do not count are left out of
// everything that is kept: see "compact" in sweep.cpp.

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace kernel {
namespace ffi = xla::ffi;

// What a function of the engine gives is 0, or the bytes that it could not have.
static void done(int64_t missing) {
  if (missing) throw NoMemory{missing};
}

struct Numbers {  // as `Numbers` in xla.py
  int64_t cell, forward, backward, project, outer, order, ends;
  int64_t time, batch, units, inputs, reverse, threads, groups, team, largest;
  int64_t within, x_stride, reads_x, biases, masked, noise_kind, gives_y;
  int64_t saves;              // forward: for a backward to come
  int64_t dy, dfinals;        // backward: whether outputs, and which states (a bit each), have a gradient
  int64_t wants_x, wants_states;
  int64_t process;            // of this process alone: what holds addresses is no other's

  Places places(const uint8_t* mask, Scratch& scratch) const { return {time, batch, mask, {1, time}, scratch}; }
  Apart x_apart() const { return {inputs, time * inputs}; }

  void project_rows(real* y, const real* x, const real* w, const real* bias, int64_t rows, int64_t in, int64_t out,
                    int64_t stride, bool across) const {
    auto call = (decltype(&whorl_project))project;
    done(call(y, x, w, bias, rows, in, out, stride, batch, across, threads));
  }
  // out [n, m] = a' (b times factor), and the columns of a into `sums`, which are there already.
  void add_outer(real* out, real* sums, const real* a, const real* b, int64_t rows, int64_t n, int64_t m, int64_t lda,
                 const real* factor, const int64_t* sequence) const {
    auto call = (decltype(&whorl_outer))outer;
    done(call(out, sums, a, b, rows, n, m, lda, m, 0, factor, sequence, batch, threads));
  }
};

struct Task {
  void (*function)(void*);
  void* data;
  bool done;
};

// The one thread in which loops run: XLA calls from several, and OpenMP gives each that calls it threads of its own.
struct Worker {
  std::mutex mutex;
  std::condition_variable changed;
  Task* task = nullptr;

  void loop() {
    for (std::unique_lock<std::mutex> lock(mutex);;) {
      changed.wait(lock, [&] { return task; });
      lock.unlock();
      task->function(task->data);
      lock.lock();
      task->done = true, task = nullptr;
      changed.notify_all();
    }
  }
  void run(Task own) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return !task; });
    task = &own;
    changed.notify_all();
    changed.wait(lock, [&] { return own.done; });
  }
  static Worker& one() {
    static Worker* made = [] {
      std::unique_ptr<Worker> worker(new Worker);
      std::thread([at = worker.get()] { at->loop(); }).detach();
      return worker.release();  // lives as long as the process: it may be at work when statics go
    }();
    return *made;
  }
};

// The buffers of a call, one after the other.
struct Buffers {
  ffi::RemainingArgs in;
  ffi::RemainingRets out;
  size_t next_in = 0, next_out = 0;

  template <typename T = real>
  const T* take(bool there = true) {
    return there ? (const T*)in.get<ffi::AnyBuffer>(next_in++)->untyped_data() : nullptr;
  }
  real* give(bool there = true) {
    return there ? (real*)(*out.get<ffi::AnyBuffer>(next_out++))->untyped_data() : nullptr;
  }
};

static Sweep sweep_of(const Numbers& n, const Places& places, const real* ih, const real* hh, const real* noise) {
  Sweep k = {};
  k.cell = (const Cell*)n.cell, k.time = n.time, k.batch = n.batch, k.units = k.width = n.units, k.reverse = n.reverse;
  k.threads = n.threads, k.groups = n.groups, k.team = n.team, k.largest = n.largest;
  k.order = (const int64_t*)n.order, k.ends = (const int64_t*)n.ends;
  k.place = places.place, k.mask = places.mask;
  k.inputs = n.inputs, k.ih = ih, k.hh = hh, k.ih_turned = k.hh_turned = 1;
  k.noise_kind = n.noise_kind, k.keep_plain = n.noise_kind != 0, k.noise = noise;
  return k;
}

// In: x, ih, hh, biases, states, mask, noise.  Out: states, y, and for backward the step's own, what entered the
// recurrent product, what entered each product of the step, the input projection.
static void forward(const Numbers& n, Buffers& at) {
  Scratch scratch;
  const Cell& cell = *(const Cell*)n.cell;
  const real *x = at.take(), *ih = at.take(), *hh = at.take(), *bias_ih = at.take(n.biases > 0), *bias_hh = at.take(n.biases > 1);
  const real* starts[MOST_STATES];
  for (int s = 0; s < cell.states; ++s) starts[s] = at.take();
  const uint8_t* mask = at.take<uint8_t>(n.masked);
  const real* noise = at.take(n.noise_kind != 0);
  const Places places = n.places(mask, scratch);
  Sweep k = sweep_of(n, places, ih, hh, noise);
  k.bias_ih = bias_ih, k.bias_hh = bias_hh;
  real* states[MOST_STATES];
  for (int s = 0; s < cell.states; ++s) {
    states[s] = at.give();
    set_or_zero(states[s], starts[s], n.batch * n.units);
  }
  k.states = states, k.y = at.give(n.gives_y), k.y_stride = n.units;
  k.saved = at.give(n.saves), k.entered = at.give(n.saves);
  real* operands[MOST_GATES];
  for (int p = 0; p < cell.products; ++p) operands[p] = at.give(n.saves);
  k.operands = n.saves && cell.products ? operands : nullptr;
  const int64_t wide = cell.gates * n.units;
  k.x = at.give(n.saves && n.reads_x), k.x_stride = n.x_stride;
  if (n.within) {
    k.input = x, k.input_step = n.x_apart().step, k.input_row = n.x_apart().row;
  } else {
    if (!k.x) k.x = scratch.take<real>(places.rows * n.x_stride);
    n.project_rows(k.x, places.gathered(x, n.x_apart(), n.inputs, scratch), ih, bias_ih, places.rows, n.inputs, wide, n.x_stride, false);
  }
  done(((decltype(&whorl_forward))n.forward)(&k));
}

// In: x, ih, hh, mask, noise, what forward kept, then the gradients of final states and of y that there are.
// Out: gradients of ih, hh, biases, and where they are wanted of the initial states and of x.
static void backward(const Numbers& n, Buffers& at) {
  Scratch scratch;
  const Cell& cell = *(const Cell*)n.cell;
  const real *x = at.take(), *ih = at.take(), *hh = at.take();
  const uint8_t* mask = at.take<uint8_t>(n.masked);
  const real* noise = at.take(n.noise_kind != 0);
  const Places places = n.places(mask, scratch);
  const int64_t rows = places.rows, units = n.units, wide = cell.gates * units, recurrent = cell.recurrent * units;
  Sweep k = sweep_of(n, places, ih, hh, noise);
  k.saved = (real*)at.take();
  const real *entered = at.take(), *operands[MOST_GATES];
  for (int p = 0; p < cell.products; ++p) operands[p] = at.take();
  k.x = (real*)at.take(n.reads_x), k.x_stride = n.x_stride;
  const int64_t each = n.batch * units;
  const real* dfinals[MOST_STATES];
  for (int s = 0; s < cell.states; ++s) dfinals[s] = at.take(n.dfinals >> s & 1);
  k.dy = at.take(n.dy), k.dy_stride = units;
  real *to_ih = at.give(), *to_hh = at.give(), *to_bias_ih = at.give(n.biases > 0), *to_bias_hh = at.give(n.biases > 1);
  real *dstates[MOST_STATES], *dp[MOST_GATES];
  for (int s = 0; s < cell.states; ++s) {
    dstates[s] = n.wants_states ? at.give() : scratch.take<real>(each);
    set_or_zero(dstates[s], dfinals[s], each);
  }
  k.dstates = dstates, k.unread = !n.wants_states;
  if (places.mask) k.dheld = scratch.take<real>(each), set_or_zero(k.dheld, nullptr, each);
  k.dx = scratch.take<real>(rows * wide);
  k.dr = cell.dr_is_dx ? k.dx : scratch.take<real>(rows * recurrent);
  for (int p = 0; p < cell.products; ++p) dp[p] = scratch.take<real>(rows * units);
  k.dp = dp;
  done(((decltype(&whorl_backward))n.backward)(&k));

  if (to_bias_ih) memset(to_bias_ih, 0, size_t(wide) * sizeof(real));
  n.add_outer(to_ih, to_bias_ih, k.dx, places.gathered(x, n.x_apart(), n.inputs, scratch), rows, wide, n.inputs, wide, nullptr, nullptr);
  real* sums = cell.dr_is_dx ? nullptr : to_bias_hh;
  if (to_bias_hh) memset(to_bias_hh, 0, size_t(recurrent) * sizeof(real));
  const int64_t* sequence = places.sequence;
  auto factor = [&](int gate) { return n.noise_kind == 2 ? noise + gate * each : noise; };
  for (int gate = 0, after; gate < cell.recurrent; gate = after) {  // neighbours whose operand is the same, at once
    after = gate + 1;
    if (!cell.leaf[gate]) {
      memset(to_hh + gate * units * units, 0, size_t(units * units) * sizeof(real));
      continue;
    }
    while (n.noise_kind != 2 && after < cell.recurrent && cell.leaf[after]) ++after;
    n.add_outer(to_hh + gate * units * units, sums ? sums + gate * units : nullptr, k.dr + gate * units, entered, rows,
                (after - gate) * units, units, recurrent, factor(gate), sequence);
  }
  for (int l = 0; l < cell.forward.links; ++l) {  // products inside the step, each of the weights of one gate
    const Link& link = cell.forward.link[l];
    n.add_outer(to_hh + link.gate * units * units, sums ? sums + link.gate * units : nullptr, dp[link.product],
                operands[link.product], rows, units, units, units, factor(link.gate), sequence);
  }
  if (cell.dr_is_dx && to_bias_hh) memcpy(to_bias_hh, to_bias_ih, size_t(recurrent) * sizeof(real));
  if (real* to_x = at.give(n.wants_x)) {
    const int64_t stride = up(n.inputs, 64);
    real* made = scratch.take<real>(rows * stride);
    n.project_rows(made, k.dx, ih, nullptr, rows, wide, n.inputs, stride, true);
    if (places.mask) memset(to_x, 0, size_t(n.time * n.batch * n.inputs) * sizeof(real));
    places.spread(to_x, n.x_apart(), made, stride, n.inputs);
  }
}

template <void (*FUNCTION)(const Numbers&, Buffers&)>
static ffi::Error in_worker(ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Span<const int64_t> given) {
  struct Job {
    Numbers numbers;
    Buffers buffers;
    int64_t missing;
  } job = {{}, {in, out}, 0};
  if (given.size() * sizeof(int64_t) != sizeof(Numbers)) return ffi::Error::InvalidArgument("xla.py and xla.cpp differ");
  memcpy((void*)&job.numbers, given.begin(), sizeof(Numbers));
  auto work = [](void* data) {
    Job& job = *(Job*)data;
    job.missing = missing([&] { FUNCTION(job.numbers, job.buffers); });
  };
  try {
    Worker::one().run({work, &job, false});
  } catch (const std::exception& error) {
    return {ffi::ErrorCode::kResourceExhausted, std::string("engine 'cpu' cannot make its thread: ") + error.what()};
  }
  if (!job.missing) return ffi::Error::Success();
  const std::string size = std::to_string(job.missing);
  return {ffi::ErrorCode::kResourceExhausted, "engine 'cpu' asked for " + size + " bytes of memory and the system gave none"};
}

}  // namespace kernel

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    whorl_xla_forward, kernel::in_worker<kernel::forward>,
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<xla::ffi::Span<const int64_t>>("numbers"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    whorl_xla_backward, kernel::in_worker<kernel::backward>,
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<xla::ffi::Span<const int64_t>>("numbers"));
