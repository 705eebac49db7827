"""Operands of a grouped GEMM, arrays or quantized tensors, read block by block inside its loop.

A block of a quantized operand is widened to f32 and multiplied by its scales there. Scales that
are the same for a whole group are not applied but returned: they multiply the dot's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.row_blocks import RowBlock
from ep_runtime_client.ops.quantize.formats.format import Part, flat, matrix
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor


def row_reader(
    operand: Any, lead: int, *, columns: bool = False, dtype: Any = None
) -> Callable[[RowBlock], Part]:
    """Reads a block's rows; rows of other groups are zeros.

    Args:
        operand: [C, ...] or [S, C, ...] array or QuantizedTensor.
        lead: how many dims the rows take, 1 or 2.
        columns: the GEMM contracts the rows: MXFP8 reads its column-wise copy.
        dtype: what an array is cast to; None leaves it.
    """
    if not isinstance(operand, QuantizedTensor):
        rows = flat(operand, lead)
        return lambda block: Part(matrix(_cast(block.read(rows), dtype)))
    return format_of(operand.recipe).row_reader(operand, lead, columns=columns)


def contracted_rows(*operands: Any) -> int:
    """Rows that a block has at most where a GEMM contracts those of `operands`; 0: any number."""
    wanted = [
        format_of(each.recipe).contracted_rows
        for each in operands
        if isinstance(each, QuantizedTensor)
    ]
    return max(wanted, default=0)


def kernel_reader(
    operand: Any, *, columns: bool = False, dtype: Any = None
) -> Callable[[jax.Array], Part]:
    """Reads one expert's kernel [K', everything else].

    Args:
        operand: [G, K', *N'] array, Pair or QuantizedTensor.
        columns: the GEMM contracts N': MXFP8 reads its column-wise copy.
        dtype: what an array is cast to; None leaves it.
    """
    if isinstance(operand, Pair):
        # One expert's at a time: sums over N' then run as those of the one array do.
        halves = [kernel_reader(half, dtype=dtype) for half in (operand.gate, operand.up)]
        return lambda expert: Part(jnp.concatenate([read(expert).values for read in halves], 1))
    if not isinstance(operand, QuantizedTensor):
        return lambda expert: Part(matrix(_cast(row_blocks.pick(operand, expert), dtype)))
    return format_of(operand.recipe).kernel_reader(operand, columns=columns)


def _cast(part: jax.Array, dtype: Any) -> jax.Array:
    return part if dtype is None else part.astype(dtype)
