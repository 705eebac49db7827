"""prepare: where every slot's row goes, decided once and identically on every rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.calls import token_layout
from ep_runtime_client.ops.calls.call import (
    Call,
    PlanMeta,
    check_handle,
    resolve_capacity,
    world_rank,
)
from ep_runtime_client.ops.calls.plan import (
    AnyArrays,
    NodePlanArrays,
    Plan,
    PlanArrays,
    arrays_type,
)
from ep_runtime_client.ops.kernels.slots import as_int32
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.partitioning.specs import known_spec
from ep_runtime_client.ops.tracing import again, eager
from ep_runtime_client.ops.tracing.ambient import manual_axes, open_layer
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import on_gpus, per_device_ops


def prepare(
    layer: EpLayer | TracedLayer,
    topk_idx: jax.Array,
    *,
    handle: int = 0,
    capacity: int | None = None,
    tokens_spec: jax.sharding.PartitionSpec | None = None,
) -> Plan:
    """Plans a dispatch: assigns each token a row at each of its experts.

    Counts and row numbers move between the ranks, and no tokens.

    Args:
        layer: a registered layer, or `stack[i]`.
        topk_idx: [T, K] or [B, S, K] int32 (int64 with x64). Expert per slot; -1 and anything
            else outside 0..E-1 is an unused slot. An expert may appear twice in a token.
        handle: which of the layer's handles this call, and calls with its plan, use.
        capacity: C, rows per slab in this call; None is the smaller of the group's capacity and
            the no-drop bound of this call.
        tokens_spec: sharding of the leading dims, if a traced 3-D array does not carry it.

    Returns:
        A Plan for `dispatch(..., plan=plan)`: nine int32 arrays with leading dim R (three more in a
        group over nodes), tagged "ep_plan" for remat policies.

    Raises:
        InvalidArgumentError: shapes, dtype, capacity or handle do not fit the layer.
        StaleHandleError: the layer's group is closed.
        NotImplementedError: under a vmap, as in `dispatch`.

    Cost: one exchange of E counts per rank and one of row numbers. A host sync only in eager calls,
    and on GPUs in a group with on_overflow="error".

    Source: padded zones of experts are from MegaBlocks (arXiv:2211.15841), the capacity that bounds
    them is from GShard (arXiv:2006.16668).
    """
    static, index, mesh = open_layer(layer)
    check_idx(static, topk_idx)
    hints = known_specs(tokens_spec, topk_idx)
    lead, given = topk_idx.shape[:-1], (index, topk_idx)
    call = make_call(static, mesh, lead, hints, given, handle=handle, capacity=capacity)
    return make_plan(call, index, topk_idx)


def known_specs(
    tokens_spec: jax.sharding.PartitionSpec | None, *arrays: Any
) -> tuple[jax.sharding.PartitionSpec, ...]:
    """The specs that tell how tokens lie: the caller's alone, or what the arrays are known by."""
    if tokens_spec is not None:
        return (tokens_spec,)
    specs = (known_spec(x) for x in arrays if x is not None)
    return tuple(spec for spec in specs if spec is not None)


def make_call(
    layer: EpLayer,
    mesh: jax.sharding.Mesh,
    lead: tuple[int, ...],
    hints: tuple[jax.sharding.PartitionSpec, ...],
    operands: tuple[Any, ...] = (),
    *,
    handle: int,
    capacity: int | None,
    remedy: str = token_layout.PAD_TOKENS,
) -> Call:
    """The static side of a call on `operands`, whose tokens have the leading dims `lead`."""
    group = layer.group_spec
    layout = token_layout.choose(group, lead, hints, manual_axes(group), remedy=remedy)
    if layout.tokens_per_rank > group.max_tokens_per_rank:
        raise InvalidArgumentError(
            f"the call has {layout.tokens_per_rank} tokens per rank, group {group.name!r} has "
            f"max_tokens_per_rank={group.max_tokens_per_rank}",
            argument="tokens",
        )
    rows = resolve_capacity(layer, layout.tokens_per_rank, capacity)
    meta = PlanMeta(layer, layout, rows, check_handle(layer, handle))
    return per_device.call_on(meta, mesh, operands)


