// Calls of a layer by the tapes of its plan (tape.py): what Python would ask of the driver, of cuBLAS, of the loops of
// engine `cpu` and of torch's memory, asked from here, and the operation of autograd around it.
//
// A tape is read once.  A call allocates what it says, puts the addresses of the call's tensors into arguments, and
// calls, launches or replays (replayed.cpp), on memory of torch's or its own (lent.cpp).  Whatever needs more than that -
// copies of weights, gradients of gradients, gradients in batches - is left to Python: a call by giving back nothing, a
// backward by an operation that Python implements.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>

namespace whorl {

using at::TensorList;
using Row = std::vector<Tensor>;
using torch::autograd::AutogradContext;

enum Kind : int64_t { ALLOCATE, FREE, CLEAR, LAUNCH, MULTIPLY, TIMES, MULTIPLY_EACH, ADD, COPY, BORROW, CALL };

struct Attribute {  // CUlaunchAttribute
  unsigned id, pad, value[16];
};

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

struct Place {  // bytes from the beginning of what a slot has; slot -1 is no address
  int64_t slot, offset;
};

struct Part {  // of a slot: its first element and how many, 0 of all, or its first columns; slot -1 of nothing
  int64_t slot, first, count, columns;
};

using Steps = std::array<int64_t, 2>;  // of a tensor's steps and sequences, from one to the next; 0 of one in one piece

struct Pointer {  // of an argument
  int64_t at;
  Place place;
};

// The rest of a row of numbers.
struct Numbers {
  at::IntArrayRef row;
  size_t at = 0;
  int64_t next() {
    TORCH_CHECK(at < row.size(), "a tape ends too early");
    return row[at++];
  }
  std::vector<int64_t> some(int64_t count) {
    std::vector<int64_t> made;
    for (int64_t i = 0; i < count; ++i) made.push_back(next());
    return made;
  }
  Place place() {
    const int64_t slot = next();
    return {slot, next()};
  }
};

struct Entry {
  Kind kind;
  int64_t slot = -1;
  // what is allocated, or changed one by one: numbers a times b into out, or a (and of its dtype) to or into out
  at::ScalarType dtype{}, of_a{};
  std::vector<int64_t> shape, steps;
  Place a{}, b{}, out{};
  // a launch
  int64_t name = 0;
  void* function = nullptr;
  Config config{};
  std::vector<Attribute> attributes;
  std::vector<uint64_t> argument;
  std::vector<Pointer> pointers;
  // a call: its first argument and its threads; of the other argument, words before steps and that are a slot's number
  void* first = nullptr;
  int64_t threads = 0;
  std::vector<std::array<int64_t, 2>> apart, items;
  // a product of matrices, or several in one launch: what cuBLAS takes, in the places of addresses nothing
  std::vector<int64_t> numbers;

  void read_product(Numbers& from, int count, int of_b, int of_a, int of_out) {
    for (int i = 0; i < count; ++i) {
      Place* const matrix = i == of_b ? &b : i == of_a ? &a : i == of_out ? &out : nullptr;
      if (matrix != nullptr) *matrix = from.place();
      numbers.push_back(matrix == nullptr ? from.next() : 0);
    }
  }
};

struct Tape {
  int64_t slots = 0;
  std::vector<Entry> entries;
  std::vector<std::string> names;  // of kernels
  bool replayable = false, multiplies = false;

  Tape() = default;
  Tape(at::IntArrayRef row, std::vector<std::string> names) : names(std::move(names)) {
    Numbers whole{row};
    slots = row.empty() ? 0 : whole.next();
    while (whole.at < row.size()) {
      const auto numbers = whole.some(whole.next());
      entries.push_back(read(Numbers{numbers}));
    }
    replayable = is_replayable();
    multiplies = std::any_of(entries.begin(), entries.end(), is_product);
  }

  static bool is_product(const Entry& entry) { return entry.kind == MULTIPLY || entry.kind == MULTIPLY_EACH; }

  // Whether it is made of launches and products alone, and needs little more memory where all of it is taken ahead.
  bool is_replayable() const {
    constexpr int64_t LITTLE = 32 << 20;
    std::vector<int64_t> bytes(slots, 0);
    int64_t launches = 0, now = 0, most = 0, all = 0;
    for (const Entry& entry : entries) {
      if (entry.kind == ALLOCATE) {
        bytes[entry.slot] = c10::multiply_integers(entry.shape) * (int64_t)c10::elementSize(entry.dtype);
        all += bytes[entry.slot];
        most = std::max(most, now += bytes[entry.slot]);
      } else if (entry.kind == FREE) {
        now -= bytes[entry.slot];
      } else if (entry.kind == LAUNCH || is_product(entry)) {
        ++launches;
      } else {
        return false;
      }
    }
    return launches > 1 && all - most <= LITTLE;
  }

