// Scales of states that may be of any size, where blocks exchange through L2: found anew at each step.
//
// A block scales a sequence's states of its own units together, and gives the exponent of what the scale is the inverse of,
// a word behind all states of the sequence in the ring (exchange.cu).  A warp takes the words of its rows before it keeps
// their states, which it brings to the scale of the largest: what is below 2^-24 of that is zero then.  Who computes the
// cell multiplies with what that scale is the inverse of.
//
//   registers  words of four blocks on their way
//   shared     what the states of each block are multiplied with, as float16, [row, 4 x OF_ROW]; what the scale of each
//              sequence is the inverse of

// `from` is where the words of a warp's first row lie, `left` how many rows there are from it on, WARPS apart.
template <int BLOCKS, int PITCH, int ROWS, int WARPS>
struct Levels {
  static constexpr int OF_ROW = (BLOCKS + 3) / 4, DOWN = (ROWS + WARPS - 1) / WARPS, COUNT = (DOWN * OF_ROW + 31) / 32;
  uint4 words[COUNT];

  __device__ __forceinline__ static bool is_there(int left, int i) {
    return i / OF_ROW < DOWN && left > i / OF_ROW * WARPS;
  }
  __device__ __forceinline__ static uint4 one(const unsigned* from, int i) {
    uint4 four = look(from + i / OF_ROW * (WARPS * PITCH) + i % OF_ROW * 4);
    if (BLOCKS % 4 > 0 && i % OF_ROW == OF_ROW - 1) {
      if (BLOCKS % 4 < 2) four.y = 0;
      if (BLOCKS % 4 < 3) four.z = 0;
      four.w = 0;
    }
    return four;
  }
  __device__ __forceinline__ void look_at(const unsigned* from, int left, int lane) {
#pragma unroll
    for (int p = 0; p < COUNT; ++p) {
      words[p] = {0, 0, 0, 0};
      if (is_there(left, p * 32 + lane)) words[p] = one(from, p * 32 + lane);
    }
  }
  __device__ __forceinline__ void settle(const unsigned* from, int lane) {
    while (__any_sync(0xffffffffu, is_missing(words, 0)))
#pragma unroll
      for (int p = 0; p < COUNT; ++p)
        if (is_missing(words[p], 0)) words[p] = one(from, p * 32 + lane);
  }
  // `factors` are where the warp's first row has its own
  __device__ __forceinline__ void keep(uint2* factors, float* scales, int left, int lane) {
    unsigned most[COUNT] = {};
#pragma unroll
    for (int row = 0; row < DOWN; ++row) {
      unsigned its = 0;
#pragma unroll
      for (int p = 0; p < COUNT; ++p)
        if ((p * 32 + lane) / OF_ROW == row)
          its = max(its, max(max(words[p].x, words[p].y), max(words[p].z, words[p].w)));
      its = __reduce_max_sync(0xffffffffu, its);
      if (lane == 0 && left > row * WARPS) scales[row * WARPS] = __uint_as_float(its << 23);
#pragma unroll
      for (int p = 0; p < COUNT; ++p)
        if ((p * 32 + lane) / OF_ROW == row) most[p] = its;
    }
#pragma unroll
    for (int p = 0; p < COUNT; ++p) {
      const int i = p * 32 + lane;
      const auto ratio = [&](unsigned its) { return __int_as_float(max(0x3f800000 - (int)((most[p] - its) << 23), 0)); };
      if (is_there(left, i))
        factors[i / OF_ROW * (WARPS * OF_ROW) + i % OF_ROW] = {half_pair(ratio(words[p].x), ratio(words[p].y)),
                                                               half_pair(ratio(words[p].z), ratio(words[p].w))};
    }
    __syncwarp();
  }
};

// States as they are kept, of which a chunk is of 8 units.
template <int OF_ROW, int SLICE, int WARPS>
struct Levelled {
  const uint2* factors;
  __device__ __forceinline__ uint4 made(int row, int chunk, const uint4& words) const {
    const unsigned its = ((const unsigned short*)(factors + row * (WARPS * OF_ROW)))[chunk / (SLICE / 8)];
    const unsigned both = its | its << 16;
    return {times_pair(words.x, both), times_pair(words.y, both), times_pair(words.z, both), times_pair(words.w, both)};
  }
};
