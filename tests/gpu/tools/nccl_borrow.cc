// An all-to-all on the communicator that XLA lends a custom call through the FFI collectives
// extension (jaxlib 0.11.2 and newer). `nccl_borrow.py` compiles it and measures.

#include <dlfcn.h>

#include <cstdint>
#include <vector>

#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// What a handler's context holds of the extension.
struct Collectives {
  using Type = const XLA_FFI_Collectives_Extension*;
  using CExtension = XLA_FFI_Collectives_Extension;
  static constexpr auto kName = "CollectivesExtension";
  static constexpr int64_t kExtensionType = XLA_FFI_Extension_Collectives;
  static constexpr int32_t kMajorVersion = XLA_FFI_Extension_Collectives_MajorVersion;
  static constexpr int32_t kMinorVersion = XLA_FFI_Extension_Collectives_MinorVersion;
  static Type Create(const XLA_FFI_Api*, const CExtension* extension) { return extension; }
};

struct Nccl {
  int (*user_rank)(void*, int*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, size_t, int, int, void*, void*);
  int (*receive)(void*, size_t, int, int, void*, void*);
};

const Nccl* LoadNccl() {
  static const Nccl* const loaded = []() -> const Nccl* {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    auto* made = new Nccl;
    made->user_rank = reinterpret_cast<int (*)(void*, int*)>(dlsym(library, "ncclCommUserRank"));
    made->group_start = reinterpret_cast<int (*)()>(dlsym(library, "ncclGroupStart"));
    made->group_end = reinterpret_cast<int (*)()>(dlsym(library, "ncclGroupEnd"));
    made->send = reinterpret_cast<int (*)(const void*, size_t, int, int, void*, void*)>(
        dlsym(library, "ncclSend"));
    made->receive = reinterpret_cast<int (*)(void*, size_t, int, int, void*, void*)>(
        dlsym(library, "ncclRecv"));
    return made;
  }();
  return loaded;
}

template <typename Args>
Args ArgsOf(const XLA_FFI_ReplicaGroup& group, int64_t id, size_t size) {
  Args args{};
  args.struct_size = size;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = &group;
  args.num_groups = 1;
  args.communication_id = id;
  return args;
}

std::vector<int64_t> Everybody(int64_t devices) {
  std::vector<int64_t> ids(devices);
  for (int64_t i = 0; i < devices; ++i) ids[i] = i;
  return ids;
}

ffi::Error Prepare(Collectives::Type lent, int64_t devices, int64_t id, ffi::RemainingArgs,
                   ffi::RemainingRets) {
  const std::vector<int64_t> ids = Everybody(devices);
  const XLA_FFI_ReplicaGroup group{ids.data(), ids.size()};
  auto args = ArgsOf<XLA_FFI_Communicator_Request_Args>(
      group, id, XLA_FFI_Communicator_Request_Args_STRUCT_SIZE);
  if (lent->request_communicator(lent, &args) == nullptr) return ffi::Error::Success();
  return ffi::Error::Internal("XLA lends no communicator");
}

ffi::Error Exchange(void* stream, Collectives::Type lent, int64_t devices, int64_t id,
                    ffi::AnyBuffer given, ffi::Result<ffi::AnyBuffer> result) {
  const Nccl* nccl = LoadNccl();
  if (nccl == nullptr) return ffi::Error::Internal("no libnccl.so.2 in this process");
  const std::vector<int64_t> ids = Everybody(devices);
  const XLA_FFI_ReplicaGroup group{ids.data(), ids.size()};
  auto args =
      ArgsOf<XLA_FFI_Communicator_Get_Args>(group, id, XLA_FFI_Communicator_Get_Args_STRUCT_SIZE);
  if (lent->get_communicator(lent, &args) != nullptr) {
    return ffi::Error::Internal("XLA gives no communicator");
  }
  const size_t bytes = given.size_bytes() / devices;
  const auto* from = static_cast<const uint8_t*>(given.untyped_data());
  auto* to = static_cast<uint8_t*>(result->untyped_data());
  int failed = nccl->group_start();
  for (int64_t peer = 0; peer < devices; ++peer) {
    const int rank = static_cast<int>(peer);
    failed |= nccl->send(from + peer * bytes, bytes, 0, rank, args.communicator, stream);
    failed |= nccl->receive(to + peer * bytes, bytes, 0, rank, args.communicator, stream);
  }
  failed |= nccl->group_end();
  // 7: in progress, of a communicator that does not block.
  return failed == 0 || failed == 7 ? ffi::Error::Success() : ffi::Error::Internal("NCCL failed");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BorrowPrepare, Prepare,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                                  .Ctx<ffi::Extension<Collectives>>()
                                  .Attr<int64_t>("devices")
                                  .Attr<int64_t>("id")
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BorrowExchange, Exchange,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::Extension<Collectives>>()
                                  .Attr<int64_t>("devices")
                                  .Attr<int64_t>("id")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
