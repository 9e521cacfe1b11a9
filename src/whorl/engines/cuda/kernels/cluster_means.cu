// Means in a cluster: a warp sends what it makes of its 16 units to every block.
//
//   slots  [source, pack of 4 floats, sequence] for each stage: the four sequences of a warp's item lie side by side, and
//          four packs after them keep two sources in different banks.  Forward a stage with no more than two numbers has
//          packs of 2: LSTM with layer norm of r and c, 512 units at batch 32, took 2.27 us a step with 4 and 2.03 with 2
//          (bfloat16, H200)

constexpr int SOURCES = CLUSTER * GROUPS, BESIDE = 8 * TILES + 4;
__device__ constexpr int pack_bytes(int stage) { return FORWARD && numbers(stage) <= 2 ? 8 : 16; }

// Bytes of the slots of one sequence, by its place among the cluster's, of the first pack of a source.
__device__ __forceinline__ int slot_of(int stage, int source, int place) {
  return (source * packs(stage) * BESIDE + place) * pack_bytes(stage);
}

// To the slots of every block, if the sequence is there.  `slot`: of it and this source, as bytes from the start of
// shared memory.
__device__ __forceinline__ void send_means(
    int stage, const float (&data)[4 * MOST(PACKS)], int slot, unsigned* memory, unsigned barrier, bool there, int lane) {
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    if (pack >= packs(stage)) break;
    const float* const of = data + 4 * pack;
    const uint4 words = {__float_as_uint(of[0]), __float_as_uint(of[1]), __float_as_uint(of[2]),
                         __float_as_uint(of[3])};
#if CLUSTER > 1
#pragma unroll
    for (int p = 0; p < (CLUSTER + 7) / 8; ++p) {
      const int target = lane / 4 + p * 8;
      if (there && target < CLUSTER) {
        const unsigned base = at_rank(shared_address(memory), target);
        if (pack_bytes(stage) == 8)
          send_pair(base + slot, base + barrier, {words.x, words.y});
        else
          send(base + slot + pack * BESIDE * 16, base + barrier, words);
      }
    }
#else
    if (lane / 4 == 0) {
      if (pack_bytes(stage) == 8)
        *(uint2*)((char*)memory + slot) = {words.x, words.y};
      else
        *(uint4*)((char*)memory + slot + pack * BESIDE * 16) = words;
    }
#endif
  }
}

// The means of one sequence, of what has come for it into the slots of a stage.
__device__ __forceinline__ void receive(int stage, const float4* slots, int place, int lane, float (&m)[MOST(MEANS)]) {
  constexpr int EACH = (SOURCES + 7) / 8;
  float4 packed[EACH][MOST(PACKS)];
  int count[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int source = lane / 4 + i * 8;
    count[i] = source < SOURCES ? units_of(source) : 0;
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      packed[i][pack] = float4{};
      if (pack >= packs(stage) || count[i] <= 0) continue;
      if (pack_bytes(stage) == 8) {
        const float2 two = ((const float2*)slots)[source * BESIDE + place];
        packed[i][pack].x = two.x, packed[i][pack].y = two.y;
      } else {
        packed[i][pack] = slots[(source * packs(stage) + pack) * BESIDE + place];
      }
    }
  }
  const auto value = [&](int i, int at) {
    const float4 pack = packed[i][at / 4];
    return at % 4 == 0 ? pack.x : at % 4 == 1 ? pack.y : at % 4 == 2 ? pack.z : pack.w;
  };
  const auto amount_of = [&](int i, int each) { return amount(count[i], each); };
  const auto first = [&](int at) {
    if (pack_bytes(stage) == 8) return ((const float*)slots)[place * 2 + at];
    return ((const float*)(slots + at / 4 * BESIDE + place))[at % 4];
  };
  merge<EACH>(stage, LANES, lane, amount_of, value, first, m);
}
