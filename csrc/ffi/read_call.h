// Reads operands, attributes and context from XLA's call frame.
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
  // true: rows in no group become zero. Calls set it to false if nobody reads such rows of their
  // results.
  bool clear_slack = true;
  // Zones in a slab are rounded up to multiples of this; 0: the layer's alignment.
  int64_t row_alignment = 0;
  // Only block calls have the attributes from here on. Prepare may have `rows`, too.
  int64_t rows = 0;  // rows of the call's workspace; for prepare see operands.h
  int64_t function = 0;
  bool gated = false;
  bool early = false;
  // How a block call quantizes: a GemmScaling, whether gradients are e5m2, and whether scales of
  // blocks are powers of two.
  int64_t scaling = 0;
  bool e5m2 = false;
  bool power_of_two = false;
  // Of a block call beside which arrays cross between nodes: the ranks of a node, the arrays, and
  // the operands before them to which gradients are added.
  int64_t node_size = 0;
  int64_t crossing = 0;
  int64_t added = 0;
};

xla::ffi::Error ToXla(const Status& status);
Status ReadFrame(xla::ffi::RemainingArgs& args, xla::ffi::RemainingRets& rets, CallFrame* frame);
Status ReadAttributes(const xla::ffi::Dictionary& attrs, Attributes* out);

// Checks the `attributes` of a call of `layer`, and fills the call's context.
Status ReadContext(const LayerEntry& layer, const Attributes& attributes, CallContext* out);
// Returns the error of a CUDA device that drives no rank of the group.
Error OtherMesh(int device, const std::string& group);

// Fills `frame`, runs `launch`, and returns its status as an error of XLA.
template <typename Launch>
xla::ffi::Error Answer(xla::ffi::RemainingArgs& args, xla::ffi::RemainingRets& rets,
                       CallFrame* frame, const Launch& launch) {
  Status status = ReadFrame(args, rets, frame);
  if (status.ok()) status = launch();
  return status.ok() ? xla::ffi::Error::Success() : ToXla(status);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_READ_CALL_H_
