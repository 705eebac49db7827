// The C edge of the CUDA library: one exported symbol, read by ctypes.
#include "cuda/device_group.h"

namespace ep_runtime {
namespace cuda {
namespace {

// Field by field a GroupSizes.
struct EpCudaSizes {
  int64_t world_size;
  int64_t ep_size;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t max_tokens_per_rank;
  int64_t recv_capacity_per_rank;
  int64_t max_top_k;
  int64_t max_token_bytes;
  int64_t lanes;
};

GroupSizes ToSizes(const EpCudaSizes& s) {
  return {s.world_size,
          s.ep_size,
          s.num_experts,
          s.hidden_size,
          s.max_tokens_per_rank,
          s.recv_capacity_per_rank,
          s.max_top_k,
          s.max_token_bytes,
          s.lanes};
}

int64_t EpCudaWindowBytes(const EpCudaSizes* sizes) {
  return FlagLayout(ToSizes(*sizes)).window_bytes;
}
int64_t EpCudaScratchBytes(const EpCudaSizes* sizes) { return ScratchBytes(ToSizes(*sizes)); }

struct EpCudaTable {
  uint32_t abi;
  uint32_t bytes;
  const char* version;
  int64_t (*window_bytes)(const EpCudaSizes*);   // of one rank, flags included
  int64_t (*scratch_bytes)(const EpCudaSizes*);  // of device memory beside the window
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* EpRuntimeCudaTable() {
  static const EpCudaTable table = {1, sizeof(EpCudaTable), EP_RUNTIME_VERSION, EpCudaWindowBytes,
                                    EpCudaScratchBytes};
  return &table;
}

}  // namespace cuda
}  // namespace ep_runtime
