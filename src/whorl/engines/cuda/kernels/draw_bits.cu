// What a layer's kernels draw anew at each step, as bits, before they run: Philox in the time loop is some 40
// instructions for each unit that a step waits for.
//
// A pair of neighbouring units of one sequence at one step has two bytes: from bit 4 x unit on whether zoneout keeps
// each state, from bit 8 on whether each unit enters the recurrent product.  A thread has two pairs at several steps: of
// a draw's first three rounds it makes at each step what the step enters, of the last what is read.  The four units share
// one draw of what enters, and of zoneout as many as whorl/noise.py says.  It is numbered by 32 bits.

// @generated

constexpr int TOGETHER = ZONES ? 4 / STATES : 1;  // units that share a draw of zoneout
constexpr unsigned ENTERS = NOISE ? 0x03000300u : 0u;  // of two pairs

struct Arguments {
  unsigned short* to;    // [time, batch, pairs]
  const long long* ids;  // what noise counts a sequence as, [batch], or null: itself
  const long long* seed;
  long long time, batch, pairs;
  long long zone_tag, zones_below[4];
  long long noise_tag, noise_below;
};

extern "C" __global__ void __launch_bounds__(256, 4) KERNEL(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  const unsigned doubles = (unsigned)((a.pairs + 1) / 2), i = blockIdx.x * 256u + threadIdx.x;
  if (i >= (unsigned)a.batch * doubles) return;
  const unsigned row = i / doubles, unit = (i - row * doubles) * 4, pair = unit / 2;
  const unsigned id = (unsigned)(a.ids != nullptr ? a.ids[row] : row);
  const uint2 key = key_of(a.seed);
  // A word that is no larger than the last below is an event, where there is such a one: 2^32 has no 32 bits.
  unsigned possible = NOISE && a.noise_below > 0 ? ENTERS : 0u;
#pragma unroll
  for (int s = 0; s < 4; ++s)
    if (zoned(s) && a.zones_below[s] > 0) possible |= 0x00110011u << s;

  const unsigned rows = gridDim.y * (unsigned)a.batch, pairs = (unsigned)a.pairs;  // from a thread's step to its next
  unsigned short* to = a.to + (blockIdx.y * a.batch + row) * a.pairs + pair;
  for (unsigned step = blockIdx.y; step < (unsigned)a.time; step += gridDim.y, to += (unsigned long long)rows * pairs) {
    unsigned events = 0;
    if constexpr (ZONES) {
#pragma unroll
      for (int d = 0; d < 4 / TOGETHER; ++d) {
        const uint4 words = philox(unit / TOGETHER + d, step, id, (unsigned)a.zone_tag, key);
#pragma unroll
        for (int i = 0; i < TOGETHER * STATES; ++i) {
          const int u = d * TOGETHER + i / STATES, s = i % STATES;
          if (zoned(s) && word_of(words, i) <= (unsigned)(a.zones_below[s] - 1))
            events |= 1u << (u / 2 * 16 + u % 2 * 4 + s);
        }
      }
    }
    if constexpr (NOISE) {
      const uint4 words = philox(unit / 4, step, id, (unsigned)a.noise_tag, key);
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (word_of(words, u) <= (unsigned)(a.noise_below - 1)) events |= 0x100u << (u / 2 * 16 + u % 2);
    }
    const unsigned bits = (events & possible) ^ ENTERS;
    if (pairs % 2 == 0) {
      *(unsigned*)to = bits;
    } else {
      to[0] = (unsigned short)bits;
      if (pair + 1 < pairs) to[1] = (unsigned short)(bits >> 16);
    }
  }
}