  // Whether steps of what a slot has are told to whom it is given.
  bool tells(int64_t slot) const {
    const auto of_slot = [&](const auto& pair) { return pair[1] == slot; };
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
      return std::any_of(entry.apart.begin(), entry.apart.end(), of_slot);
    });
  }

  static Entry read(Numbers from) {
    Entry made;
    made.kind = (Kind)from.next();
    switch (made.kind) {
      case BORROW:
      case ALLOCATE: {
        made.slot = from.next();
        made.dtype = (at::ScalarType)from.next();
        const int64_t axes = from.next();
        made.shape = from.some(axes);
        made.steps = from.some(axes);
        break;
      }
      case FREE:
      case CLEAR:
        made.slot = from.next();
        break;
      case LAUNCH: {
        made.name = from.next();
        made.function = (void*)from.next();
        const auto sizes = from.some(4);
        made.config = {{(unsigned)sizes[0], (unsigned)sizes[1], 1}, {(unsigned)sizes[2], 1, 1}, (unsigned)sizes[3],
                       nullptr, nullptr, 0};
        for (int64_t i = from.next(); i > 0; --i) {
          Attribute attribute{};
          attribute.id = (unsigned)from.next();
          attribute.value[0] = (unsigned)from.next();
          attribute.value[1] = attribute.value[2] = 1;
          made.attributes.push_back(attribute);
        }
        for (int64_t i = from.next(); i > 0; --i) made.argument.push_back((uint64_t)from.next());
        for (int64_t i = from.next(); i > 0; --i) {
          const int64_t at = from.next();
          made.pointers.push_back({at / 8, from.place()});
        }
        break;
      }
      case CALL: {
        made.function = (void*)from.next();
        made.first = (void*)from.next();
        made.threads = from.next();
        for (int64_t i = from.next(); i > 0; --i) made.argument.push_back((uint64_t)from.next());
        for (int64_t i = from.next(); i > 0; i -= 3) {
          const int64_t at = from.next();
          made.pointers.push_back({at, from.place()});
        }
        for (auto* const pairs : {&made.apart, &made.items})
          for (int64_t i = from.next(); i > 0; i -= 2) {
            const int64_t at = from.next();
            pairs->push_back({at, from.next()});
          }
        break;
      }
      case MULTIPLY:
        made.read_product(from, 18, 6, 9, 13);
        break;
      case MULTIPLY_EACH:
        made.read_product(from, 22, 6, 10, 15);
        break;
      case TIMES:
        made.dtype = (at::ScalarType)from.next();
        made.shape = {from.next()};
        made.a = from.place(), made.b = from.place(), made.out = from.place();
        break;
      case ADD:
      case COPY:
        made.shape = {from.next()};
        made.dtype = (at::ScalarType)from.next(), made.out = from.place();
        made.of_a = (at::ScalarType)from.next(), made.a = from.place();
        break;
      default:
        TORCH_CHECK(false, "a tape has an entry of an unknown kind");
    }
    return made;
  }
};

// The functions of the driver, of cuBLAS and of torch that a pass calls, as Python found them.
struct Functions {
  int (*launch)(const Config*, void*, void**, void**);
  int (*get_context)(void**);
  int (*set_context)(void*);
  int (*multiply)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                  const void*, void*, int, int, int, int);
  int (*multiply_each)(void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*, int,
                       int, long long, const void*, void*, int, int, long long, int, int, int);
  int (*set_math_mode)(void*, int);
  void* (*blas_handle)(bool);
  int (*current_stream)(int, void**);
  int (*is_capturing)(void*, int*);
  Capturing capturing;
};

// A plan made ready.
struct Plan : torch::CustomClassHolder {
  int64_t number = 0;
  Functions functions{};
  void* context = nullptr;
  int device = 0;
  at::ScalarType dtype{};
  bool gradient = false, own_math_mode = false;
  int64_t states = 0, kinds = 0;  // that a call brings, and weights of a layer and direction: matrices, then biases
  std::vector<int64_t> others;    // the dtype of what else it brings, as kernels read it; -1 of what none reads
  int64_t marks = 0;              // and how many marks
  bool constant = false;          // x has no gradient
  int64_t space = 0;              // bytes that products write to meanwhile
  int64_t threads = 0;            // of the host, where its tapes have calls of the host's functions
  std::vector<int64_t> turned;    // of each weight whether it lies the other way round
  std::vector<int64_t> shape, state;  // of x, and of an initial state
  int64_t where = 0;              // torch's number of the device of tensors, -1 of the host
  Tape forward, backward;
  std::vector<int64_t> outputs;    // slots of the output and the final states
  int64_t room = -1;               // and of what is kept for backward
  std::vector<Part> gradients;     // of x, of the states and of the weights

