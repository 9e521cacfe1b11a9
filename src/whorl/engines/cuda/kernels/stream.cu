// One step of one layer for a few streams, in one launch: both products and the cell.
//
// A warp has one unit: its lanes share the depth of the products of all gates with up to ROWS streams, the sums meet by
// shuffles, and lane `row` computes the cell for its stream.  Weights come from L2, 16 bytes a lane.
//
// The states that enter a product lie in two buffers, read in one and written in the other, since warps that are still
// reading stand beside others that have done.  Which is which is in memory, for each warp by itself, which turns it: so a
// CUDA graph can be replayed, and nobody waits for the count of all.
//
// Launches follow each other closely.  On compute capability 9.0 and later the next one begins while this one still
// runs; it reads weights, and nothing that a step writes, before it waits for the end of this one.  The first layer
// reads nothing at all before: what was launched ahead of it may have written its weights.  A step is a chain of waits
// for L2, so what it reads is asked for at once, of both buffers too, before it is known which is the right one.  What a
// step writes is read past L1, which may hold it as it was.

//: units

namespace kernel {

struct Arguments {
  const store* x;   // [batch, inputs]
  store* y;         // [batch, units]
  const store* ih;  // [gates x units, inputs]
  const store* hh;  // [recurrent gates x units, units]
  const store* bias_ih;  // null: none
  const store* bias_hh;
  const store* vectors[MOST(VECTORS)];  // [units]
  const real* extras[MOST(EXTRAS)];     // [batch, extra_widths]
  int64_t extra_widths[MOST(EXTRAS)];
  real* states[STATES];  // [batch, units]
  double shares[STATES];  // of the state before, that zoneout keeps
  const uint8_t* reset;   // [batch]; null: none
  store* operands;        // [2, batch, units]
  int* turns;             // [units]: which of them is read
  int64_t inputs, units, batch;
  int64_t follows;  // launched right after another layer of the same step
};

//: after

struct Piece {
  uint4 bits;
};
constexpr int EACH = 16 / sizeof(store);  // elements of a piece
// turns of a warp along the depth whose weights are read ahead for a single stream: at most 64 registers of them
constexpr int AHEAD = 16 / (GATES + RECURRENT) > 4 ? 4 : 16 / (GATES + RECURRENT);

__forceinline__ void multiply(real& sum, const Piece& weight, const Piece& value) {
#if WHORL_DTYPE == 16 || WHORL_DTYPE == 17
  const uint32_t* const w = &weight.bits.x;
  const uint32_t* const v = &value.bits.x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const store a = {uint16_t(w[i] >> 16 * half)}, b = {uint16_t(v[i] >> 16 * half)};
      sum += widened(a) * widened(b);
    }
#else
  const store* const w = (const store*)&weight;
  const store* const v = (const store*)&value;
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum += w[i] * v[i];
#endif
}

__forceinline__ Piece piece(const store* from) { return *(const Piece*)from; }

// The same of what a step writes.
__forceinline__ Piece fresh_piece(const store* from) {
#if defined(__CUDA_ARCH__)
  Piece made;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(made.bits.x), "=r"(made.bits.y), "=r"(made.bits.z), "=r"(made.bits.w)
               : "l"(from)
               : "memory");
  return made;
#else
  return piece(from);
#endif
}

// The same from any place.
__forceinline__ Piece piece_by_element(const store* from) {
  Piece made;
#pragma unroll
  for (int i = 0; i < EACH; ++i) ((store*)&made)[i] = from[i];
  return made;
}

template <int COUNT>
struct Weights {
  Piece pieces[MOST(AHEAD)][MOST(COUNT)];
};

// The first weights of one unit, of rows that are `apart` elements from gate to gate.
template <int COUNT>
__forceinline__ void read_ahead(Weights<COUNT>& ahead, const store* weights, int64_t apart, int64_t depth, bool wanted) {
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int64_t k = (i * 32 + threadIdx.x % 32) * EACH;
#pragma unroll
    for (int g = 0; g < COUNT; ++g)
      if (wanted && k < depth) ahead.pieces[i][g] = piece(weights + g * apart + k);
  }
}

// What a single stream multiplies them with.
struct Operands {
  Piece pieces[MOST(AHEAD)];
};
__forceinline__ void read_ahead(Operands& ahead, const store* operands, int64_t depth, bool odd) {
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int64_t k = (i * 32 + threadIdx.x % 32) * EACH;
    if (k < depth) ahead.pieces[i] = odd ? piece_by_element(operands + k) : fresh_piece(operands + k);
  }
}

