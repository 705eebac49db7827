// Target: an XLA custom call target.
#ifndef EP_RUNTIME_FFI_TARGET_H_
#define EP_RUNTIME_FFI_TARGET_H_

#include <cstddef>

#include "xla/ffi/api/c_api.h"

namespace ep_runtime {

// One XLA custom call target. Its name contains the version of operands and attributes, because XLA
// binds a name to one pointer for the life of a process.
struct Target {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
};

extern const Target kTargets[];
extern const size_t kNumTargets;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_TARGET_H_
