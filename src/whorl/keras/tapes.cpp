// A call of an engine as XLA's programs on a GPU make it: one pass of a plan, on XLA's buffers and its stream, without
// Python.  The tapes are those by which torch's own calls run; what runs them is another library, called by address.

#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace whorl {
namespace ffi = xla::ffi;

// As `_pass` in tapes.py writes them; behind them one for each array that the tape is given: whether it is there.
struct Numbers {
  int64_t pass, plan, backward;
  int64_t process;  // of this process alone: what holds addresses is no other's
};

extern "C" int64_t whorl_tapes_process;
int64_t whorl_tapes_process = 0;  // which this one is

// XLA's stream; none where the platform has no streams.
struct Stream {};

static ffi::Error pass(void* stream, ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Span<const int64_t> numbers) {
  using Pass = bool(int64_t, bool, void*, const uint64_t*, int64_t, const uint64_t*, int64_t, char*, int64_t);
  Numbers n;
  constexpr size_t first = sizeof(Numbers) / sizeof(int64_t);
  if (numbers.size() < first) return ffi::Error::InvalidArgument("tapes.py and tapes.cpp differ");
  memcpy((void*)&n, numbers.begin(), sizeof(Numbers));
  if (n.process != whorl_tapes_process)
    return {ffi::ErrorCode::kFailedPrecondition, "another process compiled this program: trace it in this one"};
  std::vector<uint64_t> given, into;
  size_t next = 0;
  for (size_t i = first; i < numbers.size(); ++i)
    given.push_back(numbers.begin()[i] ? (uint64_t)in.get<ffi::AnyBuffer>(next++)->untyped_data() : 0);
  for (size_t i = 0; i < out.size(); ++i) into.push_back((uint64_t)(*out.get<ffi::AnyBuffer>(i))->untyped_data());
  char fault[1000];
  const bool done = ((Pass*)n.pass)(n.plan, n.backward, stream, given.data(), (int64_t)given.size(), into.data(),
                                    (int64_t)into.size(), fault, sizeof fault);
  return done ? ffi::Error::Success() : ffi::Error::Internal(fault);
}

}  // namespace whorl

template <>
struct xla::ffi::CtxDecoding<whorl::Stream> {
  using Type = void*;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context, DiagnosticEngine&) {
    DiagnosticEngine unread;
    return CtxDecoding<PlatformStream<void*>>::Decode(api, context, unread).value_or(nullptr);
  }
};

XLA_FFI_DEFINE_HANDLER_SYMBOL(whorl_tapes_pass, whorl::pass,
                              xla::ffi::Ffi::Bind().Ctx<whorl::Stream>().RemainingArgs().RemainingRets().Attr<
                                  xla::ffi::Span<const int64_t>>("numbers"));
