// What is given to kernels of forward that are of steps with means alone (whole_forward.cu, sliced_forward.cu,
// spread_whole_forward.cu): the same, and as in staged_forward.cu, and where they are spread as in spread_forward.cu.
struct Arguments {
  Gate* gates[2];
  const Weight* weights[2];
  const Element* bias[2];
  const Element* x_bias[2];
  const Element* vectors[2][MOST(VECTORS)];
  const Element* initial[STATES];
  Element* finals[STATES];
  Element* y;
  Gate* apart[2];
  float* states[2];
  float* levels[2];
  Element* operands[2];
  long long time, batch;
#if SPREAD
  unsigned* ring;  // ones: [directions, RING, batch, PITCH], and for results [directions, 2, batch, RESULT_PITCH]
  long long first_row, first_direction, directions;
#if SIDED
  Places places;
#endif
#endif
  static constexpr Options o = {};
};
