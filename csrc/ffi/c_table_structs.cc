// Lists the structs of the C interface and of the board, for Python to compare with its own
// declarations.

#include <string>

#include "core/memory/board.h"
#include "ffi/c_table.h"
#include "ffi/struct_lines.h"

namespace ep_runtime {
namespace {

std::string TableStructs() {
  return EP_STRUCT_LINES(EpText, data, size) +
         EP_STRUCT_LINES(EpGroupOptions, name, generation, world_size, ep_size, num_experts,
                         hidden_size, max_tokens_per_rank, recv_capacity_per_rank, max_top_k,
                         max_token_bytes, lanes, lane_rows, spare_experts, settings, debug,
                         tell_progress, local_ranks, num_local_ranks, local_devices) +
         EP_STRUCT_LINES(EpLayer, id, name, fingerprint, top_k, alignment, in_flight, handle_base) +
         EP_STRUCT_LINES(Target, name, instantiate, execute) +
         EP_STRUCT_LINES(EpTable, abi, bytes, version, targets, num_targets, state_type_id,
                         state_type_info, open_group, add_layers, remove_layers, close_group,
                         check_group, fill_staging, window_bytes, control_bytes, structs,
                         use_row_ops, num_devices, device_uuid, reaches, architectures);
}

std::string BoardStructs() {
  return EP_STRUCT_LINES(BoardHeader, magic, version, world_size, generation, poison_generation,
                         poison_reason, poison_rank, ep_size, num_domains, lanes, max_handles,
                         meeting_slots, num_here, window_bytes, board_bytes, ranks_offset,
                         handles_offset, world_offset, domains_offset, domain_bytes,
                         failures_offset, failures, now_ns, device_rows_offset, tallies_offset,
                         tally_bytes, seats_offset, poison_uid, poison_pid, poison_note, reserved) +
         EP_STRUCT_LINES(RankRecord, sequence, state, op, waiting_for, layer_id, handle, lane,
                         epoch, since_ns, progress_ns, calls, rows, dropped_rows, open_calls, pid,
                         left, reserved) +
         EP_STRUCT_LINES(HandleRecord, state, last_op, lane, reserved0, epoch, calls, rows,
                         dropped_rows, updated_ns, rounds) +
         EP_STRUCT_LINES(DeviceRows, rows, dropped_rows) +
         EP_STRUCT_LINES(FailureRecord, ticket, site_name, launch, code, bytes, text);
}

std::string TallyStructs() {
  return EP_STRUCT_LINES(OpRecord, calls, time_ns, wait_ns, reserved, times, waits) +
         EP_STRUCT_LINES(PeerRecord, arrival_ns, wait_ns) +
         EP_STRUCT_LINES(LoadRecord, calls, time_ns, wait_ns, tokens);
}

std::string MeetingStructs() {
  return EP_STRUCT_LINES(Control, lock, ranks, lanes, open_meetings, ready_head, ready_tail,
                         free_slot, used_slots, next_epoch, owner, reserved) +
         EP_STRUCT_LINES(Lane, busy, slot, epoch, failed, reserved) +
         EP_STRUCT_LINES(MeetingSlot, state, inside, key, layer_id, op, handle, lane, hash_next,
                         ready_next, verdict_rank, epoch, opened_ns, verdict_demand,
                         verdict_capacity, changed_ns, site_name, site_ordinal, repetition, run,
                         arrived);
}

std::string Constants() {
  const auto line = [](const char* name, uint64_t value) {
    return std::string(name) + "=" + std::to_string(value) + "\n";
  };
  return line("kBoardMagic", kBoardMagic) + line("kBoardVersion", kBoardVersion) +
         line("kMaxHandles", kMaxHandles) + line("kMaxLoads", kMaxLoads) +
         line("kTallyOps", kTallyOps) + line("kTimeBuckets", kTimeBuckets) +
         line("kBucketBits", kBucketBits) + line("kMeetingSlots", kMeetingSlots) +
         line("kMaxWorldRanks", kMaxWorldRanks) + line("kFailureRecords", kFailureRecords) +
         line("kLineBytes", kLineBytes) + line("kPageBytes", kPageBytes);
}

}  // namespace

const char* EpStructs() {
  static const std::string all =
      TableStructs() + BoardStructs() + TallyStructs() + MeetingStructs() + Constants();
  return all.c_str();
}

}  // namespace ep_runtime
