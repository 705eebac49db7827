"""Grouped GEMM on a GPU: custom calls of the CUDA library, for the matmuls it supports.

They support operands that are both bf16 or both f16, with K' and N' multiples of 8; `kernels_32.py`
supports f32, `kernels_8.py` quantized operands. Every other matmul runs as plain JAX (`plain.py`)
on GPUs too. The choice is made when a program is lowered for a platform.

Letters as in `plain.py`; here N' is one dim, and rows are [S * C, ...] with sizes [S, L].
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.gemm import kernel_weights
from ep_runtime_client.ops.gemm.product import GemmKernels, Product
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.kernels.ffi import launch, once, targets
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

TARGETS = targets("ep_grouped_gemm_v1", "ep_grouped_gemm_dw_v1")
MAX_EXPERTS = 1024  # on one device
MULTIPLE = 8  # of K' and N', because tensor copies move 16 bytes at a time
_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_log = logging.getLogger(__name__)


def supports(product: Product) -> bool:
    """Whether these kernels support a matmul.

    Warns once about a 16-bit matmul that they leave to plain JAX.
    """
    operands = (product.left, product.right)
    if any(isinstance(x, QuantizedTensor) for x in operands):
        return False
    dtypes = {jnp.dtype(product.cast or x.dtype) for x in operands}
    if len(dtypes) > 1 or not dtypes <= {*_TYPES}:
        return False
    return supports_shape(MULTIPLE, product, product.rows)


def supports_shape(multiple: int, product: Product, rows: int) -> bool:
    """Whether there are kernels for K' and N' in multiples of `multiple` that support this shape.

    Warns once about a shape that they do not support, if the kernels support all GPUs of the
    process. If they do not support one of its GPUs, they support no shape.
    """
    gpus = serve.multiplying_gpus()
    if gpus is None or 0 in (rows, product.experts, *product.widths):
        return False
    widths = product.widths
    if product.experts > MAX_EXPERTS or any(width % multiple for width in widths):
        if gpus:
            _say_plain(product.experts, widths, multiple)
        return False
    return rows < 2**31


@functools.cache
def _say_plain(experts: int, widths: tuple[int, int], multiple: int) -> None:
    _log.warning(
        "a grouped GEMM of %d experts with K'=%d and N'=%d runs as plain JAX, many times slower; "
        "the GPU kernels need K' and N' in multiples of %d, and at most %d experts per device",
        experts,
        *widths,
        multiple,
        MAX_EXPERTS,
    )


def forward(
    out_dtype: Any,
    cast: Any,
    lhs: jax.Array,
    rhs: jax.Array | Pair,
    bias: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """Like `plain.forward`, but rows past the last group are undefined."""
    kernels, *up = kernel_weights.taken(rhs, cast)
    rows = _cast(lhs, cast).reshape(-1, lhs.shape[-1])
    columns = math.prod(rhs.shape[2:])
    shapes: kernel_weights.Shapes = ((rows.shape[0], columns),)
    if rows.dtype == jnp.float32:  # the kernel transposes f32 weights into this second result
        shapes += ((rhs.shape[0], columns, rhs.shape[1]),)
    way = {"data_grad": 0, "clear_slack": 0}
    biases = flat_bias(bias, rhs.shape[0])
    operands = (rows, kernels, biases, *up)
    out, *_ = _calls(TARGETS[0], shapes, out_dtype, group_sizes, *operands, **way)
    return out.reshape(*lhs.shape[:-1], *rhs.shape[2:])


def flat_bias(bias: jax.Array | None, experts: int) -> jax.Array:
    """Returns the bias as [G, N'] in a dtype that the calls support, or [0, 0] without one."""
    if bias is None:
        return jnp.zeros((0, 0), jnp.float32)
    narrow = bias.dtype in _TYPES
    return (bias if narrow else bias.astype(jnp.float32)).reshape(experts, -1)


def data_grad(
    out_dtype: Any,
    cast: Any,
    clear_slack: bool,
    grad: jax.Array,
    rhs: jax.Array | Pair,
    group_sizes: jax.Array,
) -> jax.Array:
    """Like `plain.data_grad`; rows past the last group are undefined unless cleared."""
    kernels, *up = kernel_weights.taken(rhs, cast)
    rows = _cast(grad, cast).reshape(-1, math.prod(rhs.shape[2:]))
    shape = (rows.shape[0], rhs.shape[1])
    none = jnp.zeros((0, 0), jnp.float32)
    way = {"data_grad": 1, "clear_slack": int(clear_slack)}
    operands = (rows, kernels, none, *up)
    (out,) = _calls(TARGETS[0], (shape,), out_dtype, group_sizes, *operands, **way)
    return out.reshape(*grad.shape[: group_sizes.ndim], rhs.shape[1])


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
    rows = _cast(lhs, cast).reshape(-1, lhs.shape[-1])
    grads = _cast(grad, cast).reshape(rows.shape[0], -1)

    def call(shapes: kernel_weights.Shapes) -> list[jax.Array]:
        return _calls(TARGETS[1], shapes, out_dtype, group_sizes, rows, grads)

    trailing = grad.shape[group_sizes.ndim :]
    return kernel_weights.made(call, experts, rows.shape[1], trailing, paired)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None else x.astype(dtype)


def _calls(
    target: str,
    shapes: kernel_weights.Shapes,
    out_dtype: Any,
    group_sizes: jax.Array,
    *operands: jax.Array,
    **attributes: int,
) -> list[jax.Array]:
    wanted = jnp.dtype(out_dtype)
    made = wanted if wanted == operands[0].dtype else jnp.dtype(jnp.float32)
    sizes = serve.sizes_of(group_sizes)
    results = [jax.ShapeDtypeStruct(shape, made) for shape in shapes]
    outs = launch(target, results, sizes, *operands, **attributes)
    if target != TARGETS[1]:  # only a scan's stack uses gradients of weights
        outs = once(outs)
    return [out.astype(wanted) for out in outs]


KERNELS: GemmKernels = GemmKernels(supports, forward, data_grad, weight_grad)
