"""What the ranks of an EP group send each other over the communicators that the runtime made.

Takes the place of `between_xla.py` for transport "nccl", with the same functions. Blocks travel
as bytes, in one NCCL group of sends and receives on the stream of the step; a rank's own block is
copied. Ranks and communicator are looked up when a call runs, so programs name the layer alone.

JAX 0.11.2 and newer can lend a custom call XLA's own communicator (the FFI collectives extension,
0.1 there, 0.2 with windows in 0.12). The runtime keeps its own, because a borrowed one

- cannot be aborted by who borrows it. XLA looks for NCCL's errors every 30 s, at cliques that no
  program uses just then, and what it does about a lost process is the choice of flags for the whole
  process; a wait must end within 2 s here, as PeerLostError, and the group form again in place.
- is asked for by device numbers in the Prepare stage of a program, and made when that first runs:
  on all devices at once, without a deadline of the group's, a channel limit or an id of the
  daemon's, so neither READY nor the listing can speak of it. Nothing gives it back.
- saves nothing by itself: on four H200s (`tests/gpu/tools/nccl_borrow.py`) each communication id
  took 0.17 to 0.19 s and 1.35 GB of a GPU (the first 0.68 s and 2.7 GB, with NCCL's own start), as
  ours do with 0.21 to 0.24 s, and an all-to-all moved 245 to 255 GB/s with blocks of 32 MiB.
- needs a library built against newer headers than the oldest jaxlib's, which serve all today.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.kernels.ffi import ensure_registered, once, targets

TARGETS = targets("ep_nccl_exchange_v1", "ep_nccl_all_gather_v1", "ep_nccl_counted_v1")
EXCHANGE, ALL_GATHER, COUNTED = TARGETS


def all_gather(call: Call, x: jax.Array) -> jax.Array:
    return _call(call, ALL_GATHER, (call.group.ep_size, *x.shape), x)


def exchange(call: Call, blocks: jax.Array, *after: jax.Array) -> jax.Array:
    """As in `between_xla.py`; a call begins when the array `after` is there, if one is given."""
    return _call(call, EXCHANGE, blocks.shape, blocks, *after)


def rail(call: Call, blocks: jax.Array) -> jax.Array:
    if call.group.num_nodes == 1:
        return blocks
    size = call.group.ranks_per_node
    return _call(call, EXCHANGE, blocks.shape, blocks, node_size=size, rail=True)


def rail_gather(call: Call, x: jax.Array) -> jax.Array:
    group = call.group
    if group.num_nodes == 1:
        return x[None]
    return _call(
        call, ALL_GATHER, (group.num_nodes, *x.shape), x, node_size=group.ranks_per_node, rail=True
    )


def rail_counted(
    call: Call, sent: jax.Array, received: jax.Array, *blocks: jax.Array
) -> tuple[jax.Array, ...]:
    """Arrays [D, R, X] as by `rail`, but of block m only the first sent[m] rows go to node m, and
    received[m] rows come from it, int32 [D] both; behind them stands anything.

    The host reads both once, and waits for the device until they are there.
    """
    ensure_registered("cuda")
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in blocks)
    attributes = _attributes(call, call.group.ranks_per_node, rail=True)
    counts = jnp.stack([sent, received])
    moved = jax.ffi.ffi_call(COUNTED, results)(counts, *blocks, **attributes)
    return once(tuple(moved))


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
    attributes = _attributes(call, node_size, rail=rail)
    result: Any = jax.ShapeDtypeStruct(shape, operand.dtype)
    moved: jax.Array = jax.ffi.ffi_call(target, result)(operand, *after, **attributes)
    return once(moved)


def _attributes(call: Call, node_size: int, *, rail: bool) -> dict[str, np.int64]:
    return {
        "layer_id": np.int64(call.layer.base_id),
        "fingerprint": np.int64(call.layer.fingerprint),
        "handle": np.int64(call.meta.handle),
        "node_size": np.int64(node_size),
        "rail": np.int64(rail),
    }
