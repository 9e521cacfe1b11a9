// Means where blocks exchange through L2 (exchange.cu): the first of the threads of a block that share a sequence gives
// what they make of the block's units, and each of them takes what some blocks have given.  A number gives its last bit
// away for the phase, which changes each time that its place is written anew: at every second step, when all have read
// what it was, since who writes then has read what all made of the step between.

constexpr int MEMBERS = (UNITS + SLICE - 1) / SLICE, COUPLES = (MEMBERS + 1) / 2;  // blocks with units, and 16 bytes of two
constexpr int EACH = (COUPLES + LANES - 1) / LANES;                                // that a thread takes
static_assert((LANES & (LANES - 1)) == 0 && LANES >= 4 && LANES <= 32, "the threads of a warp have whole sequences");
static_assert(ROUNDS == 0 && LEAVES == LINKS && LINKS == RECURRENT, "means alone are between the stages of what is spread");

// Pairs of numbers that a block gives of a sequence after a stage, and the words of all blocks before those of a stage.
__device__ constexpr int halves(int stage) { return (numbers(stage) + 1) / 2; }
__device__ constexpr int words_before(int stage) {
  int words = 0;
  for (int i = 0; i < stage; ++i) words += halves(i) * COUPLES * 4;
  return words;
}
constexpr int MEAN_PITCH = words_before(STAGES), MOST_HALVES = 2 * MOST(PACKS);

// `to`: the words of this sequence and block
__device__ __forceinline__ void give_means(int stage, const float (&data)[4 * MOST(PACKS)], unsigned* to, unsigned phase) {
#pragma unroll
  for (int half = 0; half < MOST_HALVES; ++half)
    if (half < halves(stage)) {
      const auto word = [&](int which) { return (__float_as_uint(data[2 * half + which]) & ~1u) | phase; };
      put_pair(to + words_before(stage) + half * COUPLES * 4, word(0), word(1));
    }
}

// The means of one sequence after a stage.  `from`: its words; `wanted`: it is there, and the block has units.
__device__ __forceinline__ void take_means(
    int stage, const unsigned* from, unsigned phase, bool wanted, int lane, float (&m)[MOST(MEANS)]) {
  if constexpr (EACH > 1) keep(lane);  // else what each source counts is made before the loop over time, and kept, or spilled
  uint4 words[EACH][MOST_HALVES];
  const auto couple = [&](int i) { return lane % LANES + i * LANES; };
  const auto is_there = [&](int i, int half) { return wanted && half < halves(stage) && couple(i) < COUPLES; };
  const auto look_at = [&](int i, int half) {
    uint4& got = words[i][half];
    got = look(from + words_before(stage) + (half * COUPLES + couple(i)) * 4);
    if (MEMBERS % 2 == 1 && couple(i) + 1 == COUPLES) got.z = got.w = phase;  // nobody gives these
  };
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int half = 0; half < MOST_HALVES; ++half) {
      words[i][half] = {phase, phase, phase, phase};
      if (is_there(i, half)) look_at(i, half);
    }
  for (;;) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int half = 0; half < MOST_HALVES; ++half) {
        const uint4 got = words[i][half];
        if (((got.x ^ phase) | (got.y ^ phase) | (got.z ^ phase) | (got.w ^ phase)) & 1u) look_at(i, half), all = false;
      }
    if (all) break;
  }
  int count[2 * EACH];
#pragma unroll
  for (int i = 0; i < 2 * EACH; ++i) count[i] = wanted ? units_of(couple(i / 2) * 2 + i % 2) : 0;
  const auto value = [&](int i, int at) {
    const uint4 got = words[i / 2][at / 2];
    return __uint_as_float((i % 2 == 0 ? at % 2 == 0 ? got.x : got.y : at % 2 == 0 ? got.z : got.w) & ~1u);
  };
  const auto first = [&](int at) {
    return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(value(0, at)), first_of(lane)));
  };
  merge(stage, count, value, first, m);
}
