// What options of layers and calls add to the kernels: one argument more, and which of it a kernel has.
//
// LENGTHS, MASK    some steps do not count: the states hold, and what is computed there is thrown away by selection,
//                  never by a product with zero
// RESET            the state before a step is another (RESET_TO) or zero; BEFORE: what was before each step is saved,
//                  where it is not the output of the step before; of the first state with ENTERED what entered the product
// ORDER            the sequences are in another order than the rows of the cluster, from the longest to the shortest
// PACKED           each step has the rows of the sequences that last so long
// NOISE            what the operand of each recurrent product is multiplied with; by gate the operand of each gate with a
//                  mask of its own, held over all steps and kept in shared memory: as bits, or where masks are given in
//                  the shape of the operand; MASKED gates have one, and where those are not all RECURRENT ones,
//                  what enters a product inside the step is multiplied with none
// zoneout(state)   how much of a state stays as it was

// kinds of NOISE: held over all steps, of each step, or by gate
constexpr int HELD = 1, GIVEN = 2, DRAWN = 3, BY_GATE = 4, GIVEN_BY_GATE = 5;
constexpr bool GATEWISE = NOISE == BY_GATE || NOISE == GIVEN_BY_GATE;
constexpr bool NOISE_INSIDE = MASKED == RECURRENT;  // masks multiply what enters products inside the step, too
constexpr int BY_SHARE = 1, AT_RANDOM = 2, BY_MASK = 3;    // kinds of zoneout
constexpr bool MARKED = LENGTHS || MASK;
constexpr bool BEFORE = MARKED || RESET || NOISE;
static_assert(!ENTERED || (NOISE == DRAWN && !STAGED && !NOISE_GRADIENT), "backward reads what it was itself");
constexpr bool ZONES_DRAWN = zoneout(0) == AT_RANDOM || zoneout(1) == AT_RANDOM || zoneout(2) == AT_RANDOM ||
                             zoneout(3) == AT_RANDOM;
constexpr bool DRAWS = NOISE == DRAWN || ZONES_DRAWN;
constexpr bool READS_DRAWN = ZONES_DRAWN || (NOISE == DRAWN && INSIDE > 0);  // what is drawn for a step, within it
constexpr int DRAWN_PAIRS = (UNITS + 1) / 2;
#if STAGED
constexpr bool FIRST = LEAVES > 0;  // the first state enters a product
#else
constexpr bool FIRST = true;
#endif
constexpr bool KEEPS_STATES = MARKED || RESET_TO || zoneout(0) > 0;  // such as were given, and may be of any size
// Whether what enters the product is scaled by one number for each sequence and all its steps (`largest_operand`).  With
// RESET it need not: a number for the first step alone took 100 steps of LSTM with 256 units at batch 128 118 us, not 101.
constexpr bool SCALES_STAY =
    HALVES && !EXACT && !BY_STEP &&
    (OPTIONS ? !BOUNDED || KEEPS_STATES || RESET || (NOISE && !GATEWISE) : FORWARD && !SPREAD && !BOUNDED);
static_assert(!HALVES || NOISE != GIVEN_BY_GATE, "masks by gate that are given multiply no float16");

