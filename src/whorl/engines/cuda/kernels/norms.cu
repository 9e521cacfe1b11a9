// Layer norm of the input projection, of all steps at once.  Forward gives what comes to the time loop; backward the
// gradient of the projection, and of biases, gains and shifts the sums over the rows of each block, which
// kernels/sums.cu adds up.
//
// GROUPS of THREADS threads in a block take row after row, each its own.  A thread's registers hold every THREADS-th
// word of a row, WORD neighbouring columns, with their bias, gain and shift, in backward their sums, and where AHEAD
// those words of the next row, which are on their way while numbers of this one are exchanged, in one round with one
// barrier.  x, y and gradients begin at multiples of 16 bytes, and WORD divides WIDTH, so a row is whole words; it need
// not divide UNITS, and vectors, which are users' own, begin anywhere: they are read element by element.
//
// Mean and variance are over the first COUNTED units of each gate.  The others are padding: forward gives what the same
// formula makes of them, backward zeros.

// @generated

constexpr int WIDTH = GATES * UNITS, WORDS = WIDTH / WORD, EACH = (WORDS + THREADS - 1) / THREADS;
constexpr int PAIRS = (WORD + 1) / 2, WARPS = THREADS / 32;
constexpr int PLACES = WARPS > 16 ? 32 : WARPS > 8 ? 16 : WARPS > 4 ? 8 : WARPS > 2 ? 4 : WARPS;  // a power of two
constexpr int COLUMNS = (2 + BIASED) * WIDTH;  // of a block's sums: bias, gains, shifts
constexpr float SHARE = 1.f / (GATES * COUNTED);
static_assert(WIDTH % WORD == 0, "rows are whole words");

__device__ __forceinline__ int mine() { return threadIdx.x % THREADS; }  // among the threads of a group
__device__ __forceinline__ int group() { return threadIdx.x / THREADS; }
__device__ __forceinline__ int column_of(int place) { return (mine() + place * THREADS) * WORD; }
__device__ __forceinline__ bool is_there(int place) { return place < EACH - 1 || column_of(place) < WIDTH; }

__device__ __forceinline__ long long start_of(long long row) { return row * WIDTH; }

// WORD neighbours as they lie in memory; one alone has nothing beside it
template <class Two> struct __align__(WORD > 1 ? WORD / 2 * sizeof(Two) : sizeof(Two)) Word { Two pair[PAIRS]; };
typedef Word<float2> Floats;
typedef Word<Pair> Elements;

__device__ __forceinline__ float2 alone(float value) { return {value, 0.f}; }
__device__ __forceinline__ void set(float2& to, float low, float high) { to = {low, high}; }
__device__ __forceinline__ void put(float* to, float value) { *to = value; }
#if ELEMENT_BYTES == 2
__device__ __forceinline__ float2 wide_pair(float2 pair) { return pair; }
__device__ __forceinline__ Pair alone(Element value) { return value; }
__device__ __forceinline__ void set(Pair& to, float low, float high) { to = narrow_pair(low, high); }
__device__ __forceinline__ void put(Element* to, float value) { *to = narrow(value); }
#endif

template <class Two> __device__ __forceinline__ float of_word(const Word<Two>& word, int j) {
  return half_of(wide_pair(word.pair[j / 2]), j % 2);
}

// A thread's part of a row; zeros past the end of it.
template <class Two, class One> __device__ __forceinline__ void load(Word<Two> (&to)[EACH], const One* row) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    to[i] = {};
    if (!is_there(i)) continue;
    if constexpr (WORD > 1)
      to[i] = *(const Word<Two>*)(row + column_of(i));
    else
      to[i].pair[0] = alone(row[column_of(i)]);
  }
}
template <class Two, class One> __device__ __forceinline__ void store(One* to, const float (&values)[WORD]) {
  if constexpr (WORD > 1) {
    Word<Two> made;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) set(made.pair[p], values[2 * p], values[2 * p + 1]);
    *(Word<Two>*)to = made;
  } else
    put(to, values[0]);
}

// A thread's part of a vector of WIDTH, of which `at` tells where a column's element lies; past the end something else.
template <class At> __device__ __forceinline__ void read(Elements (&to)[EACH], At at) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    Element one[2 * PAIRS] = {};
#pragma unroll
    for (int j = 0; j < WORD; ++j) one[j] = *at(is_there(i) ? column_of(i) + j : j);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) to[i].pair[p] = joined(one[2 * p], one[2 * p + 1]);
  }
}
__device__ __forceinline__ void read_bias(Elements (&to)[EACH], const Element* bias) {
  if (BIASED) read(to, [=](int column) { return bias + column; });
}
__device__ __forceinline__ void read_parts(Elements (&to)[EACH], const Element* const (&parts)[GATES]) {
  read(to, [&](int column) { return parts[column / UNITS] + column % UNITS; });
}

