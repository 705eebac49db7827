// NCCL by its public ABI, found at run time: a process has one libnccl, the one JAX loaded, and a
// second copy corrupts its communicators. So nothing here links or includes NCCL.
#ifndef EP_RUNTIME_CUDA_NCCL_API_H_
#define EP_RUNTIME_CUDA_NCCL_API_H_

#include <climits>
#include <cstddef>
#include <string>

#include "core/base/status.h"

namespace ep_runtime {
namespace nccl {

struct Comm;  // NCCL's own

struct UniqueId {
  char bytes[128];
};

// ncclResult_t.
enum Result : int {
  kSuccess = 0,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

// ncclDataType_t and ncclRedOp_t. Rows travel as bytes whatever they are.
constexpr int kInt8 = 0;
constexpr int kInt32 = 2;
constexpr int kSum = 0;

// ncclConfig_t as of 2.18. NCCL reads `size` bytes and takes its own defaults for what came later,
// so the struct need not grow with the library.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21801;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // NCCL's mark of what is not set
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};
static_assert(sizeof(UniqueId) == 128);
static_assert(sizeof(Config) == 48 && offsetof(Config, net_name) == 32);

// Below, non-blocking communicators or parts of Config are missing.
constexpr int kLeastVersion = 21801;
constexpr int kFirstUnknownVersion = 30000;

// A CUDA stream, as NCCL takes it; here a pointer, so that this code builds without CUDA.
using Stream = void*;

struct Api {
  int version;  // 2.28.9 is 22809
  int (*get_version)(int* version);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(Comm* comm);
  int (*get_unique_id)(UniqueId* id);
  int (*init_rank)(Comm** comm, int ranks, UniqueId id, int rank, Config* config);
  int (*get_async_error)(Comm* comm, int* error);
  int (*finalize)(Comm* comm);
  int (*abort)(Comm* comm);
  int (*count)(const Comm* comm, int* ranks);
  int (*user_rank)(const Comm* comm, int* rank);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, Comm* comm, Stream stream);
  int (*receive)(void* to, size_t count, int type, int peer, Comm* comm, Stream stream);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int op, Comm* comm,
                    Stream stream);
};

// The libnccl.so.2 that the process has loaded; else `path`, which is then the process's, and which
// a later dlopen of that name finds. "" for `path`: only what is loaded.
//
// Fails where there is none, or one of a version that this code was not written for. Loaded once:
// a success is kept.
Status Load(const std::string& path, const Api** out);

// "2.28.9" of 22809.
std::string VersionText(int version);

// What NCCL says of `result`, and of the communicator where there is one.
Status Failed(const Api& api, const std::string& what, int result, Comm* comm);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_API_H_