// Addresses are null where a kernel has no use for them.  Rows: [time, batch], or those of a PackedSequence.
struct Options {
  const long long* lengths;        // [batch]
  const bool* mask;                // [rows]
  const bool* reset;               // [rows]
  const long long* order;          // [batch]: the sequence in each place
  const long long* starts;         // [time + 1]: the first row of each step of a PackedSequence
  const float* inputs[MOST(INPUTS)];     // [rows, UNITS]
  const Element* reset_to[STATES];       // [directions, batch, UNITS]
  const float* noise[2];  // [batch, UNITS] where it is held, [MASKED, batch, UNITS] by gate, else [rows, UNITS]
  const unsigned short* drawn[2];        // [time, batch, DRAWN_PAIRS]: as draw_bits.cu has it
  const float* zoneout[2][STATES];       // [rows, UNITS]
  Element* before[2];                    // [rows, UNITS]: the first state before each step, or what of it entered
  Element* sequences[STATES];            // [rows, directions x UNITS], or null: states after each step; their gradients
  Element* entered[2];  // [rows, UNITS]: the first state as it entered its product, written by backward but with ENTERED
  Element* reset_gradients[STATES];      // [directions, batch, UNITS]
  float* input_gradients[2][MOST(INPUTS)];  // [rows, UNITS]
  float* noise_gradients[2];                // as noise
  float* zoneout_gradients[2][STATES];      // [rows, UNITS]
  float noise_scale, zoneout_share[STATES];
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

// The steps of the longest sequence among the rows that blocks own together.
template <class Arguments>
__device__ __forceinline__ int longest(const Arguments& a, int first, int count = 8 * TILES) {
  long long most = 0;
  if constexpr (ORDER) count = min(count, 1);
  for (int place = first; place < first + count && place < a.batch; ++place) {
    const long long length = a.o.lengths[sequence_at(a, place)];
    most = length > most ? length : most;
  }
  return (int)(most < a.time ? most : a.time);
}

// The number of a row: no memory holds 2^31 rows of so many units.
template <bool SHORT> struct RowNumber { typedef long long Type; };
template <> struct RowNumber<true> { typedef int Type; };
typedef RowNumber<(UNITS >= 64)>::Type Row;

// Where what is drawn for two units of a sequence at a step lies, from an even unit on.  A step comes to it in few
// instructions: it waits for those that compute the cell.
template <class Arguments>
__device__ __forceinline__ const unsigned short* drawn_place(
    const Arguments& a, int unit, int step, long long sequence, int direction) {
  const Row row = (Row)step * (Row)a.batch + (Row)sequence;
  return a.o.drawn[direction] + (long long)row * DRAWN_PAIRS + unit / 2;
}

// What is drawn there; zero where it is not `there`.
template <class Arguments>
__device__ __forceinline__ unsigned drawn_bits(
    const Arguments& a, int unit, int step, long long sequence, int direction, bool there) {
  const unsigned short* const from = drawn_place(a, unit, step, sequence, direction);
  unsigned bits = 0;
  if (there) bits = *from;
  return bits;
}

// The operand of a sequence and unit at the first step; it is computed where it is read.
template <class Arguments>
__device__ __forceinline__ Element first_operand(
    const Arguments& a, long long sequence, int unit, int direction, int step) {
  const long long at = (direction * a.batch + sequence) * UNITS + unit;
  Element value = a.initial[0] != nullptr ? a.initial[0][at] : Element{};
#if CARRIED
  if (a.come[0] != nullptr) value = narrow(a.come[0][at]);
#endif
  if constexpr (RESET) {
    const long long length = LENGTHS ? a.o.lengths[sequence] : a.time;
    if (direction == 0 && length > 0 && a.o.reset[sequence]) value = RESET_TO ? a.o.reset_to[0][at] : Element{};
  }
  if constexpr (NOISE == HELD) value = narrow(wide(value) * a.o.noise[direction][sequence * UNITS + unit]);
  if constexpr (NOISE == GIVEN || NOISE == DRAWN) {
    const bool there = !LENGTHS || step < a.o.lengths[sequence];
    const long long row = rows_of(a, step) + sequence;
    float factor = 0.f;
    if (NOISE == GIVEN && there) factor = a.o.noise[direction][row * UNITS + unit];
    if constexpr (NOISE == DRAWN)
      factor = drawn_bits(a, unit, step, sequence, direction, true) >> (8 + unit % 2) & 1
                   ? a.o.noise_scale
                   : 0.f;
    value = narrow(wide(value) * factor);
  }
  return value;
}

// With ENTERED what forward saves of two neighbouring units before the first step; zero where it does not count.
template <class Arguments>
__device__ __forceinline__ float2 first_entered(
    const Arguments& a, long long sequence, int unit, int direction, int step, bool first, bool second) {
  return {first ? wide(first_operand(a, sequence, unit, direction, step)) : 0.f,
          second ? wide(first_operand(a, sequence, unit + 1, direction, step)) : 0.f};
}

#if HALVES
// The largest that enters a sequence's recurrent product, at the first step or, where scales stay, at any: as all lanes of
// a warp find it together.  What the cell makes is in [-1, 1] or no larger than it was, and so is what zoneout makes of
// the two; a state that is kept is one of these, an initial one or one that a reset gives.
template <class Arguments>
__device__ __forceinline__ float largest_operand(const Arguments& a, int place, bool there, int direction, int lane) {
  static_assert(!SCALES_STAY || !FORWARD || (NOISE != GIVEN && zoneout(0) != BY_MASK), "they may be of any size");
  const long long sequence = there ? sequence_at(a, place) : 0, at = (direction * a.batch + sequence) * UNITS;
  float state = SCALES_STAY ? 1.f : 0.f, factor = NOISE == DRAWN ? a.o.noise_scale : NOISE == HELD ? 0.f : 1.f;
  for (int column = lane; column < UNITS && there; column += 32) {
    if (a.initial[0] != nullptr) state = fmaxf(state, fabsf(wide(a.initial[0][at + column])));
    if constexpr (RESET_TO) state = fmaxf(state, fabsf(wide(a.o.reset_to[0][at + column])));
    if constexpr (NOISE == HELD) factor = fmaxf(factor, fabsf(a.o.noise[direction][sequence * UNITS + column]));
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    state = fmaxf(state, __shfl_xor_sync(0xffffffffu, state, apart));
    factor = fmaxf(factor, __shfl_xor_sync(0xffffffffu, factor, apart));
  }
  return state * factor;
}
#endif

// A mark as a number, where there are some, else `other`; zero where it is not `there`.  Were it a truth value, its load would
// be awaited where it begins.
template <bool SOME>
__device__ __forceinline__ unsigned loaded(const bool* marks, long long at, bool there, unsigned other) {
  // loaded at its place it took LSTM with resets, 1,024 units at batch 128 and TF32, 518 us forward and not 510 (an H100)
  if constexpr (SOME && SPREAD) return there ? ((const unsigned char*)marks)[at] : 0;
  if constexpr (SOME) return load_mark(marks + at, there);
  return there ? other : 0;
}

// What forward keeps for options of two neighbouring units of one sequence.
struct Ahead {
  long long sequence;
  bool there;              // the sequence and the first of the units
  int ends;                // steps of the sequence
  unsigned valid, cut;     // the step counts; no state comes into the next: as they are loaded, to be awaited at their use
  unsigned drawn, enters;  // for this step's zoneout, and for the next step's operand
  float held[2], noise[2], zones[STATES][2];
  float now[2];  // what multiplies the operands of products inside the step
  float2 inputs[MOST(INPUTS)];
};

// Forward: what options make of a thread's two units.  Steps and rows: `at` is where the rows of a step begin.
template <class Arguments>
struct Forwards {
  const Arguments& a;
  const int unit, direction, time;  // steps of the longest sequence
  const bool has_second, reverse;

