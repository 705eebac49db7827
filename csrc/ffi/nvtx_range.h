// Names calls in profilers. NVTX is header-only and finds a profiler if the process was started
// under one. Without a profiler, or if the toolkit has no NVTX, a range only checks a null pointer.
#ifndef EP_RUNTIME_FFI_NVTX_RANGE_H_
#define EP_RUNTIME_FFI_NVTX_RANGE_H_

#include <string>

#include "core/memory/board.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define EP_RUNTIME_HAS_NVTX 1
#endif

namespace ep_runtime {

// A range "<op> <layer>" in the domain ep_runtime, for as long as this object lives.
class NvtxRange {
 public:
#ifdef EP_RUNTIME_HAS_NVTX
  NvtxRange(OpCode op, const std::string& layer) {
    if (Domain() == nullptr) return;
    const std::string name = std::string(OpName(op)) + " " + layer;
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name.c_str();
    nvtxDomainRangePushEx(Domain(), &attributes);
  }
  ~NvtxRange() {
    if (Domain() != nullptr) nvtxDomainRangePop(Domain());
  }
#else
  NvtxRange(OpCode, const std::string&) {}
#endif
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;

 private:
#ifdef EP_RUNTIME_HAS_NVTX
  // Returns the domain, or null without a profiler.
  static nvtxDomainHandle_t Domain() {
    static const nvtxDomainHandle_t domain = nvtxDomainCreateA("ep_runtime");
    return domain;
  }
#endif
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_NVTX_RANGE_H_
