// What every handler takes out of XLA's call frame before anything else.
#ifndef EP_RUNTIME_FFI_READ_CALL_H_
#define EP_RUNTIME_FFI_READ_CALL_H_

#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "core/groups/call.h"
#include "core/groups/registry.h"
#include "ffi/call_frame.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {

struct Attributes {
  uint64_t layer_id;
  uint64_t fingerprint;
  uint32_t handle;
  // Zeros also where no group is. A call that nobody follows there says no.
  bool clear_slack = true;
  // To which zones of experts are aligned in a slab; 0: as the layer's are.
  int64_t row_alignment = 0;
  // Of the block call alone.
  int64_t rows = 0;  // of its workspace
  int64_t function = 0;
  bool gated = false;
  bool early = false;
  // How it quantizes: a GemmScaling, gradients' format, and scales of blocks.
  int64_t scaling = 0;
  bool e5m2 = false;
  bool power_of_two = false;
};

xla::ffi::Error ToXla(const Status& status);
Status ReadFrame(xla::ffi::RemainingArgs& args, xla::ffi::RemainingRets& rets, CallFrame* frame);
Status ReadAttributes(const xla::ffi::Dictionary& attrs, Attributes* out);

// What `attributes` say of a call of `layer`, checked.
Status ReadContext(const LayerEntry& layer, const Attributes& attributes, CallContext* out);
// Of a CUDA device that drives no rank of that group.
Error OtherMesh(int device, const std::string& group);

// What XLA hears of a call that ends before its handler returns: `launch` finds `frame` filled.
template <typename Launch>
xla::ffi::Error Answer(xla::ffi::RemainingArgs& args, xla::ffi::RemainingRets& rets,
                       CallFrame* frame, const Launch& launch) {
  Status status = ReadFrame(args, rets, frame);
  if (status.ok()) status = launch();
  return status.ok() ? xla::ffi::Error::Success() : ToXla(status);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_READ_CALL_H_
