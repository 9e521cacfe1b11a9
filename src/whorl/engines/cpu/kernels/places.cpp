// Which steps of which sequences count, and where each lies among those that do ("compact" in sweep.cpp).

namespace kernel {

static void set_or_zero(real* to, const real* from, int64_t count) {
  from ? memcpy(to, from, size_t(count) * sizeof(real)) : memset(to, 0, size_t(count) * sizeof(real));
}

// How far the steps and the sequences of a tensor of the caller's are apart.
struct Apart {
  int64_t step, row;
};

struct Places {
  int64_t time, batch;
  int64_t rows;                     // that count
  const uint8_t* mask = nullptr;    // by outer row; null: all count
  const int64_t* place = nullptr;   // by outer row: its compact row; null: the same
  const int64_t* sequence = nullptr;  // by compact row; null: row % batch

  // `given` is null where all count.
  Places(int64_t time, int64_t batch, const uint8_t* given, Apart apart, Scratch& scratch)
      : time(time), batch(batch), rows(time * batch) {
    if (!given) return;
    uint8_t* by_time = scratch.take<uint8_t>(rows);
    int64_t *compact = scratch.take<int64_t>(rows), *of = scratch.take<int64_t>(rows), count = 0;
    for (int64_t o = 0, t = 0; t < time; ++t)
      for (int64_t r = 0; r < batch; ++r, ++o) {
        by_time[o] = given[t * apart.step + r * apart.row] != 0, compact[o] = count, of[count] = r;
        count += by_time[o];
      }
    if (count < rows) rows = count, mask = by_time, place = compact, sequence = of;
  }
  // body(compact row, step, sequence) of the rows that count.
  template <typename Body>
  void each(Body body) const {
    for (int64_t c = 0, o = 0, t = 0; t < time; ++t)
      for (int64_t r = 0; r < batch; ++r, ++o)
        if (!mask || mask[o]) body(c++, t, r);
  }
  // Of a tensor of the caller's the rows that count, one after the other.
  template <typename T>
  T* gathered(const T* from, Apart apart, int64_t width, Scratch& scratch) const {
    T* made = scratch.take<T>(rows * width);
    each([&](int64_t c, int64_t t, int64_t r) {
      memcpy(made + c * width, from + t * apart.step + r * apart.row, size_t(width) * sizeof(T));
    });
    return made;
  }
  // Back, of rows `stride` apart; where none counts nothing is written.
  template <typename T>
  void spread(T* to, Apart apart, const T* from, int64_t stride, int64_t width) const {
    each([&](int64_t c, int64_t t, int64_t r) {
      memcpy(to + t * apart.step + r * apart.row, from + c * stride, size_t(width) * sizeof(T));
    });
  }
};

}  // namespace kernel
