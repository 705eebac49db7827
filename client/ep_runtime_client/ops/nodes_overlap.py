"""Groups over nodes whose network and windows work at once: rows go in parts, one after the other.

The way out, of dispatch and combine's backward: all parts set off at once, in order, and the
windows' call of a part follows when it is there, so a part crosses while the one before is placed.
The way back, of combine and dispatch's backward: a part sets off as soon as its sums are made, and
crosses while the sums of the next one are.

An exchange is begun by one call and awaited by another (`collectives.py`). Begun exchanges hand on
the layer index, an operand of all that must not run before them: nothing else orders calls that
share no rows. What arrives is the same rows and sums as without parts, bit for bit.

Costs beside `nodes.py`: all of a rank's rows cross, as many as tokens to every node, whether needed
there or not; the windows' fixed time once per part; and the rows as they were sent are kept until
they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.calls import Call
from ep_runtime_client.ops.nodes_plan import in_parts, packing, parts_of
from ep_runtime_client.ops.nodes_rows import lined_up
from ep_runtime_client.ops.plan import NodePlanArrays, PlanArrays
from ep_runtime_client.ops.transports import collectives
from ep_runtime_client.ops.varying import like

Placed = TypeVar("Placed")


def to_windows(
    call: Call,
    plan: NodePlanArrays,
    index: jax.Array,
    sent: tuple[jax.Array, ...],
    place: Callable[[PlanArrays, tuple[jax.Array, ...], Placed | None], Placed],
) -> Placed:
    """Arrays [T, X] of tokens -> what `place` makes of them, part by part.

    Args:
        call: the call.
        plan: in parts.
        index: of the layer.
        sent: to the nodes.
        place: (plan of the part, arrays [D*B, X] of its virtual tokens, what the part before made
            or None) -> the same with this part's rows.
    """
    ops, count = collectives(call), parts_of(call, plan)
    lined = in_parts(packing(call, plan.dst_rank).token, count, 0)
    begun = []
    for tokens in lined:
        flight, index = ops.begin(call, index, *(lined_up(call, x, tokens) for x in sent))
        begun.append(flight)
    placed = None
    for part, flight in zip(plan.parts(count), begun, strict=True):
        (arrived,) = ops.arrived(call, index, flight)
        placed = place(part, tuple(x.reshape(-1, x.shape[-1]) for x in arrived), placed)
    assert placed is not None  # a plan has a part
    return placed


def from_windows(
    call: Call,
    plan: NodePlanArrays,
    index: jax.Array,
    sums: Callable[[PlanArrays, jax.Array], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """What each node says of its tokens, [D, T, X] arrays.

    Args:
        call: the call.
        plan: in parts.
        index: of the layer.
        sums: (plan of the part, layer index) -> arrays [D*B, X] of its virtual tokens.
    """
    ops, nodes = collectives(call), call.group.num_nodes
    count, tokens = parts_of(call, plan), plan.dst_rank.shape[0]
    begun = []
    for part in plan.parts(count):
        # Results of custom calls are typed as varying over nothing.
        made = (like(x, plan.chunks) for x in sums(part, index))
        blocks = (x.reshape(nodes, -1, x.shape[-1]) for x in made)
        flight, index = ops.begin(call, index, *blocks)
        begun.append(flight)
    return tuple(
        jnp.concatenate([like(x, plan.chunks) for x in array], 1)[:, :tokens]
        for array in zip(*ops.arrived(call, index, *begun), strict=True)
    )
