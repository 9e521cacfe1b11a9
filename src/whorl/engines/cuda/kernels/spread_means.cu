// Means where blocks exchange through L2 (exchange.cu): the first of the threads of a block that share a sequence gives
// what they make of the block's units, and each of them takes what some blocks have given.  A number gives its last bit
// away for the phase, which changes each time that its place is written anew: at every second step, when all have read
// what it was, since who writes then has read what all made of the step between.
//
//   words  [direction, step % 2, line, sequence] pairs of numbers; a line is of one block, stage and pair: what lies side by
//          side is written by one block

constexpr int MEMBERS = (UNITS + SLICE - 1) / SLICE;   // blocks with units
constexpr int EACH = (MEMBERS + LANES - 1) / LANES;    // of which a thread takes the numbers
static_assert((LANES & (LANES - 1)) == 0 && LANES >= 4 && LANES <= 32, "the threads of a warp have whole sequences");
static_assert(ROUNDS == 0 && LEAVES == LINKS && LINKS == RECURRENT, "means alone are between the stages of what is spread");

// Pairs of numbers that a block gives of a sequence after a stage, and the lines before those of a stage.
__device__ constexpr int halves(int stage) { return (numbers(stage) + 1) / 2; }
__device__ constexpr int lines_before(int stage) {
  int lines = 0;
  for (int i = 0; i < stage; ++i) lines += halves(i) * MEMBERS;
  return lines;
}
constexpr int MEAN_LINES = lines_before(STAGES), MOST_HALVES = 2 * MOST(PACKS);

// `to`: the words of this sequence, `line` words from those of the next line
__device__ __forceinline__ void give_means(
    int stage, const float (&data)[4 * MOST(PACKS)], unsigned* to, long long line, int rank, unsigned phase) {
#pragma unroll
  for (int half = 0; half < MOST_HALVES; ++half)
    if (half < halves(stage)) {
      const auto word = [&](int which) { return (__float_as_uint(data[2 * half + which]) & ~1u) | phase; };
      put_pair(to + (lines_before(stage) + half * MEMBERS + rank) * line, word(0), word(1));
    }
}

// The means of one sequence after a stage.  `from`, `line`: as above; `wanted`: it is there, and the block has units.
__device__ __forceinline__ void take_means(
    int stage, const unsigned* from, long long line, unsigned phase, bool wanted, int lane, float (&m)[MOST(MEANS)]) {
  __syncwarp();  // one thread of a sequence may have given: apart, each shuffle would take the warp hundreds of cycles
  if constexpr (EACH > 1) keep(lane);  // else what each source counts is made before the loop over time, and kept, or spilled
  uint2 words[EACH][MOST_HALVES];
  const auto member = [&](int i) { return lane % LANES + i * LANES; };
  const auto look_at = [&](int i, int half) {
    words[i][half] = look_pair(from + (lines_before(stage) + half * MEMBERS + member(i)) * line);
  };
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int half = 0; half < MOST_HALVES; ++half) {
      words[i][half] = {phase, phase};
      if (wanted && half < halves(stage) && member(i) < MEMBERS) look_at(i, half);
    }
  for (;;) {  // all threads of a warp leave together
    bool all = true;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int half = 0; half < MOST_HALVES; ++half)
        if (half < halves(stage) && ((words[i][half].x ^ phase) | (words[i][half].y ^ phase)) & 1u)
          look_at(i, half), all = false;
    if (__all_sync(0xffffffffu, all)) break;
  }
  int count[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) count[i] = wanted ? units_of(member(i)) : 0;
  const auto value = [&](int i, int at) {
    const uint2 got = words[i][at / 2];
    return __uint_as_float((at % 2 == 0 ? got.x : got.y) & ~1u);
  };
  const auto first = [&](int at) {
    return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(value(0, at)), first_of(lane)));
  };
  merge(stage, count, value, first, m);
}
