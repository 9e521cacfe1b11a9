// What a layer's kernels draw anew at each step, as bits, before they run: Philox in the time loop is some 70 instructions
// for each unit that a step waits for.
//
// A thread has two neighbouring units of one sequence at one step: from bit 4 x unit on whether zoneout keeps each state,
// from bit 8 on whether each unit enters the recurrent product.

// @generated

struct Arguments {
  unsigned short* to;    // [time, batch, pairs]
  const long long* ids;  // what noise counts a sequence as, [batch], or null: itself
  const long long* seed;
  long long time, batch, pairs, states;
  long long zone_tag, zones_below[4];  // a tag of -1: nothing of that is drawn
  long long noise_tag, noise_below;
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  const uint2 key = key_of(a.seed);
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < a.batch * a.pairs; i += gridDim.x * 256ll) {
    const long long row = i / a.pairs;  // once for many steps: a division takes as long as a draw
    const unsigned id = (unsigned)(a.ids != nullptr ? a.ids[row] : row), unit = (unsigned)(i - row * a.pairs) * 2;
    for (long long step = blockIdx.y; step < a.time; step += gridDim.y) {
      unsigned bits = 0;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (a.zone_tag >= 0) {
          const uint4 words = philox(unit + u, (unsigned)step, id, (unsigned)a.zone_tag, key);
#pragma unroll
          for (int s = 0; s < 4; ++s)
            if (s < a.states && is_event(word_of(words, s), a.zones_below[s])) bits |= 1u << (u * 4 + s);
        }
        if (a.noise_tag >= 0) {
          const uint4 words = philox(unit + u, (unsigned)step, id, (unsigned)a.noise_tag, key);
          if (!is_event(words.x, a.noise_below)) bits |= 256u << u;
        }
      }
      a.to[step * a.batch * a.pairs + i] = (unsigned short)bits;
    }
  }
}
