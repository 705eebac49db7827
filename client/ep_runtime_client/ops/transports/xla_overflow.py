"""on_overflow="error" of transport "xla": every device fails in the same prepare.

The verdict is a collective over all EP domains, so that no device goes on to a later collective
alone; raising is a host callback, which is the one way for plain JAX to fail a program. JAX prints
a failed callback once more when the process ends, and keeps such programs out of its cache.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.tracing import again
from ep_runtime_client.ops.tracing.varying import like


def calls_host(group: GroupSpec) -> bool:
    """Whether a prepare of the group has the host callback of `passed`."""
    plain = group.transport == "xla" or group.node_size > 0
    return plain and group.on_overflow == "error"


def passed(call: Call, rank: jax.Array, index: jax.Array, demand: jax.Array) -> jax.Array:
    """int32 [] zero, once every rank of the group fits; the program fails where one does not.

    Args:
        call: the call; its capacity is what demand is compared with.
        rank: int32 [1], world rank.
        index: int32 [1], layer of the stack.
        demand: int32 [], aligned rows that this rank is asked to hold.
    """
    axes = tuple(axis for axis, size in call.group.mesh_axes if size > 1)
    world = call.group.world_size
    first = jnp.where(demand > call.capacity, rank[0], world)
    lowest = lax.pmin(first, axes) if axes else first
    asked = jnp.where(rank[0] == lowest, demand, 0)
    asked = lax.pmax(asked, axes) if axes else asked
    verdict = jax.ShapeDtypeStruct((), jnp.int32)
    refuse = functools.partial(_refuse, call.group.name, call.layer.name, call.capacity, world)
    return like(
        jax.pure_callback(refuse, verdict, lowest, asked, again.layer_of(index)[0], rank[0]), demand
    )


def _refuse(
    group: str, name: str, capacity: int, world: int, rank: Any, demand: Any, index: Any, own: Any
) -> Any:
    if int(rank) < world:
        layer = f"{name.removesuffix('[0]')}[{int(index)}]" if name.endswith("[0]") else name
        fields = {
            "layer": layer,
            "rank": int(rank),
            "demand": int(demand),
            "capacity": capacity,
        }
        text = (
            f"EP_RUNTIME/CapacityOverflowError: layer {layer}: rank {int(rank)} would receive "
            f"{int(demand)} rows, its slab holds {capacity} {json.dumps(fields)}"
        )
        if int(own) == int(rank):  # once, for `Group.check`
            live_groups.report(group, text)
        raise RuntimeError(text)
    return np.int32(0)
