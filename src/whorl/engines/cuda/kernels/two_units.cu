// Where a thread computes the cell of two neighbouring units of a sequence, backward (whole_backward.cu,
// spread_whole_backward.cu).

struct Read {  // what one thread reads at a step
  GatePair gates[GATES], apart[MOST(APART)];
  Pair y_gradient, before;
  float2 states[MOST(STATES - 1)];
  float levels[MOST(LEVELS)];
};

struct Given {  // what the cell's gradient reads of one unit
  float x[GATES], r[MOST(LINKS)] = {}, before[STATES], v[MOST(VECTORS)];
};
