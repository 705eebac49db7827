// The CUDA library's C interface for groups over NCCL, read by `ep_runtime/nccl.py`. It is a second
// table of plain C functions, besides EpRuntimeTable; its first two fields never change.
#ifndef EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_
#define EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_

#include <cstdint>

#include "core/base/c_text.h"

namespace ep_runtime {

// Version, increased when a field of the table, or of a struct that its functions take, changes its
// meaning.
constexpr uint32_t kNcclTableAbi = 2;

struct EpNcclOptions {
  const char* library;  // path of libnccl.so.2, used if JAX has not loaded it; "": no path
  const char* name;     // name of the group
  uint64_t generation;
  int64_t ep_size;
  int64_t op_timeout_ns;
  const int64_t* local_ranks;    // [num_local_ranks] world ranks
  const int32_t* local_devices;  // [num_local_ranks] CUDA ordinals
  int64_t num_local_ranks;
  const uint8_t* ids;    // [num_domains, 128], one unique id per EP domain
  int64_t num_domains;   // 0 if ep_size is 1: the process makes ids itself
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
  // Returns NCCL's version, 22809 for 2.28.9. Loads NCCL if it is not loaded.
  int64_t (*version)(const char* library, EpText);
  // Makes a group in this process and returns its number. Does not communicate.
  int64_t (*make_group)(const EpNcclOptions*, EpText);
  int64_t (*init_group)(int64_t group, int64_t budget_ns, EpText);
  int64_t (*add_layers)(int64_t group, const EpNcclLayer*, int64_t count, EpText);
  // Aborts the group. `why` is a status's text, which becomes the error of calls that the abort
  // ends.
  void (*abort_group)(int64_t group, const char* why);
  // Returns the length of the text, 0 if there is none.
  int64_t (*check_group)(int64_t group, EpText);
  void (*close_group)(int64_t group, int64_t timeout_ns);
  // Waits for the group's first error. Returns the length of its text, 0 if there is no error
  // before the timeout, and -1 once the group closes.
  int64_t (*await_failure)(int64_t group, int64_t timeout_ns, EpText);
  // Reports that the process of `world_rank` closed the group. `why` is like abort_group's.
  void (*rank_left)(int64_t group, int64_t world_rank, const char* why);
  // Runs an all-reduce over the communicators and checks its sums.
  int64_t (*try_sum)(int64_t group, int64_t budget_ns, EpText);
  const char* (*structs)();  // lines of struct_lines.h for the structs of this header
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_
