// Rows behind masks that are held over all steps, and zero in the steps that do not count: there may be anything.
//
// BEHIND a loop over the steps that leaves multiprocessors idle, and lets this launch begin beside it, it reads nothing
// that the loop writes, and only ends after it: its last block waits for the loop, the others make room for the next.
//
// A thread has VECTOR elements, 16 bytes or one element, of a sequence at several steps, and writes them behind each of
// `count` masks.  It keeps those of GROUP masks in registers: read anew at each step they are most of what is read.  It
// is numbered by 32 bits.

// @generated

constexpr int GROUP = MASKED ? 4 : 1;

struct Arguments {
  Element* to;                 // [count, rows, width]
  const Element* from;         // [rows, width]
  const float* masks;          // [count, batch, width] where MASKED
  const long long* lengths;    // [batch], or null
  const bool* valid;           // [rows], or null
  const long long* sequences;  // [rows]: of a PackedSequence the sequence of each row, or null
  long long count, rows, batch, width;
  double scale;  // of all masks
};

struct __align__(VECTOR * ELEMENT_BYTES) Some {
  Element values[VECTOR];
};

__device__ __forceinline__ void write(const Arguments& a, unsigned i, unsigned chunks) {
  const float scale = (float)a.scale;
  const unsigned place = i / chunks, column = (i - place * chunks) * VECTOR;
  for (long long group = 0; group < a.count; group += GROUP) {
    float masks[GROUP][VECTOR];
    long long held = -1;  // the sequence whose masks they are
    for (long long step = blockIdx.y; step * a.batch + place < a.rows; step += gridDim.y) {
      const long long row = step * a.batch + place, sequence = a.sequences != nullptr ? a.sequences[row] : place;
      const bool counts = (a.lengths == nullptr || step < a.lengths[sequence]) && (a.valid == nullptr || a.valid[row]);
      const Some from = *(const Some*)(a.from + row * a.width + column);
      if (MASKED && sequence != held) {
#pragma unroll
        for (int m = 0; m < GROUP; ++m)
#pragma unroll
          for (int e = 0; e < VECTOR; ++e)
            if (group + m < a.count) masks[m][e] = scale * a.masks[((group + m) * a.batch + sequence) * a.width + column + e];
        held = sequence;
      }
#pragma unroll
      for (int m = 0; m < GROUP; ++m) {
        if (group + m >= a.count) break;
        Some to;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          const float value = MASKED ? wide(from.values[e]) * masks[m][e] : wide(from.values[e]);
          to.values[e] = narrow(counts ? value : 0.f);
        }
        *(Some*)(a.to + ((group + m) * a.rows + row) * a.width + column) = to;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  if (BEHIND)
    let_the_next_launch_begin();
  else
    wait_for_the_launch_before();
  const unsigned chunks = (unsigned)(a.width / VECTOR), i = blockIdx.x * 256u + threadIdx.x;
  if (i < (unsigned)a.batch * chunks) write(a, i, chunks);
  if (BEHIND && blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) wait_for_the_launch_before();
}
