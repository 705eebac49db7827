// CpuCall: one rank's part of a call on CPU.
#ifndef EP_RUNTIME_FFI_CPU_CALL_H_
#define EP_RUNTIME_FFI_CPU_CALL_H_

#include <cstdint>

#include "core/groups/call.h"
#include "cpu/row_ops.h"
#include "ffi/call_frame.h"

namespace ep_runtime {

// One rank's part of a call, and functions that read operands for the CPU's kernels.
struct CpuCall {
  const CallFrame& frame;
  const CallContext& context;

  template <typename Params>
  Status ReadRows(const Operand& rows, int64_t width, Params* params) const {
    params->row_bytes = width * rows.element_bytes();
    return Status();
  }
  // Reads the type of rows that are summed. Rows of 1-byte and integer types can be moved but not
  // summed.
  Status ReadSummed(const Operand& rows, RowType* type) const {
    *type = RowType::kF64;
    if (rows.type() == xla::ffi::DataType::F64 || ToFloatType(rows.type(), type)) return Status();
    return rows.MustBe("float32, bfloat16, float16 or float64, got " + TextOf(rows.type()));
  }
  // Whether tokens may be f32 sums of narrower rows.
  bool may_widen() const { return true; }
};

// Checks and runs one op. Each op has a file <op>_ffi.cc.
Status CallPrepare(const CallFrame& frame, CallContext context);
Status CallDispatch(const CallFrame& frame, CallContext context);
Status CallCombine(const CallFrame& frame, CallContext context);
Status CallDispatchBwd(const CallFrame& frame, CallContext context);
Status CallCombineBwd(const CallFrame& frame, CallContext context);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_CPU_CALL_H_
