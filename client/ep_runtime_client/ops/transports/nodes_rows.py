"""Rows on their way between nodes: lined up for them, and the nodes' sums added.

XLA's gathers of whole rows take several times what the network does, so on GPUs the kernels of
`kernels/move_rows.py` do both where they serve the rows. Letters: `nodes_plan.py`; X any width.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.kernels import move_rows as kernels
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.kernels.slots import rows_at
from ep_runtime_client.ops.transports import fp8_sums
from ep_runtime_client.ops.transports.fp8_sums import ScaledRows
from ep_runtime_client.ops.transports.nodes_plan import NodePacking
from ep_runtime_client.ops.transports.xla import round_to


def lined_up(call: Call, rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows [T, X] at every index, all of them in range: [..., X] of an index [...]."""
    flat = index.reshape(-1)
    served = call.group.transport == "nccl" and kernels.supports(rows, flat, moves=True)
    taken = either(served, functools.partial(kernels.copied, 1), rows_at, rows, flat)
    return taken.reshape(*index.shape, rows.shape[-1])


def sum_nodes(
    call: Call, tokens: NodePacking, partials: jax.Array | ScaledRows, dtype: Any
) -> jax.Array:
    """Sums [D, R, H] of the nodes, each in its own order -> tokens [T, H], in node order."""
    values = partials.data if isinstance(partials, ScaledRows) else partials
    nodes, rows = values.shape[:2]
    first = jnp.arange(nodes, dtype=jnp.int32)[:, None] * rows
    slot_row = jnp.where(tokens.has, first + tokens.position, -1).T
    if isinstance(partials, ScaledRows):
        return sum_scaled(ScaledRows(*map(_flat, partials)), slot_row, dtype)
    flat = _flat(partials)
    served = call.group.transport == "nccl" and kernels.supports(flat, slot_row)
    ways = (functools.partial(way, dtype) for way in (_summed_by_kernel, _summed))
    return either(served, *ways, flat, slot_row)


def _flat(rows: jax.Array) -> jax.Array:
    return rows.reshape(-1, rows.shape[-1])


def sum_scaled(rows: ScaledRows, slot_row: jax.Array, dtype: Any) -> jax.Array:
    """rows [R, H] by slot_row [T, D], -1 for none: [T, H], in f32, then rounded to `dtype`."""

    def plain(data: jax.Array, scale: jax.Array, slot_row: jax.Array) -> jax.Array:
        return _summed(dtype, fp8_sums.values(ScaledRows(data, scale)), slot_row)

    served = kernels.takes_scaled(dtype, rows.data, slot_row)
    by_kernel = functools.partial(kernels.summed_scaled, dtype)
    return either(served, by_kernel, plain, *rows, slot_row)


def _summed_by_kernel(dtype: Any, rows: jax.Array, slot_row: jax.Array) -> jax.Array:
    total = kernels.summed(rows, slot_row, None)  # in f32, rounded to the dtype of the rows
    return total if total.dtype == dtype else round_to(total, dtype)


def _summed(dtype: Any, rows: jax.Array, slot_row: jax.Array) -> jax.Array:
    """rows [R, H] by slot_row [T, D], -1 for none: [T, H], in f32 or wider, then rounded."""
    total = None
    for place in slot_row.T:
        value = rows_at(rows, jnp.maximum(place, 0)).astype(sum_dtype(rows.dtype))
        value = jnp.where((place >= 0)[:, None], value, 0)
        total = value if total is None else total + value
    assert total is not None  # a group has a node
    return round_to(total, dtype)
