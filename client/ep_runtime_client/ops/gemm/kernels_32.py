"""Grouped GEMM of f32 operands on a GPU, in tf32: custom calls of the CUDA library.

Copies to shared memory round operands to tf32, to nearest even: 10 bits of mantissa. Products of
tf32 values are exact, sums are f32. DEFAULT precision of f32 dots means the same in XLA on GPUs;
for any higher precision grouped GEMMs stay with XLA.

Rows may also be f32 and weights a 16-bit float, or the reverse. tf32 holds 16-bit values exactly,
so these are cast to f32.

The kernels support K' and N' that are multiples of 4, on the GPUs of `kernels_16.py`, whose calls
also take f32 rows and transpose the weights in forward: the tensor cores want tf32 operands with
the contracted dim contiguous in memory, like 8-bit ones (`kernels_8.py`). The weight's gradient has
its own call, for which both operands are copied and transposed first.

Letters as in `kernels_16.py`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.gemm import kernel_weights, kernels_8, kernels_16
from ep_runtime_client.ops.gemm.product import GemmKernels, Product
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.kernels.serve import sizes_of
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

TARGETS = targets("ep_tf32_grouped_gemm_dw_v1")
_TYPES = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))
MULTIPLE = 4  # of K' and N', because tensor copies move 16 bytes at a time
# Values of jax.default_matmul_precision that allow tf32: DEFAULT, or tf32 by name.
_PRECISIONS = (None, "default", "bfloat16", "tensorfloat32", "TF32_TF32_F32")


def allowed() -> bool:
    """Whether jax.default_matmul_precision, at this moment, lets f32 operands be tf32."""
    precision: Any = getattr(jax.config, "jax_default_matmul_precision", None)
    return precision in _PRECISIONS


def supports(product: Product) -> bool:
    """Whether these kernels support a matmul."""
    operands = (product.left, product.right)
    if not product.tf32 or any(isinstance(x, QuantizedTensor) for x in operands):
        return False
    dtypes = [jnp.dtype(product.cast or x.dtype) for x in operands]
    if not {*dtypes} <= {*_TYPES} or jnp.promote_types(*dtypes) != jnp.float32:
        return False
    rows = product.rows
    padded = rows + (kernels_8.PADDED - 1) * math.prod(product.groups) if rows else 0
    return kernels_16.supports_shape(MULTIPLE, product, padded)


def weight_grad(
    out_dtype: Any,
    cast: Any,
    experts: int,
    paired: bool,
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array | Pair:
    """Like `plain.weight_grad`; sums are f32 and rounded once."""
    del cast  # operands are always cast to f32
    lead, sizes = group_sizes.ndim, sizes_of(group_sizes)
    slab_rows = lhs.shape[lead - 1]
    transposed = [_transposed_rows(x, slab_rows, sizes) for x in (lhs, grad)]

    def call(shapes: kernel_weights.Shapes) -> list[jax.Array]:
        way = {"slab_rows": slab_rows}
        outs = kernels_8.calls(TARGETS[0], shapes, jnp.float32, sizes, *transposed, **way)
        return [out.astype(out_dtype) for out in outs]

    return kernel_weights.made(call, experts, transposed[0].shape[0], grad.shape[lead:], paired)


def _transposed_rows(x: jax.Array, slab_rows: int, sizes: jax.Array) -> jax.Array:
    """Returns [W, S * padded rows]: each group begins at a multiple of PADDED, zeros fill it up."""
    slabs, groups = sizes.shape
    rows = x.astype(jnp.float32).reshape(slabs * slab_rows, -1)
    shape = (rows.shape[1], slabs * kernels_8.padded_rows(slab_rows, groups))
    (out,) = kernels_8.calls(kernels_8.TRANSPOSE_ROWS, (shape,), jnp.float32, sizes, rows)
    return out


KERNELS: GemmKernels = GemmKernels(
    supports, kernels_16.forward, kernels_16.data_grad, weight_grad, jnp.dtype(jnp.float32)
)
