// The calls that begin and await an exchange, on XLA:CPU and between nobody: a block comes back as
// it was sent. Nothing moves before the call that awaits it, out of the buffers that the first call
// saw, so a program that reuses or moves one of them in between arrives at other rows.

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

struct Flight {
  const void* sent;
  size_t bytes;
};

std::mutex mutex;
std::map<const void*, Flight> flights;

ffi::AnyBuffer Arg(ffi::RemainingArgs& args, size_t i) { return *args.get<ffi::AnyBuffer>(i); }
ffi::AnyBuffer Ret(ffi::RemainingRets& rets, size_t i) { return **rets.get<ffi::AnyBuffer>(i); }

ffi::Error Begin(ffi::Dictionary, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const size_t count = args.size() - 1;
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i <= count; ++i) {
    if (Arg(args, i).untyped_data() != Ret(rets, count + i).untyped_data()) {
      return ffi::Error::Internal("a result has another buffer than its operand");
    }
  }
  for (size_t i = 0; i < count; ++i) {
    auto got = Ret(rets, i);
    std::memset(got.untyped_data(), 0x5A, got.size_bytes());
    flights[got.untyped_data()] = {Arg(args, i).untyped_data(), got.size_bytes()};
  }
  return ffi::Error::Success();
}

ffi::Error Arrived(ffi::Dictionary, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < rets.size(); ++i) {
    void* got = Arg(args, i).untyped_data();
    auto found = flights.find(got);
    if (found == flights.end() || Ret(rets, i).untyped_data() != got) {
      return ffi::Error::Internal("rows are awaited where none arrive");
    }
    std::memcpy(got, found->second.sent, found->second.bytes);
    flights.erase(found);
  }
  return ffi::Error::Success();
}

}  // namespace

// Exchanges that were begun and never awaited.
extern "C" __attribute__((visibility("default"))) int LateOpen() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(flights.size());
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LateBegin, Begin,
                              ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(LateArrived, Arrived,
                              ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());
