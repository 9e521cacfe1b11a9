// Products inside a step where blocks exchange through L2.
//
// Round 0 multiplies the first state, each round from 1 on what a stage of the step makes, in a ring of its own (forward),
// or the gradient of such a product's result (backward).  A round takes the weights of its own gates alone, and leaves a
// block's shared memory to the next one.

#if FORWARD
// Gates that are in the same rounds are of one kind.  The product's rows are those of a kind after those of another, from a
// whole strip of each group of warps on: gate by gate the block's units.
__device__ constexpr bool is_in(int round, int strip) { return kind_enters(round * KINDS + kind_of_strip(strip)) == 1; }
__device__ constexpr int fewest_strips() {  // of a warp in one round
  int fewest = STRIPS_OF_WARP;
  for (int round = 0; round <= INSIDE; ++round) {
    int count = 0;
    for (int strip = 0; strip < STRIPS_OF_WARP; ++strip) count += is_in(round, strip);
    fewest = count > 0 && count < fewest ? count : fewest;
  }
  return fewest;
}

// In the partial sums of a sequence all groups' strips of a kind lie behind each other: where those of a gate begin, and
// those of a warp's strip.
__device__ constexpr int column_of_gate(int gate) {
  return first_strip(kind_of(gate)) * GROUPS * 16 + place_in_kind(gate) * SLICE;
}
__device__ __forceinline__ int strip_in_kind(int group, int s) {
  return group * strips_of(kind_of_strip(s)) + s - first_strip(kind_of_strip(s));
}
__device__ __forceinline__ int column_of_strip(int group, int s) {
  return (first_strip(kind_of_strip(s)) * GROUPS + strip_in_kind(group, s)) * 16;
}
// of a strip with rows of one gate; 0 past the last
__device__ __forceinline__ int gate_of_strip(int group, int s) {
  const int kind = kind_of_strip(s), place = strip_in_kind(group, s) * 16 / SLICE;
  return place < gates_of(kind) ? gate_of_kind(kind * RECURRENT + place) : 0;
}
// Of row m, as the groups' strips follow each other, the gate and the unit of the block; RECURRENT where there is none.
__device__ __forceinline__ void place_of(int m, int& gate, int& unit) {
  const int s = m / 16 % STRIPS_OF_WARP, kind = kind_of_strip(s);
  const int row = strip_in_kind(m / (16 * STRIPS_OF_WARP), s) * 16 + m % 16, place = row / SLICE;
  gate = place < gates_of(kind) ? gate_of_kind(kind * RECURRENT + place) : RECURRENT;
  unit = row % SLICE;
}
__device__ constexpr int result_gate(int result) { return link_gate(result); }
static_assert(!GATEWISE || SLICE % 16 == 0, "a strip has rows of more than one gate");
#else
__device__ constexpr int slots_of(int round) { return round == 0 ? LEAVES : 1; }  // gates of a round
__device__ constexpr int first_slot(int round) { return round == 0 ? 0 : LEAVES + round - 1; }
__device__ constexpr int gate_in(int round, int slot) { return round == 0 ? leaf_gate(slot) : pull_gate(round - 1); }
#endif
