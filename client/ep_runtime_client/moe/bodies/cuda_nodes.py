"""The body for groups on several nodes: windows inside a node, rails between nodes.

Tokens come from the rail peers on all nodes, as in `transports/nodes.py`. The call then runs as for
a group of the node's ranks, with D*T virtual tokens each, and its sums return to the peers. If the
rows of a node do not fit the workspace, that node runs in chunks, independently of other nodes.
Rows that a call quantizes before sending are quantized before they cross the network: half the
bytes, once for all nodes, and with the same bits, because each row has its own scales.

Letters: `protocol.py`, `transports/nodes_plan.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.moe.bodies import cuda
from ep_runtime_client.moe.bodies.protocol import (
    Experts,
    Forwarded,
    Given,
    Gradients,
    Over,
    WeightGrads,
)
from ep_runtime_client.moe.resolved import ResolvedCall
from ep_runtime_client.ops.calls.plan import NodePlanArrays
from ep_runtime_client.ops.movement import quantized_rows
from ep_runtime_client.ops.transports import nodes
from ep_runtime_client.ops.transports.nodes_plan import my_node

saved, multiple, packs = cuda.saved, cuda.multiple, cuda.packs


def forward(call: ResolvedCall, given: Given, experts: Experts, over: Over) -> Forwarded:
    moved, dtype = call.moved, given.tokens.dtype
    plan, here, _ = _on_node(call, given)
    made = cuda.forward(_partial(call, dtype), here, experts, over)
    return made._replace(y=nodes.added_up(moved, plan, made.y, dtype))


def backward(
    call: ResolvedCall,
    given: Given,
    experts: Experts,
    saved: tuple[jax.Array, ...],
    dy: jax.Array,
    grads: WeightGrads,
    over: Over,
) -> Gradients:
    """Runs the backward call; the tokens cross the network once more, together with dy."""
    moved, dtype = call.moved, given.tokens.dtype
    if experts.wo_bias is None:
        dy = _packed(call, given, dy, gradient=True)
    plan, here, (dy,) = _on_node(call, given, dy)
    found = cuda.backward(_partial(call, dtype), here, experts, saved, dy, grads, over)
    d_tokens, d_weights = nodes.gradients(moved, plan, found.tokens, found.weights, dtype)
    return found._replace(tokens=d_tokens, weights=d_weights)


def _partial(call: ResolvedCall, dtype: Any) -> ResolvedCall:
    """Returns the call with the dtype in which a node's sums cross to other nodes."""
    return dataclasses.replace(call, sums=nodes.partial_dtype(call.moved, dtype))


def _packed(
    call: ResolvedCall, given: Given, rows: jax.Array, *, gradient: bool = False
) -> jax.Array:
    """Returns rows [T, H] as the node's call sends them: in 8 bits if it quantizes tokens."""
    recipe = call.recipes[0]
    if recipe is None or not packs(call):
        return rows
    return quantized_rows.packed(recipe, rows, given.plan, gradient=gradient)


def _on_node(
    call: ResolvedCall, given: Given, *rows: jax.Array
) -> tuple[NodePlanArrays, Given, tuple[jax.Array, ...]]:
    """Returns the plan between nodes; the operands for a group of this node's ranks, with virtual
    tokens; and rows [T, X] of tokens sent to rows of the virtual tokens, [D*T, X]."""
    moved, plan, top_k = call.moved, given.plan, given.topk_idx.shape[1]
    assert isinstance(plan, NodePlanArrays)
    slots = [lax.bitcast_convert_type(given.weights, jnp.int32), given.topk_idx]
    sent = (_packed(call, given, given.tokens), jnp.concatenate(slots, 1), *rows)
    tokens, virtual_slots, *rows_here = nodes.to_nodes(moved, plan, *sent)
    weights = lax.bitcast_convert_type(virtual_slots[:, :top_k], jnp.float32)
    first = my_node(moved) * (moved.group.ranks_per_node * moved.group.experts_per_rank)
    # Slots of experts on other nodes stay out; slots past the last token are undefined.
    idx = jnp.where(plan.virtual_rank >= 0, virtual_slots[:, top_k:] - first, -1)
    here = given._replace(tokens=tokens, weights=weights, topk_idx=idx, plan=plan.inside)
    return plan, here, tuple(rows_here)