  template <typename Of>  // from a place to its address
  void launch(const Entry& entry, const std::string& name, void* stream, const Of& of) const {
    c10::SmallVector<uint64_t, 160> argument(entry.argument.begin(), entry.argument.end());
    for (const Pointer& pointer : entry.pointers) argument[pointer.at] = of(pointer.place);
    Config config = entry.config;
    config.stream = stream;
    config.attributes = const_cast<Attribute*>(entry.attributes.data());
    config.count = (unsigned)entry.attributes.size();
    void* values = argument.data();
    const int status = functions.launch(&config, entry.function, &values, nullptr);
    TORCH_CHECK(status == 0, "NVIDIA's driver cannot launch ", name, " (", status, ").");
  }

  template <typename Of>
  void multiply(const Entry& entry, void* handle, const Of& of) const {
    const auto n = [&](int i) { return (int)entry.numbers[i]; };
    const auto p = [&](int i) { return (const void*)entry.numbers[i]; };
    const void *const b = (const void*)of(entry.b), *const a = (const void*)of(entry.a);
    void* const out = (void*)of(entry.out);
    const int status =
        entry.kind == MULTIPLY
            ? functions.multiply(handle, n(0), n(1), n(2), n(3), n(4), p(5), b, n(7), n(8), a, n(10), n(11), p(12), out,
                                 n(14), n(15), n(16), n(17))
            : functions.multiply_each(handle, n(0), n(1), n(2), n(3), n(4), p(5), b, n(7), n(8), entry.numbers[9], a,
                                      n(11), n(12), entry.numbers[13], p(14), out, n(16), n(17), entry.numbers[18],
                                      n(19), n(20), n(21));
    TORCH_CHECK(status == 0, "cuBLAS cannot multiply for a layer of whorl (", status, ").");
  }

  void* blas() const {
    void* const handle = functions.blas_handle(true);
    if (own_math_mode) functions.set_math_mode(handle, 0);
    return handle;
  }

  // That of this thread; torch's where it has none, as autograd's own thread before its first call of CUDA.
  void* current_context() const {
    void* current = nullptr;
    if (functions.get_context(&current) == 0 && current != nullptr) return current;
    functions.set_context(context);
    return context;
  }

  // The same pass as one before, where its addresses are; else one by one, and the next time as one.
  //
  // Args:
  //   address: of all slots.
  template <typename Of>
  void launch_or_replay(const Tape& tape, void* current, void* stream, at::ArrayRef<uint64_t> address,
                        at::Device where, const Of& of) const {
    void* handle = nullptr;
    const auto take_handle = [&] {
      if (tape.multiplies) handle = blas();
    };
    const auto ask = [&](void* on) {
      for (const Entry& entry : tape.entries)
        if (entry.kind == LAUNCH)
          launch(entry, tape.names.at(entry.name), on, of);
        else if (Tape::is_product(entry))
          multiply(entry, handle, of);
    };
    const Which which(&tape, current, stream, address);
    bool again = false;
    auto found = Passes::all().find(which, again);
    if (again) {
      take_handle();
      found = captured(functions.capturing, device, where, stream, handle, space, ask);
      Passes::all().keep(which, found);
      take_handle();  // as torch has it: stream and space too
    }
    if (found == nullptr) {
      if (!again) take_handle();
      return ask(stream);
    }
    const std::lock_guard<std::mutex> lock(found->launching);
    const int status = functions.capturing.replay(found->instance, stream);
    TORCH_CHECK(status == 0, "NVIDIA's driver cannot replay a pass of a layer of whorl (", status, ").");
  }

  bool is_capturing(void* stream) const {
    int capturing = 0;
    return functions.is_capturing(stream, &capturing) != 0 || capturing != 0;
  }

