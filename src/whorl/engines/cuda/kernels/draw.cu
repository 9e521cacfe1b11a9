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
  const uint2 key = key_of(a.seed);
  const long long together = 4 / a.count, counters = (a.width + together - 1) / together;
  const long long rows = a.time * a.batch, all = rows * a.width;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < rows * counters; i += gridDim.x * 256ll) {
    const long long at = i / counters, row = at % a.batch, step = at / a.batch, counter = i % counters;
    const unsigned id = (unsigned)(a.ids != nullptr ? a.ids[row] : row);
    const uint4 words = philox((unsigned)counter, (unsigned)step, id, (unsigned)a.tag, key);
    for (int word = 0; word < together * a.count; ++word) {
      const long long unit = counter * together + word / a.count;
      if (unit < a.width)
        a.to[word % a.count * all + at * a.width + unit] = is_event(word_of(words, word), a.below) ? (float)a.event : (float)a.other;
    }
  }
}
