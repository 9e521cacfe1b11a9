// Scales of states of any size, in the states' own words (forward.cu). What a warp has of a sequence, 16 units, mostly has the
// usual scale, level 0: where the largest is from 2^-10 to 2^10, which nobody has to find then. Numbers down to 2^-12 keep all
// their bits, and those below are off by 2^-23; no word is more than 2^8, so that two bits of its exponent are not both set.
// In the first half of the words of another level they are, and the others of the first 3 words have two bits of it each:
// these words are less than 2^-8, and off by 2^-16 of the largest. Such levels are the largest's exponent. What is below
// 2^-112 counts as zero. Of NO_LEVEL, where one of the 16 is no number, or 2^115 or more, none is a number.

constexpr unsigned OF_LEVEL = 0x60006000u, NO_LEVEL = 255;
constexpr float USUAL_UNSCALE = 4.f;  // which no other level has: its largest would be 2^-7
__device__ __forceinline__ bool is_usual(float most) { return most < 0x1p-112f || (most >= 0x1p-10f && most < 0x1p10f); }
__device__ __forceinline__ unsigned level_of(float most) {
  return is_usual(most) ? 0 : most < 0x1p115f ? __float_as_uint(most) >> 23 : NO_LEVEL;
}
__device__ __forceinline__ float unscale_of_level(unsigned level) {
  return level == 0 ? USUAL_UNSCALE : level == NO_LEVEL ? __uint_as_float(0x7fc00000u) : __uint_as_float((level + 9) << 23);
}
__device__ __forceinline__ float larger(float one, float other) {  // of two sizes; what is no number is larger than all
  return __uint_as_float(max(__float_as_uint(one), __float_as_uint(other)));
}
__device__ __forceinline__ unsigned part_of_level(unsigned level, int word) {
  if (level == 0 || word > 2) return 0u;
  const unsigned first = word == 0 ? 3u : word == 1 ? level >> 2 & 3u : level >> 6, second = word == 0 ? level & 3u : level >> 4 & 3u;
  return first << 13 | (word < 2 ? second << 29 : 0u);
}
__device__ __forceinline__ bool is_unusual(unsigned first) { return (first & 0x7fffu) >= 0x6000u; }
__device__ __forceinline__ unsigned level_of_words(const uint4& first) {
  const unsigned level = first.x >> 29 & 3u | (first.y >> 13 & 3u) << 2 | (first.y >> 29 & 3u) << 4 | (first.z >> 13 & 3u) << 6;
  return is_unusual(first.x) ? level : 0;
}
__device__ __forceinline__ bool is_zero(const uint4& words) {
  return ((words.x | words.y | words.z | words.w) & 0x7fff7fffu) == 0;
}
// Words of several scales are multiplied together as of one, whose inverse is UNRAISED times the largest `reach` of theirs:
// those less than 2^-8 are then less than 2^14, as those of the usual scale.
constexpr float RAISED = 0x1p22f, UNRAISED = 0x1p-22f;
__device__ __forceinline__ float reach_of(float unscale) { return unscale == USUAL_UNSCALE ? 0x1p16f * USUAL_UNSCALE : unscale; }
struct Brought {
  unsigned kept, first, second;  // in two steps: float16 has neither 2^22 nor 2^-25
  __device__ __forceinline__ Brought(float unscale, float reach) : kept(unscale == USUAL_UNSCALE ? ~0u : ~OF_LEVEL) {
    const float all = fminf(unscale * scale_of(reach) * RAISED, RAISED);  // zeros may have any scale
    const float half = all < 1.f ? fmaxf(all, 0x1p-14f) : fminf(all, 0x1p11f);
    const float rest = all < 1.f ? fminf(all * 0x1p14f, 1.f) : fmaxf(all * 0x1p-11f, 1.f);
    first = half_pair(half, half), second = half_pair(rest, rest);
  }
  __device__ __forceinline__ unsigned operator()(unsigned word) const { return times_pair(times_pair(word & kept, first), second); }
};
