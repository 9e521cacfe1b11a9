// Random numbers: Philox-4x32-10, counted as whorl/noise.py counts, so that every engine draws the same.

// Both halves of a product, the lower first.  Of a product of C++ the compiler adds a zero to the upper half.
__device__ __forceinline__ uint2 product(unsigned a, unsigned b) {
  uint2 both;
  asm("{\n.reg .u64 all;\nmul.wide.u32 all, %2, %3;\nmov.b64 {%0, %1}, all;\n}"
      : "=r"(both.x), "=r"(both.y)
      : "r"(a), "r"(b));
  return both;
}

__device__ __forceinline__ uint4 philox(unsigned unit, unsigned step, unsigned row, unsigned tag, uint2 key) {
  unsigned a = unit, b = step, c = row, d = tag;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint2 first = product(a, 0xD2511F53u), second = product(c, 0xCD9E8D57u);
    a = second.y ^ b ^ key.x, b = second.x;
    c = first.y ^ d ^ key.y, d = first.x;
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
