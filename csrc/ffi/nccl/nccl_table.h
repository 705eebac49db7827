// The C edge of NCCL in the CUDA library, read by `ep_runtime/nccl.py`. It is a table of plain C
// functions next to EpRuntimeTable; its first two fields never change.
#ifndef EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_
#define EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_

#include <cstdint>

#include "core/base/c_text.h"

namespace ep_runtime {

// Increased when a field of the table, or of a struct it takes, changes its meaning.
constexpr uint32_t kNcclTableAbi = 2;

struct EpNcclOptions {
  const char* library;  // path of libnccl.so.2 if JAX has loaded none; "": none
  const char* name;     // of the group
  uint64_t generation;
  int64_t ep_size;
  int64_t op_timeout_ns;
  const int64_t* local_ranks;    // [num_local_ranks] world ranks
  const int32_t* local_devices;  // [num_local_ranks] CUDA ordinals
  int64_t num_local_ranks;
  const uint8_t* ids;    // [num_domains, 128], one unique id per EP domain
  int64_t num_domains;   // 0 with ep_size of 1: NCCL makes them here
  int64_t carries_rows;  // see nccl::Purpose
  int64_t max_channels;  // 0: NCCL's choice
};

struct EpNcclLayer {
  uint64_t id;
  const char* name;
  uint64_t fingerprint;
};

struct EpNcclTable {
  uint32_t abi;
  uint32_t bytes;
  // 22809 for 2.28.9. Loads NCCL if nothing has.
  int64_t (*version)(const char* library, EpText);
  // Makes a group of this process and returns its number. Sends nothing yet.
  int64_t (*make_group)(const EpNcclOptions*, EpText);
  int64_t (*init_group)(int64_t group, int64_t budget_ns, EpText);
  int64_t (*add_layers)(int64_t group, const EpNcclLayer*, int64_t count, EpText);
  // `why` is a status' text, carried by the calls that end because of the abort.
  void (*abort_group)(int64_t group, const char* why);
  // Returns the length of the text, 0 if there is none.
  int64_t (*check_group)(int64_t group, EpText);
  void (*close_group)(int64_t group, int64_t timeout_ns);
  // Waits for the group's first error. Returns the length of its text, 0 if there is none in that
  // time, and -1 once the group closes.
  int64_t (*await_failure)(int64_t group, int64_t timeout_ns, EpText);
  // Reports that the process of that world rank closed the group. `why` is like abort_group's.
  void (*rank_left)(int64_t group, int64_t world_rank, const char* why);
  // Runs an all-reduce over the communicators and checks its sums.
  int64_t (*try_sum)(int64_t group, int64_t budget_ns, EpText);
  const char* (*structs)();  // lines of struct_lines.h for this header's structs
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_
