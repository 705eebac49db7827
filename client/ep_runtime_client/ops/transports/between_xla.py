"""The collectives of `protocol.py`, implemented with jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ep_runtime_client.ops.calls.call import Call


def ep_axes(call: Call) -> tuple[str, ...]:
    """Returns the ep axes that need a collective; an axis of size 1 needs none."""
    sizes = call.group.axis_sizes
    return tuple(axis for axis in call.group.ep_axis if sizes[axis] > 1)


def ep_rank(call: Call) -> jax.Array:
    """Returns this device's rank in its EP group, int32 []."""
    axes = ep_axes(call)
    return lax.axis_index(axes) if axes else jnp.int32(0)


def largest(call: Call, x: jax.Array) -> jax.Array:
    """Returns the largest x of all ranks of the EP group."""
    axes = ep_axes(call)
    return lax.pmax(x, axes) if axes else x


def all_gather(call: Call, x: jax.Array) -> jax.Array:
    axes = ep_axes(call)
    return lax.all_gather(x, axes) if axes else x[None]


def exchange(call: Call, blocks: jax.Array) -> jax.Array:
    return _all_to_all(call, blocks, None)


def rail(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    size, nodes = call.group.ranks_per_node, call.group.num_nodes
    peers = [[node * size + local for node in range(nodes)] for local in range(size)]
    return arrays if nodes == 1 else tuple(_all_to_all(call, x, peers) for x in arrays)


def rail_gather(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    nodes = call.group.num_nodes
    return rail(call, *(jnp.broadcast_to(x, (nodes, *x.shape)) for x in arrays))


def node(call: Call, blocks: jax.Array) -> jax.Array:
    size, nodes = call.group.ranks_per_node, call.group.num_nodes
    peers = [[node * size + local for local in range(size)] for node in range(nodes)]
    return blocks if size == 1 else _all_to_all(call, blocks, peers)


def _all_to_all(call: Call, blocks: jax.Array, groups: list[list[int]] | None) -> jax.Array:
    """Runs an all-to-all. Narrow floats are sent as bits, because XLA on CPU would widen them."""
    axes, dtype = ep_axes(call), blocks.dtype
    if not axes:
        return blocks
    if dtype.itemsize >= 4 or not jnp.issubdtype(dtype, jnp.floating):
        return _move(blocks, axes, groups)
    bits = jnp.uint16 if dtype.itemsize == 2 else jnp.uint8
    moved = _move(lax.bitcast_convert_type(blocks, bits), axes, groups)
    return lax.bitcast_convert_type(moved, dtype)


def _move(blocks: jax.Array, axes: Any, groups: list[list[int]] | None) -> jax.Array:
    # vmap asks for a batching rule of lax.all_to_all with groups even if no operand is batched, and
    # JAX has none. Batched operands were rejected before.
    @custom_vmap
    def moved(blocks: jax.Array) -> jax.Array:
        return lax.all_to_all(blocks, axes, 0, 0, axis_index_groups=groups)

    @moved.def_vmap
    def _refuse(*_: Any) -> Any:
        raise NotImplementedError("ep ops cannot run under vmap")

    return moved(blocks)
