// The activations that kernels know.
#ifndef EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_FUNCTION_H_
#define EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_FUNCTION_H_

#include <cstdint>

namespace ep_runtime {
namespace cuda {

enum class ActivationFunction : int32_t {
  kSilu = 0,
  kGelu = 1,  // tanh approximation
  kRelu = 2,
  kSquaredRelu = 3,
  kSigmoid = 4,
  kTanh = 5,
  kLinear = 6,
};
constexpr int kActivationFunctions = 7;

}  // namespace cuda
}  // namespace ep_runtime

#endif  // EP_RUNTIME_CUDA_ROWS_VALUES_ACTIVATION_FUNCTION_H_
