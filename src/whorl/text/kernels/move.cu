// A step of gradient descent for many parameters at once: the float32 one moves, and its bfloat16 copy takes its value.
//
// Gradients are bfloat16 and lie as the copies do: blocks of rows, within something larger.  blockIdx.y is the parameter;
// its blocks share its elements, below 2^32, four at a time where every row begins at a multiple of four.

// @numbers

struct Parameter {
  float* own;        // [blocks, rows, columns]
  const Half* grad;  // likewise, with the distances that follow
  Half* copy;        // likewise
  long long blocks, rows, columns, from_block, from_row;
};

struct Arguments {
  Parameter parameters[40];
  const float* rate;
};

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments a) {
  const Parameter& p = a.parameters[blockIdx.y];
  const float rate = *a.rate;
  const unsigned columns = (unsigned)p.columns, rows = (unsigned)p.rows;
  typedef unsigned long long Place;
  const Place places = (Place)p.own | (Place)p.grad << 1 | (Place)p.copy << 1;
  const bool packed = (p.columns | p.from_row | p.from_block) % 4 == 0 && places % 16 == 0;
  const unsigned each = packed ? columns / 4 : columns;
  const unsigned long long count = p.blocks * p.rows * each, step = gridDim.x * (unsigned long long)THREADS;
  for (unsigned long long at = blockIdx.x * (unsigned long long)THREADS + threadIdx.x; at < count; at += step) {
    const unsigned line = (unsigned)at / each, column = (unsigned)at % each;
    const long long there = line / rows * p.from_block + line % rows * p.from_row;
    if (packed) {
      float4 own = ((float4*)p.own)[at];
      const uint2 grad = *(const uint2*)(p.grad + there + 4 * column);
      own.x -= rate * low(grad.x), own.y -= rate * high(grad.x);
      own.z -= rate * low(grad.y), own.w -= rate * high(grad.y);
      ((float4*)p.own)[at] = own;
      *(uint2*)(p.copy + there + 4 * column) = {narrow_pair(own.x, own.y), narrow_pair(own.z, own.w)};
    } else {
      const float own = p.own[at] - rate * wide(p.grad[there + column]);
      p.own[at] = own;
      p.copy[there + column] = (Half)narrow(own);
    }
  }
}