// Add the products of one unit's rows of weights with the streams' operands, of which a single stream's first are there.
// Weights are read in pieces where they are `whole`; operands that lie at an odd place change no bit of the sums.
template <int COUNT, int ROWS>
__forceinline__ void add(
    real (&sums)[MOST(COUNT)][ROWS], const Weights<COUNT>& ahead, const Operands& entering, const store* weights,
    int64_t apart, const store* operands, int64_t depth, int rows, bool whole, bool odd) {
  const int lane = threadIdx.x % 32;
  if (COUNT == 0) return;
  constexpr int USED = ROWS == 1 ? AHEAD : 0;  // of more streams the sums take the registers
  const auto turn = [&](int64_t k) {
    Piece weight[MOST(COUNT)];
#pragma unroll
    for (int g = 0; g < COUNT; ++g) weight[g] = piece(weights + g * apart + k);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= rows) break;
      const Piece value = odd ? piece_by_element(operands + r * depth + k) : fresh_piece(operands + r * depth + k);
#pragma unroll
      for (int g = 0; g < COUNT; ++g) multiply(sums[g][r], weight[g], value);
    }
  };
  // All lanes take as many turns: of a warp whose lanes are apart each shuffle that follows takes hundreds of cycles.
  int64_t begins = 0;
  if (!whole) {
    const auto one = [&](int64_t k) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        const real value = widened(operands[r * depth + k]);
#pragma unroll
        for (int g = 0; g < COUNT; ++g) sums[g][r] += widened(weights[g * apart + k]) * value;
      }
    };
    for (; begins + 32 <= depth; begins += 32) one(begins + lane);
    if (begins + lane < depth) one(begins + lane);
    return;
  }
  begins = USED * 32 * EACH;
  if constexpr (ROWS == 1) {
#pragma unroll
    for (int i = 0; i < USED; ++i)
      if ((i * 32 + lane) * EACH < depth)
#pragma unroll
        for (int g = 0; g < COUNT; ++g) multiply(sums[g][0], ahead.pieces[i][g], entering.pieces[i]);
#pragma unroll 4
    for (; begins + 32 * EACH <= depth; begins += 32 * EACH) turn(begins + lane * EACH);
  } else {
#pragma unroll 1
    for (; begins + 32 * EACH <= depth; begins += 32 * EACH) turn(begins + lane * EACH);
  }
  if (begins + lane * EACH < depth) turn(begins + lane * EACH);
}

// The sum of every lane, in the lane of the row that it is of.
template <int ROWS>
__forceinline__ real gathered(const real (&sums)[ROWS]) {
  real mine = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    real sum = sums[r];
#pragma unroll
    for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(~0u, sum, away);
    mine = threadIdx.x % 32 == r ? sum : mine;
  }
  return mine;
}

// What one unit adds to its products, in lane g that of gate g, and its vectors.
struct Own {
  real bias_ih, bias_hh, vectors[MOST(VECTORS)];
};
__forceinline__ void read_own(Own& own, const Arguments& a, int64_t unit) {
  const int gate = threadIdx.x % 32;
  own.bias_ih = gate < GATES && a.bias_ih ? widened(a.bias_ih[gate * a.units + unit]) : real(0);
  own.bias_hh = gate < RECURRENT && a.bias_hh ? widened(a.bias_hh[gate * a.units + unit]) : real(0);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) own.vectors[v] = widened(a.vectors[v][unit]);
}

// The states before the step, in lane `row` those of its stream.
struct Before {
  bool begins;  // another sequence
  real states[STATES];
};
__forceinline__ void read_before(Before& before, const Arguments& a, int64_t unit, int64_t first, int rows) {
  const int64_t stream = first + threadIdx.x % 32;
  const bool mine = threadIdx.x % 32 < rows;
  before.begins = mine && a.reset && a.reset[stream];
#pragma unroll
  for (int s = 0; s < STATES; ++s)
    before.states[s] = mine ? *(volatile real*)(a.states[s] + stream * a.units + unit) : real(0);
}

