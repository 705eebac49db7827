// Loads NCCL.
#include "cuda/nccl/api.h"

#include <dlfcn.h>

#include <mutex>

// Tests use a library with another name, because JAX may load the real one.
#ifndef EP_RUNTIME_NCCL_SONAME
#define EP_RUNTIME_NCCL_SONAME "libnccl.so.2"
#endif

namespace ep_runtime {
namespace nccl {
namespace {

constexpr const char* kSoname = EP_RUNTIME_NCCL_SONAME;

template <typename Function>
bool Find(void* library, const char* name, Function* function, std::string* missing) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) *missing = name;
  *function = reinterpret_cast<Function>(symbol);
  return symbol != nullptr;
}

Status FindAll(void* library, Api* api) {
  std::string missing;
  const bool found = Find(library, "ncclGetVersion", &api->get_version, &missing) &&
                     Find(library, "ncclGetErrorString", &api->get_error_string, &missing) &&
                     Find(library, "ncclGetLastError", &api->get_last_error, &missing) &&
                     Find(library, "ncclGetUniqueId", &api->get_unique_id, &missing) &&
                     Find(library, "ncclCommInitRankConfig", &api->init_rank, &missing) &&
                     Find(library, "ncclCommGetAsyncError", &api->get_async_error, &missing) &&
                     Find(library, "ncclCommFinalize", &api->finalize, &missing) &&
                     Find(library, "ncclCommAbort", &api->abort, &missing) &&
                     Find(library, "ncclCommCount", &api->count, &missing) &&
                     Find(library, "ncclCommUserRank", &api->user_rank, &missing) &&
                     Find(library, "ncclGroupStart", &api->group_start, &missing) &&
                     Find(library, "ncclGroupEnd", &api->group_end, &missing) &&
                     Find(library, "ncclSend", &api->send, &missing) &&
                     Find(library, "ncclRecv", &api->receive, &missing) &&
                     Find(library, "ncclAllReduce", &api->all_reduce, &missing);
  if (found) return Status();
  return VersionSkew("this process's " + std::string(kSoname) + " has no " + missing +
                     "; NCCL must be 2.18.1 or newer")
      .With("symbol", missing);
}

Status CheckVersion(Api* api) {
  const int result = api->get_version(&api->version);
  if (result != kSuccess) return Failed(*api, "ncclGetVersion", result, nullptr);
  if (api->version >= kLeastVersion && api->version < kFirstUnknownVersion) return Status();
  return VersionSkew("NCCL must be " + VersionText(kLeastVersion) +
                     " or newer and below 3, this process has " + VersionText(api->version))
      .With("version", int64_t{api->version});
}

Status Open(const std::string& path, void** library) {
  // Open by name first, to find the copy that JAX loaded.
  *library = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD);
  if (*library != nullptr) return Status();
  if (!path.empty()) *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (*library != nullptr) return Status();
  const char* why = path.empty() ? nullptr : dlerror();
  return Error(Code::kFailedPrecondition, "RuntimeUnavailableError")
      .Says(std::string("this process has no ") + kSoname +
            (why == nullptr ? "; install ep-runtime[cuda12] or [cuda13], which bring JAX's"
                            : std::string(": ") + why));
}

Status LoadOnce(const std::string& path, Api* api) {
  void* library = nullptr;  // never closed, because communicators may outlive the caller
  EP_RETURN_IF_ERROR(Open(path, &library));
  EP_RETURN_IF_ERROR(FindAll(library, api));
  return CheckVersion(api);
}

}  // namespace

Status Load(const std::string& path, const Api** out) {
  static std::mutex mutex;
  static Api loaded;
  static bool done = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (!done) EP_RETURN_IF_ERROR(LoadOnce(path, &loaded));
  done = true;
  *out = &loaded;
  return Status();
}

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Status Failed(const Api& api, const std::string& what, int result, Comm* comm) {
  const char* last = comm == nullptr ? nullptr : api.get_last_error(comm);
  std::string text = "NCCL: " + what + ": " + api.get_error_string(result);
  if (last != nullptr && last[0] != '\0') text += std::string(" (") + last + ")";
  const bool lost = result == kRemoteError;
  return (lost ? Error(Code::kAborted, "PeerLostError").Says(text) : Internal(text))
      .With("nccl_result", int64_t{result});
}

}  // namespace nccl
}  // namespace ep_runtime
