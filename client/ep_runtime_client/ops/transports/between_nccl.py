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

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.kernels.ffi import ensure_registered, once, targets

TARGETS = targets("ep_nccl_exchange_v1", "ep_nccl_all_gather_v1", "ep_nccl_counted_v1")
EXCHANGE, ALL_GATHER, COUNTED = TARGETS


def all_gather(call: Call, x: jax.Array) -> jax.Array:
    (gathered,) = _call(call, ALL_GATHER, [_to_all(call.group.ep_size, x)], x)
    return gathered


def exchange(call: Call, blocks: jax.Array, *after: jax.Array) -> jax.Array:
    """As in `between_xla.py`; a call begins when the array `after` is there, if one is given."""
    (moved,) = _call(call, EXCHANGE, [blocks], blocks, *after)
    return moved


def rail(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """In one exchange."""
    if call.group.num_nodes == 1:
        return arrays
    size = call.group.ranks_per_node
    return _call(call, EXCHANGE, arrays, *arrays, node_size=size, rail=True)


def rail_gather(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """In one exchange."""
    group = call.group
    if group.num_nodes == 1:
        return tuple(x[None] for x in arrays)
    results = [_to_all(group.num_nodes, x) for x in arrays]
    return _call(call, ALL_GATHER, results, *arrays, node_size=group.ranks_per_node, rail=True)


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
    if size == 1:
        return blocks
    (moved,) = _call(call, EXCHANGE, [blocks], blocks, node_size=size)
    return moved


def _to_all(ranks: int, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ranks, *x.shape), x.dtype)


def _call(
    call: Call,
    target: str,
    results: Sequence[Any],
    *operands: jax.Array,
    node_size: int = 0,
    rail: bool = False,
) -> tuple[jax.Array, ...]:
    """Arrays of the shapes and dtypes of `results`."""
    ensure_registered("cuda")
    attributes = _attributes(call, node_size, rail=rail)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    return once(tuple(jax.ffi.ffi_call(target, shapes)(*operands, **attributes)))


def _attributes(call: Call, node_size: int, *, rail: bool) -> dict[str, np.int64]:
    return {
        "layer_id": np.int64(call.layer.base_id),
        "fingerprint": np.int64(call.layer.fingerprint),
        "handle": np.int64(call.meta.handle),
        "node_size": np.int64(node_size),
        "rail": np.int64(rail),
    }
