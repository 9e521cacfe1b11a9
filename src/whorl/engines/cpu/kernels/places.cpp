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
  int64_t rows;                       // that count
  const uint8_t* mask = nullptr;      // by outer row, whether it counts; null: all do
  const int64_t* lengths = nullptr;   // the steps of each sequence, from 0 to time; null: all
  const int64_t* place = nullptr;     // by outer row: its compact row; null: the same
  const int64_t* sequence = nullptr;  // by compact row; null: row % batch

  // `given` and `steps`, which lie `steps_apart` from each other, are null where all count.
  Places(int64_t time, int64_t batch, const uint8_t* given, Apart apart, Scratch& scratch, const int64_t* steps = nullptr,
         int64_t steps_apart = 1)
      : time(time), batch(batch), rows(time * batch) {
    if (!given && !steps) return;
    uint8_t* by_time = scratch.take<uint8_t>(rows);
    int64_t *compact = scratch.take<int64_t>(rows), *of = scratch.take<int64_t>(rows), count = 0;
    int64_t* held = steps ? scratch.take<int64_t>(batch) : nullptr;
    for (int64_t r = 0; r < batch && steps; ++r) {
      const int64_t length = steps[r * steps_apart];
      held[r] = length < 0 ? 0 : length < time ? length : time;
    }
    for (int64_t o = 0, t = 0; t < time; ++t)
      for (int64_t r = 0; r < batch; ++r, ++o) {
        by_time[o] = (!steps || t < held[r]) && (!given || given[t * apart.step + r * apart.row]);
        compact[o] = count, of[count] = r;
        count += by_time[o];
      }
    if (count < rows) rows = count, mask = by_time, lengths = held, place = compact, sequence = of;
  }
  // Sequences of which some are longer than others, in groups of the sizes that `ends` tells: dealt out from the longest,
  // to and fro, so that all groups have as many steps as can be.
  const int64_t* dealt(const int64_t* ends, int64_t groups, Scratch& scratch) const {
    int64_t *made = scratch.take<int64_t>(batch), *begin = scratch.zeros<int64_t>(time + 1);
    for (int64_t r = 0; r < batch; ++r)  // of each length the number of sequences that are longer
      for (int64_t shorter = 0; shorter < lengths[r]; ++shorter) ++begin[shorter];
    for (int64_t r = 0; r < batch; ++r) {
      const int64_t rank = begin[lengths[r]]++, round = rank / groups, turn = rank % groups;
      const bool back = round % 2 && (round + 1) * groups <= batch;
      made[ends[back ? groups - 1 - turn : turn] + round] = r;
    }
    return made;
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
