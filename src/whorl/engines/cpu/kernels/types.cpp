// What the two libraries of a kernel share: `sweep`, one for each dtype, and `step`, one for each cell and dtype.
//
// WHORL_DTYPE is 32, 64 or 16 (bfloat16).  `real` is what states and sums are held in, `store` what x, y, weights and
// the operands of products are.  Nothing is reordered by the compiler (no -ffast-math): a NaN goes through everything,
// and infinities do what IEEE 754 says.

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // what few calls need: the compiler would make it anew wherever it is used
#ifdef __clang__
#define EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH_ALONE _Pragma("GCC ivdep")
#endif

// In how many parts of bfloat16 a processor's matrix unit (AMX) takes a number: see parts.cpp.  0: there is no unit.
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__) && WHORL_DTYPE != 64
#define PARTS (WHORL_DTYPE == 16 ? 1 : 3)
#define UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PARTS 0
#define UNIT 0
#endif

namespace kernel {

#if WHORL_DTYPE == 64
using real = double;
#else
using real = float;
#endif
struct bfloat16 {
  uint16_t bits;
};
#if WHORL_DTYPE == 16
using store = bfloat16;
#else
using store = real;
#endif

template <typename To, typename From>
INLINE To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To made;
  __builtin_memcpy(&made, &value, sizeof(To));
  return made;
}

INLINE int64_t up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// k and columns of a tile of the matrix unit.
constexpr int64_t DEEP_TILE = 32, WIDE_TILE = 16;

// A process asks the system for the unit once.
INLINE bool unit_is_given() {
#if UNIT
  constexpr long request = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool given = !syscall(SYS_arch_prctl, request, tiles);
  return given;
#else
  return false;
#endif
}

// Whether a product of n columns and k with the rows of so many sequences is made by the unit: where few of a tile's k are
// empty, and in float32 from so many sequences on, as fewer rows take longer to bring six bytes of each weight than four.
INLINE bool unit_makes(int64_t parts, int64_t n, int64_t k, int64_t batch) {
  return unit_is_given() && batch >= (parts == 1 ? 1 : 16) && n >= WIDE_TILE && 3 * up(k, DEEP_TILE) <= 5 * k;
}

INLINE float widened(float value) { return value; }
INLINE double widened(double value) { return value; }
INLINE float widened(bfloat16 value) { return bits_of<float>(uint32_t(value.bits) << 16); }

// To the nearest, ties to even; a NaN stays one.
INLINE void put(float* at, float value) { *at = value; }
INLINE void put(double* at, double value) { *at = value; }
INLINE void put(bfloat16* at, float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  at->bits = uint16_t(value != value ? 0x7fc0u : rounded);
}

// Members of a team meet here; it is used again and again.
struct Barrier {
  int32_t size, waiting, round;

  void wait() {
    if (size == 1) return;
    const int32_t mine = __atomic_load_n(&round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&waiting, 1, __ATOMIC_ACQ_REL) == size) {
      __atomic_store_n(&waiting, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&round, mine + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int64_t spins = 0; __atomic_load_n(&round, __ATOMIC_ACQUIRE) == mine; ++spins) {
      if (spins > 4000) sched_yield();  // someone else has the processor
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
};

constexpr int MOST_STATES = 4, MOST_GATES = 8;

// Members of a team have the units [first, last) of a row each.
struct Team {
  Barrier* barrier;
  int64_t members, member;

  void wait() const { barrier->wait(); }
  int64_t part(int64_t count, int64_t grain, int64_t which) const {
    const int64_t pieces = (count + grain - 1) / grain, end = pieces * which / members * grain;
    return end < count ? end : count;
  }
  int64_t first(int64_t count, int64_t grain = 16) const { return part(count, grain, member); }
  int64_t last(int64_t count, int64_t grain = 16) const { return part(count, grain, member + 1); }
};

// One sequence at one step, as the generated lines see it.
struct Row {
  int64_t units, first, last;  // the units of the layer, and those to compute
  const real* x;
  const real* r;  // a gate's part is at r_offset
  const int64_t* r_offset;
  const real* before[MOST_STATES];
  real* after[MOST_STATES];
  const real* const* v;
  const real* const* e;
  real* means;  // results of means, of this member alone
  real* scratch;
  int64_t padded;  // of one value in scratch
  real* saved;
  const real* d[MOST_STATES];
  store* dx;
  store* dr;
  real* ds[MOST_STATES];
  real* const* dv;
  real* const* de;
  store* const* dp;
  int64_t means_at;  // of kept means in `saved`
};

// Some of them.
struct Rows {
  const Row* rows;
  int64_t count;

  const Row* begin() const { return rows; }
  const Row* end() const { return rows + count; }
};

// Between two segments of a step: result = the gate's weights (or their transpose) times operand, both in scratch.
struct Link {
  int segment, gate, operand, result, product;
};

// What a cell is: its numbers, its step forward and backward, one segment after the other, and the links between them.
struct Cell {
  int gates, recurrent, states, vectors, extras, products, saved, saved_means;
  bool dr_is_dx;         // one gradient for the input and the recurrent projection of each gate
  const bool* leaf;      // the step reads r of this recurrent gate
  const bool* multiplied;  // it multiplies with the weights of this gate itself
  struct Direction {
    int slots, means, segments, links;
    const Link* link;
    void (*segment)(int, const Row*, int64_t, const Team&);
  } forward, backward;
};

}  // namespace kernel
