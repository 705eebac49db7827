// What the tables of all libraries share: groups, layers, errors, the board's layout.

#include "ffi/c_table.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/groups/registry.h"
#include "core/memory/board.h"

namespace ep_runtime {

int64_t Fail(const Status& status, EpText error) {
  const auto length = std::min<int64_t>(status.text().size(), error.size - 1);
  std::memcpy(error.data, status.text().data(), length);
  error.data[length] = 0;
  return -1;
}

GroupSizes ToSizes(const EpGroupOptions& options) {
  return {options.world_size,
          options.ep_size,
          options.num_experts,
          options.hidden_size,
          options.max_tokens_per_rank,
          options.recv_capacity_per_rank,
          options.max_top_k,
          options.max_token_bytes,
          options.lanes};
}

Status ToOptions(const EpGroupOptions& options, std::unique_ptr<GroupOptions>* out) {
  Settings settings(options.settings);
  int64_t op_timeout_ns;
  std::string on_overflow, combine_precision;
  EP_RETURN_IF_ERROR(settings.Read("op_timeout_ns", &op_timeout_ns));
  EP_RETURN_IF_ERROR(settings.Read("on_overflow", &on_overflow));
  EP_RETURN_IF_ERROR(settings.Read("combine_precision", &combine_precision));
  *out = std::make_unique<GroupOptions>(GroupOptions{
      options.name,
      options.generation,
      ToSizes(options),
      std::move(settings),
      op_timeout_ns,
      on_overflow == "error",
      combine_precision == "exact",
      options.debug != 0,
      {options.local_ranks, options.local_ranks + options.num_local_ranks},
      /*window_bytes=*/0,
      options.tell_progress != 0,
  });
  return Status();
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

// Length of the text, 0 for none.
int64_t EpCheckGroup(int64_t group, EpText text) {
  std::shared_ptr<Group> found = ThisProcess().registry.FindGroup(group);
  if (found == nullptr) return 0;
  const std::string error = found->TakeError();
  if (error.empty()) return 0;
  Fail(Status(Code::kInternal, error), text);
  return static_cast<int64_t>(std::strlen(text.data));
}

void EpFillStaging(int64_t group, int byte) {
  std::shared_ptr<Group> found = ThisProcess().registry.FindGroup(group);
  if (found != nullptr) found->FillStaging(byte);
}

int64_t EpControlBytes(int64_t ranks, int64_t lanes) { return ControlBytes(ranks, lanes); }

namespace {

#define EP_SIZE(type) std::string(#type "=") + std::to_string(sizeof(type)) + "\n"
#define EP_AT(type, field) \
  std::string(#type "." #field "=") + std::to_string(offsetof(type, field)) + "\n"

std::string HeaderLayout() {
  return EP_SIZE(BoardHeader) + EP_AT(BoardHeader, magic) + EP_AT(BoardHeader, version) +
         EP_AT(BoardHeader, world_size) + EP_AT(BoardHeader, generation) +
         EP_AT(BoardHeader, poison_generation) + EP_AT(BoardHeader, poison_reason) +
         EP_AT(BoardHeader, poison_rank) + EP_AT(BoardHeader, ep_size) +
         EP_AT(BoardHeader, num_domains) + EP_AT(BoardHeader, lanes) +
         EP_AT(BoardHeader, max_handles) + EP_AT(BoardHeader, meeting_slots) +
         EP_AT(BoardHeader, window_bytes) + EP_AT(BoardHeader, board_bytes) +
         EP_AT(BoardHeader, ranks_offset) + EP_AT(BoardHeader, handles_offset) +
         EP_AT(BoardHeader, world_offset) + EP_AT(BoardHeader, domains_offset) +
         EP_AT(BoardHeader, domain_bytes) + EP_AT(BoardHeader, failures_offset) +
         EP_AT(BoardHeader, failures) + EP_AT(BoardHeader, now_ns) +
         EP_AT(BoardHeader, device_rows_offset);
}

std::string RecordLayout() {
  return EP_SIZE(RankRecord) + EP_AT(RankRecord, sequence) + EP_AT(RankRecord, state) +
         EP_AT(RankRecord, op) + EP_AT(RankRecord, waiting_for) + EP_AT(RankRecord, layer_id) +
         EP_AT(RankRecord, handle) + EP_AT(RankRecord, lane) + EP_AT(RankRecord, epoch) +
         EP_AT(RankRecord, since_ns) + EP_AT(RankRecord, progress_ns) + EP_AT(RankRecord, calls) +
         EP_AT(RankRecord, rows) + EP_AT(RankRecord, dropped_rows) + EP_AT(RankRecord, open_calls) +
         EP_AT(RankRecord, pid) + EP_AT(RankRecord, left) + EP_SIZE(FailureRecord) +
         EP_AT(FailureRecord, site_name) + EP_AT(FailureRecord, launch) +
         EP_AT(FailureRecord, code) + EP_AT(FailureRecord, bytes) + EP_AT(FailureRecord, text) +
         EP_SIZE(DeviceRows) + EP_AT(DeviceRows, dropped_rows) + EP_SIZE(HandleRecord) +
         EP_AT(HandleRecord, state) + EP_AT(HandleRecord, last_op) + EP_AT(HandleRecord, lane) +
         EP_AT(HandleRecord, epoch) + EP_AT(HandleRecord, calls) + EP_AT(HandleRecord, rows) +
         EP_AT(HandleRecord, dropped_rows) + EP_AT(HandleRecord, updated_ns) +
         EP_AT(HandleRecord, rounds);
}

std::string MeetingLayout() {
  return EP_SIZE(Control) + EP_AT(Control, lock) + EP_AT(Control, ranks) + EP_AT(Control, lanes) +
         EP_AT(Control, open_meetings) + EP_AT(Control, ready_head) + EP_AT(Control, free_slot) +
         EP_AT(Control, used_slots) + EP_AT(Control, next_epoch) + EP_AT(Control, owner) +
         EP_SIZE(Lane) + EP_AT(Lane, busy) + EP_AT(Lane, slot) + EP_AT(Lane, epoch) +
         EP_AT(Lane, failed) + EP_SIZE(MeetingSlot) + EP_AT(MeetingSlot, state) +
         EP_AT(MeetingSlot, inside) + EP_AT(MeetingSlot, key) + EP_AT(MeetingSlot, layer_id) +
         EP_AT(MeetingSlot, lane) + EP_AT(MeetingSlot, verdict_rank) + EP_AT(MeetingSlot, epoch) +
         EP_AT(MeetingSlot, arrived) + EP_AT(MeetingSlot, changed_ns) +
         EP_AT(MeetingSlot, site_name) + EP_AT(MeetingSlot, site_ordinal) +
         EP_AT(MeetingSlot, repetition) + EP_AT(MeetingSlot, run);
}

#undef EP_SIZE
#undef EP_AT

}  // namespace

// Sizes and offsets of the board structs as "Struct=bytes" and "Struct.field=offset" lines, for
// the test that compares them with Python's.
const char* EpBoardLayout() {
  static const std::string all = HeaderLayout() + RecordLayout() + MeetingLayout();
  return all.c_str();
}

}  // namespace ep_runtime