  __device__ __forceinline__ bool within(const Ahead& i, int step) const {
    return i.there && (!LENGTHS || step < i.ends);
  }
  __device__ __forceinline__ unsigned counts(const Ahead& i, int step, long long at) const {
    return loaded<MASK>(a.o.mask, at + i.sequence, within(i, step), 1);
  }
  // before a step, as it is computed; `before`: the rows of the step that is computed before it
  __device__ __forceinline__ unsigned is_cut(const Ahead& i, int step, long long at, long long before) const {
    const bool may = i.there && (reverse ? step + 1 < (LENGTHS ? i.ends : time) : within(i, step));
    return loaded<RESET>(a.o.reset, (reverse ? before : at) + i.sequence, may, 0);
  }
  __device__ __forceinline__ float reset_state(const Ahead& i, int s, int u) const {
    const bool given = RESET_TO && i.there && (u == 0 || has_second);
    return given ? wide(a.o.reset_to[s][((long long)direction * a.batch + i.sequence) * UNITS + unit + u]) : 0.f;
  }
  __device__ __forceinline__ void load(Ahead& i, int step, long long at) const {  // zoneout and extra inputs
    const bool first = within(i, step), second = first && has_second;
    const long long from = (at + i.sequence) * UNITS + unit;
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      if (zoneout(s) == BY_MASK) {
        const float2 value = load_wide_pair(a.o.zoneout[direction][s] + from, first, second);
        i.zones[s][0] = value.x, i.zones[s][1] = value.y;
      }
#pragma unroll
    for (int e = 0; e < INPUTS; ++e) i.inputs[e] = load_wide_pair(a.o.inputs[e] + from, first, second);
  }
  __device__ __forceinline__ void load_noise(Ahead& i, int step, long long at) const {  // of what enters a step
    const bool first = NOISE == HELD ? i.there : within(i, step), second = first && has_second;
    const float2 value = load_wide_pair(a.o.noise[direction] + (at + i.sequence) * UNITS + unit, first, second);
    i.noise[0] = value.x, i.noise[1] = value.y;
  }
  // of a step, and of the one after it what enters, where there is such a one
  __device__ __forceinline__ void draw(Ahead& i, int step, bool goes_on, int later) const {
    if constexpr (READS_DRAWN) i.drawn = drawn_bits(a, unit, step, i.sequence, direction, i.there);
    if constexpr (NOISE == DRAWN) i.enters = drawn_bits(a, unit, later, i.sequence, direction, i.there && goes_on);
  }