  void call(const Entry& entry, at::ArrayRef<Steps> steps, at::ArrayRef<uint64_t> address) const {
    c10::SmallVector<uint64_t, 128> words(entry.argument.begin(), entry.argument.end());
    for (const Pointer& pointer : entry.pointers) {
      const uint64_t first = address[pointer.place.slot];
      words[pointer.at] = first == 0 ? 0 : first + pointer.place.offset;
    }
    for (const auto& [at, slot] : entry.apart)
      for (int64_t axis = 0; axis < 2; ++axis) words[at + 1 + axis] = steps[slot][axis];
    for (const auto& [at, slot] : entry.items) words[at] = *(const uint64_t*)address[slot];
    const auto function = (int64_t(*)(void*, const void*, int64_t))entry.function;
    if (function(entry.first, words.data(), entry.threads) != 0) throw Lacking();
  }

  // Does what a tape says, and gives what its slots hold at the end.
  //
  // Args:
  //   given: the addresses of its first slots.
  //   steps: of each of them, where one that says so is not in one piece.
  //   brought: of each slot that of the memory which it is to have; 0, or none at all, where it gets its own.
  Row run(const Tape& tape, at::ArrayRef<uint64_t> given, at::ArrayRef<Steps> steps, at::Device where,
          at::ArrayRef<uint64_t> brought = {}) const {
    Row held(tape.slots);
    c10::SmallVector<uint64_t, 64> address(tape.slots, 0);
    std::copy(given.begin(), given.end(), address.begin());
    const auto of = [&](const Place& place) -> uint64_t {
      const uint64_t first = place.slot < 0 ? 0 : address[place.slot];
      return first == 0 ? 0 : first + place.offset;
    };
    const auto take = [&](const Entry& entry) {
      const auto options = at::TensorOptions(entry.dtype).device(where);
      const uint64_t there = brought.empty() ? 0 : brought[entry.slot];
      held[entry.slot] = there                   ? at::from_blob((void*)there, entry.shape, entry.steps, options)
                         : entry.kind == BORROW ? borrowed(entry.shape, entry.steps, options)
                                                : allocated(entry.shape, entry.steps, options);
      address[entry.slot] = (uint64_t)held[entry.slot].data_ptr();
    };
    void *stream = nullptr, *handle = nullptr, *current = nullptr;
    if (threads == 0) {
      TORCH_CHECK(functions.current_stream(device, &stream) == 0, "torch does not tell its current stream");
      current = current_context();
    }
    if (tape.replayable && brought.empty() && !is_capturing(stream)) {  // what others own may come and go
      for (const Entry& entry : tape.entries)
        if (entry.kind == ALLOCATE) take(entry);
      launch_or_replay(tape, current, stream, address, where, of);
      for (const Entry& entry : tape.entries)
        if (entry.kind == FREE) held[entry.slot].reset();
      return held;
    }
    for (const Entry& entry : tape.entries) switch (entry.kind) {
        case BORROW:
        case ALLOCATE:
          take(entry);
          break;
        case CALL:
          call(entry, steps, address);
          break;
        case FREE:
          held[entry.slot].reset();
          break;
        case CLEAR:
          held[entry.slot].zero_();
          break;
        case LAUNCH:
          launch(entry, tape.names.at(entry.name), stream, of);
          break;
        case MULTIPLY:
        case MULTIPLY_EACH:
          if (handle == nullptr) handle = blas();
          multiply(entry, handle, of);
          break;
        case TIMES: {
          const auto options = at::TensorOptions(entry.dtype).device(where);
          const auto at = [&](const Place& place) { return at::from_blob((void*)of(place), entry.shape, options); };
          Tensor out = at(entry.out);
          at::mul_out(out, at(entry.a), at(entry.b));
          break;
        }
        case ADD:
        case COPY: {
          const auto at = [&](const Place& place, at::ScalarType dtype) {
            return at::from_blob((void*)of(place), entry.shape, at::TensorOptions(dtype).device(where));
          };
          Tensor out = at(entry.out, entry.dtype);
          const Tensor a = at(entry.a, entry.of_a);
          entry.kind == ADD ? out.add_(a) : out.copy_(a);
          break;
        }
      }
    return held;
  }
};

// As kernels and copies of rows read it: in one piece, 16 bytes at a time, in the layer's dtype.
Tensor as_read(const Tensor& tensor, at::ScalarType dtype) {
  Tensor made = (tensor.scalar_type() == dtype ? tensor : tensor.to(dtype)).contiguous();
  return (uint64_t)made.data_ptr() % 16 ? made.clone() : made;
}