// What is kept stays packed over the rows: unpacked before the loop, it would take twice the registers.
#if ELEMENT_BYTES == 2
__device__ __forceinline__ void keep(Pair& pair) { asm volatile("" : "+r"(pair)); }
#else
__device__ __forceinline__ void keep(Pair&) {}
#endif
__device__ __forceinline__ void keep_all(Elements (&kept)[EACH]) {
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) keep(kept[i].pair[p]);
}

// Which of a thread's columns count, a bit each; a bit for each word, where all columns of a word count or none.
constexpr int BITS = UNITS % WORD == 0 && COUNTED % WORD == 0 ? 1 : WORD;
static_assert(EACH * BITS <= 32, "there is a bit for each");
__device__ __forceinline__ unsigned counted() {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < BITS; ++j)
      if (is_there(i) && (column_of(i) + j) % UNITS < COUNTED) bits |= 1u << i * BITS + j;
  return bits;
}
__device__ __forceinline__ bool counts(unsigned bits, int i, int j) {
  return COUNTED == UNITS ? is_there(i) : bits >> i * BITS + j % BITS & 1;
}

// The sum over so many neighbouring lanes.
template <int LANES> __device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
  for (int apart = LANES / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

// Two numbers of each warp of the group in one of its three rooms, a warp's for every PLACES-th lane.
__device__ __forceinline__ float2* room_of(int which) {
  extern __shared__ __align__(16) unsigned memory[];
  return (float2*)memory + (group() * 3 + which) * WARPS;
}
__device__ __forceinline__ float2 from_room(int which) {
  const int place = threadIdx.x % PLACES;
  return place < WARPS ? room_of(which)[place] : float2{};
}
// Used in turns, two rooms need one barrier: who writes into one has met all others since they read it.
__device__ __forceinline__ float2 of_warps(float2 own, int which) {
  if constexpr (WARPS == 1) return own;
  if (threadIdx.x % 32 == 0) room_of(which)[mine() / 32] = own;
  if constexpr (GROUPS == 1)
    __syncthreads();
  else
    named_barrier(1 + group(), THREADS);
  return from_room(which);
}

#if FORWARD

struct Arguments {
  const float* x;                // [rows, WIDTH], without its bias
  const Element* bias;           // [WIDTH]
  const Element* gains[GATES];   // [UNITS]
  const Element* shifts[GATES];
  Gate* y;                       // [rows, WIDTH]
  float *means, *scales;         // [rows]: the mean, and what the distance from it is multiplied by
  long long rows;
};

// Each warp has the mean of its own columns and the squares of the distances from that; the squares of the distances
// from the mean of all are more by the square of what lies between the means, for each column.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  long long row = blockIdx.x;
  const unsigned bits = counted();
  Floats next[EACH];
  if (AHEAD && row < a.rows) load(next, a.x + start_of(row));
  Elements bias[EACH] = {}, gain[EACH], shift[EACH];
  read_bias(bias, a.bias);
  read_parts(gain, a.gains);
  read_parts(shift, a.shifts);
  float columns = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < WORD; ++j) columns += counts(bits, i, j) ? 1.f : 0.f;
  const float own = over_lanes<32>(columns), own_share = own > 0.f ? 1.f / own : 0.f;
  float2 warp = of_warps({own, own_share}, 2);  // how many columns that warp has whose numbers this lane will have

  for (int turn = 0; row < a.rows; row += gridDim.x, ++turn) {
    if (!AHEAD) load(next, a.x + start_of(row));
    keep_all(bias), keep_all(gain), keep_all(shift);
    float x[EACH][WORD], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        x[i][j] = of_word(next[i], j) + of_word(bias[i], j);
        sum += counts(bits, i, j) ? x[i][j] : 0.f;
      }
    if (AHEAD && row + gridDim.x < a.rows) load(next, a.x + start_of(row + gridDim.x));
    sum = over_lanes<32>(sum);
    const float middle = sum * own_share;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        const float apart = counts(bits, i, j) ? x[i][j] - middle : 0.f;
        squares += apart * apart;
      }
    const float2 all = of_warps({sum, over_lanes<32>(squares)}, turn % 2);
    if constexpr (WARPS > 1) warp = from_room(2);  // which takes no register in between
    const float mean = over_lanes<PLACES>(all.x) / (GATES * COUNTED), apart = all.x * warp.y - mean;
    const float scale = rsqrtf(over_lanes<PLACES>(all.y + warp.x * apart * apart) * SHARE + EPS);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
      for (int j = 0; j < WORD; ++j) x[i][j] = (x[i][j] - mean) * scale * of_word(gain[i], j) + of_word(shift[i], j);
      if (is_there(i)) store<GatePair>(a.y + start_of(row) + column_of(i), x[i]);
    }
    if (mine() == 0) {
      a.means[row] = mean;
      a.scales[row] = scale;
    }
  }
}

