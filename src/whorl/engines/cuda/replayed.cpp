// Passes that come again on the same addresses, replayed from CUDA graphs: the part of taped.cpp that keeps them.
//
// The driver takes the host some 4 us for a launch, cuBLAS 9 to 50 for a product, and the driver 4 for a whole graph.
// In a loop torch's memory comes round, so that a pass has the addresses of one before it.  One that has them for the
// second time is captured on a stream of its own and replayed from then on; what has not come round is launched one by
// one.  The same kernels and products in the same order give the same bits.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace whorl {

// The functions of the driver and of cuBLAS with which a graph is made, as Python found them.
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
};

// A pass, ready to be launched as one.
struct Replayed {
  const Capturing& functions;
  void* stream;
  std::vector<uint64_t> address;
  void* instance = nullptr;
  std::mutex launching;  // the driver takes one launch of it at a time

  Replayed(const Capturing& functions, void* stream, at::ArrayRef<uint64_t> address)
      : functions(functions), stream(stream), address(address.vec()) {}
  ~Replayed() {  // one that still runs ends first: the driver sees to it
    if (instance != nullptr) functions.destroy_instance(instance);
  }
  bool is_of(void* other, at::ArrayRef<uint64_t> addresses) const {
    return stream == other && addresses == at::ArrayRef<uint64_t>(address);
  }
};

// The passes of one tape that came before: which are kept, and which were seen.  All layers of one shape have one tape.
class Passes {
  static constexpr size_t KEPT_MOST = 128, SEEN_MOST = 512;
  static constexpr int64_t BEHIND = 4;         // replays that a graph has to bring before another takes its place
  static constexpr int64_t EVERYWHERE = 1024;  // graphs of all tapes: 120 took 14 MiB of a GPU

  std::mutex changing;
  std::unordered_map<uint64_t, std::shared_ptr<Replayed>> kept;  // by what `mixed` makes of a pass
  std::vector<uint64_t> in_order, seen;
  size_t next_kept = 0, next_seen = 0;
  int64_t made = 0, replays = 0;
  bool refused = false;

  static std::atomic<int64_t>& everywhere() {
    static std::atomic<int64_t> count{0};
    return count;
  }

 public:
  enum Found { NEW, AGAIN, KEPT };

  static uint64_t mixed(void* stream, at::ArrayRef<uint64_t> address) {
    uint64_t made = (uint64_t)stream + 1;
    for (const uint64_t one : address) made = (made ^ one) * 0x9e3779b97f4a7c15u, made ^= made >> 29;
    return made;
  }

  // What is known of a pass, and where it is kept what; one that is new is remembered.
  Found look(void* stream, at::ArrayRef<uint64_t> address, std::shared_ptr<Replayed>& found) {
    const uint64_t which = mixed(stream, address);
    const std::lock_guard<std::mutex> lock(changing);
    if (const auto one = kept.find(which); one != kept.end()) {
      if (!one->second->is_of(stream, address)) return NEW;
      found = one->second;
      ++replays;
      return KEPT;
    }
    if (std::find(seen.begin(), seen.end(), which) == seen.end()) {
      put(seen, next_seen, SEEN_MOST, which);
      return NEW;
    }
    const bool room = in_order.size() == KEPT_MOST || everywhere() < EVERYWHERE;
    return refused || !room || made >= (int64_t)KEPT_MOST + replays / BEHIND ? NEW : AGAIN;
  }

  // Args:
  //   one: nothing where CUDA does not take it, as it then does no other of the tape.
  void keep(const std::shared_ptr<Replayed>& one) {
    const std::lock_guard<std::mutex> lock(changing);
    if (one == nullptr) {
      refused = true;
      return;
    }
    const uint64_t which = mixed(one->stream, one->address);
    if (!kept.emplace(which, one).second) return;  // another thread was faster
    ++made;
    ++everywhere();
    if (const auto last = put(in_order, next_kept, KEPT_MOST, which)) everywhere() -= kept.erase(*last);
  }

 private:
  // Into a row of so many at most, in the place of the oldest, which it gives.
  static std::optional<uint64_t> put(std::vector<uint64_t>& row, size_t& next, size_t most, uint64_t which) {
    if (row.size() < most) {
      row.push_back(which);
      return {};
    }
    return std::exchange(row[next++ % most], which);
  }
};

// Of a device and priority the stream on which passes are captured, and of a stream what its products write to
// meanwhile: torch's own is that of its handle, and what is replayed has to keep it.
class Rooms {
  std::map<std::pair<int, int>, void*> streams;
  std::map<std::pair<int, void*>, at::Tensor> spaces;

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

  void* space(at::Device where, int device, void* stream, int64_t bytes) {
    auto& made = spaces[{device, stream}];
    if (!made.defined()) made = at::empty({bytes}, at::TensorOptions(at::kByte).device(where));
    return made.data_ptr();
  }
};

// A pass as `ask(stream, handle)` launches it, captured; nothing where CUDA does not take it.
//
// Args:
//   handle: of cuBLAS and this thread, as torch gives it, which sets it anew each time that it is asked for.
//   bytes: of what products write to meanwhile.
template <typename Ask>
std::shared_ptr<Replayed> captured(const Capturing& functions, int device, at::Device where, void* stream,
                                   void* handle, int64_t bytes, at::ArrayRef<uint64_t> address, const Ask& ask) {
  constexpr int RELAXED = 2;  // what cuBLAS and other threads ask of CUDA meanwhile is their own affair
  Rooms& rooms = Rooms::all();
  const std::lock_guard<std::mutex> lock(rooms.capturing);
  int mode = RELAXED, priority = 0;
  if (functions.exchange_mode(&mode) != 0) return nullptr;
  auto made = std::make_shared<Replayed>(functions, stream, address);
  bool whole = false;
  void* graph = nullptr;
  void* const space = rooms.space(where, device, stream, bytes);
  void* const on = functions.priority(stream, &priority) == 0 ? rooms.stream(functions, device, priority) : nullptr;
  if (on != nullptr && functions.set_stream(handle, on) == 0 && functions.set_workspace(handle, space, bytes) == 0 &&
      functions.begin(on, RELAXED) == 0) {
    try {
      ask(on, handle);
      whole = true;
    } catch (const c10::Error&) {  // launched one by one it fails too, and is seen
    }
    whole = functions.end(on, &graph) == 0 && whole;
  }
  whole = whole && functions.instantiate(&made->instance, graph, 0) == 0;
  if (graph != nullptr) functions.destroy(graph);
  functions.exchange_mode(&mode);
  return whole ? made : nullptr;
}

}  // namespace whorl