// Whether kernels and copies of rows can read these as they lie: matrices, and x where it is not copied first.
bool readable(const Plan& plan, const Tensor& x, TensorList weights) {
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    const bool whole = weight.is_contiguous();
    if (plan.turned[i] ? whole || weight.stride(0) != 1 || weight.stride(1) != weight.size(0) : !whole) return false;
    if (plan.threads == 0 && (int64_t)i % plan.kinds < 2 && (uint64_t)weight.data_ptr() % 16) return false;  // no bias
  }
  return plan.threads > 0 || !x.is_contiguous() || (uint64_t)x.data_ptr() % 16 == 0;
}

// Whether its memory holds its numbers: torch negates some by a mark alone, and gives zeros of derivatives no memory.
bool is_written(const Tensor& tensor) { return !tensor.is_neg() && !tensor._is_zerotensor(); }

// What of a call lives while its kernels are launched, and the addresses in the order of a tape's first slots.
struct Given {
  const Tape& tape;
  Row alive;
  c10::SmallVector<uint64_t, 64> address;
  c10::SmallVector<Steps, 64> steps;
  void add_place(void* place, Steps own = {}) {
    address.push_back((uint64_t)place);
    steps.push_back(own);
  }
  void add(const Tensor& tensor) {
    alive.push_back(tensor);
    add_place(tensor.data_ptr());
  }
  // What may lie as it likes where a tape tells of it.
  void add_rows(const Tensor& tensor, at::ScalarType dtype) {
    if (!tape.tells((int64_t)address.size())) return add(as_read(tensor, dtype));
    const Tensor rows = tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
    if (rows.is_contiguous() || rows.stride(2) != 1 || rows.stride(0) == 0) return add(rows.contiguous());
    alive.push_back(rows);
    add_place(rows.data_ptr(), {rows.stride(0), rows.stride(1)});
  }
  void add_call(const Plan& plan, const Tensor& x, TensorList states, TensorList weights, TensorList others,
                TensorList marks) {
    if (plan.threads > 0)
      add_rows(x, plan.dtype);
    else
      add(x.contiguous());
    for (const Tensor& state : states) add(as_read(state, plan.dtype));
    for (const Tensor& weight : weights) add_place(weight.data_ptr());
    for (size_t i = 0; i < others.size(); ++i)
      if (plan.others[i] >= 0) add(as_read(others[i], (at::ScalarType)plan.others[i]));
    for (const Tensor& mark : marks) add(as_read(mark, mark.scalar_type()));
  }
};

Row ahead(const Plan& plan, const Tensor& x, TensorList states, TensorList weights, TensorList others, TensorList marks,
          Tensor* room) {
  at::AutoDispatchBelowADInplaceOrView below;
  Given given{plan.forward};
  given.add_call(plan, x, states, weights, others, marks);
  const Row held = plan.run(plan.forward, given.address, given.steps, x.device());
  Row made;
  for (const int64_t slot : plan.outputs) made.push_back(held[slot]);
  if (room != nullptr) *room = held[plan.room];
  return made;
}

// Python's way of a backward pass: differentiable, and of gradients that are many in one tensor.
Row by_python(const Plan& plan, const std::string& slow, const Row& grads, const Row& row) {
  using Backward = Row(int64_t, c10::string_view, const c10::List<std::optional<Tensor>>&, TensorList);
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("whorl_taped::backward", "").typed<Backward>();
  c10::List<std::optional<Tensor>> given;
  for (const Tensor& grad : grads) given.push_back(grad.defined() ? std::optional<Tensor>(grad) : std::nullopt);
  Row made = operation.call(plan.number, slow, given, row);
  for (Tensor& grad : made)
    if (grad.scalar_type() == at::kBool) grad.reset();  // what stands for none
  return made;
}

// For ever: nodes of autograd refer to them, and may outlive all else.  They are read without a lock, which another thread
// may hold when a process forks.
std::mutex adding;
constexpr int64_t MOST_PLANS = 1 << 20;
std::atomic<Plan*> plans[MOST_PLANS];

c10::intrusive_ptr<Plan> plan_of(int64_t number) {
  TORCH_CHECK(number >= 0 && number < MOST_PLANS && plans[number].load(), "there is no plan ", number);
  return c10::intrusive_ptr<Plan>::reclaim_copy(plans[number].load());
}

