// Passes that come again on the same addresses, replayed from CUDA graphs: the part of taped.cpp that keeps them.
//
// The driver takes the host some 4 us for a launch, cuBLAS 9 to 50 for a product, and the driver 4 for a whole graph.
// In a loop torch's memory comes round, so that a pass has the addresses of one before it.  One that has them for the
// second time is captured on a stream of its own and replayed from then on; what has not come round is launched one by
// one.  The same kernels and products in the same order give the same bits.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace whorl {

// The functions of the driver, of cuBLAS and of Python with which a graph is made, as Python found them.
struct Capturing {
  int (*exchange_mode)(int*);
  int (*priority)(void*, int*);
  int (*create_stream)(void**, unsigned, int);
  int (*begin)(void*, int);
  int (*end)(void*, void**);
  int (*instantiate)(void**, void*, unsigned long long);
  int (*destroy)(void*);
  int (*replay)(void*, void*);
  int (*destroy_instance)(void*);
  int (*set_stream)(void*, void*);
  int (*set_workspace)(void*, void*, size_t);
  int (*hold_python)();
  void (*let_python_go)(int);
};

// While it lives, what this thread asks of CUDA neither disturbs what other threads capture nor is disturbed by it.
class Relaxed {
  const Capturing& functions;
  int mode = 2;

 public:
  explicit Relaxed(const Capturing& functions) : functions(functions) { functions.exchange_mode(&mode); }
  ~Relaxed() { functions.exchange_mode(&mode); }
};

// While it lives, no other thread runs Python.
class Held {
  const Capturing& functions;
  const int state;

 public:
  explicit Held(const Capturing& functions) : functions(functions), state(functions.hold_python()) {}
  ~Held() { functions.let_python_go(state); }
};

// A pass: the tape that says it, where, and on what.
struct Which {
  const void *tape, *context, *stream;
  std::vector<uint64_t> address;

  Which(const void* tape, const void* context, const void* stream, at::ArrayRef<uint64_t> address)
      : tape(tape), context(context), stream(stream), address(address.vec()) {}
  bool operator==(const Which& other) const {
    return tape == other.tape && context == other.context && stream == other.stream && address == other.address;
  }
};

struct Mixed {
  size_t operator()(const Which& which) const {
    uint64_t made = 1;
    const auto add = [&](uint64_t one) { made = (made ^ one) * 0x9e3779b97f4a7c15u, made ^= made >> 29; };
    for (const void* one : {which.tape, which.context, which.stream}) add((uint64_t)one);
    for (const uint64_t one : which.address) add(one);
    return made;
  }
};

// A pass ready to be launched as one.
struct Replayed {
  const Capturing& functions;
  void* instance = nullptr;
  std::mutex launching;  // the driver takes one launch of it at a time

  explicit Replayed(const Capturing& functions) : functions(functions) {}
  ~Replayed() {  // what still runs of it ends first
    const Relaxed relaxed(functions);
    if (instance != nullptr) functions.destroy_instance(instance);
  }
};

// The passes of all tapes that came before, the latest first: those that can be replayed, and those that were seen.
class Passes {
  static constexpr size_t KEPT = 1024;   // 120 of them took 14 MiB of an H100
  static constexpr size_t SEEN = 8192;   // some hundred bytes each
  static constexpr int64_t COSTS = 8;    // replays after which a graph has been worth its making
  static constexpr int64_t WAITS = 256;  // passes that are launched after CUDA has refused to capture one

  struct Known {
    Which which;
    std::shared_ptr<Replayed> graph;  // nothing where it was only seen
  };
  using Row = std::list<Known>;

  std::mutex changing;
  Row kept, seen;
  std::unordered_map<Which, Row::iterator, Mixed> at;
  int64_t credit = COSTS * KEPT, waits = 0;

 public:
  static Passes& all() {
    static auto* const made = new Passes;
    return *made;
  }

  // The pass, where it can be replayed.
  //
  // Args:
  //   again: gets whether it is to be captured: it was seen before, and as many replays came as captures are to bring.
  std::shared_ptr<Replayed> find(const Which& which, bool& again) {
    const std::lock_guard<std::mutex> lock(changing);
    again = false;
    if (waits > 0) --waits;
    if (const auto found = at.find(which); found != at.end()) {
      Row& row = found->second->graph == nullptr ? seen : kept;
      row.splice(row.begin(), row, found->second);
      credit = std::min(credit + (&row == &kept), COSTS * (int64_t)KEPT);
      again = &row == &seen && waits == 0 && credit >= COSTS;
      return found->second->graph;
    }
    seen.push_front({which, nullptr});
    at[which] = seen.begin();
    if (seen.size() > SEEN) at.erase(seen.back().which), seen.pop_back();
    return nullptr;
  }

