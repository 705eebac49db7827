// The C edge of NCCL in the CUDA library: what `ep_runtime/nccl.py` reads. A table of its own
// beside EpRuntimeTable, of plain C functions; its first two fields never change.
#ifndef EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_
#define EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_

#include <cstdint>

#include "cuda/nccl/communicators.h"

namespace ep_runtime {

// Raised when a field of the table, or of a struct it takes, changes its meaning.
constexpr uint32_t kNcclTableAbi = 2;

// As EpText of c_table.h.
struct EpNcclText {
  char* data;
  int64_t size;
};

struct EpNcclOptions {
  const char* library;  // path of libnccl.so.2 where JAX has loaded none; "": none
  const char* name;     // of the group
  uint64_t generation;
  int64_t ep_size;
  int64_t op_timeout_ns;
  const int64_t* local_ranks;    // [num_local_ranks] world ranks
  const int32_t* local_devices;  // [num_local_ranks] CUDA ordinals
  int64_t num_local_ranks;
  const uint8_t* ids;    // [num_domains, 128], one unique id per EP domain
  int64_t num_domains;   // 0 with ep_size of 1: NCCL makes them here
  int64_t carries_rows;  // or nothing does until it is asked for: nccl::Purpose
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
  // 22809 of 2.28.9; loads NCCL where nothing has yet.
  int64_t (*version)(const char* library, EpNcclText);
  // A group of this process, by number; nothing is sent yet.
  int64_t (*make_group)(const EpNcclOptions*, EpNcclText);
  int64_t (*init_group)(int64_t group, int64_t budget_ns, EpNcclText);
  int64_t (*add_layers)(int64_t group, const EpNcclLayer*, int64_t count, EpNcclText);
  // `why` as a status' text, which calls that end because of it carry.
  void (*abort_group)(int64_t group, const char* why);
  int64_t (*check_group)(int64_t group, EpNcclText);  // length of the text, 0 for none
  void (*close_group)(int64_t group, int64_t timeout_ns);
  // Waits for the group's first error: the length of its text, 0 where there is none in that time,
  // -1 once the group closes.
  int64_t (*await_failure)(int64_t group, int64_t timeout_ns, EpNcclText);
  // The process of that world rank closed the group; `why` as of abort_group.
  void (*rank_left)(int64_t group, int64_t world_rank, const char* why);
  // An all-reduce over the communicators, whose sums are checked.
  int64_t (*try_sum)(int64_t group, int64_t budget_ns, EpNcclText);
  const char* (*structs)();  // lines of struct_lines.h, of this header's structs
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NCCL_NCCL_TABLE_H_