// What forward kept: the marks, the call's tensors, the output and the room.
struct Kept {
  TensorList marks, states, weights, others;
  const Tensor &x, &y, &room;
  Kept(const Plan& plan, TensorList row)
      : marks(row.slice(0, plan.marks)),
        states(row.slice(plan.marks + 1, plan.states)),
        weights(row.slice(plan.marks + 1 + plan.states, plan.turned.size())),
        others(row.slice(row.size() - 2 - plan.others.size(), plan.others.size())),
        x(row[plan.marks]),
        y(row[row.size() - 2]),
        room(row[row.size() - 1]) {}
};

struct Recurrent : torch::autograd::Function<Recurrent> {
  static Row forward(AutogradContext* context, const c10::intrusive_ptr<Plan>& plan, c10::string_view slow,
                     const Tensor& x, TensorList states, TensorList weights, TensorList others, TensorList marks) {
    Tensor room;
    const Row made = ahead(*plan, x, states, weights, others, marks, &room);
    Row kept = marks.vec();  // as Python keeps them: a checkpoint may run forward again the other way
    kept.push_back(x);
    for (const TensorList some : {states, weights, others}) kept.insert(kept.end(), some.begin(), some.end());
    kept.push_back(made[0]);  // not the final states: users change them in place before backward, as torch lets them
    kept.push_back(room);
    context->save_for_backward(std::move(kept));
    context->saved_data["plan"] = plan->number;
    context->saved_data["slow"] = std::string(slow);
    context->set_materialize_grads(false);
    return made;
  }

  static Row backward(AutogradContext* context, const Row& grads) {
    const auto held = plan_of(context->saved_data["plan"].toInt());
    const Plan& plan = *held;
    const Row row = context->get_saved_variables();
    const Kept kept(plan, row);
    Row made(2 + plan.gradients.size() + plan.others.size() + plan.marks);  // plan, setting, others, marks have none
    bool some = false, odd = false;
    for (const Tensor& grad : grads) {
      some |= grad.defined();
      odd |= grad.defined() && (grad.key_set().has(c10::DispatchKey::Batched) || !is_written(grad));
    }
    if (!some) return made;
    const auto left = [&] {
      const Row found = by_python(plan, context->saved_data["slow"].toStringRef(), grads, row);
      std::copy(found.begin(), found.end(), made.begin() + 2);
      return made;
    };
    // what hooks of saved tensors give back may lie otherwise
    if (odd || at::GradMode::is_enabled() || !readable(plan, kept.x, kept.weights)) return left();
    try {
      const Row found = by_tape(plan, grads, kept);
      std::copy(found.begin(), found.end(), made.begin() + 2);
      return made;
    } catch (const Lacking&) {
      return left();
    }
  }

  // The gradient of x, of the states and of the weights.
  static Row by_tape(const Plan& plan, const Row& grads, const Kept& kept) {
    at::AutoDispatchBelowADInplaceOrView below;
    Given given{plan.backward};
    given.add_call(plan, kept.x, kept.states, kept.weights, kept.others, kept.marks);
    given.add(as_read(kept.y, plan.dtype));
    given.add(as_read(kept.room, at::kByte));
    for (const Tensor& grad : grads) {
      if (grad.defined())
        given.add_rows(grad, plan.dtype);
      else
        given.add_place(nullptr);
    }
    const Row found = plan.run(plan.backward, given.address, given.steps, kept.x.device());
    Row made(plan.gradients.size());
    for (size_t i = 0; i < made.size(); ++i)
      if (const Part& part = plan.gradients[i]; part.slot >= 0) {
        const Tensor& whole = found[part.slot];
        made[i] = part.columns ? whole.narrow(-1, 0, part.columns)
                  : part.count ? whole.narrow(0, part.first, part.count)
                               : whole;
      }
    return made;
  }
};