  // before the first step; `next` is the one after it, which may be none
  __device__ __forceinline__ void begin(
      Ahead& i, float (&state)[STATES][2], int step, long long at, int next, long long next_at) const {
    i.held[0] = i.held[1] = 0.f;
    i.valid = counts(i, step, at);
    i.cut = next >= 0 && next < time ? is_cut(i, next, next_at, at) : 0;
    if (is_cut(i, step, at, at))  // forward: backwards nothing comes before the last step
#pragma unroll
      for (int s = 0; s < STATES; ++s) state[s][0] = reset_state(i, s, 0), state[s][1] = reset_state(i, s, 1);
    load(i, step, at);
    if constexpr (NOISE == HELD) load_noise(i, step, 0);
    if constexpr (NOISE == GIVEN && INSIDE > 0) {
      load_noise(i, step, at);
      i.now[0] = i.noise[0], i.now[1] = i.noise[1];
    }
    if constexpr (NOISE == GIVEN) load_noise(i, next, next_at);
    if constexpr (DRAWS) draw(i, step, next >= 0 && next < time, next);
  }

  // what multiplies unit u of the operand of a product inside the step; masks by gate are in the product
  __device__ __forceinline__ float inside(const Ahead& i, int u) const {
    if constexpr (!NOISE_INSIDE) return 1.f;
    if constexpr (NOISE == HELD) return i.noise[u];
    if constexpr (NOISE == GIVEN) return i.now[u];
    if constexpr (NOISE == DRAWN) return i.drawn >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
    return 1.f;
  }

  // From what the cell made of a unit to its states after the step (`after`) and before the next (`state`), what is put
  // out, and what enters the next product.
  __device__ __forceinline__ void end(
      Ahead& i, int u, int step, const float (&before)[STATES], float (&after)[STATES], float (&state)[STATES][2],
      float& output, float& entering) const {
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      if constexpr (OPTIONS) {
        const float share = zoneout(s) == BY_MASK ? i.zones[s][u] : a.o.zoneout_share[s];
        after[s] = kept(zoneout(s), share, i.drawn >> (u * 4 + s) & 1, before[s], after[s]);
        if (MARKED && !i.valid) after[s] = before[s];
      }
      state[s][u] = after[s];
      if (RESET && i.cut) state[s][u] = reset_state(i, s, u);
    }
    output = after[0];
    if constexpr (MASK) output = i.held[u] = i.valid ? after[0] : i.held[u];
    if (LENGTHS && step >= i.ends) output = 0.f;
    entering = this->entering(i, state, u);
  }
  __device__ __forceinline__ float entering(const Ahead& i, const float (&state)[STATES][2], int u) const {
    float value = state[0][u];
    if constexpr (NOISE == HELD || NOISE == GIVEN) value *= i.noise[u];
    if constexpr (NOISE == DRAWN) value *= i.enters >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
    return value;
  }

