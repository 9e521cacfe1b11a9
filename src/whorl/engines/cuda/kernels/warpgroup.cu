// Products of four warps together, on the tensor cores of compute capability 9.0: 64 rows of weights, 16 of each warp, with
// 8 x TILES sequences.  A warp has its weights in registers, as for `multiply`, or those of all four lie in shared memory;
// the states of the sequences always do, and are read once for four warps.
//
// In shared memory an operand is made of squares of 8 rows x 16 bytes, one row behind the other.  Products are begun in
// their order and run beside the threads: nobody may look at their sums, or write over what they read, until `multiplied`.
//
// Where states have two planes, as 8 x TILES rows each, weights are multiplied with both at once (`multiply_both`): an
// operand that comes from shared memory takes as long with 32 columns as with 16.

static_assert(OPERAND_BYTES == 2, "products of four warps are of two bytes");
#if BFLOAT16
#define WIDE_MMA(columns) "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "
#else
#define WIDE_MMA(columns) "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 "
#endif

// a number that is the same for all threads of a warp, in a register of the warp
__device__ __forceinline__ int of_warp(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// An operand in shared memory: `across` bytes to the next 16 bytes of the same rows, 128 to the next 8 rows.  It may be
// moved on by 16 bytes at a time.
__device__ __forceinline__ unsigned operand_at(unsigned address, int across) {
  return address >> 4 | across >> 4 << 16;
}
__device__ __forceinline__ unsigned long long described(unsigned operand) {
  return operand | (unsigned long long)(128 >> 4) << 32;
}

// What threads wrote to shared memory is seen by the tensor cores, once they have met.
__device__ __forceinline__ void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define SUM_OF(i) (i < TILES ? to + i : beside + (i - TILES))[0]
#define SUMS_OF(i) "+f"(SUM_OF(i)[0]), "+f"(SUM_OF(i)[1]), "+f"(SUM_OF(i)[2]), "+f"(SUM_OF(i)[3])
#define WIDE_SUMS_1 SUMS_OF(0)
#define WIDE_SUMS_2 WIDE_SUMS_1, SUMS_OF(1)
#define WIDE_SUMS_3 WIDE_SUMS_2, SUMS_OF(2)
#define WIDE_SUMS_4 WIDE_SUMS_3, SUMS_OF(3)
#define WIDE_SUMS_6 WIDE_SUMS_4, SUMS_OF(4), SUMS_OF(5)
#define WIDE_SUMS_8 WIDE_SUMS_6, SUMS_OF(6), SUMS_OF(7)
#define WIDE_NAMES_1 "%0, %1, %2, %3"
#define WIDE_NAMES_2 WIDE_NAMES_1 ", %4, %5, %6, %7"
#define WIDE_NAMES_3 WIDE_NAMES_2 ", %8, %9, %10, %11"
#define WIDE_NAMES_4 WIDE_NAMES_3 ", %12, %13, %14, %15"
#define WIDE_NAMES_6 WIDE_NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WIDE_NAMES_8 WIDE_NAMES_6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WIDE_PRODUCT(tiles, columns, a0, a1, a2, a3, b, adds)                                                          \
  "{\n.reg .pred p;\nsetp.ne.u32 p, %" #adds ", 0;\n" WIDE_MMA(columns) "{" WIDE_NAMES_##tiles "}, {%" #a0 ", %" #a1  \
  ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 0;\n}"                                                                    \
      : WIDE_SUMS_##tiles                                                                                             \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(described(columns_at)), "r"((unsigned)add)
#define WIDE_PRODUCT_FROM_SHARED(tiles, columns, a, b, adds)                                                            \
  "{\n.reg .pred p;\nsetp.ne.u32 p, %" #adds ", 0;\n" WIDE_MMA(columns) "{" WIDE_NAMES_##tiles "}, %" #a ", %" #b         \
  ", p, 1, 1, 0, 0;\n}"                                                                                               \
      : WIDE_SUMS_##tiles                                                                                             \
      : "l"(described(rows_at)), "l"(described(columns_at)), "r"((unsigned)add)

// sums[TILES][4] are, or with `add` are added, the warp's 16 rows of weights x the columns at an operand, 8 words deep
__device__ __forceinline__ void multiply_columns(float (&sums)[TILES][4], const uint4& a, unsigned columns_at, bool add) {
  float(*const to)[4] = sums, (*const beside)[4] = sums;
  if constexpr (TILES == 1) asm volatile(WIDE_PRODUCT(1, 8, 4, 5, 6, 7, 8, 9));
  if constexpr (TILES == 2) asm volatile(WIDE_PRODUCT(2, 16, 8, 9, 10, 11, 12, 13));
  if constexpr (TILES == 3) asm volatile(WIDE_PRODUCT(3, 24, 12, 13, 14, 15, 16, 17));
  if constexpr (TILES == 4) asm volatile(WIDE_PRODUCT(4, 32, 16, 17, 18, 19, 20, 21));
}

// the same with the four warps' weights at an operand
__device__ __forceinline__ void multiply_shared(float (&sums)[TILES][4], unsigned rows_at, unsigned columns_at, bool add) {
  float(*const to)[4] = sums, (*const beside)[4] = sums;
  if constexpr (TILES == 1) asm volatile(WIDE_PRODUCT_FROM_SHARED(1, 8, 4, 5, 6));
  if constexpr (TILES == 2) asm volatile(WIDE_PRODUCT_FROM_SHARED(2, 16, 8, 9, 10));
  if constexpr (TILES == 3) asm volatile(WIDE_PRODUCT_FROM_SHARED(3, 24, 12, 13, 14));
  if constexpr (TILES == 4) asm volatile(WIDE_PRODUCT_FROM_SHARED(4, 32, 16, 17, 18));
}

// the same with the columns of two planes, each with sums of its own
__device__ __forceinline__ void multiply_both_columns(
    float (&sums)[TILES][4], float (&second)[TILES][4], const uint4& a, unsigned columns_at, bool add) {
  float(*const to)[4] = sums, (*const beside)[4] = second;
  if constexpr (TILES == 1) asm volatile(WIDE_PRODUCT(2, 16, 8, 9, 10, 11, 12, 13));
  if constexpr (TILES == 2) asm volatile(WIDE_PRODUCT(4, 32, 16, 17, 18, 19, 20, 21));
  if constexpr (TILES == 3) asm volatile(WIDE_PRODUCT(6, 48, 24, 25, 26, 27, 28, 29));
  if constexpr (TILES == 4) asm volatile(WIDE_PRODUCT(8, 64, 32, 33, 34, 35, 36, 37));
}
__device__ __forceinline__ void multiply_both_shared(
    float (&sums)[TILES][4], float (&second)[TILES][4], unsigned rows_at, unsigned columns_at, bool add) {
  float(*const to)[4] = sums, (*const beside)[4] = second;
  if constexpr (TILES == 1) asm volatile(WIDE_PRODUCT_FROM_SHARED(2, 16, 8, 9, 10));
  if constexpr (TILES == 2) asm volatile(WIDE_PRODUCT_FROM_SHARED(4, 32, 16, 17, 18));
  if constexpr (TILES == 3) asm volatile(WIDE_PRODUCT_FROM_SHARED(6, 48, 24, 25, 26));
  if constexpr (TILES == 4) asm volatile(WIDE_PRODUCT_FROM_SHARED(8, 64, 32, 33, 34));
}

// waits for all that were begun, or for all but those between the last `begin_products` and `end_products`
__device__ __forceinline__ void multiplied() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void multiplied_but_the_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
