// Custom calls that process rows in one or two launches, without workspace.
#ifndef EP_RUNTIME_FFI_ROWS_ROWS_FFI_CUDA_H_
#define EP_RUNTIME_FFI_ROWS_ROWS_FFI_CUDA_H_

#include "cuda/rows/row_groups.h"
#include "ffi/call_frame.h"
#include "ffi/target.h"

namespace ep_runtime {

// Reads rows [S * C, width] in slabs of equal size, and group_sizes s32 [S, L], or [S, 0] for one
// group of all rows.
Status ReadRowGroups(const Operand& sizes, const Operand& rows, cuda::rows::RowGroups* groups);

// Handlers, each in a file <op>_ffi_cuda.cc.
extern XLA_FFI_Handler* const kActivationV1;
extern XLA_FFI_Handler* const kActivationBwdV1;
extern XLA_FFI_Handler* const kActivationAmaxV1;
extern XLA_FFI_Handler* const kQuantizeActivationV1;
extern XLA_FFI_Handler* const kGroupAmaxV1;
extern XLA_FFI_Handler* const kScaleRowsV1;
extern XLA_FFI_Handler* const kQuantizeTilesV1;
extern XLA_FFI_Handler* const kQuantizeBlocksV1;
extern XLA_FFI_Handler* const kQuantizeWeightsV1;
extern XLA_FFI_Handler* const kQuantizeMxV1;
extern XLA_FFI_Handler* const kGatherRowsV1;
extern XLA_FFI_Handler* const kSpreadRowsV1;
extern XLA_FFI_Handler* const kSumRowsV1;
extern XLA_FFI_Handler* const kSumScaledRowsV1;
extern XLA_FFI_Handler* const kGroupSumsV1;

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_ROWS_ROWS_FFI_CUDA_H_
