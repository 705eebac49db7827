// Declares NCCL's public ABI, which is loaded at run time. A process must have only one libnccl,
// the one JAX loaded, because a second copy corrupts communicators. So nothing here links or
// includes NCCL.
#ifndef EP_RUNTIME_CUDA_NCCL_API_H_
#define EP_RUNTIME_CUDA_NCCL_API_H_

#include <climits>
#include <cstddef>
#include <string>

#include "core/base/status.h"

namespace ep_runtime {
namespace nccl {

struct Comm;  // NCCL's own type

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

// ncclDataType_t and ncclRedOp_t. Rows of every type are sent as bytes.
constexpr int kInt8 = 0;
constexpr int kInt32 = 2;
constexpr int kSum = 0;

// ncclConfig_t of 2.18. NCCL reads `size` bytes and uses defaults for later fields, so the struct
// need not grow with the library.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21801;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // means to NCCL that the field is not set
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};
static_assert(sizeof(UniqueId) == 128);
static_assert(sizeof(Config) == 48 && offsetof(Config, net_name) == 32);

// The oldest supported version: earlier ones lack non-blocking communicators or fields of Config.
constexpr int kLeastVersion = 21801;
constexpr int kFirstUnknownVersion = 30000;

// A CUDA stream as an argument of NCCL's functions. The type is void*, so that this code builds
// without CUDA.
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

// Loads the libnccl.so.2 that the process has loaded. If there is none, loads `path`, which becomes
// the process's libnccl and is found by a later dlopen of that name. If `path` is "", uses only a
// loaded library.
//
// Fails without a library, or with a version that this code was not written for. Keeps the first
// success.
Status Load(const std::string& path, const Api** out);

// "2.28.9" for 22809.
std::string VersionText(int version);

// Returns an error with NCCL's text for `result`, and for the communicator unless it is null.
Status Failed(const Api& api, const std::string& what, int result, Comm* comm);

}  // namespace nccl
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_NCCL_API_H_
