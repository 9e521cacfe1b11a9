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
  const int64_t* counted = nullptr;   // of each sequence how many of its steps count; null: all

  // `given` and `steps`, which lie `steps_apart` from each other, are null where all count.
  Places(int64_t time, int64_t batch, const uint8_t* given, Apart apart, Scratch& scratch, const int64_t* steps = nullptr,
         int64_t steps_apart = 1)
      : time(time), batch(batch), rows(time * batch) {
    if (!given && !steps) return;
    uint8_t* by_time = scratch.take<uint8_t>(rows);
    int64_t *compact = scratch.take<int64_t>(rows), *of = scratch.take<int64_t>(rows), count = 0;
    int64_t *held = steps ? scratch.take<int64_t>(batch) : nullptr, *counts = scratch.zeros<int64_t>(batch);
    for (int64_t r = 0; r < batch && steps; ++r) {
      const int64_t length = steps[r * steps_apart];
      held[r] = length < 0 ? 0 : length < time ? length : time;
    }
    for (int64_t o = 0, t = 0; t < time; ++t)
      for (int64_t r = 0; r < batch; ++r, ++o) {
        by_time[o] = (!steps || t < held[r]) && (!given || given[t * apart.step + r * apart.row]);
        compact[o] = count, of[count] = r;
        count += by_time[o], counts[r] += by_time[o];
      }
    if (count < rows) rows = count, mask = by_time, lengths = held, place = compact, sequence = of, counted = counts;
  }
  // Whether groups of the sizes that `ends` tells are so unlike that one has an eighth more steps than their mean.
  bool is_uneven(const int64_t* ends, int64_t groups) const {
    int64_t most = 0, all = 0;
    for (int64_t group = 0; group < groups; ++group) {
      int64_t own = 0;
      for (int64_t r = ends[group]; r < ends[group + 1]; ++r) own += counted[r];
      most = own > most ? own : most, all += own;
    }
    return 8 * groups * most > 9 * all;
  }
  // Sequences of which some are longer than others, in such groups: dealt out from the longest, to and fro, so that all
  // have as many steps as can be.
  const int64_t* dealt(const int64_t* ends, int64_t groups, Scratch& scratch) const {
    int64_t *made = scratch.take<int64_t>(batch), *begin = scratch.zeros<int64_t>(time + 1);
    for (int64_t r = 0; r < batch; ++r)  // of each length the number of sequences that are longer
      for (int64_t shorter = 0; shorter < counted[r]; ++shorter) ++begin[shorter];
    for (int64_t r = 0; r < batch; ++r) {
      const int64_t rank = begin[counted[r]]++, round = rank / groups, turn = rank % groups;
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
  // Of each of them where it begins there.
  const int64_t* at(Apart apart, Scratch& scratch) const {
    int64_t* made = scratch.take<int64_t>(rows);
    each([&](int64_t c, int64_t t, int64_t r) { made[c] = t * apart.step + r * apart.row; });
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

// The rows of a batch's steps in shares of some sequences each, as many as the sizes of a batch alone decide.  Threads that
// write the steps of some sequences multiply the same, where they can: to bring what another wrote from its cache takes
// long, and longer to write there what another has read, where they have no cache together (of 64 bytes 2 ns where two
// processors of an AMD EPYC have, 26 where not).
struct Shares {
  static constexpr int64_t MOST = 8, SEQUENCES = 4, ROWS = 60, BYTES = 16 << 20;
  int64_t count = 1;
  const int64_t* of = nullptr;  // share by share, their rows; null: all, in one
  int64_t ends[MOST];

  // Each but the first takes so many bytes for its sums, which are added in the end: of many shares each has more rows.
  static Shares of_batch(const Places& places, int64_t bytes, Scratch& scratch) {
    Shares made = of_one(places.rows);
    const int64_t time = places.time, batch = places.batch;
    auto fits = [&](int64_t count) {
      return batch >= count * SEQUENCES && time * batch >= count * count * ROWS && (count - 1) * bytes <= BYTES;
    };
    while (made.count < MOST && fits(2 * made.count)) made.count *= 2;
    if (made.count == 1) return made;
    int64_t *of = scratch.take<int64_t>(places.rows), n = 0;
    made.of = of;
    for (int64_t share = 0; share < made.count; ++share) {
      const int64_t first = batch * share / made.count, last = batch * (share + 1) / made.count;
      for (int64_t t = 0; t < time; ++t)
        for (int64_t o = t * batch + first; o < t * batch + last; ++o)
          if (!places.mask || places.mask[o]) of[n++] = places.place ? places.place[o] : o;
      made.ends[share] = n;
    }
    return made;
  }
  static Shares of_one(int64_t rows) {
    Shares made;
    made.ends[0] = rows;
    return made;
  }
  int64_t begin(int64_t share) const { return share ? ends[share - 1] : 0; }
  int64_t row(int64_t place) const { return of ? of[place] : place; }
  // Of several threads that of a block of a share.
  int64_t owner(int64_t share, int64_t block, int64_t threads) const {
    const int64_t first = share * threads / count, own = (share + 1) * threads / count - first;
    return first + (own > 1 ? block % own : 0);
  }
  // body(share) of all, of a thread first of its own.
  template <typename Body>
  void each(int64_t thread, int64_t threads, Body body) const {
    for (int64_t i = 0; i < count; ++i) body((thread * count / threads + i) % count);
  }
};

}  // namespace kernel
