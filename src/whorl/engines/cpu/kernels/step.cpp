// A cell's step, unit by unit: functions that a compiler turns into vector instructions, and the generated lines.
//
// They are written without branches, so that a loop around them becomes vector code.  Within `kernel` the name `std` means
// the functions below: the generated lines, which say std::exp, get these.

namespace kernel {

namespace std {

// --- float: at most 2 units in the last place, tested over all exponents ---------------------------------------------

// e^r - 1 - r for |r| <= log(2) / 2 (coefficients of Cephes' expf).
INLINE float rest_of_exp(float r) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r);
}

// x = n log(2) + r; n is in the low bits of `shifted`.
INLINE float reduced(float x, float& shifted) {
  shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: what is added rounds to an integer
  const float n = shifted - 12582912.0f;
  return (x - n * 0.693359375f) - n * -2.12194440e-4f;
}

INLINE float power_of_two(int32_t n) { return bits_of<float>(uint32_t(n + 127) << 23); }

INLINE float exp(float x) {
  const float held = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
  const float shifted = held * 1.44269504088896341f + 12582912.0f, whole = shifted - 12582912.0f;
  const float most = held - whole * 0.693359375f, r = most - whole * -2.12194440e-4f;
  const float lost = (most - r) - whole * -2.12194440e-4f;  // what was rounded away in r
  const float most_of_e = 1.0f + r;
  const float e = most_of_e + ((r - (most_of_e - 1.0f)) + (rest_of_exp(r) + lost));
  const int32_t n = int32_t(bits_of<uint32_t>(shifted) - 0x4b400000u), half = n >> 1;
  return e * power_of_two(half) * power_of_two(n - half);
}

INLINE float expm1(float x) {
  const float held = x < -30.0f ? -30.0f : (x > 20.0f ? 20.0f : x);
  float shifted;
  const float r = reduced(held, shifted);
  const float power = power_of_two(int32_t(bits_of<uint32_t>(shifted) - 0x4b400000u));
  const float near = power * (rest_of_exp(r) + r) + (power - 1.0f);
  return x > 20.0f ? exp(x) : (x == 0.0f ? x : near);
}

// A sigmoid and a tanh of fewer instructions, for processors with fused multiply-adds: with these they are wrong by at
// most 1.65 and 1.44 units in the last place (of all floats from 2^-24 to 64 and to 16), without by 1.98 and 1.48.  Those
// that processors without them get are wrong by 1.68 and 1.35, with them and without.
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
#define FUSED 1
#else
#define FUSED 0
#endif

#if FUSED

// For bfloat16 by the matrix unit, of which products take so little time that these count, sigmoid and tanh are right to
// 2^-17; else to two units in the last place.
constexpr bool NARROW = WHORL_DTYPE == 16 && UNIT;

// -2 |x|, from `least` on.  In a product a NaN keeps its sign, so here a NaN alone has none, and is the least as an
// integer without a sign: of these the minimum is one instruction, of numbers GCC makes a comparison and a blend.
INLINE float twice_down(float x, float least) {
  const uint32_t bits = bits_of<uint32_t>(__builtin_fabsf(x) * -2.0f), most = bits_of<uint32_t>(least);
  return bits_of<float>(bits < most ? bits : most);
}

// 2^n, where n and the exponent's bias of 127 are in the low bits of a number.
INLINE float power_of_low_bits(float shifted) { return bits_of<float>(bits_of<uint32_t>(shifted) << 23); }

