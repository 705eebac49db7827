// The operand `layer_index` of a call: the layer's index in its stack, plus kMadeAgain if the call
// repeats an earlier call of the step, as in the backward pass of a rematerialised layer. A
// repeated call moves rows like any other, but its rows are not counted.

#ifndef EP_RUNTIME_CORE_BASE_LAYER_INDEX_H_
#define EP_RUNTIME_CORE_BASE_LAYER_INDEX_H_

#include <cstdint>

namespace ep_runtime {

// `ops/tracing/again.py` adds this. A negative index is an error with or without it.
constexpr int32_t kMadeAgain = 1 << 30;

struct LayerIndex {
  int32_t layer;
  bool again;
};

inline LayerIndex ReadLayerIndex(int32_t operand) {
  const bool again = operand >= kMadeAgain;
  return {again ? operand - kMadeAgain : operand, again};
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_LAYER_INDEX_H_
