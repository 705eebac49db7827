// Reads plans, and checks sizes, for calls that move rows.
#include "ffi/movement/operands.h"

#include <string>

namespace ep_runtime {
namespace {

Error Wrong(const CallFrame& frame, const char* name, const std::string& want, int64_t got) {
  return Refused(frame.call, name,
                 std::string(name) + " must be " + want + ", got " + std::to_string(got));
}

Status CheckAtMost(const CallFrame& frame, const char* name, int64_t got, const char* limit_name,
                   int64_t limit) {
  if (got <= limit) return Status();
  return Wrong(frame, name,
               "at most the group's " + std::string(limit_name) + "=" + std::to_string(limit), got);
}

Status CheckEqual(const CallFrame& frame, const char* name, int64_t got, int64_t want) {
  if (got == want) return Status();
  return Wrong(frame, name, std::to_string(want), got);
}

}  // namespace

PlanOperands PlanAt(const CallFrame& frame, const std::vector<Buffer>& buffers, size_t first) {
  const auto next = [&](const char* name) { return Operand(frame.call, name, buffers[first++]); };
  return {next("plan.dst_rank"),     next("plan.dst_row"),     next("plan.recv_count"),
          next("plan.staged_start"), next("plan.staged_row"),  next("plan.staged_slot"),
          next("plan.kept"),         next("plan.group_sizes"), next("plan.num_recv")};
}

Status CheckSizes(const CallFrame& frame, const CallContext& context, const Sizes& sizes,
                  int64_t element_bytes) {
  const GroupSizes& group = context.group->sizes();
  EP_RETURN_IF_ERROR(CheckAtMost(frame, "tokens of one rank", sizes.tokens, "max_tokens_per_rank",
                                 group.max_tokens_per_rank));
  EP_RETURN_IF_ERROR(CheckEqual(frame, "top_k", sizes.top_k, context.layer.top_k));
  EP_RETURN_IF_ERROR(CheckAtMost(frame, "top_k", sizes.top_k, "max_top_k", group.max_top_k));
  if (element_bytes == 0) return Status();  // the call has no rows
  if (element_bytes == 1) {                 // bytes: values, or values with scales
    return CheckAtMost(frame, "bytes of a row", sizes.width, "hidden_size * max_token_dtype bytes",
                       group.hidden_size * group.max_token_bytes);
  }
  EP_RETURN_IF_ERROR(CheckEqual(frame, "hidden_size", sizes.width, group.hidden_size));
  return CheckAtMost(frame, "bytes of a row element", element_bytes, "max_token_dtype bytes",
                     group.max_token_bytes);
}

Status CheckPlanned(const CallFrame& frame, const CallContext& context, const Sizes& sizes) {
  const GroupSizes& group = context.group->sizes();
  // A plan with copies of experts has its own capacity, for balanced rows.
  if (IsSpread(sizes, group)) return Status();
  EP_RETURN_IF_ERROR(CheckAtMost(frame, "capacity", sizes.capacity, "recv_capacity_per_rank",
                                 group.recv_capacity_per_rank));
  return CheckEqual(frame, "experts of one rank", sizes.experts, group.experts_per_rank());
}

}  // namespace ep_runtime