// With e = e^-2|x| it is (1 - e) / (1 + e).  Narrow, that is all: 1 - e is right near zero too.  Else from 0.625 on it is
// 1 - 2 e / (1 + e), in which e's error and the quotient's count less than the last rounding, and a polynomial below.
INLINE float tanh(float x) {
  const float held = twice_down(x, -30.0f);
  const float shifted = held * 1.44269504088896341f + 12583039.0f, n = shifted - 12583039.0f;  // 1.5 * 2^23 + 127
  const float r = held - n * 0.693147180559945f, power = power_of_low_bits(shifted);  // e is small where n is not
  if (NARROW) {
    float p = 8.33807300064e-3f;  // (e^r - 1 - r) / r^2 for |r| <= log(2) / 2, to 4.5e-7 of e^r - 1
    p = p * r + 4.1872607369e-2f;
    p = p * r + 1.66668310393e-1f;
    p = p * r + 4.99994023936e-1f;
    const float rest = p * (r * r) + r;
    return __builtin_copysignf((power * rest + (power - 1.0f)) / (power * rest + (power + 1.0f)), x);
  }
  float p = 1.38145995531e-3f;  // e^r to 3e-9 of itself
  p = p * r + 8.36871687526e-3f;
  p = p * r + 4.1668388031e-2f;
  p = p * r + 1.66665206318e-1f;
  p = p * r + 4.99999934478e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float e = power * p, far = 1.0f - 2.0f * (e / (1.0f + e));
  const float size = __builtin_fabsf(x), square = x * x;
  float q = -5.70498872745e-3f;  // coefficients of Cephes' tanhf
  q = q * square + 2.06390887954e-2f;
  q = q * square - 5.37397155531e-2f;
  q = q * square + 1.33314422036e-1f;
  q = q * square - 3.33332819422e-1f;
  return size < 0.625f ? q * square * x + x : __builtin_copysignf(far, x);
}

#else

// e^r 2^n for n from -126 to 127 - bias, r and n as `reduced` gives them; times 2^bias.
INLINE float rebuilt(float r, float shifted, uint32_t bias) {
  const float most = 1.0f + r;
  return (most + ((r - (most - 1.0f)) + rest_of_exp(r))) * bits_of<float>((bits_of<uint32_t>(shifted) << 23) + ((127 + bias) << 23));
}

INLINE float tanh(float x) {
  const float size = __builtin_fabsf(x), square = x * x;
  float p = -5.70498872745e-3f;  // coefficients of Cephes' tanhf
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const float near = p * square * x + x;
  const float twice = 2.0f * size;
  float shifted;
  const float r = reduced(20.0f < twice ? 20.0f : twice, shifted);
  const float far = 1.0f - 2.0f / (rebuilt(r, shifted, 0) + 1.0f);
  return size < 0.625f ? near : __builtin_copysignf(far, x);
}

#endif

// log(y) - lower log(2) of a y that is normal and above 0.
INLINE float log_of_normal(float y, float lower) {
  const uint32_t bits = bits_of<uint32_t>(y) - 0x3f3504f3u;  // from sqrt(1/2) on
  const int32_t n = int32_t(bits) >> 23;
  const float m = bits_of<float>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 7.0376836292e-2f;  // coefficients of Cephes' logf
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const float k = float(n) - lower, square = m * m;
  const float result = p * m * square + k * -2.12194440e-4f;
  return (result - 0.5f * square) + m + k * 0.693359375f;
}

INLINE float log(float x) {
  const bool tiny = x < 1.17549435e-38f;  // and what is negative
  float result = log_of_normal(tiny ? x * 8388608.0f : x, tiny ? 23.0f : 0.0f);
  result = x == __builtin_inff() ? x : result;
  result = x == 0.0f ? -__builtin_inff() : result;
  return x < 0.0f || x != x ? __builtin_nanf("") : result;
}

INLINE float log1p(float x) {
  const float u = 1.0f + x;
  const float made = log(u) + (x - (u - 1.0f)) / u;  // what was rounded away in u
  return u == __builtin_inff() || u == 0.0f ? log(u) : (u == 1.0f ? x : made);
}

// --- double -----------------------------------------------------------------------------------------------------------

INLINE double power_of_two(int64_t n) { return bits_of<double>(uint64_t(n + 1023) << 52); }

