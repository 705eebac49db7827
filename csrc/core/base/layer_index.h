// What the operand `layer_index` of a call says: which layer of a stack, and whether the call has
// been made before in this step and is made again, as the backward pass of a rematerialised layer
// does. Such a call moves rows as any other and counts none.

#ifndef EP_RUNTIME_CORE_BASE_LAYER_INDEX_H_
#define EP_RUNTIME_CORE_BASE_LAYER_INDEX_H_

#include <cstdint>

namespace ep_runtime {

// `ops/tracing/again.py` sets it. A negative index is an error with or without it.
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
