// Rows in the order of their numbers, those of one number in their own order: a block for each row counts its place.

// @numbers

struct Arguments {
  const long long* tokens;  // [rows]: a row's number
  int* order;               // [rows]: rows, by their numbers
  int* starts;              // [rows]: where in it those of a row's number begin
  int* counts;              // [rows]: how many they are, at the first of them; at the others 0
  long long rows;
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned memory[];
  const long long row = blockIdx.x, mine = a.tokens[row];
  float less = 0.f, before = 0.f, alike = 0.f;  // counts below 2^24
  for (long long at = threadIdx.x; at < a.rows; at += THREADS) {
    const long long other = a.tokens[at];
    less += other < mine, alike += other == mine, before += other == mine && at < row;
  }
  less = over_block<false>(less, (float*)memory, THREADS);
  before = over_block<false>(before, (float*)memory, THREADS);
  alike = over_block<false>(alike, (float*)memory, THREADS);
  if (threadIdx.x == 0) {
    a.order[(int)(less + before)] = (int)row;
    a.starts[row] = (int)less;
    a.counts[row] = before == 0.f ? (int)alike : 0;
  }
}