INLINE double exp(double x) {
  const double held = x < -746.0 ? -746.0 : (x > 710.0 ? 710.0 : x);
  const double shifted = held * 1.4426950408889634074 + 6755399441055744.0;  // 1.5 * 2^52
  const double n = shifted - 6755399441055744.0;
  const double r = (held - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  double p = 1.0 / 6227020800.0;  // Taylor's series: its error is below 1e-17
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  const double e = p * (r * r) + r + 1.0;
  const int64_t whole = int64_t(bits_of<uint64_t>(shifted) - 0x4338000000000000ull), half = whole >> 1;
  return e * power_of_two(half) * power_of_two(whole - half);
}

INLINE double tanh(double x) {
  const double size = __builtin_fabs(x), square = x * x;
  const double p = (-9.64399179425052238628e-1 * square - 9.92877231001918586564e1) * square - 1.61468768441708447952e3;
  const double q = ((square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3) * square +
                   4.84406305325125486048e3;  // coefficients of Cephes' tanh
  const double near = x + x * (square * p / q);
  const double far = 1.0 - 2.0 / (exp(2.0 * size) + 1.0);
  return size < 0.625 ? near : __builtin_copysign(far, x);
}

INLINE double expm1(double x) { return __builtin_expm1(x); }
INLINE double log(double x) { return __builtin_log(x); }
INLINE double log1p(double x) { return __builtin_log1p(x); }

// --- those that few steps have: the library's, one unit after the other -----------------------------------------------

INLINE float erf(float x) { return __builtin_erff(x); }
INLINE double erf(double x) { return __builtin_erf(x); }
INLINE float sin(float x) { return __builtin_sinf(x); }
INLINE double sin(double x) { return __builtin_sin(x); }
INLINE float cos(float x) { return __builtin_cosf(x); }
INLINE double cos(double x) { return __builtin_cos(x); }
INLINE float pow(float x, float y) { return __builtin_powf(x, y); }
INLINE double pow(double x, double y) { return __builtin_pow(x, y); }
INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
INLINE double sqrt(double x) { return __builtin_sqrt(x); }
INLINE float fabs(float x) { return __builtin_fabsf(x); }
INLINE double fabs(double x) { return __builtin_fabs(x); }

}  // namespace std

INLINE double sigmoid(double x) {
  const double z = std::exp(-std::fabs(x));
  return (x < 0.0 ? z : 1.0) / (1.0 + z);
}

// With z = e^-|x| the sigmoid is z or 1, less its product with z / (1 + z): 1 + z rounds, and so matters less than in a
// quotient of its own.  Until z's last product the exponent has 64 more: denormals round once.
#if FUSED
// r is twice what is left of -|x|, and p is e^(r/2) 2^-64.
INLINE float sigmoid(float x) {
  constexpr float down = 5.42101086242752217e-20f;
  const float held = std::twice_down(x, -208.0f);
  const float shifted = held * 0.721347520444481704f + 12583103.0f, n = shifted - 12583103.0f;  // 1.5 * 2^23 + 127 + 64
  const float r = (held - n * 1.38671875f) - n * -4.2438888e-4f;
  float p;  // with the least error of e^(r/2) for |r| <= log(2): 3e-9 of it, narrow 5.3e-6
  if (std::NARROW) {
    p = 4.12776722338e-2f / 16 * down * r + 1.67535312676e-1f / 8 * down;
    p = p * r + 5.00051180426e-1f / 4 * down;
  } else {
    p = 1.38145995531e-3f / 64 * down * r + 8.36871687526e-3f / 32 * down;
    p = p * r + 4.1668388031e-2f / 16 * down;
    p = p * r + 1.66665206318e-1f / 8 * down;
    p = p * r + 4.99999934478e-1f / 4 * down;
  }
  p = p * r + 0.5f * down;
  p = p * r + down;
  const float z = p * std::power_of_low_bits(shifted), most = x < 0.0f ? z : 1.0f;
  return std::NARROW ? most / (1.0f + z) : most - most * (z / (1.0f + z));
}
#else
INLINE float sigmoid(float x) {
  const float down = -__builtin_fabsf(x);
  float shifted;
  const float r = std::reduced(-104.0f > down ? -104.0f : down, shifted);
  const float z = std::rebuilt(r, shifted, 64) * 5.42101086242752217e-20f, most = x < 0.0f ? z : 1.0f;
  return most - most * (z / (1.0f + z));
}
#endif

INLINE double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

// log(1 + e^-|x|), and x where it is above 0: no branch, which would keep a loop from becoming vector code.
INLINE float softplus(float x) {
  const float z = std::exp(-__builtin_fabsf(x)), u = 1.0f + z;
  return (x > 0.0f ? x : 0.0f) + (std::log_of_normal(u, 0.0f) + (z - (u - 1.0f)) / u);
}

// Means over the units of some rows, in an order that their length alone decides.
typedef real lanes __attribute__((vector_size(64)));
typedef real loose_lanes __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));
typedef real half_lanes __attribute__((vector_size(32)));
typedef real quarter_lanes __attribute__((vector_size(16)));
constexpr int64_t WIDE = 64 / int64_t(sizeof(real));

