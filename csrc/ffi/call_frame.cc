#include "ffi/call_frame.h"

#include <cstring>
#include <sstream>

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

std::string Text(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

std::string Text(ffi::DataType type) {
  std::ostringstream text;
  text << type;
  return text.str();
}

Error Wrong(const CallFrame& frame, const char* name, const std::string& want,
            const std::string& got) {
  const char* call = frame.call == nullptr ? OpName(frame.op) : frame.call;
  return InvalidArgument(std::string(call) + ": " + name + " must be " + want + ", got " + got)
      .With("argument", std::string(name));
}

bool IsInteger(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
    case ffi::DataType::S8:
    case ffi::DataType::S16:
    case ffi::DataType::S32:
    case ffi::DataType::S64:
    case ffi::DataType::U8:
    case ffi::DataType::U16:
    case ffi::DataType::U32:
    case ffi::DataType::U64:
      return true;
    default:
      return false;
  }
}

Status CheckAtMost(const CallFrame& frame, const char* name, int64_t got, const char* limit_name,
                   int64_t limit) {
  if (got <= limit) return Status();
  return Wrong(frame, name,
               "at most the group's " + std::string(limit_name) + "=" + std::to_string(limit),
               std::to_string(got));
}

Status CheckEqual(const CallFrame& frame, const char* name, int64_t got, int64_t want) {
  if (got == want) return Status();
  return Wrong(frame, name, std::to_string(want), std::to_string(got));
}

}  // namespace

bool Buffer::empty() const {
  for (int64_t dim : dims) {
    if (dim == 0) return true;
  }
  return false;
}

Status CheckShape(const CallFrame& frame, const char* name, const Buffer& got, const Dims& want) {
  if (got.dims == want) return Status();
  return Wrong(frame, name, "of shape " + Text(want), Text(got.dims));
}

Status CheckType(const CallFrame& frame, const char* name, const Buffer& got, ffi::DataType want) {
  if (got.dtype == want) return Status();
  return Wrong(frame, name, Text(want), Text(got.dtype));
}

Status CheckArray(const CallFrame& frame, const char* name, const Buffer& got, ffi::DataType type,
                  const Dims& want) {
  EP_RETURN_IF_ERROR(CheckType(frame, name, got, type));
  return CheckShape(frame, name, got, want);
}

Status CheckCount(const CallFrame& frame, size_t args, size_t rets) {
  if (frame.args.size() == args && frame.rets.size() == rets) return Status();
  return Wrong(frame, "call",
               std::to_string(args) + " operands and " + std::to_string(rets) + " results",
               std::to_string(frame.args.size()) + " and " + std::to_string(frame.rets.size()));
}

Status CheckSizes(const CallFrame& frame, const CallContext& context, const Sizes& sizes,
                  int64_t element_bytes) {
  const GroupSizes& group = context.group->sizes();
  EP_RETURN_IF_ERROR(CheckAtMost(frame, "tokens of one rank", sizes.tokens, "max_tokens_per_rank",
                                 group.max_tokens_per_rank));
  EP_RETURN_IF_ERROR(CheckEqual(frame, "top_k", sizes.top_k, context.layer.top_k));
  EP_RETURN_IF_ERROR(CheckAtMost(frame, "top_k", sizes.top_k, "max_top_k", group.max_top_k));
  EP_RETURN_IF_ERROR(CheckAtMost(frame, "capacity", sizes.capacity, "recv_capacity_per_rank",
                                 group.recv_capacity_per_rank));
  EP_RETURN_IF_ERROR(
      CheckEqual(frame, "experts of one rank", sizes.experts, group.experts_per_rank()));
  if (element_bytes == 0) return Status();  // no rows in this call
  EP_RETURN_IF_ERROR(CheckEqual(frame, "hidden_size", sizes.width, group.hidden_size));
  return CheckAtMost(frame, "bytes of a row element", element_bytes, "max_token_dtype bytes",
                     group.max_token_bytes);
}

Status ReadPlan(const CallFrame& frame, const std::vector<Buffer>& buffers, size_t first,
                const Sizes& sizes, int64_t ep_size, MutablePlan* plan) {
  const struct {
    const char* name;
    Dims dims;
    int32_t** out;
  } arrays[kPlanArrays] = {
      {"plan.dst_rank", {sizes.tokens, sizes.top_k}, &plan->dst_rank},
      {"plan.dst_row", {sizes.tokens, sizes.top_k}, &plan->dst_row},
      {"plan.recv_count", {ep_size, kRecvCountColumns}, &plan->recv_count},
      {"plan.staged_start", {ep_size * sizes.tokens + 1}, &plan->staged_start},
      {"plan.staged_row", {sizes.capacity}, &plan->staged_row},
      {"plan.staged_slot", {sizes.capacity}, &plan->staged_slot},
      {"plan.kept", {sizes.experts}, &plan->kept},
      {"plan.group_sizes", {sizes.experts}, &plan->group_sizes},
      {"plan.num_recv", {1}, &plan->num_recv},
  };
  for (size_t i = 0; i < kPlanArrays; ++i) {
    const Buffer& got = buffers[first + i];
    EP_RETURN_IF_ERROR(CheckArray(frame, arrays[i].name, got, ffi::DataType::S32, arrays[i].dims));
    *arrays[i].out = static_cast<int32_t*>(got.data);
  }
  return Status();
}

Status ReadRowType(const CallFrame& frame, const char* name, const Buffer& got, RowType* type) {
  switch (got.dtype) {
    case ffi::DataType::F32:
      *type = kF32;
      return Status();
    case ffi::DataType::BF16:
      *type = kBF16;
      return Status();
    case ffi::DataType::F16:
      *type = kF16;
      return Status();
    case ffi::DataType::F64:
      *type = kF64;
      return Status();
    default:
      return Wrong(frame, name, "float32, bfloat16, float16 or float64", Text(got.dtype));
  }
}

void FillLost(const CallFrame& frame) {
  for (const Buffer& ret : frame.rets) {
    int64_t bytes = ElementBytes(ret);
    for (int64_t dim : ret.dims) bytes *= dim;
    // All ones are a NaN in every float type.
    std::memset(ret.data, IsInteger(ret.dtype) ? 0 : 0xFF, static_cast<size_t>(bytes));
  }
}

int64_t ElementBytes(const Buffer& buffer) {
  return static_cast<int64_t>(ffi::ByteWidth(buffer.dtype));
}

}  // namespace ep_runtime
