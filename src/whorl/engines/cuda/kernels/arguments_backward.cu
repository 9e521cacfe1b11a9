// What is given to kernels of backward that are of steps with means alone (whole_backward.cu, sliced_backward.cu,
// spread_whole_backward.cu): as in staged_backward.cu, without options, and where they are spread as in spread_backward.cu.
struct Arguments {
  const Gate* gates[2];
  const Weight* weights[2];
  const Element* vectors[2][MOST(VECTORS)];
  const Element* initial[STATES];
  const Element* y;
  const Gate* apart[2];
  const float* states[2];
  const Element* y_gradient;
  const Element* final_gradients[STATES];
  Element* gate_gradients[2];
  Element* apart_gradients[2];
  Element* initial_gradients[STATES];
  float* sums[2];  // [rows, SUMMED x UNITS]: a row of each sequence
  const float* levels[2];
  long long time, batch;
#if SPREAD
  unsigned* ring;  // ones: [directions, RING, batch, PITCH], and for sums [directions, 2, batch, SOURCES, SUM_PITCH]
  long long first_row, first_direction, directions;
#if SIDED
  Places places;
#endif
#endif
  static constexpr Options o = {};
};