template <typename Half, typename Whole>
INLINE Half folded(const Whole& values) {
  Half halves[2];
  __builtin_memcpy(halves, &values, sizeof(values));
  return halves[0] + halves[1];
}
// By halves: no long chain of sums.
INLINE real sum_of(const lanes& values) {
  const quarter_lanes four = folded<quarter_lanes>(folded<half_lanes>(values));
  if constexpr (WIDE == 16) return (four[0] + four[2]) + (four[1] + four[3]);
  return four[0] + four[1];
}

// Of each of some groups of rows the mean of all (null: not wanted), and the mean of the squares of what they are apart
// from it.  What is summed is apart from a number near the mean, so that little is rounded away: for means alone from the
// mean as the rows' sum gives it, so they are read twice; for squares from the mean of their first numbers, so they are
// read once, and again where that is so far from the mean that squares would cancel.  One group does not wait for another:
// from a sum to the mean is a long way, which they go beside each other.
template <bool SQUARES, int GROUPS, int N>
static inline void means_of(
    const real* const (&rows)[GROUPS][N], int64_t count, real* const (&means)[GROUPS],
    real* const (&variances)[GROUPS]) {
  constexpr real FAR = real(4);
  const int64_t whole = count / WIDE * WIDE, left = count - whole;
  const real every = real(N * count);
  lanes sums[GROUPS][N] = {}, squares[GROUPS][N] = {}, rest[GROUPS][N] = {}, middle[GROUPS], counted = {};
  real near[GROUPS], variance[GROUPS];
  auto total = [](lanes (&parts)[N]) {
    for (int row = 1; row < N; ++row) parts[0] += parts[row];
    return sum_of(parts[0]);
  };
  for (int64_t u = 0; u < whole && !SQUARES; u += WIDE)
    for (int group = 0; group < GROUPS; ++group)
      for (int row = 0; row < N; ++row) sums[group][row] += *(const loose_lanes*)(rows[group][row] + u);
  if (left) {
    real some[WIDE] = {};
    for (int64_t lane = 0; lane < left; ++lane) some[lane] = real(1);
    __builtin_memcpy(&counted, some, sizeof(some));
    for (int group = 0; group < GROUPS; ++group)
      for (int row = 0; row < N; ++row) {
        for (int64_t lane = 0; lane < left; ++lane) some[lane] = rows[group][row][whole + lane];
        __builtin_memcpy(&rest[group][row], some, sizeof(some));
        sums[group][row] += rest[group][row];
      }
  }
  for (int group = 0; group < GROUPS; ++group) {
    // a copy: a reference would be to lanes that lie aligned
    const lanes some = whole ? *(const loose_lanes*)rows[group][0] : rest[group][0];
    if (!SQUARES) near[group] = total(sums[group]) / every;
    else near[group] = sum_of(some) / real(whole ? WIDE : left);
  }
  bool again = true, far[GROUPS];
  for (int pass = 0; again && pass < 2; ++pass) {
    for (int group = 0; group < GROUPS; ++group) {
      middle[group] = lanes{} + near[group];
      for (int row = 0; row < N; ++row) {
        sums[group][row] = left ? rest[group][row] - middle[group] * counted : lanes{};
        if (SQUARES) squares[group][row] = sums[group][row] * sums[group][row];
      }
    }
    for (int64_t u = 0; u < whole; u += WIDE)
      for (int group = 0; group < GROUPS; ++group)
        for (int row = 0; row < N; ++row) {
          const lanes apart = *(const loose_lanes*)(rows[group][row] + u) - middle[group];
          sums[group][row] += apart;
          if (SQUARES) squares[group][row] += apart * apart;
        }
    again = false;
    for (int group = 0; group < GROUPS; ++group) {
      if (pass && !far[group]) continue;  // a row's numbers do not depend on which rows are beside it
      const real lost = total(sums[group]) / every;
      if (SQUARES || near[group] - near[group] == real(0)) near[group] += lost;  // an infinity has no distance to it
      if (SQUARES) variance[group] = total(squares[group]) / every - lost * lost;
      far[group] = SQUARES && lost * lost > FAR * variance[group];
      again = again || far[group];
    }
  }
  for (int group = 0; group < GROUPS; ++group) {
    if (means[group]) *means[group] = near[group];
    if (SQUARES) *variances[group] = variance[group] < real(0) ? real(0) : variance[group];
  }
}

