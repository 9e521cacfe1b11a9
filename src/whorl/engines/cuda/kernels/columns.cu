// Where a word of a sequence's operand lies among the states: [depth, tile, odd or even, 4 sequences, 8 words].  What a
// warp sends to a block at once is then 128 bytes in a row.  The 16 bytes of 8 sequences that a tensor core reads together
// are in 32 different banks.
__device__ __forceinline__ constexpr int word_of(int row, int word) {
  const int half = word / 4 % 2 ^ row % 2;
  return (((word / 8 * TILES + row / 8) * 2 + row % 2) * 4 + row % 8 / 2) * 8 + half * 4 + word % 4;
}
