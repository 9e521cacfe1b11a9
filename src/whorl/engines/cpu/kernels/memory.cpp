// Memory of a call.  Only `Scratch` takes any, in the thread that called and never while others run: where there is none
// nothing waits for anybody, what was taken before goes, and the caller is told how much it was.

namespace kernel {

// So many bytes could not be had.
struct NoMemory {
  int64_t bytes;
};

// All of it goes at the end of its scope.
struct Scratch {
  struct alignas(64) Block {
    Block* before;
  };
  Block* last = nullptr;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    while (last) {
      Block* before = last->before;
      free(last), last = before;
    }
  }
  // Of 64 bytes each the first is a multiple, and as many lie behind the last.
  template <typename T>
  T* take(int64_t count) {
    const int64_t bytes = up(count * int64_t(sizeof(T)) + int64_t(sizeof(Block)) + 64, 64);
    Block* made = (Block*)aligned_alloc(64, size_t(bytes));
    if (!made) throw NoMemory{bytes};
    made->before = last, last = made;
    return (T*)(made + 1);
  }
  template <typename T>
  T* zeros(int64_t count) {
    return (T*)memset((void*)take<T>(count), 0, size_t(count) * sizeof(T));
  }
  // It stays, and goes with the scratch whose `last` this is.
  Block* keep() {
    Block* kept = last;
    last = nullptr;
    return kept;
  }
};

// What who calls into a library gets: 0 where the call is done, else the bytes that could not be had.
template <typename Body>
static int64_t missing(Body body) {
  try {
    body();
  } catch (const NoMemory& found) {
    return found.bytes;
  }
  return 0;
}

}  // namespace kernel
