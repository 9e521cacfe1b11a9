// What spread_whole_forward.cu and spread_whole_backward.cu have in common: the product of a block's weights with what it has
// of ROWS sequences, by four warps together (warpgroup.cu), and what threads prefetch.

constexpr int ROWS = 8 * TILES, THREADS = 32 * WARPS;
constexpr int STRIDE = ROWS * 4 + 4;  // words of 16 bytes of all sequences
static_assert(ELEMENT_BYTES == 2 && WARPGROUPS && WARPS == 8, "four warps multiply two bytes");

// where a word of a sequence lies
__device__ constexpr int word_at(int row, int word) { return word / 4 * STRIDE + row * 4 + word % 4; }

// Operands of a warp, SHARE strips x DEPTHS, times the sequences' words from `columns` on, of which the warp's begin at `first`;
// what is to be added up comes in CHAINS, of which none waits for another.  `beside` is called while the product runs.
template <class KEPT, int SHARE, int DEPTHS, int STREAMED, int CHAINS, class Beside>
__device__ __forceinline__ void multiply_sequences(
    float (&sums)[CHAINS][SHARE][TILES][4], const uint4* resident, const unsigned* memory, const unsigned* columns, int first, int warp,
    const Beside& beside) {
  // found anew at each step, or the compiler would find all that follow before the first, and spill them
  const unsigned rows_at = operand_at(shared_address(memory) + of_warp(warp / 4) * STREAMED * 2048, 1024);
  const unsigned columns_at = operand_at(shared_address(columns) + of_warp(first / 4 * STRIDE) * 4, STRIDE * 4);
  begin_products();
#pragma unroll
  for (int i = 0; i < SHARE * DEPTHS; ++i) {
    const unsigned at = columns_at + i / SHARE * 2 * STRIDE / 4;
    const bool adds = i >= SHARE * CHAINS;
    float(&to)[TILES][4] = sums[i / SHARE % CHAINS][i % SHARE];
    if (KEPT::streamed(i))
      multiply_shared(to, rows_at + KEPT::before(i) * (2048 / 16), at, adds);
    else
      multiply_columns(to, resident[KEPT::resident(i)], at, adds);
  }
  end_products();
  beside();
  multiplied();
#pragma unroll
  for (int i = 0; i < CHAINS * SHARE * TILES * 4; ++i)
    keep(sums[i / (SHARE * TILES * 4)][i / (TILES * 4) % SHARE][i / 4 % TILES][i % 4]);
}

// Sums of a warp into L2, of `lines` sequences, whose words are PITCH apart: the last bit of each is the phase.  `place(s)`:
// where the thread's first sequence has the two of strip s; null where they are of no unit.
template <int PITCH, int SHARE, int CHAINS, class Place>
__device__ __forceinline__ void put_sums(
    const float (&sums)[CHAINS][SHARE][TILES][4], int lines, int lane, unsigned phase, const Place& place) {
  const auto put_all = [&](bool all) {
#pragma unroll
    for (int s = 0; s < SHARE; ++s) {
      unsigned* const to = place(s);
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const auto word = [&](int i) {
            float sum = sums[0][s][n][i];
            if constexpr (CHAINS > 1) sum += sums[CHAINS - 1][s][n][i];
            return (__float_as_uint(sum) & ~1u) | phase;
          };
          if (to != nullptr && (all || n * 8 + lane % 4 * 2 + e < lines)) put_pair(to + (n * 8 + e) * PITCH, word(e), word(e + 2));
        }
    }
  };
  if (lines == ROWS)  // usually, and without questions
    put_all(true);
  else
    put_all(false);
}

// A row of so many bytes to L2, by warp `which`: a thread for each 128.
template <int BYTES>
__device__ __forceinline__ void prefetch_row(const void* row, int which, int warp, int lane) {
  if (warp == which)
    for (int at = lane * 128; at < BYTES; at += 32 * 128) prefetch((const char*)row + at);
}
