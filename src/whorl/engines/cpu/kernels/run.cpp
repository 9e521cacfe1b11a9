// All groups, and what Python calls.

namespace kernel {

struct Run {
  const Sweep* k;
  const Weights* w;
  void (*group)(const Group&, Memory, Memory);
  char *memory, *own;
  int64_t bytes, own_bytes;
  Barrier* barriers;
  int32_t* begun;  // of each group
};

static void run_groups(void* data, int thread, int threads) {
  Run& run = *(Run*)data;
  const Sweep& k = *run.k;
  const int64_t team = threads < k.threads ? 1 : k.team;  // fewer threads than asked for: no team is whole
  const int64_t slot = thread / team;
  if (team > 1 && slot >= k.groups) return;
  Team mine = {&run.barriers[slot], team, thread % team};
  if (team == 1) mine.barrier->size = 1;
  // A thread's first group is the same in every call, where no other had to begin it: what it writes lies in its cache.
  for (int64_t turn = 0; turn < k.groups; ++turn) {
    const int64_t group = (slot + turn) % k.groups, begin = k.ends[group];
    if (team == 1 && __atomic_exchange_n(&run.begun[group], 1, __ATOMIC_RELAXED)) continue;
    run.group(Group(k, *run.w, k.order + begin, k.ends[group + 1] - begin, mine), {run.own + thread * run.own_bytes},
              {run.memory + slot * run.bytes});
    if (team > 1) return;
  }
}

// Memory of a team and of a member, in bytes.
struct Room {
  int64_t bytes, own_bytes;
};

static Room room_of(const Sweep& k, const Weights& w, bool backward) {
  const Cell& cell = *k.cell;
  const Cell::Direction& way = backward ? cell.backward : cell.forward;
  const int64_t larger = up(k.units > k.width ? k.units : k.width, 64), gates = cell.recurrent > 1 ? cell.recurrent : 1;
  const int64_t row = w.r_size + (way.slots + 2 * cell.states + cell.extras + gates + 8) * (larger + 64);
  const int64_t pointers = cell.vectors + 2 * cell.extras + cell.products + 16;
  const int64_t own = k.largest * (int64_t(sizeof(Row)) + (pointers + way.means) * 8) +
                      (cell.saved + MOST_STATES) * (larger + 64) * 8;
  const int64_t ahead = backward || !k.input ? 0 : 48 + k.largest;  // rows whose input is projected at once, at most
  const int64_t reals = k.largest * row + ahead * up(cell.gates * k.units, 64);
  return {up(reals * int64_t(sizeof(real)) + 4096, 4096), up(own + (2 * cell.saved_means + 2 * ahead) * 8 + 8192, 4096)};
}

static void run_all(const Sweep& k, bool backward) {
  Scratch scratch;
  const Weights w = make_weights(k, !backward, scratch);
  const Room room = room_of(k, w, backward);
  Run run = {};
  run.k = &k, run.w = &w, run.group = backward ? backward_group : forward_group;
  run.bytes = room.bytes, run.own_bytes = room.own_bytes;
  const int64_t teams = k.threads / k.team;
  run.memory = scratch.take<char>(run.bytes * k.threads);
  run.own = scratch.take<char>(run.own_bytes * k.threads);
  run.barriers = scratch.zeros<Barrier>(k.threads), run.begun = scratch.zeros<int32_t>(k.groups);
  for (int64_t slot = 0; slot < k.threads; ++slot) run.barriers[slot].size = int32_t(slot < teams ? k.team : 1);
  parallel(int(k.threads), run_groups, &run);
}

}  // namespace kernel

extern "C" {

// Whether it is ready: there may be no memory for what a fork calls.
bool whorl_start(void* parallel, void* thread, void* threads) {
  if (parallel && thread && threads)
    kernel::runtime = {(void (*)(void (*)(void*), void*, unsigned, unsigned))parallel, (int (*)())thread,
                       (int (*)())threads};
  return !pthread_atfork(nullptr, nullptr, kernel::after_fork);
}

int64_t whorl_size() { return int64_t(sizeof(kernel::Sweep)); }

// These give what `missing` gives, as every function does that takes memory.  Where that is not 0, outputs hold anything,
// and what was there before a call and is written by it (states, sums that are added to) is as it was.
int64_t whorl_forward(const kernel::Sweep* k) {
  return kernel::missing([&] { kernel::run_all(*k, false); });
}
int64_t whorl_backward(const kernel::Sweep* k) {
  return kernel::missing([&] { kernel::run_all(*k, true); });
}

// y = x w' + bias of many rows: x [rows, inputs], y [rows, stride], the stride in whole vectors; w is [outputs, inputs]
// where `across`, else [inputs, outputs].  The rows are of `batch` sequences.
int64_t whorl_project(
    kernel::real* y, const kernel::store* x, const kernel::store* w, const kernel::real* bias, int64_t rows,
    int64_t inputs, int64_t outputs, int64_t stride, int64_t batch, int64_t across, int64_t threads) {
  return kernel::missing([&] {
    kernel::project({y, x, w, bias, rows, inputs, outputs, stride, batch, across != 0, {}, {}, {}, nullptr}, int(threads));
  });
}

// out [n, m] = a' b over rows (`add`: += a' b): a [rows, lda] of n columns, b [rows, ldb] of m columns; sums [n] +=
// those of a, where wanted.  b is multiplied by `factor` [.., m] where it is given: by the row that `sequence` names for
// each of its rows, or by its `batch` rows in turn.
int64_t whorl_outer(
    kernel::real* out, kernel::real* sums, const kernel::store* a, const kernel::store* b, int64_t rows, int64_t n,
    int64_t m, int64_t lda, int64_t ldb, int64_t add, const kernel::real* factor, const int64_t* sequence, int64_t batch,
    int64_t threads) {
  return kernel::missing([&] {
    const kernel::Operand to = {out, b, m, ldb, 0, rows, factor, sequence, batch, 0, nullptr, 0, n};
    kernel::outer({sums, a, rows, n, lda, add != 0, 1, {to}, 0, 0}, int(threads));
  });
}

// As `draw_masks` has it.
void whorl_draw(
    kernel::real* to, int64_t count, int64_t rows, int64_t width, const int64_t* ids, uint64_t seed, int64_t tag,
    uint64_t below, double scale) {
  kernel::draw_masks(to, count, rows, width, ids, seed, tag, below, scale);
}
}
