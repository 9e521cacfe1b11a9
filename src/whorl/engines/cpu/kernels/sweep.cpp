// One layer in one direction: all of its steps, forward or backward.
//
// Rows are sequences.  A thread (or a team of threads, each with a part of the units) takes a group of rows through all
// steps, so nothing but weights is shared.  What a row gives depends on that row alone, to the bit: not on the rows or
// threads beside it, but in float32 for whether a batch has enough rows for the products of parts.cpp.
//
// Three ways to count rows: r is a sequence, o the place of step t of r in x and y as the caller has them ("outer"), and
// c its place among the steps that count: what backward reads is kept for these alone.  Steps that do not count are
// skipped, never computed and thrown away.

namespace kernel {

constexpr int MOST_MATRICES = MOST_GATES;

struct Zoneout {
  int64_t kind;  // 0 none, 1 a share of the state before, 2 drawn, 3 given
  double share;
  chance below;
  const real* given;  // [outer rows, width of the state]
  real* apart;        // the state before less what the step made, [compact rows, width]; null: not kept
  real* dgiven;       // gradient of `given`, [outer rows, width]
};

struct Sweep {
  const Cell* cell;
  int64_t time, batch, units, width, reverse, threads, groups, team, largest;
  const int64_t* starts;   // outer row of (t, 0), [time]; null: t * batch
  const int64_t* lengths;  // [batch]; null: all steps
  const int64_t* place;    // compact row of each outer row; null: the same
  const uint8_t* mask;     // by outer row; null: all count
  const uint8_t* reset;    // by outer row; null: none
  const int64_t* ids;      // what noise counts a row as, [batch]; null: itself
  const int64_t* order;    // rows, group by group, [batch]
  const int64_t* ends;     // where each group begins in `order`, [groups + 1]
  real* x;                 // [compact rows, x_stride]: the input projection, gate by gate; null: made here, and not kept
  int64_t x_stride;
  const store* input;      // [outer rows, inputs]: what forward makes it of; null: it is there
  int64_t inputs;
  int64_t input_step, input_row;  // from one of its steps and sequences to the next; 0: as outer rows lie
  const store* ih;         // [gates x units, inputs]
  const real* bias_ih;     // [gates x units]; null: zero
  const store* hh;         // [recurrent gates x units, width]
  const real* bias_hh;     // [recurrent gates x units]; null: zero
  const store* hr;         // [width, units]; null: no projection
  const real* const* vectors;      // [units] each
  const real* const* extras;       // [outer rows, units or 1] each
  const int64_t* extra_widths;
  real* const* states;             // [batch, width of the state]: initial, then final
  const real* const* reset_to;     // the same; null: zero
  int64_t noise_kind;              // of the recurrent product: 0 none, 1 held, 2 held by gate, 3 given by step, 4 drawn
  int64_t keep_plain;              // what entered is kept as it was before it was multiplied with noise
  const real* noise;               // 1: [batch, width]; 2: [recurrent gates, batch, width]; 3: [outer rows, width]
  chance noise_below;
  double noise_scale;
  uint64_t seed;
  int64_t noise_tag, zoneout_tag;
  Zoneout zoneout[MOST_STATES];
  store* y;  // [outer rows, y_stride]; null where it is not wanted, forward
  int64_t y_stride;
  store* const* sequences;  // each state at each step, [outer rows, strides]; null: not wanted
  const int64_t* sequence_strides;
  store* entered;            // what entered the recurrent product, [compact rows, width]; null: not kept
  store* unprojected;        // what entered the projection, [compact rows, units]; null: not kept
  real* saved;               // [compact rows, saved x units + saved_means]; null: not kept
  store* const* operands;    // what entered each product of the step, [compact rows, width]; null: not kept
  const store* dy;           // [outer rows, dy_stride]; null: zero
  int64_t dy_stride;
  int64_t dy_step, dy_row;  // as `input_step` and `input_row`
  const store* const* dsequences;  // null, or null for a state: zero
  const int64_t* dsequence_strides;
  real* const* dstates;   // of the final states, then of the initial ones
  real* const* dreset;    // of reset_to, added to; null: not wanted
  real* dheld;            // [batch, width], zero at first; null where there is no mask
  store* dx;              // [compact rows, gates x units]
  store* dr;              // [compact rows, recurrent gates x units]; not read where the cell has dr_is_dx
  store* const* dp;       // of each product of the step, [compact rows, units]
  // of the vectors in each sequence, [batch, vectors, units]; the other way round a row has all in one set of a cache
  real* dv;
  real* const* de;        // [outer rows, units], added to
  store* dprojected;      // [compact rows, width]
  int64_t ih_turned, hh_turned;  // ih and hh lie the other way round: [inputs, gates x units], as Keras has them
  int64_t unread;         // nobody reads the gradients of the initial states, and those of reset_to are not wanted
};

}  // namespace kernel

// What of run.cpp another library calls by address: it takes their types from here, and what differs does not compile.
extern "C" {
int64_t whorl_forward(const kernel::Sweep* k);
int64_t whorl_backward(const kernel::Sweep* k);
int64_t whorl_project(
    kernel::real* y, const kernel::store* x, const kernel::store* w, const kernel::real* bias, int64_t rows,
    int64_t inputs, int64_t outputs, int64_t stride, int64_t batch, int64_t across, int64_t threads);
int64_t whorl_outer(
    kernel::real* out, kernel::real* sums, const kernel::store* a, const kernel::store* b, int64_t rows, int64_t n,
    int64_t m, int64_t lda, int64_t ldb, int64_t add, const kernel::real* factor, const int64_t* sequence, int64_t batch,
    int64_t threads);
}
