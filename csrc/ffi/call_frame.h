#ifndef EP_RUNTIME_FFI_CALL_FRAME_H_
#define EP_RUNTIME_FFI_CALL_FRAME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/groups/call.h"
#include "cpu/plan_view.h"
#include "cpu/row_ops.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {

using Dims = std::vector<int64_t>;

// One operand or result. Its memory lives until the call's future completes.
struct Buffer {
  void* data;
  xla::ffi::DataType dtype;
  Dims dims;

  int64_t dim(size_t index) const { return index < dims.size() ? dims[index] : -1; }
  bool empty() const;
};

// What XLA handed to one call. XLA's own frame is gone once the handler returns.
struct CallFrame {
  OpCode op;
  const char* call = nullptr;  // names in errors what is no op of a group
  std::vector<Buffer> args;
  std::vector<Buffer> rets;
};

// Errors name op, argument, what was expected and what came.
Status CheckShape(const CallFrame& frame, const char* name, const Buffer& got, const Dims& want);
Status CheckType(const CallFrame& frame, const char* name, const Buffer& got,
                 xla::ffi::DataType want);
Status CheckArray(const CallFrame& frame, const char* name, const Buffer& got,
                  xla::ffi::DataType type, const Dims& want);
Status CheckCount(const CallFrame& frame, size_t args, size_t rets);

// T, K, C, L, H against what the group and the layer allow. `element_bytes` of one row element.
Status CheckSizes(const CallFrame& frame, const CallContext& context, const Sizes& sizes,
                  int64_t element_bytes);

// The nine plan arrays among `buffers` from `first` on; their shapes follow from `sizes`.
Status ReadPlan(const CallFrame& frame, const std::vector<Buffer>& buffers, size_t first,
                const Sizes& sizes, int64_t ep_size, MutablePlan* plan);
inline Plan Const(const MutablePlan& plan) {
  return {plan.dst_rank,    plan.dst_row, plan.recv_count,  plan.staged_start, plan.staged_row,
          plan.staged_slot, plan.kept,    plan.group_sizes, plan.num_recv};
}

// The type of rows that are summed; 1-byte and integer rows only travel.
Status ReadRowType(const CallFrame& frame, const char* name, const Buffer& got, RowType* type);
int64_t ElementBytes(const Buffer& buffer);

// Fills what a call that cannot be made returns: NaN, integers 0.
void FillLost(const CallFrame& frame);

constexpr size_t kPlanArrays = 9;

// Checks and bindings of one op: reads `frame`, runs the kernel. One per <op>_ffi.cc.
Status CallPrepare(const CallFrame& frame, CallContext context);
Status CallDispatch(const CallFrame& frame, CallContext context);
Status CallCombine(const CallFrame& frame, CallContext context);
Status CallDispatchBwd(const CallFrame& frame, CallContext context);
Status CallCombineBwd(const CallFrame& frame, CallContext context);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_CALL_FRAME_H_