  // what the next step reads, and of the one after it, `later`, what enters; `goes_on`: there is such a one
  __device__ __forceinline__ void advance(
      Ahead& i, int next, long long next_at, bool goes_on, int later, long long later_at) const {
    if constexpr (MARKED) i.valid = counts(i, next, next_at);
    if constexpr (RESET) i.cut = goes_on ? is_cut(i, later, later_at, next_at) : 0;
    load(i, next, next_at);
    if constexpr (NOISE == GIVEN && INSIDE > 0) i.now[0] = i.noise[0], i.now[1] = i.noise[1];
    if (NOISE == GIVEN && goes_on) load_noise(i, later, later_at);
    if constexpr (READS_DRAWN && NOISE == DRAWN) {
      i.drawn = i.enters;  // both are of the next step
      i.enters = drawn_bits(a, unit, later, i.sequence, direction, i.there && goes_on);
    } else if constexpr (DRAWS) {
      draw(i, next, goes_on, later);
    }
  }
};

// What backward reads for options of a step, for two neighbouring units of one sequence.
struct Step {
  unsigned valid, cut;  // the step counts; no state came into it from the one before: as in `Ahead`
  unsigned drawn;
  float2 zones[STATES], noise, inputs[MOST(INPUTS)];
  Pair state_gradients[STATES];
};

// What it keeps of them from step to step.
struct Back {
  long long sequence;
  bool there;  // the sequence and the first of the units
  int ends;    // steps of the sequence
  // of the step before, whose product arrives: what multiplied its operand, whether a reset came before it
  float factor[2];
  float2 operand_before;
  unsigned was_cut;
  float held[2] = {}, noise_sums[2] = {}, reset_sums[STATES][2] = {};
};

// Backward: what options make of a thread's two units.
template <class Arguments>
struct Backwards {
  const Arguments& a;
  const int unit, direction;
  const long long width;  // of a row of outputs
  const bool has_second, reverse;

  __device__ __forceinline__ long long start_of(const Back& own) const {  // in a tensor [directions, batch, UNITS]
    return ((long long)direction * a.batch + own.sequence) * UNITS + unit;
  }

