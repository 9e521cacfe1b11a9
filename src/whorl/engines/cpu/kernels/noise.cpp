// Random numbers: Philox-4x32-10, counted as whorl/noise.py counts, so that the decisions are the same.

namespace kernel {

// A word below this is an event of its probability; 2^32 is certain.
typedef uint64_t chance;

// What a word becomes.
struct Choice {
  real event, other;
};

#if defined(__AVX512F__)

// Eight counters beside each other, each word in the lower half of 64 bits, as its products take it.
struct Beside {
  uint64_t keys[20];
  __m512i step, row, tag;

  Beside(uint64_t seed, uint32_t step, uint32_t row, uint32_t tag)
      : step(_mm512_set1_epi64(step)), row(_mm512_set1_epi64(row)), tag(_mm512_set1_epi64(tag)) {
    uint32_t key = uint32_t(seed), other = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      keys[2 * round] = key, keys[2 * round + 1] = other;
      key += 0x9E3779B9u, other += 0xBB67AE85u;
    }
  }
  // The upper halves of what this gives are of no meaning.
  void words(__m512i a, __m512i (&to)[4]) const {
    constexpr int XOR = 0x96;
    __m512i b = step, c = row, d = tag;
    for (int round = 0; round < 10; ++round) {
      const __m512i first = _mm512_mul_epu32(a, _mm512_set1_epi64(0xD2511F53)), upper = _mm512_srli_epi64(first, 32);
      const __m512i second = _mm512_mul_epu32(c, _mm512_set1_epi64(0xCD9E8D57));
      a = _mm512_ternarylogic_epi64(_mm512_srli_epi64(second, 32), b, _mm512_set1_epi64(int64_t(keys[2 * round])), XOR);
      c = _mm512_ternarylogic_epi64(upper, d, _mm512_set1_epi64(int64_t(keys[2 * round + 1])), XOR);
      b = second, d = first;
    }
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  }
};

// Of two words of each counter one after the other.
INLINE __m512i in_turn(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32));
}

// What the words of units from `u` on become, of those from `first` to before `last`; COUNT of them at most.
template <int64_t COUNT>
INLINE void choose(
    real* to, __m512i words, chance below, const Choice& choice, int64_t u, int64_t first, int64_t last) {
  __mmask16 event = _mm512_cmple_epu32_mask(words, _mm512_set1_epi32(int(uint32_t(below - 1))));
  if (!below) event = 0;
  const int64_t begin = first > u ? first - u : 0, end = last - u < COUNT ? last - u : COUNT;
  if (begin >= end) return;
  const __mmask16 wanted = __mmask16((1u << end) - (1u << begin));
#if WHORL_DTYPE == 64
  const __m512d yes = _mm512_set1_pd(choice.event), no = _mm512_set1_pd(choice.other);
  _mm512_mask_storeu_pd(to + u, __mmask8(wanted), _mm512_mask_blend_pd(__mmask8(event), no, yes));
  if (wanted >> 8)
    _mm512_mask_storeu_pd(to + u + 8, __mmask8(wanted >> 8), _mm512_mask_blend_pd(__mmask8(event >> 8), no, yes));
#else
  const __m512 made = _mm512_mask_blend_ps(event, _mm512_set1_ps(choice.other), _mm512_set1_ps(choice.event));
  _mm512_mask_storeu_ps(to + u, wanted, made);
#endif
}

// For each unit from `first` to before `last` what each of its COUNT words becomes.  Neighbouring units share a counter.
template <int COUNT>
static void events_of(
    real* const* out, const chance* below, const Choice& choice, uint64_t seed, uint32_t step, uint32_t row, uint32_t tag,
    int64_t first, int64_t last) {
  constexpr int64_t TOGETHER = 4 / COUNT, UNITS = 8 * TOGETHER;
  const Beside beside(seed, step, row, tag);
  const __m512i order = COUNT == 1 ? _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7) : _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t u = first / UNITS * UNITS; u < last; u += UNITS) {
    __m512i words[4];
    beside.words(_mm512_add_epi64(order, _mm512_set1_epi64(u / TOGETHER)), words);
    if constexpr (COUNT == 1) {
      const __m512i front = in_turn(words[0], words[1]), back = in_turn(words[2], words[3]);
      choose<16>(out[0], _mm512_unpacklo_epi64(front, back), below[0], choice, u, first, last);
      choose<16>(out[0], _mm512_unpackhi_epi64(front, back), below[0], choice, u + 16, first, last);
    } else if constexpr (COUNT == 2) {
      for (int word = 0; word < 2; ++word)
        choose<16>(out[word], in_turn(words[word], words[word + 2]), below[word], choice, u, first, last);
    } else {
      for (int word = 0; word < COUNT; ++word) {
        const __m512i some = _mm512_castsi256_si512(_mm512_cvtepi64_epi32(words[word]));
        choose<8>(out[word], some, below[word], choice, u, first, last);
      }
    }
  }
}

#else

INLINE void philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t key, uint32_t other, uint32_t words[4]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(a) * 0xD2511F53u, second = uint64_t(c) * 0xCD9E8D57u;
    a = uint32_t(second >> 32) ^ b ^ key, b = uint32_t(second);
    c = uint32_t(first >> 32) ^ d ^ other, d = uint32_t(first);
    key += 0x9E3779B9u, other += 0xBB67AE85u;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// As above: those before the first and after the last unit of which they have all are apart.
template <int COUNT>
static void events_of(
    real* const* out, const chance* below, const Choice& choice, uint64_t seed, uint32_t step, uint32_t row, uint32_t tag,
    int64_t first, int64_t last) {
  constexpr int TOGETHER = 4 / COUNT;
  const auto some = [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) {
      uint32_t words[4];
      philox(uint32_t(u / TOGETHER), step, row, tag, uint32_t(seed), uint32_t(seed >> 32), words);
      for (int word = 0; word < COUNT; ++word)
        out[word][u] = uint64_t(words[u % TOGETHER * COUNT + word]) < below[word] ? choice.event : choice.other;
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
        out[word][c * TOGETHER + u] = uint64_t(words[u * COUNT + word]) < below[word] ? choice.event : choice.other;
  }
  some(end > begin ? end : begin, last);
}

#endif

APART static void events(
    int count, real* const* out, const chance* below, const Choice& choice, uint64_t seed, uint32_t step, uint32_t row,
    uint32_t tag, int64_t first, int64_t last) {
  switch (count) {
    case 1: return events_of<1>(out, below, choice, seed, step, row, tag, first, last);
    case 2: return events_of<2>(out, below, choice, seed, step, row, tag, first, last);
    case 3: return events_of<3>(out, below, choice, seed, step, row, tag, first, last);
    default: return events_of<4>(out, below, choice, seed, step, row, tag, first, last);
  }
}

// Masks of dropout for each row: 0 where a word is below, else scale; `count` words, [count, rows, width].
APART static void draw_masks(
    real* to, int64_t count, int64_t rows, int64_t width, const int64_t* ids, uint64_t seed, int64_t tag, chance below,
    double scale) {
  const chance all[4] = {below, below, below, below};
  const Choice choice = {real(0), real(scale)};
  for (int64_t r = 0; r < rows; ++r) {
    real* out[4] = {};
    for (int64_t word = 0; word < count; ++word) out[word] = to + (word * rows + r) * width;
    events(int(count), out, all, choice, seed, 0, uint32_t(ids ? ids[r] : r), uint32_t(tag), 0, width);
  }
}

}  // namespace kernel
