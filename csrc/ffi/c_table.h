// The C interface of every native library, read by `ep_runtime/native.py`. Each library exports one
// symbol: a table of plain C functions. The table's first two fields never change, and later fields
// are only appended.
#ifndef EP_RUNTIME_FFI_C_TABLE_H_
#define EP_RUNTIME_FFI_C_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/c_text.h"
#include "core/base/status.h"
#include "core/groups/group.h"
#include "core/memory/layout.h"
#include "ffi/target.h"

namespace ep_runtime {

// Version, increased when a field of the table, or of a struct that its functions take, changes its
// meaning.
constexpr uint32_t kTableAbi = 6;

struct EpGroupOptions {
  const char* name;
  uint64_t generation;
  int64_t world_size;
  int64_t ep_size;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t max_tokens_per_rank;
  int64_t recv_capacity_per_rank;
  int64_t max_top_k;
  int64_t max_token_bytes;
  int64_t lanes;
  int64_t lane_rows;
  int64_t spare_experts;
  const char* settings;  // all settings of the group, in the format of core/base/settings.h
  int32_t debug;
  int32_t tell_progress;  // 1: devices write their progress to the board
  const int64_t* local_ranks;
  int64_t num_local_ranks;
  const int32_t* local_devices;  // [num_local_ranks] CUDA ordinals; null on CPU
};

struct EpLayer {
  uint64_t id;
  const char* name;
  uint64_t fingerprint;
  int64_t top_k;
  int64_t alignment;
  int64_t in_flight;
  uint32_t handle_base;
};

struct EpTable {
  uint32_t abi;
  uint32_t bytes;
  const char* version;
  const Target* targets;
  uint64_t num_targets;
  void* state_type_id;  // null if targets keep no state
  const void* state_type_info;
  int64_t (*open_group)(const EpGroupOptions*, int, const int*, int64_t, EpText);
  int64_t (*add_layers)(int64_t, const EpLayer*, int64_t, EpText);
  void (*remove_layers)(int64_t, const uint64_t*, int64_t);
  void (*close_group)(int64_t, int64_t);
  int64_t (*check_group)(int64_t, EpText);
  void (*fill_staging)(int64_t, int);
  int64_t (*window_bytes)(const EpGroupOptions*);  // bytes of one rank's window, on a device with
                                                   // its flags
  int64_t (*control_bytes)(int64_t, int64_t);
  const char* (*structs)();  // lines of struct_lines.h for all structs that Python declares too
  int (*use_row_ops)(int);   // null on a device
  // For device libraries only; null on CPU.
  int64_t (*num_devices)(EpText);
  int64_t (*device_uuid)(int32_t, EpText);       // returns the length of the text
  int64_t (*reaches)(int32_t, int32_t, EpText);  // 1 if a device can map memory of a peer
  const char*
      architectures;  // architectures that kernels are compiled for, by nvcc's names: "90a 100"
};

GroupSizes ToSizes(const EpGroupOptions& options);
Status ToOptions(const EpGroupOptions& options, std::unique_ptr<GroupOptions>* out);

// Opens a group. Each library has its own implementation.
Status OpenGroup(const EpGroupOptions& options, int board_fd, const std::vector<int>& window_fds,
                 std::shared_ptr<Group>* out);

int64_t EpOpenGroup(const EpGroupOptions* options, int board_fd, const int* window_fds,
                    int64_t num_windows, EpText error);
int64_t EpAddLayers(int64_t group, const EpLayer* layers, int64_t count, EpText error);
void EpRemoveLayers(int64_t group, const uint64_t* ids, int64_t count);
void EpCloseGroup(int64_t group, int64_t timeout_ns);
int64_t EpCheckGroup(int64_t group, EpText text);
void EpFillStaging(int64_t group, int byte);
int64_t EpControlBytes(int64_t ranks, int64_t lanes);
const char* EpStructs();

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_C_TABLE_H_