  // of a step, whose rows begin at `at`
  __device__ __forceinline__ void load(Step& to, const Back& own, int step, long long at) const {
    const bool there = own.there && (!LENGTHS || step < own.ends), also = there && has_second;
    const long long row = at + own.sequence, from = row * UNITS + unit;
    to.valid = loaded<MASK>(a.o.mask, row, there, 1);
    if constexpr (RESET) {
      const bool may = reverse ? own.there && step + 1 < own.ends : there;
      to.cut = loaded<RESET>(a.o.reset, reverse ? rows_of(a, step + 1) + own.sequence : row, may, 0);
    }
    if constexpr (NOISE == GIVEN) to.noise = load_wide_pair(a.o.noise[direction] + from, there, also);
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      if (zoneout(s) == BY_MASK) to.zones[s] = load_wide_pair(a.o.zoneout[direction][s] + from, there, also);
      if constexpr (SEQUENCES) {
        const bool wanted = a.o.sequences[s] != nullptr;
        to.state_gradients[s] = load_pair(a.o.sequences[s] + row * width + direction * UNITS + unit, there && wanted,
                                          also && wanted);
      }
    }
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) to.inputs[i] = load_wide_pair(a.o.inputs[i] + from, there, also);
    if constexpr (DRAWS) to.drawn = drawn_bits(a, unit, step, own.sequence, direction, there);
  }

  // What arrived of a step's product, which is behind its mask and its reset; the step's rows begin at `at`.
  __device__ __forceinline__ void arrive(
      Back& own, float (&carried)[STATES][2], const float (&sums)[2], int step, long long at) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float scale = GATEWISE ? a.o.noise_scale : own.factor[u];
      if constexpr (FIRST) carried[0][u] += NOISE ? scale * sums[u] : sums[u];
      if constexpr (FIRST && NOISE_GRADIENT) own.noise_sums[u] += sums[u] * half_of(own.operand_before, u);
      if (RESET && own.was_cut)
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
          if constexpr (RESET_TO) own.reset_sums[s][u] += carried[s][u];
          carried[s][u] = 0.f;
        }
    }
    if (NOISE_GRADIENT && NOISE == GIVEN) {
      const bool there = own.there && (!PACKED || step < own.ends);
      store_wide_pair(a.o.noise_gradients[direction] + (at + own.sequence) * UNITS + unit, own.noise_sums[0],
                      own.noise_sums[1], there, there && has_second);
      own.noise_sums[0] = own.noise_sums[1] = 0.f;
    }
  }

  // The gradients that come to the cell's states of unit u (`d`), what zoneout keeps of them, and those of its masks
  // but for a factor.
  __device__ __forceinline__ void begin(
      const Step& step, Back& own, int u, float output, float (&carried)[STATES][2], float (&d)[STATES],
      float (&stayed)[STATES], float (&to_zones)[STATES]) const {
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      if constexpr (SEQUENCES) carried[s][u] += half_of(wide_pair(step.state_gradients[s]), u);
      d[s] = carried[s][u];
    }
    d[0] += output;
    if constexpr (MASK) {  // what came to an output that was held goes to the step that it was held from
      own.held[u] += output;
      d[0] = carried[0][u] + own.held[u];
      if (step.valid) own.held[u] = 0.f;
    }
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
      to_zones[s] = d[s], stayed[s] = 0.f;
      if constexpr (OPTIONS) {
        const float share = zoneout(s) == BY_MASK ? half_of(step.zones[s], u) : a.o.zoneout_share[s];
        if (zoneout(s) == BY_SHARE || zoneout(s) == BY_MASK) stayed[s] = share * d[s], d[s] -= stayed[s];
        if (zoneout(s) == AT_RANDOM && step.drawn >> (u * 4 + s) & 1) stayed[s] = d[s], d[s] = 0.f;
      }
    }
  }

  // what multiplied the operand of unit u
  __device__ __forceinline__ float factor(const Step& step, int u, bool valid) const {
    if constexpr (NOISE == DRAWN) return step.drawn >> (8 + u) & 1 ? a.o.noise_scale : 0.f;
    return valid ? half_of(step.noise, u) : 0.f;
  }
  // the same of a product inside the step; masks by gate are in the product, but for their scale
  __device__ __forceinline__ float inside(const Step& step, int u, bool valid) const {
    if constexpr (!NOISE_INSIDE) return 1.f;
    if constexpr (GATEWISE) return a.o.noise_scale;
    if constexpr (NOISE > 0) return factor(step, u, valid);
    return 1.f;
  }

  // gradients of a step, whose rows begin at `at`, where they are `shown`
  __device__ __forceinline__ void store(
      const Back& own, float2 before, long long at, const float2 (&to_zones)[STATES],
      const float2 (&to_inputs)[MOST(INPUTS)], bool shown) const {
    const long long from = (at + own.sequence) * UNITS + unit;
    const bool also = shown && has_second;
    if constexpr (NOISE && !GATEWISE && !ENTERED)
      store_pair(a.o.entered[direction] + from, before.x * own.factor[0], before.y * own.factor[1], shown, also);
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      if (ZONEOUT_GRADIENT && zoneout(s) == BY_MASK)
        store_wide_pair(a.o.zoneout_gradients[direction][s] + from, to_zones[s].x, to_zones[s].y, shown, also);
#pragma unroll
    for (int i = 0; i < INPUTS; ++i)
      store_wide_pair(a.o.input_gradients[direction][i] + from, to_inputs[i].x, to_inputs[i].y, shown, also);
  }

  // zero for a step that the blocks did not compute, whose rows begin at `at`
  __device__ __forceinline__ void past_the_end(const Back& own, long long at) const {
    const long long from = (at + own.sequence) * UNITS + unit;
    const bool there = own.there, also = there && has_second;
    if constexpr (NOISE && !GATEWISE && !ENTERED) store_pair(a.o.entered[direction] + from, 0.f, 0.f, there, also);
    if (NOISE_GRADIENT && NOISE == GIVEN)
      store_wide_pair(a.o.noise_gradients[direction] + from, 0.f, 0.f, there, also);
#pragma unroll
    for (int s = 0; s < STATES; ++s)
      if (ZONEOUT_GRADIENT && zoneout(s) == BY_MASK)
        store_wide_pair(a.o.zoneout_gradients[direction][s] + from, 0.f, 0.f, there, also);
#pragma unroll
    for (int i = 0; i < INPUTS; ++i)
      store_wide_pair(a.o.input_gradients[direction][i] + from, 0.f, 0.f, there, also);
  }

  // sums over all steps
  __device__ __forceinline__ void end(const Back& own) const {
    const bool there = own.there, also = there && has_second;
    if constexpr (RESET_TO)
#pragma unroll
      for (int s = 0; s < STATES; ++s)
        store_pair(a.o.reset_gradients[s] + start_of(own), own.reset_sums[s][0], own.reset_sums[s][1], there, also);
    if (NOISE_GRADIENT && NOISE == HELD)
      store_wide_pair(a.o.noise_gradients[direction] + own.sequence * UNITS + unit, own.noise_sums[0],
                      own.noise_sums[1], there, also);
  }
};

