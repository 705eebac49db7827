"""Grouped GEMM of quantized operands on a GPU: custom calls of the CUDA library.

They support two operands of the same recipe, with K' and N' multiples of 16, on the GPUs that
`kernels_16.py` supports:

- TensorScaling: the tensor cores multiply the 8-bit data, in all three matmuls.
- BlockScaling: likewise. But the weight's gradient sums over rows, so scales along a row's values
  do not work: both operands are quantized again, in blocks of 128 rows of a group times 128 values
  (`formats/blocks.py`).
- MXFP8: Hopper's tensor cores do not support such scales. Kernels multiply data times scales in
  bf16, which is exact and no faster than bf16; a warning reports it once.

The tensor cores want 8-bit data with the contracted dim contiguous in memory. Other data are
transposed first, with each group's rows padded to a multiple of PADDED. On GPUs with row kernels,
the quantizer of grouped_gemm writes weights in both layouts already.

Letters as in `kernels_16.py`. 8-bit data and e8m0 scales enter the calls as uint8.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.gemm import kernel_weights, kernels_16
from ep_runtime_client.ops.gemm.product import GemmKernels, Product
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.kernels.ffi import launch, once, targets
from ep_runtime_client.ops.quantize import kernels as quantize_kernels
from ep_runtime_client.ops.quantize.formats.format import OnGpu
from ep_runtime_client.ops.quantize.formats.recipes import DATA_DTYPES
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits, num_tiles
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

TARGETS = targets(
    "ep_fp8_grouped_gemm_v1",
    "ep_fp8_grouped_gemm_dw_v1",
    "ep_transpose_rows_v1",
    "ep_transpose_weights_v1",
    "ep_dequantize_v1",
    "ep_requantize_rows_v1",
)
_GEMM, _GEMM_DW, TRANSPOSE_ROWS, _TRANSPOSE_WEIGHTS, _DEQUANTIZE, _REQUANTIZE = TARGETS
MULTIPLE = quantize_kernels.PRODUCT_MULTIPLE
PADDED = 128  # the rows of a group in a transposed copy are a multiple of PADDED
_E4M3, _E5M2 = (jnp.dtype(name) for name in DATA_DTYPES)
_log = logging.getLogger(__name__)


def supports(product: Product) -> bool:
    """Whether these kernels support a matmul.

    Warns once for each shape of quantized operands that they leave to plain JAX, in a process that
    has GPUs which these kernels support.
    """
    left, right, features = product.left, product.right, product.features
    if not isinstance(left, QuantizedTensor) or not isinstance(right, QuantizedTensor):
        return False
    form = format_of(left.recipe)
    if left.recipe != right.recipe or form.on_gpu is None:
        return False
    gpus = serve.multiplying_gpus()
    if gpus is None:
        return False
    sizes, experts = left.group_sizes, product.experts
    groups = experts if sizes is None else math.prod(sizes.shape)
    rows, widths = product.rows, product.widths
    padded = rows + (PADDED - 1) * groups
    if 0 in (rows, experts, *widths) or experts > kernels_16.MAX_EXPERTS or padded >= 2**31:
        return False
    # A block of scales ends at the last dim: a block of flattened N' could begin inside one.
    whole = len(features) == 2 or features[-1] % form.tile == 0
    # Gradients are rows, and may have the dtype with more range; the other operand may not.
    other = left if right.is_rows else right
    fits = whole and other.dtype == _E4M3 and not any(width % MULTIPLE for width in widths)
    if gpus and not fits:
        _say_plain(type(left.recipe).__name__, tuple(features))
    elif gpus and not form.on_gpu.rows:
        _say_wide(type(left.recipe).__name__)
    return fits


@functools.cache
def _say_plain(recipe: str, features: tuple[int, ...]) -> None:
    _log.warning(
        "a grouped GEMM of %s with K'=%d and N'=%s runs as plain JAX, many times slower; the GPU "
        "kernels need K' and N' in multiples of %d, whole blocks in its last dim if N' has several",
        recipe,
        features[0],
        list(features[1:]),
        MULTIPLE,
    )


@functools.cache
def _say_wide(recipe: str) -> None:
    _log.warning(
        "matmuls of %s run in bf16, because the tensor cores of these GPUs do not support its "
        "scales; they are exact, and take 1.1 times the time of bf16 rows. BlockScaling multiplies "
        "in 8 bits",
        recipe,
    )


def _on_gpu(x: QuantizedTensor) -> OnGpu:
    on_gpu = format_of(x.recipe).on_gpu
    assert on_gpu is not None
    return on_gpu


def forward(
    out_dtype: Any,
    cast: Any,
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    bias: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """Like `plain.forward`, but rows past the last group are undefined."""
    del cast  # only arrays are cast
    if not _on_gpu(lhs).rows:
        rows, kernel = _wide_rows(lhs, group_sizes), _wide_kernel(rhs)
        return kernels_16.forward(out_dtype, None, rows, kernel, bias, group_sizes)
    transposed, rows = transposed_weights(rhs), bits(lhs.data).reshape(-1, rhs.shape[1])
    biases = kernels_16.flat_bias(bias, rhs.shape[0])
    way = {"data_grad": 0, "clear_slack": 0}
    out = _multiply_rows(out_dtype, way, lhs, rows, rhs, transposed, biases, group_sizes)
    return out.reshape(*lhs.shape[:-1], *rhs.shape[2:])


def transposed_weights(rhs: QuantizedTensor) -> jax.Array:
    """Returns kernels in the layout of forward matmuls, uint8 [G, N', K'] with N' one dim."""
    experts, k, n = (*rhs.shape[:2], math.prod(rhs.shape[2:]))
    if rhs.transposed is not None:
        return bits(rhs.transposed).reshape(experts, n, k)
    kernel = bits(rhs.data).reshape(experts, k, n)
    return _call(_TRANSPOSE_WEIGHTS, (experts, n, k), jnp.uint8, kernel)


