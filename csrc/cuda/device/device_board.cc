// DeviceBoard: maps the board for kernels.
#include "cuda/device/device_board.h"

#include <cuda_runtime.h>

#include <cstddef>

#include "core/memory/tally.h"
#include "cuda/device/driver.h"

namespace ep_runtime {
namespace cuda {

Status DeviceBoard::Register(const void* start, int64_t bytes, uint8_t** device) {
  void* pages = const_cast<void*>(start);
  EP_RETURN_IF_CUDA(
      cudaHostRegister(pages, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  registered_.push_back(pages);
  void* mapped = nullptr;
  EP_RETURN_IF_CUDA(cudaHostGetDevicePointer(&mapped, pages, 0));
  *device = static_cast<uint8_t*>(mapped);
  return Status();
}

Status DeviceBoard::Map(const Group& group) {
  const BoardHeader& header = group.header();
  // Rank and handle records are between the header and the failures, which start on a new page.
  const auto records = static_cast<int64_t>(header.failures_offset);
  return Register(&header, group.options().tell_progress ? records : kPageBytes, &board_);
}

void DeviceBoard::Unmap() {
  for (void* pages : registered_) cudaHostUnregister(pages);
  registered_.clear();
}

const uint64_t* DeviceBoard::poison_generation() const {
  return reinterpret_cast<const uint64_t*>(board_ + offsetof(BoardHeader, poison_generation));
}

Status DeviceBoard::OpenRank(const Group& group, int64_t world_rank, Progress* out) {
  *out = Progress{};
  const BoardHeader& header = group.header();
  if (!group.options().tell_progress || header.device_rows_offset == 0) return Status();
  const int64_t bytes = int64_t{kMaxHandles} * sizeof(DeviceRows);
  const auto* board = reinterpret_cast<const uint8_t*>(&header);
  const int64_t seat = group.seat(world_rank);
  uint8_t* rows = nullptr;
  EP_RETURN_IF_ERROR(Register(board + header.device_rows_offset + seat * bytes, bytes, &rows));
  out->now_ns = reinterpret_cast<const uint64_t*>(board_ + offsetof(BoardHeader, now_ns));
  out->rank = board_ + header.ranks_offset + seat * sizeof(RankRecord);
  out->handles = board_ + header.handles_offset;
  out->device_rows = rows;
  return OpenTally(group, seat, &out->tally);
}

Status DeviceBoard::OpenTally(const Group& group, int64_t seat, DeviceTally* out) {
  const BoardHeader& header = group.header();
  const TallyLayout layout(group.sizes());
  const auto* board = reinterpret_cast<const uint8_t*>(&header);
  EP_RETURN_IF_ERROR(Register(board + header.tallies_offset + seat * layout.tally_bytes,
                              layout.tally_bytes, &out->board));
  out->peers_offset = layout.peers_offset;
  out->loads_offset = layout.loads_offset;
  out->load_bytes = layout.load_bytes;
  out->experts = group.sizes().experts_per_rank();
  return Status();
}

}  // namespace cuda
}  // namespace ep_runtime
