// Means over the units of each sequence, which lie in all blocks of a cluster.
//
// A warp makes of its 16 units one sum, or a mean and the sum of squared distances from it, and sends them to every
// block; a reader merges what has come from all sources, in their order.  Sums are of distances from one of the values, or
// from one of the means: where a mean is large beside its deviation, nothing is lost.  Eight threads of a warp share a sequence: those whose lanes are
// equal modulo 4.
//
//   slots  [source, pack of 4 floats, sequence] for each stage: the four sequences of a warp's item lie side by side, and
//          four packs after them keep two sources in different banks

constexpr int SOURCES = CLUSTER * GROUPS, BESIDE = 8 * TILES + 4;
// Bytes of the slots of one sequence, by its place among the cluster's, of the first pack of a source.
__device__ __forceinline__ int slot_of(int stage, int source, int place) {
  return (source * packs(stage) * BESIDE + place) * 16;
}

// Units of the group of a source that are there.
__device__ __forceinline__ int units_of(int source) {
  const int left = UNITS - (source / GROUPS * SLICE + source % GROUPS * 16);
  return left < 0 ? 0 : left < 16 ? left : 16;
}

__device__ __forceinline__ float over_units(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 4);
  value += __shfl_xor_sync(0xffffffffu, value, 8);
  return value + __shfl_xor_sync(0xffffffffu, value, 16);
}

// What a warp sends of one sequence after a stage.  `to`: a thread's values of its two units; `there`: units of the group.
__device__ __forceinline__ void summarise(
    int stage, const float (&to)[2][MOST(VALUES)], bool first, bool second, int there, int lane,
    float (&data)[4 * MOST(PACKS)]) {
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    // from one of the values on: their mean is not much farther away than they are from each other
    const float start =
        reduction_moments(i) ? __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(to[0][reduction_first(i)]), lane % 4))
                             : 0.f;
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int k = 0; k < VALUES; ++k)
      if (k >= reduction_first(i) && k < reduction_first(i) + reduction_count(i)) {
        const float low = first ? to[0][k] - start : 0.f, high = second ? to[1][k] - start : 0.f;
        sum += low + high;
        squares += low * low + high * high;
      }
    sum = over_units(sum);
    if (reduction_moments(i)) {
      const float apart = there > 0 ? sum / (float)(there * reduction_count(i)) : 0.f;
      data[at++] = start + apart, data[at++] = over_units(squares) - sum * apart;
    } else {
      data[at++] = sum;
    }
  }
}

// To the slots of every block.  `slot`: of this sequence and source, as bytes from the start of shared memory.
__device__ __forceinline__ void send_means(
    int stage, const float (&data)[4 * MOST(PACKS)], int slot, unsigned* memory, unsigned barrier, int lane) {
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
      if (target < CLUSTER) {
        const unsigned there = at_rank(shared_address(memory), target);
        send(there + slot + pack * BESIDE * 16, there + barrier, words);
      }
    }
#else
    if (lane / 4 == 0) *(uint4*)((char*)memory + slot + pack * BESIDE * 16) = words;
#endif
  }
}

// The means of one sequence, of what has come for it into the slots of a stage.
__device__ __forceinline__ void merge(int stage, const float4* slots, int place, int lane, float (&m)[MOST(MEANS)]) {
  constexpr int EACH = (SOURCES + 7) / 8;
  float4 packed[EACH][MOST(PACKS)];
  int count[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int source = lane / 4 + i * 8;
    count[i] = source < SOURCES ? units_of(source) : 0;
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack)
      packed[i][pack] = pack < packs(stage) && count[i] > 0 ? slots[(source * packs(stage) + pack) * BESIDE + place] : float4{};
  }
  const auto value = [&](int i, int at) {
    const float4 pack = packed[i][at / 4];
    return at % 4 == 0 ? pack.x : at % 4 == 1 ? pack.y : at % 4 == 2 ? pack.z : pack.w;
  };
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    const float all = 1.f / (float)(UNITS * reduction_count(i));
    // from the mean of the first source on, which is there
    const float start = reduction_moments(i) ? ((const float*)(slots + at / 4 * BESIDE + place))[at % 4] : 0.f;
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int s = 0; s < EACH; ++s) {
      const float values = (float)(count[s] * reduction_count(i)), apart = value(s, at) - start;
      sum += reduction_moments(i) ? values * apart : value(s, at);
      if (reduction_moments(i)) squares += count[s] > 0 ? value(s, at + 1) + values * apart * apart : 0.f;
    }
    sum = over_units(sum) * all;
    m[reduction_place(i)] = start + sum;
    if (reduction_moments(i)) {
      const float variance = over_units(squares) * all - sum * sum;
      m[reduction_place(i) + 1] = variance < 0.f ? 0.f : variance;
    }
    at += reduction_moments(i) ? 2 : 1;
  }
}
