// Random numbers: Philox-4x32-10, counted as whorl/noise.py counts, so that the decisions are the same.

namespace kernel {

INLINE void philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t key, uint32_t other, uint32_t words[4]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(a) * 0xD2511F53u, second = uint64_t(c) * 0xCD9E8D57u;
    a = uint32_t(second >> 32) ^ b ^ key, b = uint32_t(second);
    c = uint32_t(first >> 32) ^ d ^ other, d = uint32_t(first);
    key += 0x9E3779B9u, other += 0xBB67AE85u;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// A word below this is an event of its probability; 2^32 is certain.
typedef uint64_t chance;

// For each unit from `first` to before `last` whether a word is an event: 1 where it is, else 0, for COUNT words.
// Neighbouring units share a counter: those before the first and after the last of which they have all are apart.
template <int COUNT>
static void events_of(
    real* const* out, const chance* below, uint64_t seed, uint32_t step, uint32_t row, uint32_t tag, int64_t first,
    int64_t last) {
  constexpr int TOGETHER = 4 / COUNT;
  const auto some = [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) {
      uint32_t words[4];
      philox(uint32_t(u / TOGETHER), step, row, tag, uint32_t(seed), uint32_t(seed >> 32), words);
      for (int word = 0; word < COUNT; ++word)
        out[word][u] = uint64_t(words[u % TOGETHER * COUNT + word]) < below[word] ? real(1) : real(0);
    }
  };
  const int64_t next = (first + TOGETHER - 1) / TOGETHER * TOGETHER, begin = next < last ? next : last;
  const int64_t end = last / TOGETHER * TOGETHER;
  some(first, begin);
  EACH_ALONE
  for (int64_t c = begin / TOGETHER; c < end / TOGETHER; ++c) {
    uint32_t words[4];
    philox(uint32_t(c), step, row, tag, uint32_t(seed), uint32_t(seed >> 32), words);
    for (int u = 0; u < TOGETHER; ++u)
      for (int word = 0; word < COUNT; ++word)
        out[word][c * TOGETHER + u] = uint64_t(words[u * COUNT + word]) < below[word] ? real(1) : real(0);
  }
  some(end > begin ? end : begin, last);
}

APART static void events(
    int count, real* const* out, const chance* below, uint64_t seed, uint32_t step, uint32_t row, uint32_t tag,
    int64_t first, int64_t last) {
  switch (count) {
    case 1: return events_of<1>(out, below, seed, step, row, tag, first, last);
    case 2: return events_of<2>(out, below, seed, step, row, tag, first, last);
    case 3: return events_of<3>(out, below, seed, step, row, tag, first, last);
    default: return events_of<4>(out, below, seed, step, row, tag, first, last);
  }
}

}  // namespace kernel
