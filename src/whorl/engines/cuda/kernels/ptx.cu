// What the kernels use of PTX, in the words of this file.  A "word" is the 4 bytes of a tensor core's operand: two
// elements of two bytes, or one of four.

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

// The number of a thread's warp.  So the compiler knows it to be the same for all of the warp: else, where warps do different
// things, it takes care that their threads could, too (20 to 25 percent more instructions in whole_forward.cu).
__device__ __forceinline__ int own_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

#if ELEMENT_BYTES == 2
typedef unsigned short Element;
typedef unsigned Pair;  // two neighbours in memory

#if BFLOAT16
__device__ __forceinline__ float wide(Element value) { return __uint_as_float((unsigned)value << 16); }
__device__ __forceinline__ Element narrow(float value) {
  Element result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
__device__ __forceinline__ float2 wide_pair(Pair pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ Pair narrow_pair(float low, float high) {
  Pair result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
__device__ __forceinline__ float wide(Element value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
}
__device__ __forceinline__ Element narrow(float value) {
  Element result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
__device__ __forceinline__ float2 wide_pair(Pair pair) {
  return {wide((Element)(pair & 0xffffu)), wide((Element)(pair >> 16))};
}
__device__ __forceinline__ Pair narrow_pair(float low, float high) {
  Pair result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif

__device__ __forceinline__ Pair joined(Element low, Element high) { return low | (unsigned)high << 16; }

#else  // four bytes: float32, which enters a product rounded to tf32, or whole in two parts of tf32

typedef float Element;
typedef float2 Pair;

__device__ __forceinline__ float wide(Element value) { return value; }
__device__ __forceinline__ Element narrow(float value) { return value; }
__device__ __forceinline__ float2 wide_pair(Pair pair) { return pair; }
__device__ __forceinline__ Pair narrow_pair(float low, float high) { return {low, high}; }
__device__ __forceinline__ Pair joined(Element low, Element high) { return {low, high}; }
__device__ __forceinline__ unsigned to_tf32(float value) {
  unsigned result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}
#if EXACT
__device__ __forceinline__ unsigned operand(float value) { return __float_as_uint(value); }
#else
__device__ __forceinline__ unsigned operand(float value) { return to_tf32(value); }
#endif
#if HALVES
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#endif
#endif

// What a product takes.  With HALVES a float32 enters as float16, which has tf32's 10 bits of mantissa, scaled by powers
// of two such that the largest of some is from 2^14 to 2^15; where products are exact it enters as two, which lie in two
// planes.  With `most` the largest of those, a number is then off by 2^-11 of itself (two: 2^-22) or by 2^-39 of `most`,
// whichever is more, so a product's sum by that of |weight| x |state or gradient| and of their largest: whatever their
// size is, up to 2^90 for weights.  A not-a-number has no part in `most`, and stays one.
//   weights           forward the largest of a row; backward of a unit, of those that a block multiplies
//   gradients         of a sequence and 16 units; where blocks exchange through L2, of those that a block multiplies, and
//                     below 2^-24 of a block's others those of another are zero
//   states            of a cell whose states are in [-1, 1] 1 stands for the largest, so what is below 2^-29 has fewer
//                     bits than tf32 gives it, and below 2^-40 is zero; initial states: the largest of a sequence.  Of
//                     a cell whose states are never larger than 1 and the largest of a sequence's initial states that
//                     stands for it at all steps.  With options: as options.cu has it.  Where blocks exchange through
//                     L2 it is so where products are exact, too.  In a cluster exact ones and (BY_STEP) those of other
//                     cells: of a sequence and 16 units, anew at each step, whatever they are, but the latter mostly have
//                     one for all (scales.cu); where blocks exchange through L2 such of other
//                     cells of a sequence and a block's units (levels.cu), and where products are not exact those below
//                     2^-24 of a sequence's largest are zero (in a cluster 2^-39 of what a warp multiplies)
#if HALVES
constexpr int OPERAND_BYTES = 2, PLANES = EXACT ? 2 : 1;
#else
constexpr int OPERAND_BYTES = ELEMENT_BYTES, PLANES = 1;
#endif
struct Planes { uint4 plane[PLANES]; };
constexpr int WORD_ELEMENTS = 4 / OPERAND_BYTES;
constexpr int SHARERS = 2 * WORD_ELEMENTS;  // threads whose two units each make 16 bytes together

#if HALVES
constexpr float STATE_SCALE = 32768.f;  // of states, which are in [-1, 1]
// From the largest of some numbers: 2^-k, such that 2^k times it is from 2^14 to 2^15 (less below 2^-112); and back.
__device__ __forceinline__ float unscale_of(float most) {
  const unsigned exponent = __float_as_uint(most) >> 23;
  return __uint_as_float(((exponent < 15 ? 15 : exponent) - 14) << 23);
}
__device__ __forceinline__ float scale_of(float unscale) {
  return __uint_as_float((254u << 23) - __float_as_uint(unscale));
}
__device__ __forceinline__ unsigned half_pair(float low, float high) {
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
__device__ __forceinline__ unsigned times_pair(unsigned pair, unsigned factors) {
  unsigned result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(factors));
  return result;
}
__device__ __forceinline__ float low_half(unsigned pair) {
  float result;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(result) : "r"(pair));
  return result;
}
// Where blocks exchange through L2 a second float16 has a power of two of its own, so that states need no scale at each
// step: what is above 2^-29 of the largest is off by 2^-22 of itself, and what is below by 2^-51 of the largest.
constexpr float LOW_SCALE = SPREAD && PLANES > 1 ? 2048.f : 1.f;
// two numbers, and what float16 leaves of them
__device__ __forceinline__ void split_halves(float first, float second, unsigned& high, unsigned& low) {
  high = half_pair(first, second);
  if constexpr (PLANES > 1)
    low = half_pair((first - low_half(high)) * LOW_SCALE, (second - low_half(high >> 16)) * LOW_SCALE);
}
#endif

#if HALVES || ELEMENT_BYTES == 2
// two neighbours (scaled, with HALVES) as a word of an operand
__device__ __forceinline__ unsigned operand_pair(float low, float high) {
#if HALVES
  return half_pair(low, high);
#else
  return narrow_pair(low, high);
#endif
}

// the 4 words that 4 threads, APART lanes apart, have one each of: each of them gets all
template <int APART>
__device__ __forceinline__ uint4 gathered_words(unsigned mine, int lane) {
  const unsigned other = __shfl_xor_sync(0xffffffffu, mine, APART);
  const unsigned low = lane & APART ? other : mine, high = lane & APART ? mine : other;
  const unsigned far_low = __shfl_xor_sync(0xffffffffu, low, 2 * APART);
  const unsigned far_high = __shfl_xor_sync(0xffffffffu, high, 2 * APART);
  return lane & 2 * APART ? uint4{far_low, far_high, low, high} : uint4{low, high, far_low, far_high};
}
#endif

// the 16 bytes that SHARERS threads, 4 lanes apart, make of two values each (scaled, with HALVES): each of them gets all
__device__ __forceinline__ Planes gathered(float first, float second, int lane, unsigned level) {
#if HALVES
  unsigned words[2];
  split_halves(first, second, words[0], words[1]);
  words[0] |= level;
  Planes result;
#pragma unroll
  for (int p = 0; p < PLANES; ++p) result.plane[p] = gathered_words<4>(words[p], lane);
  return result;
#elif ELEMENT_BYTES == 2
  return {{gathered_words<4>(narrow_pair(first, second), lane)}};
#else
  const unsigned low = operand(first), high = operand(second);
  const unsigned far_low = __shfl_xor_sync(0xffffffffu, low, 4), far_high = __shfl_xor_sync(0xffffffffu, high, 4);
  return {{lane & 4 ? uint4{far_low, far_high, low, high} : uint4{low, high, far_low, far_high}}};
#endif
}

// What a thread sends of two units: in two bytes a word of its own, so that a warp sends each block 128 bytes in a row at
// once; else the 16 bytes that SENDERS threads have together, each to every SENDERS-th block.  Forward of plain LSTM took
// 0.94 to 0.98 of the time with words, with 320 units and layer norm in clusters of 16 0.82 (H100).  `level` is the word's
// part of that, where states have one.
#define BY_WORDS (CLUSTER > 1 && (ELEMENT_BYTES == 2 || (HALVES && !EXACT)))
#if BY_WORDS
typedef unsigned Sent;
__device__ __forceinline__ Sent to_send(float first, float second, int, unsigned level = 0) {
  return operand_pair(first, second) | level;
}
#else
typedef Planes Sent;
__device__ __forceinline__ Sent to_send(float first, float second, int lane, unsigned level = 0) {
  return gathered(first, second, lane, level);
}
#endif
constexpr int SENDERS = BY_WORDS ? 1 : SHARERS;

// What the gates are kept in: the layer's own dtype, or float32 for a cell with a kink, where a rounded sum would take
// the other side.
#if WIDE_GATES
typedef float Gate;
typedef float2 GatePair;
__device__ __forceinline__ float2 wide_gates(GatePair pair) { return pair; }
#define load_gates load_wide_pair
#define store_gates store_wide_pair
#else
typedef Element Gate;
typedef Pair GatePair;
__device__ __forceinline__ float2 wide_gates(GatePair pair) { return wide_pair(pair); }
#define load_gates load_pair
#define store_gates store_pair
#endif

// two neighbouring values in memory, where they are there, and zero where not
__device__ __forceinline__ Pair load_pair(const Element* at, bool first, bool second) {
  if constexpr (UNITS % 2 == 0) return first ? *(const Pair*)at : Pair{};
  return joined(first ? at[0] : Element{}, second ? at[1] : Element{});
}
__device__ __forceinline__ float2 load_wide_pair(const float* at, bool first, bool second) {
  if constexpr (UNITS % 2 == 0) return first ? *(const float2*)at : float2{};
  return {first ? at[0] : 0.f, second ? at[1] : 0.f};
}
__device__ __forceinline__ void store_pair(Element* at, float low, float high, bool first, bool second) {
  if constexpr (UNITS % 2 == 0) {
    if (first) *(Pair*)at = narrow_pair(low, high);
  } else {
    if (first) at[0] = narrow(low);
    if (second) at[1] = narrow(high);
  }
}
__device__ __forceinline__ void store_wide_pair(float* at, float low, float high, bool first, bool second) {
  if constexpr (UNITS % 2 == 0) {
    if (first) *(float2*)at = {low, high};
  } else {
    if (first) at[0] = low;
    if (second) at[1] = high;
  }
}

__device__ __forceinline__ float half_of(float2 pair, int which) { return which == 0 ? pair.x : pair.y; }

// sums += a x b, for 16 rows, 8 columns and 8 words of depth
__device__ __forceinline__ void multiply_words(float (&sums)[4], const uint4& a, const uint2& b) {
  asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// the same of bfloat16, whatever the kernel's products are of
__device__ __forceinline__ void add_products(float (&sums)[4], const uint4& a, const uint2& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
__device__ __forceinline__ unsigned two_bfloat16(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// What is multiplied, as the tensor cores take it: left the weights, right the states or gradients.
#if EXACT
// A float32 is the sum of two numbers of tf32 to 2^-23 of itself, or of two of float16 to 2^-22; the product of the two
// small ones is left out.  Tensor cores cut off what they add (1e-5 of a sum over 1,024 terms), so each product is added
// to its sum by float32's own addition, multiplied with what scales of its 16 units were the inverse of.
struct Left { uint4 high, low; };
struct Right { uint2 high, low; float2 unscale; };  // of two neighbouring sequences
#if HALVES
__device__ __forceinline__ Left left_of(const Planes& a) { return {a.plane[0], a.plane[1]}; }
__device__ __forceinline__ Left left_of(const uint4& a) { return {a, {0u, 0u, 0u, 0u}}; }
__device__ __forceinline__ Right right_of(unsigned b0, unsigned b1) { return {{b0, b1}, {0u, 0u}, {1.f, 1.f}}; }
#else
constexpr unsigned KEPT = 0xffffe000u;  // the bits of a float32 that tf32 has
// `volatile`, so that weights are not split before the loop, where the two parts would need twice the registers
__device__ __forceinline__ unsigned high_of(unsigned value) {
  unsigned result;
  asm volatile("add.u32 %0, %1, 0x1000;" : "=r"(result) : "r"(value));
  return result & KEPT;  // as `cvt.rna.tf32`, which takes an instruction more to look for what is not finite
}
__device__ __forceinline__ unsigned low_of(unsigned value, unsigned high) {
  return __float_as_uint(__uint_as_float(value) - __uint_as_float(high)) & KEPT;  // which is at most one bit longer
}
__device__ __forceinline__ Left left_of(const uint4& a) {
  const uint4 high = {high_of(a.x), high_of(a.y), high_of(a.z), high_of(a.w)};
  return {high, {low_of(a.x, high.x), low_of(a.y, high.y), low_of(a.z, high.z), low_of(a.w, high.w)}};
}
__device__ __forceinline__ Right right_of(unsigned b0, unsigned b1) {
  const uint2 high = {high_of(b0), high_of(b1)};
  return {high, {low_of(b0, high.x), low_of(b1, high.y)}, {1.f, 1.f}};
}
#endif
__device__ __forceinline__ void multiply(float (&sums)[4], const Left& a, const Right& b) {
  float part[4] = {};
  multiply_words(part, a.high, b.low);
  multiply_words(part, a.low, b.high);
  multiply_words(part, a.high, b.high);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += part[i] * half_of(b.unscale, i % 2);
}
// the same where a second number has a power of two of its own, and so sums of its own, which are small
__device__ __forceinline__ void multiply_apart(float (&sums)[4], float (&low)[4], const Left& a, const Right& b) {
  float part[4] = {};
  multiply_words(low, a.high, b.low);
  multiply_words(part, a.high, b.high);
  multiply_words(low, a.low, b.high);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += part[i];
}
#else
typedef uint4 Left;
typedef uint2 Right;
__device__ __forceinline__ Left left_of(const uint4& a) { return a; }
__device__ __forceinline__ Right right_of(unsigned b0, unsigned b1) { return {b0, b1}; }
__device__ __forceinline__ void multiply(float (&sums)[4], const Left& a, const Right& b) { multiply_words(sums, a, b); }
#endif

#if !(EXACT && HALVES)
__device__ __forceinline__ Left left_of(const Planes& a) { return left_of(a.plane[0]); }
#endif

// weights from where one lane has its first plane
__device__ __forceinline__ Planes weights_at(const uint4* at) {
  Planes result;
#pragma unroll
  for (int p = 0; p < PLANES; ++p) result.plane[p] = at[p * 32];
  return result;
}

// b of 16 words of depth: rows of 8 x 16 bytes, one row's address from each thread
__device__ __forceinline__ uint4 load_columns(unsigned address) {
  uint4 b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
               : "r"(address)
               : "memory");
  return b;
}

// and of 8 words, from the addresses of the first 16 threads
__device__ __forceinline__ uint4 load_half_columns(unsigned address) {
  uint4 b = {0, 0, 0, 0};
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(b.x), "=r"(b.y)
               : "r"(address)
               : "memory");
  return b;
}

// bytes from global to shared memory, past the registers; zero where they are not there.  Done when `copies_done` is.
__device__ __forceinline__ void copy_16(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_8(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}
__device__ __forceinline__ void copy_4(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A byte as a number; zero where it is not `there`.  Loaded at this place, and without a branch: the compiler put such loads
// behind what is stored.
__device__ __forceinline__ unsigned load_mark(const bool* global, bool there) {
  unsigned mark;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.u8 %0, [%1];\n}"
               : "=r"(mark)
               : "l"(global), "r"((unsigned)there));
  return mark;
}
__device__ __forceinline__ void prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// For a warp that does not wait for the others.
__device__ __forceinline__ void arrive_at_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ float logistic(float value) { return 1.f / (1.f + expf(-value)); }
__device__ __forceinline__ float softplus(float value) { return value > 20.f ? value : log1pf(expf(value)); }

#if !EXACT
__device__ __forceinline__ float fast_exp(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
  return result;
}
__device__ __forceinline__ float fast_log(float value) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return 0.69314718f * result;
}
// log(1 + e^x) is max(x, 0) + log(1 + e^-|x|): good to 4e-6 of itself, where 1 + e^-|x| loses digits by its series
__device__ __forceinline__ float fast_softplus(float value) {
  const float part = fast_exp(-fabsf(value));
  const float near = part + part * part * (-0.5f + part * (0.333333333f + part * (-0.25f + part * 0.2f)));
  return fmaxf(value, 0.f) + (part < 0.06f ? near : fast_log(1.f + part));
}
#define softplus fast_softplus
#endif

#if ELEMENT_BYTES == 2 && FORWARD  // good to 2^-11, which is finer than what is kept of the result
__device__ __forceinline__ float fast_tanh(float value) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
__device__ __forceinline__ float fast_logistic(float value) { return 0.5f * fast_tanh(0.5f * value) + 0.5f; }
#define tanhf fast_tanh
#define logistic fast_logistic
#elif !EXACT  // 1 - tanh^2 and s (1 - s) must be good where they are small
__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
__device__ __forceinline__ float fast_tanh(float value) {
  const float far = 1.f - 2.f * reciprocal(1.f + fast_exp(2.f * value));
#if ELEMENT_BYTES == 2
  return far;
#else  // near zero that is good to 1e-7 of 1, not of itself: the first terms of the series are, to 2e-7
  const float square = value * value;
  const float near = value + value * square * (-0.333333333f + square * (0.133333333f - 0.0539682540f * square));
  return square < 0.0441f ? near : far;
#endif
}
__device__ __forceinline__ float fast_logistic(float value) { return reciprocal(1.f + fast_exp(-value)); }
#define tanhf fast_tanh
#define logistic fast_logistic
#endif

// What is ready before a wait is not computed behind it.
__device__ __forceinline__ void ready(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void ready(unsigned& value) { asm volatile("" : "+r"(value)); }

#if CLUSTER > 1
__device__ __forceinline__ unsigned rank_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// where a shared address of this block lies in the block of this rank
__device__ __forceinline__ unsigned at_rank(unsigned address, unsigned rank) {
  unsigned result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// An mbarrier that completes when `expect` or `arrive_here` was called so often and so many bytes have arrived.
__device__ __forceinline__ void start_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive_here(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barriers_started() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// The data came through the barrier itself, so nothing else has to be made visible: with `.acquire.cluster` the L1
// cache would be emptied at every step.
__device__ __forceinline__ void wait(unsigned barrier, unsigned phase) {
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  } while (!done);
}

// 16 bytes to another block's shared memory, counted by its barrier; addresses as `at_rank` gives them
__device__ __forceinline__ void send(unsigned address, unsigned barrier, uint4 data) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(data.x), "r"(data.y), "r"(data.z), "r"(data.w), "r"(barrier)
      : "memory");
}

// 8 bytes so
__device__ __forceinline__ void send_pair(unsigned address, unsigned barrier, uint2 data) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
      "r"(data.x), "r"(data.y), "r"(barrier)
      : "memory");
}

// 4 bytes so
__device__ __forceinline__ void send_word(unsigned address, unsigned barrier, unsigned data) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(data), "r"(barrier)
               : "memory");
}

// registers of a thread from here on: all four warps of a warpgroup say so; there are more only once others have fewer
template <int COUNT> __device__ __forceinline__ void take_more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#else
__device__ __forceinline__ unsigned rank_in_cluster() { return 0; }
#endif
