// What options of layers and calls add to the kernels: one argument more, and which of it a kernel has.
//
// LENGTHS, MASK    some steps do not count: the states hold, and what is computed there is thrown away by selection,
//                  never by a product with zero
// RESET            the state before a step is another (RESET_TO) or zero; BEFORE: what was before each step is saved,
//                  where it is not the output of the step before
// ORDER            the sequences are in another order than the rows of the cluster, from the longest to the shortest
// PACKED           each step has the rows of the sequences that last so long
// NOISE            what the operand of the recurrent product is multiplied with; by gate the operand of each gate with a
//                  mask of its own, held over all steps and kept in shared memory: as bits, or where masks are given in
//                  the shape of the operand
// zoneout(state)   how much of a state stays as it was

// kinds of NOISE: held over all steps, of each step, or by gate
constexpr int HELD = 1, GIVEN = 2, DRAWN = 3, BY_GATE = 4, GIVEN_BY_GATE = 5;
constexpr bool GATEWISE = NOISE == BY_GATE || NOISE == GIVEN_BY_GATE;
constexpr int BY_SHARE = 1, AT_RANDOM = 2, BY_MASK = 3;    // kinds of zoneout
constexpr bool MARKED = LENGTHS || MASK;
constexpr bool BEFORE = MARKED || RESET || NOISE;
constexpr bool ZONES_DRAWN = zoneout(0) == AT_RANDOM || zoneout(1) == AT_RANDOM || zoneout(2) == AT_RANDOM ||
                             zoneout(3) == AT_RANDOM;
constexpr bool DRAWS = NOISE == DRAWN || ZONES_DRAWN;

// Addresses are null where a kernel has no use for them.  Rows: [time, batch], or those of a PackedSequence.
struct Options {
  const long long* lengths;        // [batch]
  const bool* mask;                // [rows]
  const bool* reset;               // [rows]
  const long long* order;          // [batch]: the sequence in each place
  const long long* starts;         // [time + 1]: the first row of each step of a PackedSequence
  const long long* ids;            // [batch]: what noise counts a sequence as
  const long long* seed;
  const float* inputs[MOST(INPUTS)];     // [rows, UNITS]
  const Element* reset_to[STATES];       // [directions, batch, UNITS]
  const float* noise[2];  // [batch, UNITS] where it is held, [RECURRENT, batch, UNITS] by gate, else [rows, UNITS]
  const float* zoneout[2][STATES];       // [rows, UNITS]
  Element* before[2];                    // [rows, UNITS]: the first state before each step
  Element* sequences[STATES];            // [rows, directions x UNITS], or null: states after each step; their gradients
  Element* entered[2];                   // [rows, UNITS]: the operand of the recurrent product, written by backward
  Element* reset_gradients[STATES];      // [directions, batch, UNITS]
  float* input_gradients[2][MOST(INPUTS)];  // [rows, UNITS]
  float* noise_gradients[2];                // as noise
  float* zoneout_gradients[2][STATES];      // [rows, UNITS]
  long long layer, noise_below, zoneout_below[STATES];
  double noise_scale, zoneout_share[STATES];
};

// A state after a step of which zoneout keeps some as it was; what is kept is kept to the bit, also beside a NaN.
__device__ __forceinline__ float kept(int kind, float share, bool drawn, float before, float after) {
  if (kind == BY_SHARE) return share * before + (1.f - share) * after;
  if (kind == BY_MASK) return after + share * (before - after);
  return kind == AT_RANDOM && drawn ? before : after;
}

// The sequence in a place of the clusters' rows.
template <class Arguments>
__device__ __forceinline__ long long sequence_at(const Arguments& a, int place) {
  if constexpr (ORDER) return a.o.order[place];
  return place;
}

// The first row of a step.
template <class Arguments>
__device__ __forceinline__ long long rows_of(const Arguments& a, int step) {
  if constexpr (PACKED) return a.o.starts[step];
  return (long long)step * a.batch;
}

// The steps of the longest sequence among a cluster's rows.
template <class Arguments>
__device__ __forceinline__ int longest(const Arguments& a, int first) {
  long long most = 0;
  for (int place = first; place < first + 8 * TILES && place < a.batch; ++place) {
    const long long length = a.o.lengths[sequence_at(a, place)];
    most = length > most ? length : most;
  }
  return (int)(most < a.time ? most : a.time);
}

// What is drawn for two units of a sequence: from bit 4 x unit on whether zoneout keeps each state, at one step, and
// from bit 8 on whether each unit enters the product, at another.
template <class Arguments>
__device__ __forceinline__ unsigned drawn_bits(
    const Arguments& a, int unit, int zone_step, int operand_step, long long sequence, int direction, uint2 key) {
  const unsigned id = (unsigned)(a.o.ids != nullptr && sequence < a.batch ? a.o.ids[sequence] : sequence);
  unsigned bits = 0;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    if constexpr (ZONES_DRAWN) {
      const unsigned tag = tag_of(FOR_ZONEOUT, a.o.layer, direction);
      const uint4 words = philox((unsigned)(unit + u), (unsigned)zone_step, id, tag, key);
#pragma unroll
      for (int s = 0; s < STATES; ++s)
        if (is_event(word_of(words, s), a.o.zoneout_below[s])) bits |= 1u << (u * 4 + s);
    }
    if constexpr (NOISE == DRAWN) {
      const unsigned tag = tag_of(FOR_RECURRENT, a.o.layer, direction);
      const uint4 words = philox((unsigned)(unit + u), (unsigned)operand_step, id, tag, key);
      if (!is_event(words.x, a.o.noise_below)) bits |= 256u << u;
    }
  }
  return bits;
}

// What of a word passes a pair of bits: of the 16 pairs in `bits` the upper bits of the first 8 begin at bit 31, their
// lower bits at 23, those of the others at 15 and 7.  Words of one element have their bits from 31 on.
#if ELEMENT_BYTES == 2
__device__ __forceinline__ unsigned spread_signs(unsigned bytes, unsigned selector) {
  unsigned result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(bytes), "r"(selector));
  return result;
}
__device__ __forceinline__ unsigned passed(unsigned word, unsigned bits, int pair) {
  return word & spread_signs(bits << pair % 8, pair < 8 ? 0xBBAAu : 0x9988u);
}
__device__ __forceinline__ unsigned bit_of(int pair, int element) {
  return 1u << ((element ? 31 : 23) - pair % 8 - (pair < 8 ? 0 : 16));
}
#else
__device__ __forceinline__ unsigned passed(unsigned word, unsigned bits, int pair) {
  return bits << pair & 0x80000000u ? word : 0u;
}
__device__ __forceinline__ unsigned bit_of(int pair, int) { return 0x80000000u >> pair; }
#endif

// The products of the elements of two words.
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
#if ELEMENT_BYTES == 4
  return operand(__uint_as_float(a) * __uint_as_float(b));
#else
  unsigned result;
#if BFLOAT16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return result;
#endif
}
