// Functions for groups, layers and errors that the tables of all libraries share.

#include "ffi/c_table.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/groups/registry.h"

namespace ep_runtime {

GroupSizes ToSizes(const EpGroupOptions& options) {
  return {options.world_size,
          options.ep_size,
          options.num_experts,
          options.hidden_size,
          options.max_tokens_per_rank,
          options.recv_capacity_per_rank,
          options.max_top_k,
          options.max_token_bytes,
          options.lanes,
          options.lane_rows,
          options.spare_experts};
}

Status ToCombinePrecision(const std::string& name, CombinePrecision* out) {
  if (name == "fast") {
    *out = CombinePrecision::kFast;
  } else if (name == "exact") {
    *out = CombinePrecision::kExact;
  } else if (name == "fp8") {
    *out = CombinePrecision::kFp8;
  } else {
    return InvalidArgument("combine_precision \"" + name + "\" is unknown to this library");
  }
  return Status();
}

Status ToOptions(const EpGroupOptions& options, std::unique_ptr<GroupOptions>* out) {
  Settings settings(options.settings);
  int64_t op_timeout_ns;
  std::string on_overflow, combine_precision;
  EP_RETURN_IF_ERROR(settings.Read("op_timeout_ns", &op_timeout_ns));
  EP_RETURN_IF_ERROR(settings.Read("on_overflow", &on_overflow));
  EP_RETURN_IF_ERROR(settings.Read("combine_precision", &combine_precision));
  CombinePrecision precision;
  EP_RETURN_IF_ERROR(ToCombinePrecision(combine_precision, &precision));
  *out = std::make_unique<GroupOptions>(GroupOptions{
      options.name,
      options.generation,
      ToSizes(options),
      std::move(settings),
      op_timeout_ns,
      on_overflow == "error",
      precision,
      options.debug != 0,
      {options.local_ranks, options.local_ranks + options.num_local_ranks},
      /*window_bytes=*/0,
      options.tell_progress != 0,
  });
  return Status();
}

int64_t EpOpenGroup(const EpGroupOptions* options, int board_fd, const int* window_fds,
                    int64_t num_windows, EpText error) {
  std::shared_ptr<Group> group;
  const Status status =
      OpenGroup(*options, board_fd, {window_fds, window_fds + num_windows}, &group);
  if (!status.ok()) return Fail(status, error);
  return ThisProcess().registry.AddGroup(std::move(group));
}

int64_t EpAddLayers(int64_t group, const EpLayer* layers, int64_t count, EpText error) {
  std::vector<LayerEntry> entries;
  for (int64_t i = 0; i < count; ++i) {
    const EpLayer& layer = layers[i];
    entries.push_back({layer.id, layer.name, layer.fingerprint, layer.top_k, layer.alignment,
                       layer.in_flight, layer.handle_base});
  }
  const Status status = ThisProcess().registry.AddLayers(group, entries);
  return status.ok() ? 0 : Fail(status, error);
}

void EpRemoveLayers(int64_t group, const uint64_t* ids, int64_t count) {
  ThisProcess().registry.RemoveLayers(group, std::vector<uint64_t>(ids, ids + count));
}

void EpCloseGroup(int64_t group, int64_t timeout_ns) {
  std::shared_ptr<Group> found = ThisProcess().registry.RemoveGroup(group);
  if (found != nullptr) found->Close(timeout_ns);
}

// Returns the length of the text, or 0 if there is none.
int64_t EpCheckGroup(int64_t group, EpText text) {
  std::shared_ptr<Group> found = ThisProcess().registry.FindGroup(group);
  return found == nullptr ? 0 : Say(found->TakeError(), text);
}

void EpFillStaging(int64_t group, int byte) {
  std::shared_ptr<Group> found = ThisProcess().registry.FindGroup(group);
  if (found != nullptr) found->FillStaging(byte);
}

int64_t EpControlBytes(int64_t ranks, int64_t lanes) { return ControlBytes(ranks, lanes); }

}  // namespace ep_runtime
