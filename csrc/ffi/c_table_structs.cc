// The structs of the C edge and of the board, for Python to compare with its own.

#include <string>

#include "core/memory/board.h"
#include "ffi/c_table.h"
#include "ffi/struct_lines.h"

namespace ep_runtime {
namespace {

std::string TableStructs() {
  return EP_STRUCT_LINE(EpText) + EP_FIELD_LINE(EpText, data) + EP_FIELD_LINE(EpText, size) +
         EP_STRUCT_LINE(EpGroupOptions) + EP_FIELD_LINE(EpGroupOptions, name) +
         EP_FIELD_LINE(EpGroupOptions, generation) + EP_FIELD_LINE(EpGroupOptions, world_size) +
         EP_FIELD_LINE(EpGroupOptions, ep_size) + EP_FIELD_LINE(EpGroupOptions, num_experts) +
         EP_FIELD_LINE(EpGroupOptions, hidden_size) +
         EP_FIELD_LINE(EpGroupOptions, max_tokens_per_rank) +
         EP_FIELD_LINE(EpGroupOptions, recv_capacity_per_rank) +
         EP_FIELD_LINE(EpGroupOptions, max_top_k) + EP_FIELD_LINE(EpGroupOptions, max_token_bytes) +
         EP_FIELD_LINE(EpGroupOptions, lanes) + EP_FIELD_LINE(EpGroupOptions, lane_rows) +
         EP_FIELD_LINE(EpGroupOptions, spare_experts) + EP_FIELD_LINE(EpGroupOptions, settings) +
         EP_FIELD_LINE(EpGroupOptions, debug) + EP_FIELD_LINE(EpGroupOptions, tell_progress) +
         EP_FIELD_LINE(EpGroupOptions, local_ranks) +
         EP_FIELD_LINE(EpGroupOptions, num_local_ranks) +
         EP_FIELD_LINE(EpGroupOptions, local_devices) + EP_STRUCT_LINE(EpLayer) +
         EP_FIELD_LINE(EpLayer, id) + EP_FIELD_LINE(EpLayer, name) +
         EP_FIELD_LINE(EpLayer, fingerprint) + EP_FIELD_LINE(EpLayer, top_k) +
         EP_FIELD_LINE(EpLayer, alignment) + EP_FIELD_LINE(EpLayer, in_flight) +
         EP_FIELD_LINE(EpLayer, handle_base) + EP_STRUCT_LINE(Target) +
         EP_FIELD_LINE(Target, name) + EP_FIELD_LINE(Target, instantiate) +
         EP_FIELD_LINE(Target, execute) + EP_STRUCT_LINE(EpTable) + EP_FIELD_LINE(EpTable, abi) +
         EP_FIELD_LINE(EpTable, bytes) + EP_FIELD_LINE(EpTable, version) +
         EP_FIELD_LINE(EpTable, targets) + EP_FIELD_LINE(EpTable, num_targets) +
         EP_FIELD_LINE(EpTable, state_type_id) + EP_FIELD_LINE(EpTable, state_type_info) +
         EP_FIELD_LINE(EpTable, open_group) + EP_FIELD_LINE(EpTable, add_layers) +
         EP_FIELD_LINE(EpTable, remove_layers) + EP_FIELD_LINE(EpTable, close_group) +
         EP_FIELD_LINE(EpTable, check_group) + EP_FIELD_LINE(EpTable, fill_staging) +
         EP_FIELD_LINE(EpTable, window_bytes) + EP_FIELD_LINE(EpTable, control_bytes) +
         EP_FIELD_LINE(EpTable, structs) + EP_FIELD_LINE(EpTable, use_row_ops) +
         EP_FIELD_LINE(EpTable, num_devices) + EP_FIELD_LINE(EpTable, device_uuid) +
         EP_FIELD_LINE(EpTable, reaches) + EP_FIELD_LINE(EpTable, architectures);
}

std::string BoardStructs() {
  return EP_STRUCT_LINE(BoardHeader) + EP_FIELD_LINE(BoardHeader, magic) +
         EP_FIELD_LINE(BoardHeader, version) + EP_FIELD_LINE(BoardHeader, world_size) +
         EP_FIELD_LINE(BoardHeader, generation) + EP_FIELD_LINE(BoardHeader, poison_generation) +
         EP_FIELD_LINE(BoardHeader, poison_reason) + EP_FIELD_LINE(BoardHeader, poison_rank) +
         EP_FIELD_LINE(BoardHeader, ep_size) + EP_FIELD_LINE(BoardHeader, num_domains) +
         EP_FIELD_LINE(BoardHeader, lanes) + EP_FIELD_LINE(BoardHeader, max_handles) +
         EP_FIELD_LINE(BoardHeader, meeting_slots) + EP_FIELD_LINE(BoardHeader, reserved0) +
         EP_FIELD_LINE(BoardHeader, window_bytes) + EP_FIELD_LINE(BoardHeader, board_bytes) +
         EP_FIELD_LINE(BoardHeader, ranks_offset) + EP_FIELD_LINE(BoardHeader, handles_offset) +
         EP_FIELD_LINE(BoardHeader, world_offset) + EP_FIELD_LINE(BoardHeader, domains_offset) +
         EP_FIELD_LINE(BoardHeader, domain_bytes) + EP_FIELD_LINE(BoardHeader, failures_offset) +
         EP_FIELD_LINE(BoardHeader, failures) + EP_FIELD_LINE(BoardHeader, now_ns) +
         EP_FIELD_LINE(BoardHeader, device_rows_offset) +
         EP_FIELD_LINE(BoardHeader, tallies_offset) + EP_FIELD_LINE(BoardHeader, tally_bytes) +
         EP_FIELD_LINE(BoardHeader, poison_uid) + EP_FIELD_LINE(BoardHeader, poison_pid) +
         EP_FIELD_LINE(BoardHeader, poison_note) + EP_STRUCT_LINE(RankRecord) +
         EP_FIELD_LINE(RankRecord, sequence) + EP_FIELD_LINE(RankRecord, state) +
         EP_FIELD_LINE(RankRecord, op) + EP_FIELD_LINE(RankRecord, waiting_for) +
         EP_FIELD_LINE(RankRecord, layer_id) + EP_FIELD_LINE(RankRecord, handle) +
         EP_FIELD_LINE(RankRecord, lane) + EP_FIELD_LINE(RankRecord, epoch) +
         EP_FIELD_LINE(RankRecord, since_ns) + EP_FIELD_LINE(RankRecord, progress_ns) +
         EP_FIELD_LINE(RankRecord, calls) + EP_FIELD_LINE(RankRecord, rows) +
         EP_FIELD_LINE(RankRecord, dropped_rows) + EP_FIELD_LINE(RankRecord, open_calls) +
         EP_FIELD_LINE(RankRecord, pid) + EP_FIELD_LINE(RankRecord, left) +
         EP_FIELD_LINE(RankRecord, reserved) + EP_STRUCT_LINE(HandleRecord) +
         EP_FIELD_LINE(HandleRecord, state) + EP_FIELD_LINE(HandleRecord, last_op) +
         EP_FIELD_LINE(HandleRecord, lane) + EP_FIELD_LINE(HandleRecord, reserved0) +
         EP_FIELD_LINE(HandleRecord, epoch) + EP_FIELD_LINE(HandleRecord, calls) +
         EP_FIELD_LINE(HandleRecord, rows) + EP_FIELD_LINE(HandleRecord, dropped_rows) +
         EP_FIELD_LINE(HandleRecord, updated_ns) + EP_FIELD_LINE(HandleRecord, rounds) +
         EP_STRUCT_LINE(DeviceRows) + EP_FIELD_LINE(DeviceRows, rows) +
         EP_FIELD_LINE(DeviceRows, dropped_rows) + EP_STRUCT_LINE(FailureRecord) +
         EP_FIELD_LINE(FailureRecord, ticket) + EP_FIELD_LINE(FailureRecord, site_name) +
         EP_FIELD_LINE(FailureRecord, launch) + EP_FIELD_LINE(FailureRecord, code) +
         EP_FIELD_LINE(FailureRecord, bytes) + EP_FIELD_LINE(FailureRecord, text);
}

std::string TallyStructs() {
  return EP_STRUCT_LINE(OpRecord) + EP_FIELD_LINE(OpRecord, calls) +
         EP_FIELD_LINE(OpRecord, time_ns) + EP_FIELD_LINE(OpRecord, wait_ns) +
         EP_FIELD_LINE(OpRecord, reserved) + EP_FIELD_LINE(OpRecord, times) +
         EP_FIELD_LINE(OpRecord, waits) + EP_STRUCT_LINE(PeerRecord) +
         EP_FIELD_LINE(PeerRecord, arrival_ns) + EP_FIELD_LINE(PeerRecord, wait_ns) +
         EP_STRUCT_LINE(LoadRecord) + EP_FIELD_LINE(LoadRecord, calls) +
         EP_FIELD_LINE(LoadRecord, time_ns) + EP_FIELD_LINE(LoadRecord, wait_ns) +
         EP_FIELD_LINE(LoadRecord, tokens);
}

std::string MeetingStructs() {
  return EP_STRUCT_LINE(Control) + EP_FIELD_LINE(Control, lock) + EP_FIELD_LINE(Control, ranks) +
         EP_FIELD_LINE(Control, lanes) + EP_FIELD_LINE(Control, open_meetings) +
         EP_FIELD_LINE(Control, ready_head) + EP_FIELD_LINE(Control, ready_tail) +
         EP_FIELD_LINE(Control, free_slot) + EP_FIELD_LINE(Control, used_slots) +
         EP_FIELD_LINE(Control, next_epoch) + EP_FIELD_LINE(Control, owner) +
         EP_FIELD_LINE(Control, reserved) + EP_STRUCT_LINE(Lane) + EP_FIELD_LINE(Lane, busy) +
         EP_FIELD_LINE(Lane, slot) + EP_FIELD_LINE(Lane, epoch) + EP_FIELD_LINE(Lane, failed) +
         EP_FIELD_LINE(Lane, reserved) + EP_STRUCT_LINE(MeetingSlot) +
         EP_FIELD_LINE(MeetingSlot, state) + EP_FIELD_LINE(MeetingSlot, inside) +
         EP_FIELD_LINE(MeetingSlot, key) + EP_FIELD_LINE(MeetingSlot, layer_id) +
         EP_FIELD_LINE(MeetingSlot, op) + EP_FIELD_LINE(MeetingSlot, handle) +
         EP_FIELD_LINE(MeetingSlot, lane) + EP_FIELD_LINE(MeetingSlot, hash_next) +
         EP_FIELD_LINE(MeetingSlot, ready_next) + EP_FIELD_LINE(MeetingSlot, verdict_rank) +
         EP_FIELD_LINE(MeetingSlot, epoch) + EP_FIELD_LINE(MeetingSlot, opened_ns) +
         EP_FIELD_LINE(MeetingSlot, verdict_demand) + EP_FIELD_LINE(MeetingSlot, verdict_capacity) +
         EP_FIELD_LINE(MeetingSlot, arrived) + EP_FIELD_LINE(MeetingSlot, changed_ns) +
         EP_FIELD_LINE(MeetingSlot, site_name) + EP_FIELD_LINE(MeetingSlot, site_ordinal) +
         EP_FIELD_LINE(MeetingSlot, repetition) + EP_FIELD_LINE(MeetingSlot, run) +
         EP_FIELD_LINE(MeetingSlot, reserved);
}

std::string Constants() {
  const auto line = [](const char* name, uint64_t value) {
    return std::string(name) + "=" + std::to_string(value) + "\n";
  };
  return line("kBoardMagic", kBoardMagic) + line("kBoardVersion", kBoardVersion) +
         line("kMaxHandles", kMaxHandles) + line("kMaxLoads", kMaxLoads) +
         line("kTallyOps", kTallyOps) + line("kTimeBuckets", kTimeBuckets) +
         line("kBucketBits", kBucketBits) + line("kMeetingSlots", kMeetingSlots) +
         line("kMaxMeetingRanks", kMaxMeetingRanks) + line("kFailureRecords", kFailureRecords) +
         line("kLineBytes", kLineBytes) + line("kPageBytes", kPageBytes);
}

}  // namespace

const char* EpStructs() {
  static const std::string all =
      TableStructs() + BoardStructs() + TallyStructs() + MeetingStructs() + Constants();
  return all.c_str();
}

}  // namespace ep_runtime