// One unit of the streams from `first` on.
template <int ROWS>
__forceinline__ void unit_of(
    const Arguments& a, const Weights<GATES>& of_x, const Weights<RECURRENT>& of_r, const Operands& entering,
    const Operands& held, const Own& own, const Before& was, int64_t unit, int64_t first, int rows, const store* from,
    store* to, bool whole) {
  const int lane = threadIdx.x % 32;
  const int64_t stream = first + lane;
  real before[STATES], after[STATES];
  real x[MOST(GATES)][ROWS] = {}, r[MOST(RECURRENT)][ROWS] = {};
  add<GATES>(x, of_x, entering, a.ih + unit * a.inputs, a.units * a.inputs, a.x + first * a.inputs, a.inputs, rows,
             whole, (unsigned long long)a.x % 16 != 0);
  add<RECURRENT>(r, of_r, held, a.hh + unit * a.units, a.units * a.units, from + first * a.units, a.units, rows, whole,
                 false);
  real own_x[MOST(GATES)], own_r[MOST(RECURRENT)], saved[MOST(SAVED + SAVED_MEANS)];
#pragma unroll
  for (int g = 0; g < GATES; ++g) own_x[g] = gathered<ROWS>(x[g]) + __shfl_sync(~0u, own.bias_ih, g);
#pragma unroll
  for (int g = 0; g < RECURRENT; ++g) {
    const real sum = gathered<ROWS>(r[g]);
    own_r[g] = (was.begins ? real(0) : sum) + __shfl_sync(~0u, own.bias_hh, g);
  }
  if (lane >= rows) return;
  const real *at_vectors[MOST(VECTORS)], *extras[MOST(EXTRAS)];
  Row row;
  row.units = 1, row.first = 0, row.last = 1, row.x = own_x, row.r = own_r, row.saved = saved, row.means_at = SAVED;
  row.v = at_vectors, row.e = extras, row.means = nullptr, row.scratch = nullptr, row.padded = 0;
#pragma unroll
  for (int g = 0; g < RECURRENT; ++g) row.r_offset[g] = g;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) at_vectors[v] = own.vectors + v;
#pragma unroll
  for (int e = 0; e < EXTRAS; ++e)
    extras[e] = a.extras[e] + stream * a.extra_widths[e] + (a.extra_widths[e] > 1 ? unit : 0);
#pragma unroll
  for (int s = 0; s < STATES; ++s) {
    before[s] = was.begins ? real(0) : was.states[s];
    row.before[s] = before + s, row.after[s] = after + s;
  }
  forward_segment(0, row, {threadIdx.x});
#pragma unroll
  for (int s = 0; s < STATES; ++s) {
    const real share = real(a.shares[s]);
    after[s] = share == real(0) ? after[s] : share * before[s] + (real(1) - share) * after[s];
    a.states[s][stream * a.units + unit] = after[s];
  }
  put(to + stream * a.units + unit, after[0]);
  put(a.y + stream * a.units + unit, after[0]);
}

}  // namespace kernel

extern "C" __global__ void __launch_bounds__(128) NAME(stream)(const __grid_constant__ kernel::Arguments a) {
  using namespace kernel;
  const int64_t unit = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const bool whole = a.inputs % EACH == 0 && a.units % EACH == 0;  // matrices begin at 16 bytes, x may not
  Weights<GATES> of_x;
  Weights<RECURRENT> of_r;
  Operands entering, both[2];
  Own own;
  if (!a.follows) wait_for_the_launch_before();
  if (unit >= a.units) return;  // the whole warp
  const bool ahead = a.batch == 1 && whole;
  read_ahead<GATES>(of_x, a.ih + unit * a.inputs, a.units * a.inputs, a.inputs, ahead);
  read_ahead<RECURRENT>(of_r, a.hh + unit * a.units, a.units * a.units, a.units, ahead);
  read_own(own, a, unit);
  if (a.follows) wait_for_the_launch_before();
  let_the_next_launch_begin();
  int turn = ((volatile int*)a.turns)[unit];
  store* const buffers[2] = {a.operands, a.operands + a.batch * a.units};
  if (ahead) {
    read_ahead(entering, a.x, a.inputs, (unsigned long long)a.x % 16 != 0);
    if (RECURRENT > 0) read_ahead(both[0], buffers[0], a.units, false), read_ahead(both[1], buffers[1], a.units, false);
  }
  Before was;
  if (a.batch == 1) read_before(was, a, unit, 0, 1);
  turn = __shfl_sync(~0u, turn, 0);  // by then every lane has read it
  Operands held;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) held.pieces[i] = turn ? both[1].pieces[i] : both[0].pieces[i];
  const store* const from = turn ? buffers[1] : buffers[0];
  store* const to = turn ? buffers[0] : buffers[1];
  if (a.batch == 1)
    unit_of<1>(a, of_x, of_r, entering, held, own, was, unit, 0, 1, from, to, whole);
  else
    for (int64_t first = 0; first < a.batch; first += 8) {
      const int rows = int(a.batch - first < 8 ? a.batch - first : 8);
      read_before(was, a, unit, first, rows);
      unit_of<8>(a, of_x, of_r, entering, held, own, was, unit, first, rows, from, to, whole);
    }
  if (threadIdx.x % 32 == 0) a.turns[unit] = 1 - turn;
}
