// Reports a call whose rows do not travel through windows.
#ifndef EP_RUNTIME_CUDA_MOVEMENT_CALL_NOTE_CALL_H_
#define EP_RUNTIME_CUDA_MOVEMENT_CALL_NOTE_CALL_H_

#include <cuda_runtime.h>

#include "cuda/device/device_group.h"

namespace ep_runtime {

enum class OpCode : uint32_t;

namespace cuda {

// Reports on the board a call whose rows do not travel through windows, in a group with one rank
// per node: that the call ran, and for a dispatch the rows in `recv_count` ([1, 4], device; or
// null). The reported time covers only this launch.
cudaError_t LaunchNoteCall(cudaStream_t stream, DeviceGroup* group, const CallName& name, OpCode op,
                           const int32_t* recv_count);

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_MOVEMENT_CALL_NOTE_CALL_H_
