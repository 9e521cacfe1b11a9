// Rows behind masks that are held over all steps, and zero in the steps that do not count: there may be anything.
//
// A thread has VECTOR elements of a row, 16 bytes or one element, and writes them behind each of `count` masks.

// @generated

struct Arguments {
  Element* to;                 // [count, rows, width]
  const Element* from;         // [rows, width]
  const float* masks;          // [count, batch, width], or null
  const long long* lengths;    // [batch], or null
  const bool* valid;           // [rows], or null
  const long long* sequences;  // [rows]: of a PackedSequence the sequence of each row, or null
  long long count, rows, batch, width;
};

struct __align__(VECTOR * ELEMENT_BYTES) Some {
  Element values[VECTOR];
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments a) {
  const long long chunks = a.width / VECTOR, all = a.rows * chunks;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < all; i += gridDim.x * 256ll) {
    const bool small = all <= 0x7fffffff;  // whose division takes a tenth
    const long long row = small ? (unsigned)i / (unsigned)chunks : i / chunks, column = (i - row * chunks) * VECTOR;
    const long long step = small ? (unsigned)row / (unsigned)a.batch : row / a.batch;
    const long long sequence = a.sequences != nullptr ? a.sequences[row] : row - step * a.batch;
    const bool counts = (a.lengths == nullptr || step < a.lengths[sequence]) && (a.valid == nullptr || a.valid[row]);
    const Some from = *(const Some*)(a.from + row * a.width + column);
    for (long long m = 0; m < a.count; ++m) {
      Some to;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const long long at = (m * a.batch + sequence) * a.width + column + e;
        const float value = a.masks != nullptr ? wide(from.values[e]) * a.masks[at] : wide(from.values[e]);
        to.values[e] = narrow(counts ? value : 0.f);
      }
      *(Some*)(a.to + (m * a.rows + row) * a.width + column) = to;
    }
  }
}