#else

struct Arguments {
  const float* x;              // [rows, WIDTH], without its bias
  const Element* bias;         // [WIDTH]
  const Element* gains[GATES];
  const float *means, *scales;  // [rows], as forward left them
  const Element* grad;         // [rows, WIDTH], of what forward gave
  Element* made;               // [rows, WIDTH], of x
  float* sums;                 // [blocks, COLUMNS]
  long long rows;
};

// A thread's part of what backward reads of a row.
struct Row {
  Floats x[EACH];
  Elements grad[EACH];
  float mean, scale;
};
__device__ __forceinline__ void load_row(Row& to, const Arguments& a, int row) {
  load(to.x, a.x + start_of(row));
  load(to.grad, a.grad + start_of(row));
  to.mean = a.means[row];
  to.scale = a.scales[row];
}

extern "C" __global__ void __launch_bounds__(THREADS * GROUPS, RESIDENT) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  // rows are fewer than 2^30: counted in 64 bits, they took registers that sm_100a and sm_120a did not have
  const int step = gridDim.x * GROUPS;
  int row = blockIdx.x + gridDim.x * group();
  Row next;
  if (AHEAD && row < a.rows) load_row(next, a, row);
  Elements bias[EACH] = {}, gain[EACH];
  read_bias(bias, a.bias);
  read_parts(gain, a.gains);
  const unsigned bits = counted();
  float to_bias[EACH][WORD] = {}, to_gain[EACH][WORD] = {}, to_shift[EACH][WORD] = {};
  for (int turn = 0; row < a.rows; row += step, ++turn) {
    if (!AHEAD) load_row(next, a, row);
    keep_all(bias), keep_all(gain);
    const float mean = next.mean, scale = next.scale;
    float normal[EACH][WORD], to_normal[EACH][WORD], first = 0.f, second = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        const bool there = counts(bits, i, j);
        const float grad = there ? of_word(next.grad[i], j) : 0.f;
        normal[i][j] = there ? (of_word(next.x[i], j) + of_word(bias[i], j) - mean) * scale : 0.f;
        to_normal[i][j] = there ? grad * of_word(gain[i], j) : 0.f;
        to_gain[i][j] += grad * normal[i][j];
        to_shift[i][j] += grad;
        first += to_normal[i][j];
        second += to_normal[i][j] * normal[i][j];
      }
    if (AHEAD && row + step < a.rows) load_row(next, a, row + step);
    const float2 all = of_warps({over_lanes<32>(first), over_lanes<32>(second)}, turn % 2);
    const float same = over_lanes<PLACES>(all.x) * SHARE, along = over_lanes<PLACES>(all.y) * SHARE;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float to_x[WORD];
#pragma unroll
      for (int j = 0; j < WORD; ++j) {
        to_x[j] = counts(bits, i, j) ? scale * (to_normal[i][j] - same - normal[i][j] * along) : 0.f;
        to_bias[i][j] += to_x[j];
      }
      if (is_there(i)) store<Pair>(a.made + start_of(row) + column_of(i), to_x);
    }
  }
  float* const sums = a.sums + (long long)blockIdx.x * COLUMNS;
  if constexpr (GROUPS == 1) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (!is_there(i)) continue;
      if (BIASED) store<float2>(sums + column_of(i), to_bias[i]);
      store<float2>(sums + BIASED * WIDTH + column_of(i), to_gain[i]);
      store<float2>(sums + (BIASED + 1) * WIDTH + column_of(i), to_shift[i]);
    }
  } else {
    extern __shared__ __align__(16) unsigned memory[];
    float* const all = (float*)memory + GROUPS * 8 * WARPS;  // [GROUPS, COLUMNS], from a multiple of 16 bytes on
    float* const own = all + group() * COLUMNS;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (!is_there(i)) continue;
      if (BIASED) store<float2>(own + column_of(i), to_bias[i]);
      store<float2>(own + BIASED * WIDTH + column_of(i), to_gain[i]);
      store<float2>(own + (BIASED + 1) * WIDTH + column_of(i), to_shift[i]);
    }
    __syncthreads();
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS * GROUPS) {
      float sum = 0.f;
#pragma unroll
      for (int from = 0; from < GROUPS; ++from) sum += all[from * COLUMNS + column];
      sums[column] = sum;
    }
  }
}

#endif
