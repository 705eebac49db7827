"""The collectives of `protocol.py` over NCCL communicators that the runtime created.

Blocks are sent as bytes, in one NCCL group of sends and receives on the stream of the step; a
rank's own block is copied. Ranks and communicator are looked up when a call runs, so programs
contain only the layer.

JAX 0.11.2 and newer can lend a custom call XLA's own communicator (the FFI collectives extension
0.1; 0.2 with windows in JAX 0.12). The runtime keeps its own, because a borrowed one

- cannot be aborted by the borrower. XLA checks for NCCL errors every 30 s, and only for cliques
  that no program is using. Flags for the whole process decide how it handles a lost process. Here a
  wait must end within 2 s, as PeerLostError, and the group must then form again in place.
- is requested by device numbers in the Prepare stage of a program, and created when the program
  first runs: on all devices at once, without the group's deadline, a channel limit or the daemon's
  id, so neither READY nor the listing can show it. It is never freed.
- saves neither time nor memory. On four H200s a call that borrowed one took 0.17 to 0.19 s and 1.35
  GB of a GPU per communication id (0.68 s and 2.7 GB for the first, including NCCL's own start).
  Ours take 0.21 to 0.24 s. An all-to-all moved 245 to 255 GB/s with blocks of 32 MiB.
- needs a library built with newer headers than the oldest jaxlib's, which work for all today.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.transports.windows import native_call

TARGETS = targets("ep_nccl_exchange_v1", "ep_nccl_all_gather_v1", "ep_nccl_counted_v1")
EXCHANGE, ALL_GATHER, COUNTED = TARGETS


def all_gather(call: Call, x: jax.Array) -> jax.Array:
    return _between(call, ALL_GATHER, _shapes([x], call.group.ep_size), x)[0]


def exchange(call: Call, blocks: jax.Array, *after: jax.Array) -> jax.Array:
    """Exchanges blocks; the call begins after `after` is computed, if given."""
    return _between(call, EXCHANGE, _shapes([blocks]), blocks, *after)[0]


def node(call: Call, blocks: jax.Array) -> jax.Array:
    size = call.group.ranks_per_node
    if size == 1:
        return blocks
    return _between(call, EXCHANGE, _shapes([blocks]), blocks, node_size=size)[0]


def rail(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Moves all arrays in one exchange."""
    if call.group.num_nodes == 1:
        return arrays
    return _rails(call, EXCHANGE, _shapes(arrays), *arrays)


def rail_gather(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Moves all arrays in one exchange."""
    nodes = call.group.num_nodes
    if nodes == 1:
        return tuple(x[None] for x in arrays)
    return _rails(call, ALL_GATHER, _shapes(arrays, nodes), *arrays)


def rail_counted(
    call: Call, sent: jax.Array, received: jax.Array, *arrays: jax.Array, rows: int
) -> tuple[jax.Array, ...]:
    """Moves arrays as `rail` does, but only the rows that counts name.

    sent[m] rows go to node m, and received[m] rows come from it, int32 [D] both. Rows of a rank's
    own tokens are lined up: those of one node after the other. Rows of other ranks' tokens are
    blocks. Rows after these are undefined.

    Arrays lined up [N, X] arrive as blocks [D, rows, X], blocks [D, R, X] lined up [rows, X].

    The host reads both counts once, and waits for the device until they are there.
    """
    dims = [(call.group.num_nodes, rows) if x.ndim == 2 else (rows,) for x in arrays]
    pairs = zip(dims, arrays, strict=True)
    results = [ShapeDtypeStruct((*lead, x.shape[-1]), x.dtype) for lead, x in pairs]
    return _rails(call, COUNTED, results, jnp.stack([sent, received]), *arrays)


_between = functools.partial(native_call, node_size=0, rail=0)


def _rails(call: Call, *given: Any) -> tuple[jax.Array, ...]:
    return native_call(call, *given, node_size=call.group.ranks_per_node, rail=1)


def _shapes(arrays: Sequence[jax.Array], *lead: int) -> list[ShapeDtypeStruct]:
    return [ShapeDtypeStruct((*lead, *x.shape), x.dtype) for x in arrays]
