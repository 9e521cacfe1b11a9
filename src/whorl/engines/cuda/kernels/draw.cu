// Masks held over all steps, or masks of every step, as numbers: `event` where a word is an event, else `other`.
//
// A thread draws the four words of one counter, which neighbouring units share, and writes those that are theirs.

// @generated

struct Arguments {
  float* to;             // [count, time, batch, width]
  const long long* ids;  // what noise counts a sequence as, [batch], or null: itself
  const long long* seed;
  long long count, time, batch, width, tag, below;
  double event, other;
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  const uint2 key = key_of(a.seed);
  const int together = 4 / (int)a.count;
  const long long counters = (a.width + together - 1) / together;
  const long long rows = a.time * a.batch, all = rows * a.width;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < rows * counters; i += gridDim.x * 256ll) {
    const long long at = i / counters, row = at % a.batch, step = at / a.batch, counter = i % counters;
    const unsigned id = (unsigned)(a.ids != nullptr ? a.ids[row] : row);
    const uint4 words = philox((unsigned)counter, (unsigned)step, id, (unsigned)a.tag, key);
    long long unit = counter * together;
    int which = 0;  // of the masks: counted, since a division for each word takes longer than the draw
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if (word < together * a.count && unit < a.width)
        a.to[which * all + at * a.width + unit] = is_event(word_of(words, word), a.below) ? (float)a.event : (float)a.other;
      if (++which == a.count) which = 0, ++unit;
    }
  }
}
