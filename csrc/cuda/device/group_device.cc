// CudaGroup: opens and closes groups, and reports errors.
#include "cuda/device/group_device.h"

#include <algorithm>
#include <utility>

#include "core/groups/registry.h"

namespace ep_runtime {
namespace cuda {
namespace {

// Measured on H200: more blocks gain little and take SMs from overlapping GEMMs.
constexpr LaunchBlocks kDefaultBlocks = {32, {12, 28, 24, 16}, {20, 44, 38, 26}, {}};

// Divides `total` blocks of an exchange, at least 2, in the proportion that measured best.
ExchangeBlocks Share(int32_t total) {
  ExchangeBlocks blocks{};
  blocks.push = std::max(total * 3 / 10, 1);
  blocks.place = total - blocks.push;
  blocks.sum = std::max(total * 2 / 5, 1);
  blocks.reduce = total - blocks.sum;
  return blocks;
}

ExchangeBlocks AtMost(const ExchangeBlocks& blocks, int32_t sms) {
  return blocks.push + blocks.place > sms ? Share(sms) : blocks;
}

Status CheckAtMost(const char* name, int64_t got, int64_t most) {
  if (got <= most) return Status();
  return InvalidArgument(std::string("transport nvlink takes ") + name + " up to " +
                         std::to_string(most) + ", got " + std::to_string(got))
      .With("argument", std::string(name));
}

}  // namespace

Status CudaGroup::Open(const Group* group, const std::vector<int>& window_fds,
                       const std::vector<int>& devices, std::unique_ptr<CudaGroup>* out) {
  std::unique_ptr<CudaGroup> made(new CudaGroup(group));
  EP_RETURN_IF_ERROR(made->CheckLimits(devices));
  EP_RETURN_IF_ERROR(made->ChooseBlocks(devices));
  EP_RETURN_IF_ERROR(group->options().settings.Read("overlap", &made->overlap_));
  EP_RETURN_IF_ERROR(made->board_.Map(*group));
  const FlagLayout flags(group->sizes());
  EP_RETURN_IF_ERROR(made->windows_.Map(window_fds, flags.window_bytes, devices));
  const std::vector<int64_t>& ranks = group->options().local_ranks;
  for (size_t i = 0; i < ranks.size(); ++i) {
    EP_RETURN_IF_ERROR(made->OpenRank(ranks[i], devices[i]));
  }
  *out = std::move(made);
  return Status();
}

Status CudaGroup::CheckLimits(const std::vector<int>& devices) const {
  const GroupSizes& sizes = group_->sizes();
  EP_RETURN_IF_ERROR(CheckAtMost("ep_size", sizes.ep_size, kMaxRanks));
  EP_RETURN_IF_ERROR(CheckAtMost("max_top_k", sizes.max_top_k, kMaxTopK));
  EP_RETURN_IF_ERROR(CheckAtMost("num_experts", sizes.physical_experts(), kMaxExperts));
  if (sizes.lanes < 2) {
    return InvalidArgument("transport nvlink needs lanes of at least 2, got " +
                           std::to_string(sizes.lanes))
        .With("argument", std::string("lanes"));
  }
  const size_t num_ranks = group_->options().local_ranks.size();
  if (devices.empty() || devices.size() != num_ranks) {
    return InvalidArgument("local_devices must hold one device per local rank, " +
                           std::to_string(num_ranks) + ", got " + std::to_string(devices.size()));
  }
  return Status();
}

// The blocks of a kernel wait for each other, so each needs its own SM. Under MPS and in a slice of
// MIG the attribute counts only the SMs that this process may use.
Status CudaGroup::CountSms(const std::vector<int>& devices, int32_t* sms) const {
  *sms = kMaxBlocks;
  for (int device : devices) {
    int found = 0;
    EP_RETURN_IF_CUDA(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device));
    *sms = std::min(*sms, found);
  }
  return Status();
}

Status CudaGroup::ChooseBlocks(const std::vector<int>& devices) {
  EP_RETURN_IF_ERROR(group_->options().settings.Read("num_sms", &num_sms_));
  int32_t sms = 0;
  EP_RETURN_IF_ERROR(CountSms(devices, &sms));
  if (num_sms_ > sms) {
    return InvalidArgument("num_sms must be at most " + std::to_string(sms) +
                           ", the SMs that this process may use, got " + std::to_string(num_sms_))
        .With("argument", std::string("num_sms"));
  }
  blocks_ = kDefaultBlocks;
  // Exchanges do not depend on how many blocks other ranks use, so each rank chooses alone.
  if (num_sms_ > 0) {
    blocks_.alone = blocks_.beside = Share(static_cast<int32_t>(num_sms_));
  } else {
    blocks_.alone = AtMost(blocks_.alone, sms);
    blocks_.beside = AtMost(blocks_.beside, sms);
  }
  // 8-bit sums take more arithmetic than other sums, so they gain more from SMs.
  const bool fp8 = group_->options().combine_precision == CombinePrecision::kFp8;
  blocks_.combine = fp8 ? blocks_.alone : blocks_.beside;
  // A block of prepare counts its slots in 16 bits.
  const GroupSizes& sizes = group_->sizes();
  const int64_t slots = sizes.max_tokens_per_rank * sizes.max_top_k;
  while (blocks_.prepare < kMaxPrepareBlocks &&
         (slots + blocks_.prepare - 1) / blocks_.prepare > kMaxBlockSlots / 2) {
    blocks_.prepare *= 2;
  }
  // All ranks must run the same number of blocks of prepare, because a rank waits for as many
  // blocks of a peer as it has itself.
  if (blocks_.prepare + 1 > sms) {
    return InvalidArgument("prepare runs " + std::to_string(blocks_.prepare + 1) +
                           " blocks at once on every rank of a group, and this process may use " +
                           std::to_string(sms) + " SMs of a GPU: give it more of them " +
                           "(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, the MIG profile)");
  }
  return CheckAtMost("max_tokens_per_rank * max_top_k", slots,
                     (kMaxBlockSlots - sizes.max_top_k) * kMaxPrepareBlocks);
}

Status CudaGroup::DescribeRank(const LocalRank& rank, DeviceGroup* group) {
  const GroupSizes& sizes = group_->sizes();
  const int64_t ep_rank = rank.world_rank % sizes.ep_size;
  const int64_t first_rank = rank.world_rank - ep_rank;
  SetSizes(sizes, first_rank, ep_rank, group);
  group->generation = group_->options().generation;
  group->windows = windows_.window(first_rank);
  group->window_stride = windows_.stride();
  group->budget_ns = static_cast<uint64_t>(group_->options().op_timeout_ns);
  group->poison_generation = board_.poison_generation();
  EP_RETURN_IF_ERROR(board_.OpenRank(*group_, rank.world_rank, &group->progress));
  if (group->progress.rank != nullptr) {
    group->progress.totals = rank.totals;
    group->progress.tally.sums = rank.tally;
  }
  group->progress.counts_calls = rank.world_rank == windows_.first_rank();
  group->record = rank.record;
  group->bad_index = group_->options().debug ? rank.bad_index : nullptr;
  group->scratch = rank.scratch;
  group->open = 1;
  return Status();
}

Status CudaGroup::OpenSide(LocalRank* rank) {
  if (overlap_ == 0) return Status();
  sides_.push_back(std::make_unique<SideStreams>());
  rank->side = sides_.back().get();
  EP_RETURN_IF_CUDA(rank->side->Open());
  return Status();
}

Status CudaGroup::OpenRank(int64_t world_rank, int device) {
  const GroupSizes& sizes = group_->sizes();
  const OnDevice on_device(device);
  LocalRank rank{};
  EP_RETURN_IF_ERROR(ProcessRankMemories().Take(group_->options(), {num_sms_, overlap_}, world_rank,
                                                device, &rank));
  rank.world_rank = world_rank;
  rank.device = device;
  ranks_.push_back(rank);  // from here on Close returns its memory
  EP_RETURN_IF_ERROR(OpenSide(&ranks_.back()));
  DeviceGroup group{};
  EP_RETURN_IF_ERROR(DescribeRank(rank, &group));
  uint8_t* window = windows_.window(world_rank);
  const int64_t lanes_bytes = WindowBytes(sizes);
  const int64_t flag_bytes = FlagLayout(sizes).window_bytes - lanes_bytes;
  EP_RETURN_IF_CUDA(cudaMemset(window + lanes_bytes, 0, flag_bytes));
  if (group_->options().debug) EP_RETURN_IF_CUDA(cudaMemset(window, 0xFF, lanes_bytes));
  EP_RETURN_IF_CUDA(cudaMemcpy(rank.group, &group, sizeof(group), cudaMemcpyHostToDevice));
  EP_RETURN_IF_CUDA(cudaDeviceSynchronize());
  return Status();
}

const LocalRank* CudaGroup::OfDevice(int device) const {
  for (const LocalRank& rank : ranks_) {
    if (rank.device == device) return &rank;
  }
  return nullptr;
}

Status CudaGroup::ErrorOf(const FailRecord& record) const {
  const auto op = static_cast<OpCode>(record.op);
  const std::string layer = ThisProcess().registry.LayerName(record.layer_id);
  const std::string where =
      std::string(OpName(op)) + " of layer " + layer + " handle " + std::to_string(record.handle);
  const int64_t peer = record.waiting_for;
  const auto epoch = static_cast<int64_t>(record.epoch);
  switch (static_cast<FailReason>(record.reason)) {
    case FailReason::kTimeout: {
      const double waited_s = static_cast<double>(record.waited_ns) * 1e-9;
      return Error(Code::kDeadlineExceeded, "OpTimeoutError")
          .Says(where + " waited " + std::to_string(waited_s) + " s for EP rank " +
                std::to_string(peer))
          .With("rank", peer)
          .With("layer", layer)
          .With("op", std::string(OpName(op)))
          .With("epoch", epoch)
          .With("waited_s", waited_s);
    }
    case FailReason::kMismatch: {
      const std::string other = ThisProcess().registry.LayerName(record.peer_layer_id);
      return Error(Code::kFailedPrecondition, "SpecMismatchError")
          .Says("call " + std::to_string(epoch) + " of the group is " + where +
                " here, and on EP rank " + std::to_string(peer) + " it is " +
                OpName(static_cast<OpCode>(record.peer_op)) + " of layer " + other + " handle " +
                std::to_string(record.peer_handle) +
                "; the ranks run different programs: compile the same ones in the same order")
          .With("object", std::string("call"))
          .With("rank", peer)
          .With("layer", layer)
          .With("op", std::string(OpName(op)))
          .With("epoch", epoch);
    }
    case FailReason::kPoisoned: {
      Status gone = group_->Alive(layer, op, epoch);
      if (!gone.ok()) return gone;
      return group_->ClosedError(layer);
    }
    default:
      return group_->ClosedError(layer);
  }
}

Status CudaGroup::ErrorOf(const BadIndex& record) const {
  const std::string layer = ThisProcess().registry.LayerName(record.layer_id);
  return InvalidArgument("layer " + layer + ": topk_idx must be in [-1, " +
                         std::to_string(group_->sizes().num_experts) + "), got " +
                         std::to_string(record.value) + " at token " +
                         std::to_string(record.token) + " slot " + std::to_string(record.slot))
      .With("argument", std::string("topk_idx"));
}

// Returns the error of a program whose group was formed again with other settings.
Status CudaGroup::ReplayError(const FailRecord& record) const {
  const std::string layer = ThisProcess().registry.LayerName(record.layer_id);
  const std::string op = OpName(static_cast<OpCode>(record.op));
  return Error(Code::kFailedPrecondition, "StaleHandleError")
      .Says(op + " of layer " + layer + " ran for generation " + std::to_string(record.generation) +
            " of group " + group_->options().name + ", which is closed; this is generation " +
            std::to_string(group_->options().generation) +
            " with other settings: trace and compile the program again")
      .With("layer", layer)
      .With("op", op)
      .With("generation", static_cast<int64_t>(record.generation));
}

Status CudaGroup::FirstFailure() const {
  for (const LocalRank& rank : ranks_) {
    if (IsWritten(rank.bad_index->valid)) return ErrorOf(*rank.bad_index);
    if (IsWritten(rank.record->valid)) return ErrorOf(*rank.record);
  }
  return Status();
}

Status CudaGroup::Decide(uint64_t run, const std::string& layer_name, OpCode op) {
  return starts_.Decide(run, [&] {
    const Status failure = FirstFailure();
    return failure.ok() ? group_->Alive(layer_name, op, /*epoch=*/0) : failure;
  });
}

std::string CudaGroup::TakeError() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!told_) {
    const Status status = FirstFailure();
    told_ = !status.ok();
    if (told_) return status.text();
  }
  FailRecord replay;
  if (!ProcessRankMemories().TakeReplay(group_->options().name, &replay)) return std::string();
  return ReplayError(replay).text();
}

void CudaGroup::FillStaging(int byte) {
  for (const LocalRank& rank : ranks_) {
    const OnDevice on_device(rank.device);
    cudaDeviceSynchronize();
    cudaMemset(windows_.window(rank.world_rank), byte, WindowBytes(group_->sizes()));
    cudaDeviceSynchronize();
  }
}

void CudaGroup::Close() {
  if (std::exchange(closed_, true)) return;
  const uint32_t closed = 0;
  // Close all ranks first, because a kernel may be waiting for a rank that begins no more calls.
  for (const LocalRank& rank : ranks_) {
    const OnDevice on_device(rank.device);
    cudaMemcpy(&rank.group->open, &closed, sizeof(closed), cudaMemcpyHostToDevice);
  }
  for (const LocalRank& rank : ranks_) {
    const OnDevice on_device(rank.device);
    // Running kernels still use the windows. Their waits end soon after `open` is cleared.
    cudaDeviceSynchronize();
  }
  windows_.Unmap();
  board_.Unmap();
  for (const LocalRank& rank : ranks_) {
    ProcessRankMemories().GiveBack(group_->options().name, rank);
  }
}

}  // namespace cuda
}  // namespace ep_runtime
