// Reports a call whose rows do not travel through windows.
#include "cuda/movement/call/call.cuh"
#include "cuda/movement/call/note_call.h"

namespace ep_runtime {
namespace cuda {
namespace {

constexpr int kThreads = 64;  // the second warp reports the call

__global__ void __launch_bounds__(kThreads, 1)
    NoteCallKernel(DeviceGroup* group, const __grid_constant__ CallName name, OpCode op,
                   const int32_t* recv_count) {
  const DeviceCall call = BeginCall(group, name, op);
  if (!call.dead && threadIdx.x >= 32) TellCall(call, name);
  if (!call.dead && recv_count != nullptr && threadIdx.x == 0) {
    CountRows(group, name, recv_count[1], max(recv_count[3], 0));
  }
  const Output nothing[] = {{nullptr, 0, 0}};
  EndCall(call, nothing);
}

}  // namespace

cudaError_t LaunchNoteCall(cudaStream_t stream, DeviceGroup* group, const CallName& name, OpCode op,
                           const int32_t* recv_count) {
  NoteCallKernel<<<1, kThreads, 0, stream>>>(group, name, op, recv_count);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace ep_runtime
