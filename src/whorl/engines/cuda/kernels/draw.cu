// Masks held over all steps, or masks of every step, as numbers: `event` where a word is an event, else `other`.
//
// A thread draws the four words of one counter and writes those that are asked for.

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
  const long long all = a.time * a.batch * a.width;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < all; i += gridDim.x * 256ll) {
    const long long row = i / a.width % a.batch, step = i / a.width / a.batch;
    const unsigned id = (unsigned)(a.ids != nullptr ? a.ids[row] : row);
    const uint4 words = philox((unsigned)(i % a.width), (unsigned)step, id, (unsigned)a.tag, key);
    for (int word = 0; word < a.count; ++word)
      a.to[word * all + i] = is_event(word_of(words, word), a.below) ? (float)a.event : (float)a.other;
  }
}