// A sum that a loop made lane by lane beside what else it does: of each lane few numbers, so that little is rounded away.
INLINE real total_of(const real (&sums)[WIDE]) {
  lanes values;
  __builtin_memcpy(&values, sums, sizeof(values));
  return sum_of(values);
}
// The same to the bit of a row that lies in memory: its units are several threads'.
static inline real sum_in_lanes(const real* row, int64_t units) {
  real sums[WIDE] = {};
  int64_t begin = 0;
  for (; begin + WIDE <= units; begin += WIDE)
    for (int64_t lane = 0; lane < WIDE; ++lane) sums[lane] += row[begin + lane];
  for (int64_t lane = 0; lane < units - begin; ++lane) sums[lane] += row[begin + lane];
  return total_of(sums);
}
// A value as it is stored: a compiler that does not know that `nothing` is 0 makes no fused step of a product and its sum.
#if WHORL_DTYPE == 64
typedef uint64_t word;
#else
typedef uint32_t word;
#endif
INLINE real rounded(real value, word nothing) { return bits_of<real>(bits_of<word>(value) ^ nothing); }

//: generated

}  // namespace kernel

extern "C" const kernel::Cell* whorl_cell() { return &kernel::CELL; }
#ifdef WHORL_TESTED
// The functions of this file, for tests: 0 exp, 1 expm1, 2 tanh, 3 log, 4 log1p, 5 sigmoid, 6 softplus.
extern "C" void whorl_maths(int64_t which, int64_t count, const kernel::real* x, kernel::real* y) {
  using namespace kernel;
  EACH_ALONE
  for (int64_t u = 0; u < count; ++u)
    y[u] = which == 0 ? kernel::std::exp(x[u]) : which == 1 ? kernel::std::expm1(x[u]) : which == 2 ? kernel::std::tanh(x[u])
           : which == 3 ? kernel::std::log(x[u]) : which == 4 ? kernel::std::log1p(x[u])
           : which == 5 ? kernel::sigmoid(x[u]) : kernel::softplus(x[u]);
}
// Of the first two rows the mean and the variance, then of the next two.
extern "C" void whorl_means(const kernel::real* rows, int64_t count, int64_t apart, kernel::real* to) {
  kernel::means_of<true>({{rows, rows + apart}, {rows + 2 * apart, rows + 3 * apart}}, count, {to, to + 2}, {to + 1, to + 3});
}
#endif
