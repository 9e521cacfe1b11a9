// Initial states as operands of a cluster's first product (whole_forward.cu, sliced_forward.cu).

// Of `lines` sequences from `first_place` on; with HALVES what those of a sequence are scaled by is the inverse of scales[row].
// `row_of(line)`: a sequence's row of the product; `at(row, word)`: where its words lie.
template <int WARPS, class Row, class At>
__device__ __forceinline__ void bring_initial(
    const Arguments& a, int direction, int batch, int first_place, int lines, int warp, int lane, unsigned* states, float* scales,
    const Row& row_of, const At& at) {
#if HALVES
  for (int line = warp; line < lines && a.initial[0] != nullptr; line += WARPS) {
    const Element* const from = a.initial[0] + ((long long)direction * batch + first_place + line) * UNITS;
    float most = 0.f;
    for (int column = lane; column < UNITS; column += 32) most = fmaxf(most, fabsf(from[column]));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
    const float scale = scale_of(unscale_of(most));
    if (lane == 0) scales[row_of(line)] = unscale_of(most);
    for (int word = lane; 2 * word < UNITS; word += 32) {
      const float odd = 2 * word + 1 < UNITS ? from[2 * word + 1] : 0.f;
      states[at(row_of(line), word)] = half_pair(from[2 * word] * scale, odd * scale);
    }
  }
#else
  for (int i = threadIdx.x; i < lines * UNITS && a.initial[0] != nullptr; i += 32 * WARPS) {
    const int line = i / UNITS, column = i % UNITS;
    ((Element*)(states + at(row_of(line), column / 2)))[column % 2] =
        a.initial[0][((long long)direction * batch + first_place + line) * UNITS + column];
  }
#endif
}
