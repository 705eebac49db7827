"""What the ranks of an EP group send each other over the communicators that the runtime made.

Takes the place of `collectives.py` for transport "nccl", with the same functions. Blocks travel
as bytes, in one NCCL group of sends and receives on the stream of the step; a rank's own block is
copied. Ranks and communicator are looked up when a call runs, so programs name the layer alone.

JAX 0.11.2 and newer can lend a custom call XLA's own communicator. That would save a second set of
connections and their memory, and nothing of the runtime could bootstrap, watch or abort it. Before
anybody builds it, measure: memory of both per GPU, the time of one exchange from a stream that XLA
owns against one of ours, whether a lost rank ends the borrowed one within two seconds, and whether
a group can form again on it without restarting the process.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ep_runtime_client.ops._ffi import ensure_registered
from ep_runtime_client.ops.calls import Call

EXCHANGE, ALL_GATHER = TARGETS = ("ep_nccl_exchange_v1", "ep_nccl_all_gather_v1")


def all_gather(call: Call, x: jax.Array) -> jax.Array:
    return _call(call, ALL_GATHER, (call.group.ep_size, *x.shape), x)


def exchange(call: Call, blocks: jax.Array, *after: jax.Array) -> jax.Array:
    """As in `collectives.py`; a call begins when the array `after` is there, if one is given."""
    return _call(call, EXCHANGE, blocks.shape, blocks, *after)


def rail(call: Call, blocks: jax.Array) -> jax.Array:
    if call.group.num_nodes == 1:
        return blocks
    size = call.group.ranks_per_node
    return _call(call, EXCHANGE, blocks.shape, blocks, node_size=size, rail=True)


def node(call: Call, blocks: jax.Array) -> jax.Array:
    size = call.group.ranks_per_node
    return blocks if size == 1 else _call(call, EXCHANGE, blocks.shape, blocks, node_size=size)


def _call(
    call: Call,
    target: str,
    shape: tuple[int, ...],
    operand: jax.Array,
    *after: jax.Array,
    node_size: int = 0,
    rail: bool = False,
) -> jax.Array:
    ensure_registered("cuda")
    attributes = {
        "layer_id": np.int64(call.layer.base_id),
        "fingerprint": np.int64(call.layer.fingerprint),
        "handle": np.int64(call.meta.handle),
        "node_size": np.int64(node_size),
        "rail": np.int64(rail),
    }
    result: Any = jax.ShapeDtypeStruct(shape, operand.dtype)
    moved: jax.Array = jax.ffi.ffi_call(target, result)(operand, *after, **attributes)
    return moved