def make_plan(call: Call, index: jax.Array, topk_idx: jax.Array) -> Plan:
    """The plan of a checked call."""
    if call.layout.tokens_per_rank == 0:
        return Plan(_empty_plan(call, topk_idx.shape[-1]), call.meta)
    kind = arrays_type(call.group)
    return Plan(kind(*_tagged(call, index, topk_idx, most=False)), call.meta)


def make_plan_with_most(
    call: Call, index: jax.Array, topk_idx: jax.Array
) -> tuple[Plan, jax.Array]:
    """The plan of a checked call that has tokens; and int32 [R, 1]: the most rows that the zones
    of any rank of the EP group have, of groups over nodes any rank of the node."""
    *arrays, most = _tagged(call, index, topk_idx, most=True)
    return Plan(arrays_type(call.group)(*arrays), call.meta), most


def _tagged(call: Call, index: jax.Array, topk_idx: jax.Array, *, most: bool) -> list[jax.Array]:
    with scope("prepare", call.layer):
        call = call.varied(topk_idx, index)
        idx = per_device.place(call, "topk_idx", topk_idx, call.layout.spec())
        made = eager.settled(prepared, (call, most), again.told(index, idx), idx)
    return [checkpoint_name(x, "ep_plan") for x in made]


def prepared(
    static: tuple[Call, bool], index: jax.Array, topk_idx: jax.Array
) -> tuple[jax.Array, ...]:
    """The arrays of a plan, which no checkpoint keeps, of topk_idx [..., K]; with True in `static`
    also the most rows, as `make_plan_with_most` says."""
    call, most = static
    prepare = _ops_with_most(call) if most else per_device_ops(call).prepare

    def body(index: jax.Array, idx: jax.Array) -> tuple[jax.Array, ...]:
        local = idx.reshape(-1, idx.shape[-1])
        made = prepare(call, world_rank(call.group), index, local)
        return tuple(x[None] for x in jax.tree.leaves(made))

    given = (((),), call.layout.entries())
    count = len(arrays_type(call.group)._fields) + most
    made = [(call.group.token_axes,)] * count
    return per_device.run(call, "prepare", body, (index, as_int32(topk_idx)), given, made)


def check_idx(layer: EpLayer, topk_idx: jax.Array) -> None:
    shape, dtype = jnp.shape(topk_idx), jnp.result_type(topk_idx)
    if len(shape) not in (2, 3) or shape[-1] != layer.top_k:
        raise InvalidArgumentError(
            f"topk_idx must be [T, {layer.top_k}] or [B, S, {layer.top_k}] "
            f"(top_k of layer {layer.name!r}), got {list(shape)}",
            argument="topk_idx",
        )
    if dtype not in (jnp.int32, jnp.int64):
        raise InvalidArgumentError(
            f"topk_idx must be int32 (or int64 with x64), got {dtype}", argument="topk_idx"
        )


def _ops_with_most(call: Call) -> Any:
    """The per-device function: a call on GPUs has the number, and nodes ask inside each; everywhere
    else ranks ask around."""
    ops = per_device_ops(call)
    if call.group.node_size or on_gpus(call.group):
        return ops.prepare_with_most

    def prepare(call: Call, rank: jax.Array, index: jax.Array, idx: jax.Array) -> Any:
        arrays = ops.prepare(call, rank, index, idx)
        axes = tuple(axis for axis in call.group.ep_axis if call.group.axis_sizes[axis] > 1)
        rows = arrays.group_sizes.sum(keepdims=True, dtype=jnp.int32)
        return arrays, lax.pmax(rows, axes) if axes else rows

    return prepare


def _empty_plan(call: Call, top_k: int) -> AnyArrays:
    """The plan of a call without tokens: nothing to exchange, so nothing is called."""
    slabs, group = call.num_slabs, call.group

    def filled(value: int, *shape: int) -> jax.Array:
        return jnp.full((slabs, *shape), value, jnp.int32)

    arrays = PlanArrays(
        filled(-1, 0, top_k),
        filled(-1, 0, top_k),
        filled(0, group.ranks_per_node, 4),
        filled(0, 1),
        filled(-1, call.capacity),
        filled(-1, call.capacity),
        filled(0, group.experts_per_rank),
        filled(0, group.experts_per_rank),
        filled(0, 1),
    )
    if group.node_size == 0:
        return arrays
    return NodePlanArrays(*arrays, filled(-1, 0, top_k), filled(-1, 0, top_k), filled(0, 1))
