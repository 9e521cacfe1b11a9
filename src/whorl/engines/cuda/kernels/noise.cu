// Random numbers: Philox-4x32-10, counted as whorl/noise.py counts, so that every engine draws the same.

__device__ __forceinline__ uint4 philox(unsigned unit, unsigned step, unsigned row, unsigned tag, uint2 key) {
  unsigned a = unit, b = step, c = row, d = tag;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = a * 0xD2511F53ull, second = c * 0xCD9E8D57ull;
    a = (unsigned)(second >> 32) ^ b ^ key.x, b = (unsigned)second;
    c = (unsigned)(first >> 32) ^ d ^ key.y, d = (unsigned)first;
    key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
  }
  return {a, b, c, d};
}

__device__ __forceinline__ uint2 key_of(const long long* seed) {
  const unsigned long long value = (unsigned long long)*seed;
  return {(unsigned)value, (unsigned)(value >> 32)};
}

// A word below this is an event of its probability; 2^32 is certain.
__device__ __forceinline__ bool is_event(unsigned word, long long below) { return (long long)word < below; }

__device__ __forceinline__ unsigned word_of(const uint4& words, int which) {
  return which == 0 ? words.x : which == 1 ? words.y : which == 2 ? words.z : words.w;
}