// The number of a plan, which is made of: addresses of functions in the order of `Functions`, and of the context;
// device, dtype, whether a gradient is wanted, whether cuBLAS is told not to round, states, kinds of weights, the slot
// of the room, whether x has no gradient, its shape, that of a state, where tensors are, marks, bytes that products
// write to meanwhile, threads of the host; the tapes, slots, dtypes and ways of `Plan`.
int64_t add(at::IntArrayRef functions, at::IntArrayRef numbers, at::IntArrayRef forward, at::IntArrayRef backward,
            at::IntArrayRef outputs, at::IntArrayRef gradients, at::IntArrayRef others, at::IntArrayRef turned,
            std::vector<std::string> forward_names, std::vector<std::string> backward_names) {
  TORCH_CHECK(functions.size() == 23 && numbers.size() == 18, "a plan is made of other numbers");
  auto made = c10::make_intrusive<Plan>();
  static_assert(sizeof(Functions) == 22 * sizeof(int64_t), "a function has one address");
  memcpy(&made->functions, functions.data(), sizeof(Functions));
  made->context = (void*)functions[22];
  made->device = (int)numbers[0];
  made->dtype = (at::ScalarType)numbers[1];
  made->gradient = numbers[2], made->own_math_mode = numbers[3];
  made->states = numbers[4], made->kinds = numbers[5], made->room = numbers[6], made->constant = numbers[7];
  made->shape = numbers.slice(8, 3).vec(), made->state = numbers.slice(11, 3).vec(), made->where = numbers[14];
  made->marks = numbers[15], made->space = numbers[16], made->threads = numbers[17];
  made->forward = Tape(forward, std::move(forward_names)), made->backward = Tape(backward, std::move(backward_names));
  made->outputs = outputs.vec(), made->others = others.vec(), made->turned = turned.vec();
  for (size_t i = 0; i < gradients.size(); i += 4)
    made->gradients.push_back({gradients[i], gradients[i + 1], gradients[i + 2], gradients[i + 3]});
  static int64_t count = 0;
  const std::lock_guard<std::mutex> lock(adding);
  TORCH_CHECK(count < MOST_PLANS, "there are ", count, " plans already: set WHORL_CALLS to python");
  made->number = count++;
  plans[made->number] = c10::intrusive_ptr<Plan>(made).release();
  return made->number;
}

// Whether a call can go by its tapes: weights as kernels read them, nothing of Python's between tensors and memory, the
// numbers in it, and no CUDA graph, in which some products have a branch.
bool takes(const Plan& plan, const Tensor& x, TensorList states, TensorList weights, TensorList others,
           TensorList marks) {
  const auto ordinary = [](const Tensor& tensor) {
    return !tensor.unsafeGetTensorImpl()->is_python_dispatch() && is_written(tensor);
  };
  for (const TensorList some : {states, weights, others, marks})
    if (!std::all_of(some.begin(), some.end(), ordinary)) return false;
  if (!ordinary(x) || weights.size() != plan.turned.size() || !readable(plan, x, weights)) return false;
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  if (plan.threads > 0) return plan.threads == at::get_num_threads();
  void* stream = nullptr;
  return plan.functions.current_stream(plan.device, &stream) == 0 && !plan.is_capturing(stream);
}

Row run_plan(const c10::intrusive_ptr<Plan>& plan, c10::string_view slow, const Tensor& x, TensorList states,
             TensorList weights, TensorList others, TensorList marks) {
  if (!takes(*plan, x, states, weights, others, marks)) return {};
  try {
    return plan->gradient ? Recurrent::apply(plan, slow, x, states, weights, others, marks)
                          : ahead(*plan, x, states, weights, others, marks, nullptr);
  } catch (const Lacking&) {
    return {};
  }
}

// The output and the final states; nothing where the call is left to Python.  `slow` is the setting of the block in
// which it is made, or empty.
Row run(int64_t number, c10::string_view slow, const Tensor& x, TensorList states, TensorList weights,
        TensorList others, TensorList marks) {
  return run_plan(plan_of(number), slow, x, states, weights, others, marks);
}

// The same of a call without others, whose marks are those of the plan; nothing where anything that a plan reads of
// tensors is not as this one has it.
Row run_like(int64_t number, c10::string_view slow, const Tensor& x, TensorList states, TensorList weights,
             TensorList marks) {
  const auto plan = plan_of(number);
  const auto is_like = [&](const Tensor& tensor) {
    return tensor.scalar_type() == plan->dtype && tensor.device() == x.device();
  };
  if (x.sizes() != at::IntArrayRef(plan->shape) || x.get_device() != plan->where || !is_like(x)) return {};
  if (plan->where < 0 && !x.is_cpu()) return {};  // of others than GPUs the number is -1 too
  if ((int64_t)states.size() != plan->states || !plan->others.empty() || (int64_t)marks.size() != plan->marks)
    return {};
  bool gradient = x.requires_grad();
  if (plan->gradient && gradient == plan->constant) return {};
  for (const TensorList some : {states, weights})
    for (const Tensor& tensor : some) {
      if (!is_like(tensor)) return {};
      gradient |= tensor.requires_grad();
    }
  if ((gradient && at::GradMode::is_enabled()) != plan->gradient) return {};
  for (const Tensor& state : states)
    if (state.sizes() != at::IntArrayRef(plan->state)) return {};
  return run_plan(plan, slow, x, states, weights, {}, marks);
}