  // Args:
  //   graph: nothing where CUDA did not take it.
  //
  // Returns:
  //   What had to make room, which is destroyed outside of the lock.
  std::shared_ptr<Replayed> keep(const Which& which, std::shared_ptr<Replayed> graph) {
    const std::lock_guard<std::mutex> lock(changing);
    credit -= COSTS;
    if (graph == nullptr) {
      waits = WAITS;
      return nullptr;
    }
    const auto found = at.find(which);
    if (found == at.end() || found->second->graph != nullptr) return graph;  // another thread was faster
    found->second->graph = std::move(graph);
    kept.splice(kept.begin(), seen, found->second);
    if (kept.size() <= KEPT) return nullptr;
    std::shared_ptr<Replayed> last = std::move(kept.back().graph);
    at.erase(kept.back().which);
    kept.pop_back();
    return last;
  }
};

// Of a device and priority the stream on which passes are captured, and of a stream what its products write to
// meanwhile: torch's own is that of its handle, and what is replayed has to keep it.
class Rooms {
  std::map<std::pair<int, int>, void*> streams;
  std::map<std::tuple<int, void*, int64_t>, at::Tensor> spaces;

 public:
  std::mutex capturing;  // one pass at a time, as they share a stream

  static Rooms& all() {
    static auto* const made = new Rooms;
    return *made;
  }

  void* stream(const Capturing& functions, int device, int priority) {
    auto& made = streams[{device, priority}];
    if (made == nullptr && functions.create_stream(&made, 1, priority) != 0) made = nullptr;  // 1: not with stream 0
    return made;
  }

  // Nothing where there is no room.
  void* space(at::Device where, int device, void* stream, int64_t bytes) {
    auto& made = spaces[{device, stream, bytes}];
    try {
      if (!made.defined()) made = at::empty({bytes}, at::TensorOptions(at::kByte).device(where));
    } catch (const c10::OutOfMemoryError&) {
      return nullptr;
    }
    return made.data_ptr();
  }
};

// A pass as `ask(stream)` launches it, captured; nothing where CUDA does not take it.
//
// No other thread runs Python meanwhile: one that waited for the whole GPU, as torch.cuda.synchronize does, would be
// refused by CUDA while anything is captured there.
//
// Args:
//   handle: of cuBLAS and this thread, which is left to this stream and space; null where nothing is multiplied.
//   bytes: of what products write to meanwhile.
template <typename Ask>
std::shared_ptr<Replayed> captured(const Capturing& functions, int device, at::Device where, void* stream,
                                   void* handle, int64_t bytes, const Ask& ask) {
  constexpr int RELAXED = 2;  // what other threads ask of CUDA meanwhile is their own affair
  const Held held(functions);
  Rooms& rooms = Rooms::all();
  const std::lock_guard<std::mutex> lock(rooms.capturing);
  void* const space = handle == nullptr ? nullptr : rooms.space(where, device, stream, bytes);
  if (handle != nullptr && space == nullptr) return nullptr;
  const Relaxed relaxed(functions);
  auto made = std::make_shared<Replayed>(functions);
  int priority = 0;
  void* const on = functions.priority(stream, &priority) == 0 ? rooms.stream(functions, device, priority) : nullptr;
  if (on == nullptr) return nullptr;
  if (handle != nullptr && functions.set_stream(handle, on) != 0) return nullptr;
  if (handle != nullptr && functions.set_workspace(handle, space, bytes) != 0) return nullptr;
  if (functions.begin(on, RELAXED) != 0) return nullptr;
  bool whole = true;
  try {
    ask(on);
  } catch (...) {  // launched one by one it fails too, and is seen
    whole = false;
  }
  void* graph = nullptr;
  whole = functions.end(on, &graph) == 0 && whole && functions.instantiate(&made->instance, graph, 0) == 0;
  if (graph != nullptr) functions.destroy(graph);
  return whole ? made : nullptr;
}

}  // namespace whorl
