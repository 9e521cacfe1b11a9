// A matrix of float32 to what a product of TF32 takes of it, which adds three such products to each other: of the high
// and low parts of a and b, low x high, high x low and high x high.  A part has TF32's 10 bits of mantissa, and zeros
// behind them, so that it is the same however cuBLAS rounds; both parts are the number to 2^-23 of itself.  The depth is
// cut into groups, of which each becomes three, one behind the other, in float32 all of them:
//   a  low, high, whole     b  high, low, whole      whole is high; where a number is not finite the two before are zero
// So what is infinite meets each number of the other matrix once, as in the plain product: not its low part, which may
// be zero or of the other sign.  A part that would make a number infinite is cut off in place of rounded: such a number
// is off by 2^-22.  Where a product of two numbers is beyond float32's, so may that of high and low be, of the other sign:
// what is infinite in the plain product is then a not-a-number.
// Below 2^-112 a number has few bits of a low part left, and below 2^-136 fewer of the high one: it is off by 2^-137 then.
//
// A thread writes four neighbours of a row three times; rows are written to their whole width, zeros where nothing is.

// @generated

struct Arguments {
  const float* from;
  float* to;
  long long step;            // of `from`: from row to row
  long long height, width;   // of what is read
  long long rows, quads;     // of what is written three times: rows, and four times how many columns
  long long each;            // depth of a group, a multiple of 4
  long long across;          // the depth goes from row to row, not along a row
  long long low;             // which of the three is the low part, 0 or 1
};

constexpr unsigned KEPT = 0xffffe000u, INFINITE = 0x7f800000u, NOT_A_NUMBER = 0x7fc00000u;  // bits of float32

__device__ __forceinline__ bool finite(unsigned bits) { return (bits & INFINITE) != INFINITE; }

// The nearest number of TF32, of two the one that is further from zero; or the next one to zero where, added to `rest`,
// it would be infinite.
__device__ __forceinline__ float rounded(float value, float rest) {
  const unsigned bits = __float_as_uint(value);
  const float made = __uint_as_float((bits + 0x1000u) & KEPT);
  return finite(__float_as_uint(made + rest)) ? made : __uint_as_float(bits & KEPT);
}

__device__ __forceinline__ void split(float value, float& low, float& high, float& whole) {
  const unsigned bits = __float_as_uint(value);
  if (finite(bits)) {
    whole = high = rounded(value, 0.f);
    low = rounded(value - high, high);
  } else {  // TF32 might not have the bits that tell a not-a-number from what is infinite
    whole = __uint_as_float(bits << 1 == INFINITE << 1 ? bits : NOT_A_NUMBER);
    high = low = 0.f;
  }
}

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  const unsigned index = blockIdx.x * 256u + threadIdx.x, quads = (unsigned)a.quads;
  const long long row = index / quads, column = 4ll * (index % quads);
  if (row >= a.rows) return;
  float4 value = {0.f, 0.f, 0.f, 0.f};
  if (row < a.height && column < a.width) {
    const float* const from = a.from + row * a.step + column;
    if (column + 4 <= a.width && (unsigned long long)from % 16 == 0) {
      value = *(const float4*)from;
    } else {
      value.x = from[0];
      if (column + 1 < a.width) value.y = from[1];
      if (column + 2 < a.width) value.z = from[2];
      if (column + 3 < a.width) value.w = from[3];
    }
  }
  float4 low, high, whole;
  split(value.x, low.x, high.x, whole.x);
  split(value.y, low.y, high.y, whole.y);
  split(value.z, low.z, high.z, whole.z);
  split(value.w, low.w, high.w, whole.w);
  const long long wide = 4 * a.quads, before = (a.across ? row : column) / a.each * 2 * a.each;
  float* const to = a.to + (a.across ? (row + before) * wide + column : 3 * row * wide + column + before);
  const long long next = a.across ? a.each * wide : a.each;
  *(float4*)(to + a.low * next) = low;
  *(float4*)(to + (1 - a.low) * next) = high;
  *(float4*)(to + 2 * next) = whole;
}
