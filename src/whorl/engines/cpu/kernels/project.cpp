// The input product: y = x w' + bias for the rows of all steps at once, in blocks of rows that threads take in turn.

namespace kernel {

struct Projection {
  real* y;
  const store* x;
  const store* w;
  const real* bias;
  int64_t rows, inputs, outputs, stride, batch;
  bool across;  // w is [outputs, inputs]; else [inputs, outputs]
  Shares shares;
  int64_t next[Shares::MOST];
  Packed packed;
  store* padded;  // of each thread a block of rows, filled up to pairs; null: rows are read as they lie

  static constexpr int64_t BLOCK = 8 * ROWS;
  int64_t deep() const { return up(inputs, STEP); }
};

static void pack_projection(void* data, int thread, int threads) {
  const Projection& p = *(Projection*)data;
  const int64_t every = shares(p.packed);
  pack(p.packed, p.w, p.across ? p.inputs : p.outputs, p.across, every * thread / threads, every * (thread + 1) / threads);
}

static void project_rows(void* data, int thread, int threads) {
  Projection& p = *(Projection*)data;
  constexpr int64_t block = Projection::BLOCK;
  const int64_t deep = p.deep();
  store* const padded = p.padded ? p.padded + thread * block * deep : nullptr;
  p.shares.each(thread, threads, [&](int64_t share) {
    const int64_t first = p.shares.begin(share), last = p.shares.ends[share];
    for (;;) {
      const int64_t begin = first + __atomic_fetch_add(&p.next[share], block, __ATOMIC_RELAXED);
      if (begin >= last) break;
      const int64_t count = last - begin < block ? last - begin : block;
      const store* a[block];
      real* c[block];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = p.shares.row(begin + i);
        a[i] = p.x + r * p.inputs, c[i] = p.y + r * p.stride;
        if (!padded) continue;
        store* row = padded + i * deep;
        memcpy(row, a[i], size_t(p.inputs) * sizeof(store));
        put(row + p.inputs, real(0));
        a[i] = row;
      }
      product(p.packed, count, a, c, false, 0, shares(p.packed));
    }
  });
}

static void project(Projection p, int threads, const Shares* shares_of = nullptr) {
  Scratch scratch;
  p.shares = shares_of ? *shares_of : Shares::of_one(p.rows);
  p.packed = unpacked(p.outputs, p.inputs, p.batch);
  const int64_t bytes = up(p.packed.bytes(), 64), bias = up(p.outputs, LANES);
  const int64_t before = bytes + up(bias * int64_t(sizeof(real)), 64);
  const int64_t blocks = p.deep() > p.inputs ? threads * Projection::BLOCK * p.deep() * int64_t(sizeof(store)) : 0;
  char* memory = scratch.take<char>(before + blocks);
  place(p.packed, memory), p.packed.bias = (real*)(memory + bytes);
  p.padded = blocks ? (store*)(memory + before) : nullptr;
  for (int64_t n = 0; n < bias; ++n) p.packed.bias[n] = p.bias && n < p.outputs ? p.bias[n] : real(0);
  parallel(p.inputs * p.outputs < 16384 ? 1 : threads, pack_projection, &p);
  parallel(p.rows * p.inputs * p.outputs < 200000 ? 1 : threads, project_rows, &p);
}

}  // namespace kernel