def data_grad(
    out_dtype: Any,
    cast: Any,
    clear_slack: bool,
    grad: QuantizedTensor,
    rhs: QuantizedTensor,
    group_sizes: jax.Array,
) -> jax.Array:
    """Like `plain.data_grad`; rows past the last group are undefined unless cleared."""
    del cast  # only arrays are cast
    if not _on_gpu(rhs).rows:
        wide = _wide_rows(grad, group_sizes), _wide_kernel(rhs, columns=True)
        return kernels_16.data_grad(out_dtype, None, clear_slack, *wide, group_sizes)
    kernel = bits(rhs.data).reshape(*rhs.shape[:2], -1)
    rows = bits(grad.data).reshape(-1, kernel.shape[2])
    none = jnp.zeros((0, 0), jnp.float32)
    way = {"data_grad": 1, "clear_slack": int(clear_slack)}
    out = _multiply_rows(out_dtype, way, grad, rows, rhs, kernel, none, group_sizes)
    return out.reshape(*grad.shape[: group_sizes.ndim], rhs.shape[1])


def _multiply_rows(
    out_dtype: Any,
    way: dict[str, int],
    lhs: QuantizedTensor,
    rows: jax.Array,
    rhs: QuantizedTensor,
    kernel: jax.Array,
    bias: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """Multiplies rows [S * C, contracted] by kernels [G, made, contracted] -> [S * C, made]."""
    assert lhs.scale is not None
    assert rhs.scale is not None
    sizes = serve.sizes_of(group_sizes)
    blocks = not format_of(lhs.recipe).per_group
    lhs_scale, rhs_scale = lhs.scale.reshape(sizes.shape) if not blocks else lhs.scale, rhs.scale
    if blocks:
        lhs_scale = lhs_scale.reshape(rows.shape[0], -1)
        rhs_scale = rhs_scale.reshape(*rhs_scale.shape[:2], -1)
    way = way | {"block": int(blocks), "e5m2": int(lhs.dtype == _E5M2)}
    shape = (rows.shape[0], kernel.shape[1])
    operands = (sizes, rows, kernel, lhs_scale, rhs_scale, bias)
    return _call(_GEMM, shape, _made(out_dtype), *operands, **way).astype(out_dtype)


def weight_grad(
    out_dtype: Any,
    cast: Any,
    experts: int,
    paired: bool,
    lhs: QuantizedTensor,
    grad: QuantizedTensor,
    group_sizes: jax.Array,
) -> jax.Array | Pair:
    """Like `plain.weight_grad`; sums are f32 and rounded once."""
    del cast  # only arrays are cast
    if not _on_gpu(lhs).columns:
        left, right = (_wide_rows(x, group_sizes, columns=True) for x in (lhs, grad))
        return kernels_16.weight_grad(out_dtype, None, experts, paired, left, right, group_sizes)
    sizes, lead = serve.sizes_of(group_sizes), group_sizes.ndim
    blocks = not format_of(lhs.recipe).per_group
    transpose = _requantized_rows if blocks else _transposed_rows
    transposed, scales = zip(*(transpose(x, group_sizes) for x in (lhs, grad)), strict=True)
    way = {
        "slab_rows": lhs.shape[lead - 1],
        "block": int(blocks),
        "e5m2": int(grad.dtype == _E5M2),
    }

    def call(shapes: kernel_weights.Shapes) -> list[jax.Array]:
        outs = calls(_GEMM_DW, shapes, _made(out_dtype), sizes, *transposed, *scales, **way)
        return [out.astype(out_dtype) for out in outs]

    return kernel_weights.made(call, experts, transposed[0].shape[0], grad.shape[lead:], paired)


def padded_rows(slab_rows: int, groups: int) -> int:
    """Returns the columns of a slab in a transposed copy, enough for any group sizes."""
    return (slab_rows + (PADDED - 1) * min(groups, slab_rows)) // PADDED * PADDED


def _transposed_rows(x: QuantizedTensor, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows transposed, [W, S * padded rows] with zero-padded groups, and scales [S, L]."""
    assert x.scale is not None
    sizes, rows, shape = _rows_to_transpose(x, group_sizes)
    return _call(TRANSPOSE_ROWS, shape, jnp.uint8, sizes, rows), x.scale.reshape(sizes.shape)


def _requantized_rows(x: QuantizedTensor, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Like `_transposed_rows`, but quantized again in blocks of 128 x 128.

    Scales are [S * padded rows / 128, W / 128].
    """
    assert x.scale is not None
    sizes, rows, shape = _rows_to_transpose(x, group_sizes)
    made = (
        jax.ShapeDtypeStruct(shape, jnp.uint8),
        jax.ShapeDtypeStruct((shape[1] // PADDED, num_tiles(shape[0], PADDED)), jnp.float32),
    )
    way = {
        "power_of_two": int(format_of(x.recipe).power_of_two(x.recipe)),
        "e5m2": int(x.dtype == _E5M2),
    }
    operands = (sizes, rows, x.scale.reshape(rows.shape[0], -1))
    data, scale = (once(out) for out in launch(_REQUANTIZE, made, *operands, **way))
    return data, scale


def _rows_to_transpose(
    x: QuantizedTensor, group_sizes: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[int, int]]:
    """Returns sizes [S, L], rows [S * C, W] as bits, and the shape of their transposed copy."""
    sizes, slab_rows = serve.sizes_of(group_sizes), x.shape[group_sizes.ndim - 1]
    rows = bits(x.data).reshape(sizes.shape[0] * slab_rows, -1)
    return sizes, rows, (rows.shape[1], sizes.shape[0] * padded_rows(slab_rows, sizes.shape[1]))


def _wide_rows(x: QuantizedTensor, group_sizes: jax.Array, columns: bool = False) -> jax.Array:
    """Dequantizes to bf16 rows in the shape of `x`; rows outside all groups are undefined."""
    sizes, lead = serve.sizes_of(group_sizes), group_sizes.ndim
    flat = (sizes.shape[0], x.shape[lead - 1], math.prod(x.shape[lead:]))
    form = format_of(x.recipe)
    columns = columns and form.columns
    tiles = form.tiles(x.ndim, lead, columns=columns)
    tile = (tiles.get(lead - 1, 1), tiles.get(x.ndim - 1, 1))
    return _dequantized(x, columns, sizes, flat, tile)


def _wide_kernel(x: QuantizedTensor, columns: bool = False) -> jax.Array:
    """Dequantizes to bf16 kernels [G, K', *N']."""
    flat = (*x.shape[:2], math.prod(x.shape[2:]))
    tiles = format_of(x.recipe).tiles(x.ndim, None, columns=columns)
    tile = (tiles.get(1, 1), tiles.get(x.ndim - 1, 1))
    return _dequantized(x, columns, jnp.zeros((0, 0), jnp.int32), flat, tile)


def _dequantized(
    x: QuantizedTensor,
    columns: bool,
    sizes: jax.Array,
    shape: tuple[int, ...],
    tile: tuple[int, int],
) -> jax.Array:
    """Dequantizes an array of planes, lines and columns, in which each `tile` shares a scale."""
    data, scale = (x.data_columns, x.scale_columns) if columns else (x.data, x.scale)
    assert data is not None
    assert scale is not None
    scales = [math.ceil(size / each) for size, each in zip(shape[1:], tile, strict=True)]
    operands = (sizes, bits(data).reshape(shape), bits(scale).reshape(shape[0], *scales))
    way = {"line_values": tile[0], "column_values": tile[1], "e5m2": int(data.dtype == _E5M2)}
    return _call(_DEQUANTIZE, shape, jnp.bfloat16, *operands, **way).reshape(x.shape)


def _made(out_dtype: Any) -> Any:
    """Returns the dtype that the kernels store, before a cast to `out_dtype`."""
    wanted = jnp.dtype(out_dtype)
    return wanted if wanted == jnp.bfloat16 else jnp.dtype(jnp.float32)


def _call(
    target: str, shape: tuple[int, ...], dtype: Any, *operands: jax.Array, **attributes: int
) -> jax.Array:
    (out,) = calls(target, (shape,), dtype, *operands, **attributes)
    return once(out)


def calls(
    target: str,
    shapes: kernel_weights.Shapes,
    dtype: Any,
    *operands: jax.Array,
    **attributes: int,
) -> list[jax.Array]:
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return launch(target, results, *operands, **attributes)


KERNELS: GemmKernels = GemmKernels(supports, forward, data_grad, weight_grad)