// What of a word passes a pair of bits, of the 16 pairs in `bits`: two pairs lie behind one shift, the even one with its
// upper bit from bit 31 on and its lower from 15 on, the odd one from 23 and 7 on.  Words of one element have their bits
// from 31 on.
#if ELEMENT_BYTES == 2 || HALVES
__device__ __forceinline__ unsigned spread_signs(unsigned bytes, unsigned which) {
  unsigned result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(bytes), "r"(which));
  return result;
}
__device__ __forceinline__ unsigned passed(unsigned word, unsigned bits, int pair) {
  return word & spread_signs(bits << pair / 2, pair % 2 ? 0xAA88 : 0xBB99);
}
__device__ __forceinline__ unsigned bit_of(int pair, int element) {
  return (element ? 0x80000000u : 0x8000u) >> (pair / 2 + pair % 2 * 8);
}
__device__ __forceinline__ unsigned bits_from(unsigned bits, int gate) { return bits << gate; }  // which has two pairs
#else
__device__ __forceinline__ unsigned passed(unsigned word, unsigned bits, int pair) {
  return bits << pair & 0x80000000u ? word : 0u;
}
__device__ __forceinline__ unsigned bit_of(int pair, int) { return 0x80000000u >> pair; }
__device__ __forceinline__ unsigned bits_from(unsigned bits, int gate) { return bits << 2 * gate; }
#endif

// The bits of a gate at a sequence's place, for two words of the operand, 4 words apart, from a column on: those of a pair
// and of the next.
template <class Arguments>
__device__ __forceinline__ unsigned gate_bits(
    const Arguments& a, int place, int first_column, int direction, int gate, int first_pair) {
  const bool there = place < a.batch && gate < MASKED;
  const long long sequence = there ? sequence_at(a, place) : 0;
  const float* const masks = a.o.noise[direction] + (gate * a.batch + sequence) * UNITS;
  unsigned bits = 0;
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    const int column = first_column + word * 4 * WORD_ELEMENTS;
    const bool first = there && column < UNITS;
    float2 its = {};
    if constexpr (WORD_ELEMENTS == 2)
      its = load_wide_pair(masks + column, first, there && column + 1 < UNITS);
    else if (first)
      its.x = masks[column];
    if (its.x != 0.f) bits |= bit_of(first_pair + word, 0);
    if (its.y != 0.f) bits |= bit_of(first_pair + word, 1);
  }
  return bits;
}
// The same of all gates, each behind the one before it.
template <class Arguments>
__device__ __forceinline__ unsigned gates_bits(const Arguments& a, int place, int first_column, int direction) {
  unsigned bits = 0;
#pragma unroll
  for (int gate = 0; gate < MASKED; ++gate) bits |= gate_bits(a, place, first_column, direction, gate, gate * 2);
  return bits;
}

// A gate's mask at a sequence's place, for one word of the operand.
template <class Arguments>
__device__ __forceinline__ unsigned mask_word(const Arguments& a, int gate, int place, int column, int direction) {
  if (place >= a.batch || column >= UNITS) return 0;
  const float* const at = a.o.noise[direction] + (gate * a.batch + sequence_at(a, place)) * UNITS + column;
#if ELEMENT_BYTES == 2
  return narrow_pair(at[0], column + 1 < UNITS ? at[1] : 0.f);
#else
  return operand(at[0]);
#endif
}

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
