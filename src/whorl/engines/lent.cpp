// Memory of the host as memory.py of engine `cpu` has it, the part of taped.cpp that has it: what is large in large pages,
// and what no caller sees used again.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <deque>
#include <exception>
#include <mutex>

namespace whorl {

using at::Tensor;

// The system gives no memory: Python asks again, and says so.
struct Lacking : std::exception {};

constexpr size_t PAGE = 1 << 21, LARGE = 2 * PAGE, MOST_IDLE = 1 << 28;

void advise(void* begin, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const size_t from = ((size_t)begin + PAGE - 1) / PAGE * PAGE, to = ((size_t)begin + size) / PAGE * PAGE;
  if (to > from) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

// For the caller.
Tensor allocated(at::IntArrayRef shape, at::IntArrayRef steps, const at::TensorOptions& options) {
  Tensor made = at::empty_strided(shape, steps, options);
  if (made.is_cpu() && made.nbytes() >= LARGE) advise(made.data_ptr(), made.nbytes());
  return made;
}

#if defined(__linux__)
// Regions that lie idle, those that have longest first.  Where another thread is at it, or was when the process forked,
// one goes without.
class Idle {
  std::mutex busy;
  std::deque<std::pair<void*, size_t>> regions;
  size_t bytes = 0;

 public:
  static Idle& all() {
    static auto* const made = new Idle;
    return *made;
  }
  std::pair<void*, size_t> take(size_t size) {
    if (const std::unique_lock<std::mutex> lock(busy, std::try_to_lock); lock) {
      const auto fits = [&](const auto& one) { return size <= one.second && one.second <= size + size / 4 + 2 * PAGE; };
      const auto found = std::find_if(regions.begin(), regions.end(), fits);
      if (found != regions.end()) {
        const auto taken = *found;
        regions.erase(found);
        bytes -= taken.second;
        return taken;
      }
    }
    const size_t whole = (size + PAGE - 1) / PAGE * PAGE + PAGE;
    void* const made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw Lacking();
    advise(made, whole);
    return {made, whole};
  }
  void give_back(std::pair<void*, size_t> region) {
    const std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
    if (!lock) {
      munmap(region.first, region.second);
      return;
    }
    regions.push_back(region);
    for (bytes += region.second; bytes > MOST_IDLE; regions.pop_front()) {
      bytes -= regions.front().second;
      munmap(regions.front().first, regions.front().second);
    }
  }
};
#endif

// What no caller sees.
Tensor borrowed(at::IntArrayRef shape, at::IntArrayRef steps, const at::TensorOptions& options) {
#if defined(__linux__)
  const size_t size = (size_t)c10::multiply_integers(shape) * options.dtype().itemsize();
  if (size >= LARGE) {
    const auto region = Idle::all().take(size);
    const auto back = [region](void*) { Idle::all().give_back(region); };
    return at::from_blob(region.first, shape, steps, back, options);
  }
#endif
  return allocated(shape, steps, options);
}

}  // namespace whorl
