// Means where a block has whole sequences (whole_forward.cu, spread_whole_forward.cu): of distances from the mean that the
// sequence had at the step before, and variances of their squares.  Both are added up by tensor cores (means.cu), then over
// the sequence's warps through shared memory.  Where a mean is farther from the one before than its deviation, the sums are
// made in a second round, from this mean on.
//
//   slots  [round, stage, warp, number]: sums that a warp has made of its units are read by all warps of the sequence behind
//          a barrier, one a round, and no warp writes where another still reads before the next step

// Over a warp's units the sums that a stage's means are made of: of values, or of distances from `start` and of their squares.
__device__ __forceinline__ void sums_of_units(
    int stage, const float (&to)[2][MOST(VALUES)], bool first, bool second, int lane, const float (&start)[MOST(REDUCTIONS)],
    float (&data)[4 * MOST(PACKS)]) {
  float sum[MOST(REDUCTIONS)], squares[MOST(REDUCTIONS)];
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    float own[MOST(VALUES)], square[MOST(VALUES)];
#pragma unroll
    for (int k = 0; k < VALUES; ++k)
      if (k < reduction_count(i)) {
        const int at = reduction_first(i) + k;
        const float low = first ? to[0][at] - start[i] : 0.f, high = second ? to[1][at] - start[i] : 0.f;
        own[k] = low + high, square[k] = low * low + high * high;
      }
#pragma unroll
    for (int away = 1; away < VALUES; away *= 2)  // in pairs: fewer wait for each other
#pragma unroll
      for (int k = 0; k < VALUES; k += 2 * away)
        if (k + away < reduction_count(i)) own[k] += own[k + away], square[k] += square[k + away];
    sum[i] = own[0], squares[i] = square[0];
  }
  add_up(stage, LANES, lane, sum, squares);
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    data[at++] = sum[i];
    if (reduction_moments(i)) data[at++] = squares[i];
  }
}

// The means of such sums over all units, which the next ones start from.  Whether each was near where it started, no farther
// than its deviation: else its variance is the small difference of two large numbers, or these are too large, and another
// round starts from the mean.
__device__ __forceinline__ bool means_from(
    int stage, int round, const float (&sums)[4 * MOST(PACKS)], float (&start)[MOST(REDUCTIONS)], float (&m)[MOST(MEANS)]) {
  bool near = true;
  int at = 0;
#pragma unroll
  for (int i = 0; i < REDUCTIONS; ++i) {
    if (reduction_stage(i) != stage) continue;
    const float all = 1.f / (float)(UNITS * reduction_count(i)), apart = sums[at++] * all, mean = start[i] + apart;
    m[reduction_place(i)] = mean;
    if (reduction_moments(i)) {
      const float squares = sums[at++] * all, variance = squares - apart * apart;
      m[reduction_place(i) + 1] = round > 0 && variance < 0.f ? 0.f : variance;  // what is near is not below 0
      near = near & (squares < MOST_FLOAT) & (apart * apart <= variance);
      start[i] = fabsf(mean) < MOST_FLOAT ? mean : 0.f;  // what is not a number does not stay for the next steps
    }
  }
  return near;
}

// The means of a stage, of a sequence that WHOLE warps have, of which this is `part`: all its threads have them, and call `meet`
// together with those of the others.
template <class Meet>
__device__ __forceinline__ void find_means(
    int stage, const float (&to)[2][MOST(VALUES)], bool first, bool second, int part, int lane, float* slots,
    float (&start)[MOST(REDUCTIONS)], float (&m)[MOST(MEANS)], const Meet& meet) {
  const auto summed = [&](int round) {
    float data[4 * MOST(PACKS)] = {};
    sums_of_units(stage, to, first, second, lane, start, data);
    float4* const at = (float4*)(slots + round * MEAN_WORDS + mean_offset(stage));
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack)
      if (pack < packs(stage) && lane == 0) {
        if (numbers(stage) - pack * 4 > 2)
          at[pack * WHOLE + part] = {data[pack * 4], data[pack * 4 + 1], data[pack * 4 + 2], data[pack * 4 + 3]};
        else  // without zeros, which the compiler makes after the product
          *(float2*)(at + pack * WHOLE + part) = {data[pack * 4], data[pack * 4 + 1]};
      }
    meet();
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack)
      if (pack < packs(stage)) {
        float4 sum = at[pack * WHOLE];
#pragma unroll
        for (int s = 1; s < WHOLE; ++s) {
          const float4 value = at[pack * WHOLE + s];
          sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
        }
        data[pack * 4] = sum.x, data[pack * 4 + 1] = sum.y, data[pack * 4 + 2] = sum.z, data[pack * 4 + 3] = sum.w;
      }
    return means_from(stage, round, data, start, m);
  };
  if (!summed(0)) summed(1);  // all threads of the sequence, which have the same numbers
}