// The number of a plan on a GPU, which is mostly its own; else Python makes it ready there, once.
int64_t on_device(int64_t number, int device) {
  static auto& known = *new std::map<std::pair<int64_t, int>, int64_t>;
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("whorl_taped::on", "").typed<int64_t(int64_t, int64_t)>();
  {
    const std::lock_guard<std::mutex> lock(adding);
    if (const auto found = known.find({number, device}); found != known.end())
      return found->second;
  }
  const int64_t made = operation.call(number, device);  // not under the lock: it adds one
  const std::lock_guard<std::mutex> lock(adding);
  return known[{number, device}] = made;
}

// Of a pass the slots of what it makes for its caller: each once, in the order in which they are known.
std::vector<int64_t> makes(const Plan& plan, bool backward) {
  std::vector<int64_t> slots = plan.outputs, made;
  if (plan.gradient) slots.push_back(plan.room);
  if (backward) {
    slots.clear();
    for (const Part& part : plan.gradients) slots.push_back(part.slot);
  }
  for (const int64_t slot : slots)
    if (slot >= 0 && std::find(made.begin(), made.end(), slot) == made.end()) made.push_back(slot);
  return made;
}

void pass(int64_t number, bool backward, void* stream, at::ArrayRef<uint64_t> given, at::ArrayRef<uint64_t> into) {
  auto plan = plan_of(number);
  at::Device where(at::kCPU);
  std::optional<c10::StreamGuard> guard;
  if (plan->where >= 0) {
    TORCH_CHECK(stream != nullptr, "the program runs on cpu and was traced for cuda: trace it with jax.default_device "
                                   "set to the one that it runs on.");
    where = at::globalContext().getDeviceFromPtr((void*)given[0], at::kCUDA);
    if (where.index() != plan->device) plan = plan_of(on_device(number, where.index()));
    guard.emplace(c10::Stream(c10::Stream::UNSAFE, where, (c10::StreamId)stream));  // as torch has one of others
  }
  const Tape& tape = backward ? plan->backward : plan->forward;
  const auto slots = makes(*plan, backward);
  TORCH_CHECK(slots.size() == into.size(), "a pass makes ", slots.size(), " arrays, ", into.size(), " are there");
  c10::SmallVector<uint64_t, 64> brought(tape.slots, 0);
  for (size_t i = 0; i < slots.size(); ++i) brought[slots[i]] = into[i];
  for (const at::ArrayRef<uint64_t> some : {given, into})
    for (const uint64_t place : some) TORCH_CHECK(place % 16 == 0, "an array does not begin at 16 bytes");
  at::AutoDispatchBelowADInplaceOrView below;
  plan->run(tape, given, {}, where, brought);
}

}  // namespace whorl

// A pass of a plan on memory that others own, on a stream of theirs, called from wherever.
//
// Args:
//   given: the addresses of the tape's first slots; 0 of a gradient that there is not.
//   into: of what it makes, see `makes`.
//   fault: gets what went wrong, in so many bytes.
//
// Returns:
//   Whether all went well.
extern "C" bool whorl_taped_pass(int64_t plan, bool backward, void* stream, const uint64_t* given, int64_t count,
                                 const uint64_t* into, int64_t made, char* fault, int64_t bytes) {
  std::string said;
  try {
    whorl::pass(plan, backward, stream, {given, (size_t)count}, {into, (size_t)made});
    return true;
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  } catch (const std::exception& error) {
    said = error.what();
  }
  fault[said.copy(fault, bytes - 1)] = 0;
  return false;
}

TORCH_LIBRARY(whorl_taped, library) {
  library.def("add(int[] functions, int[] numbers, int[] forward, int[] backward, int[] outputs, int[] gradients, "
              "int[] others, int[] turned, str[] forward_names, str[] backward_names) -> int",
              &whorl::add);
  library.def("run(int plan, str slow, Tensor x, Tensor[] states, Tensor[] weights, Tensor[] others, "
              "Tensor[] marks) -> Tensor[]");
  library.def("run_like(int plan, str slow, Tensor x, Tensor[] states, Tensor[] weights, Tensor[] marks) -> Tensor[]");
  library.def("backward(int plan, str slow, Tensor?[] grads, Tensor[] row) -> Tensor[]");  // of Python
  library.def("on(int plan, int device) -> int");  // likewise
  library.impl("run", c10::DispatchKey::CompositeImplicitAutograd, &whorl::run);
  library.impl("run_like", c10::DispatchKey::CompositeImplicitAutograd, &whorl::run_like);
}
