"""prepare: decides once, and identically on every rank, where every slot's row goes.

Also makes the calls of dispatch and combine: checked, opened on their layer, placed on its mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.calls import token_layout
from ep_runtime_client.ops.calls.call import Call, PlanMeta, check_handle, resolve_capacity
from ep_runtime_client.ops.calls.plan import Plan, arrays_type, check_plan, plan_shapes
from ep_runtime_client.ops.kernels.slots import as_int32
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.roles import known_spec
from ep_runtime_client.ops.tracing import again, eager
from ep_runtime_client.ops.tracing.ambient import manual_axes, open_layer
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.xla_plan import calls_host

# Arrays of a plan with row or slot numbers, in which -1 means none.
_PLACES = ("dst_", "staged_row", "staged_slot", "virtual_")


def prepare(
    layer: EpLayer | TracedLayer,
    topk_idx: jax.Array,
    *,
    handle: int = 0,
    capacity: int | None = None,
    tokens_spec: PartitionSpec | None = None,
) -> Plan:
    """Plans a dispatch: assigns each token a row at each of its experts.

    The ranks exchange counts and row numbers, but no tokens.

    Args:
        layer: a registered layer, or `stack[i]`.
        topk_idx: [T, K] or [B, S, K] int32 (int64 with x64). Expert per slot; -1 and anything
            else outside 0..E-1 is an unused slot. An expert may appear twice in a token.
        handle: the layer's handle that this call uses, and later calls with the plan too.
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
    return make_plan(call, index, topk_idx)[0]


def open_call(
    opened: tuple[EpLayer, jax.Array, Mesh],
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    handle: int,
    capacity: int | None,
    tokens_spec: PartitionSpec | None,
) -> tuple[Call, jax.Array | None]:
    """Checks a dispatch without a plan on an open layer; returns its call and weights in f32."""
    static, index, mesh = opened
    check_tokens(static, tokens)
    check_idx(static, topk_idx)
    _check_lead("topk_idx", topk_idx, tokens.shape[:-1])
    hints = known_specs(tokens_spec, tokens, topk_idx, topk_weights)
    lead, given = tokens.shape[:-1], (index, tokens, topk_idx, topk_weights)
    call = make_call(static, mesh, lead, hints, given, handle=handle, capacity=capacity)
    return call, as_weights(call, topk_weights)


def known_specs(tokens_spec: PartitionSpec | None, *arrays: Any) -> tuple[PartitionSpec, ...]:
    """Returns specs that tell how tokens are sharded: the caller's, else the arrays' specs."""
    if tokens_spec is not None:
        return (tokens_spec,)
    specs = (known_spec(x) for x in arrays if x is not None)
    return tuple(spec for spec in specs if spec is not None)


def make_call(
    layer: EpLayer,
    mesh: Mesh,
    lead: tuple[int, ...],
    hints: tuple[PartitionSpec, ...],
    operands: tuple[Any, ...] = (),
    *,
    handle: int,
    capacity: int | None,
    remedy: str = token_layout.PAD_TOKENS,
) -> Call:
    """Makes the static side of a call on `operands`, whose tokens have the leading dims `lead`."""
    group = layer.group_spec
    layout = token_layout.choose(group, lead, hints, manual_axes(group), remedy=remedy)
    tokens = layout.tokens_per_rank
    if tokens > group.max_tokens_per_rank:
        raise InvalidArgumentError(
            f"the call has {tokens} tokens per rank, group {group.name!r} has "
            f"max_tokens_per_rank={group.max_tokens_per_rank}",
            argument="tokens",
        )
    rows = resolve_capacity(layer, tokens, capacity)
    meta = PlanMeta(layer, layout, rows, check_handle(layer, handle))
    return call_on(meta, mesh, operands)


def call_on(meta: PlanMeta, mesh: Mesh, operands: Sequence[Any] = ()) -> Call:
    """Makes the call of a plan's meta on these operands.

    The layer already tells how they are sharded, so only a group with partitioning="rule" uses the
    rule. A host callback in a rule ends the process, so with one, or on one device, shard_map runs.
    """
    where = regions.of_opened(meta.layer, mesh, operands, known=True)
    if where.mode == "rule" and (mesh.size == 1 or calls_host(meta.group)):
        where = dataclasses.replace(where, mode="shard_map")
    return Call(meta, where)


def call_of_plan(layer: EpLayer, mesh: Mesh, plan: Plan, *operands: Any) -> Call:
    """Checks that a plan is for a layer; returns its call as `call_on` does."""
    return call_on(check_plan(plan, layer), mesh, (*operands, plan.arrays))


def make_plan(
    call: Call, index: jax.Array, topk_idx: jax.Array, *, most: bool = False
) -> tuple[Plan, jax.Array | None]:
    """Makes the plan of a checked call.

    With `most` also returns int32 [R, 1]: the most rows in the zones of any rank of the EP group,
    or of any rank of the node in a group over nodes.
    """
    kind = arrays_type(call.group)
    if call.layout.tokens_per_rank == 0:
        return Plan(kind(*_without_tokens(call, kind._fields)), call.meta), None
    with scope("prepare", call.layer):
        call = call.varied(topk_idx, index)
        idx = per_device.place(call, "topk_idx", topk_idx)
        made = eager.settled(prepared, (call, most), again.told(index, idx), idx)
    arrays, others = made[: len(kind._fields)], made[len(kind._fields) :]
    plan = Plan(kind(*(checkpoint_name(x, "ep_plan") for x in arrays)), call.meta)
    return plan, checkpoint_name(others[0], "ep_plan") if most else None


def prepared(
    static: tuple[Call, bool], index: jax.Array, topk_idx: jax.Array
) -> tuple[jax.Array, ...]:
    """Makes the arrays of a plan from topk_idx [..., K], without names for `jax.checkpoint`.

    If the bool of `static` is True it also returns the most rows, as `make_plan` does.
    """
    call, most = static
    body = functools.partial(per_device_ops(call.group).prepare, most=most)
    results = len(arrays_type(call.group)._fields) + most
    return per_device.run(call, "prepare", body, index, (as_int32(topk_idx),), (), results)


def _without_tokens(call: Call, names: tuple[str, ...]) -> Iterator[jax.Array]:
    """Makes the arrays of a plan for ranks that have no token, without an op."""
    shapes = plan_shapes(call, 0, call.layer.top_k)
    for name, dims in zip(names, shapes, strict=True):
        value = -1 if name.startswith(_PLACES) else 0
        yield jnp.full((call.num_slabs, *dims), value, jnp.int32)


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


def check_tokens(layer: EpLayer, tokens: jax.Array) -> None:
    group = layer.group_spec
    shape, dtype = jnp.shape(tokens), jnp.result_type(tokens)
    if len(shape) not in (2, 3) or shape[-1] != group.hidden_size:
        raise InvalidArgumentError(
            f"tokens must be [T, {group.hidden_size}] or [B, S, {group.hidden_size}] "
            f"(hidden_size of group {group.name!r}), got {list(shape)}",
            argument="tokens",
        )
    check_width("tokens", layer, dtype, one_byte=True)


def check_width(name: str, layer: EpLayer, dtype: Any, *, one_byte: bool) -> None:
    """Raises InvalidArgumentError unless rows of `dtype` fit into the group's lanes."""
    group = layer.group_spec
    is_float = jnp.issubdtype(dtype, jnp.floating)
    small = jnp.dtype(dtype).itemsize == 1
    if not (is_float and not small) and not (one_byte and small):
        kinds = "a float dtype or a 1-byte one" if one_byte else "a float dtype of 2 bytes or more"
        raise InvalidArgumentError(f"{name} must have {kinds}, got {dtype}", argument=name)
    most = DTYPE_BYTES[group.max_token_dtype]
    if jnp.dtype(dtype).itemsize > most:
        raise InvalidArgumentError(
            f"{name} of {dtype} ({jnp.dtype(dtype).itemsize} bytes) is wider than "
            f"max_token_dtype={group.max_token_dtype} ({most} bytes) of group {group.name!r}",
            argument=name,
        )


def _check_lead(name: str, array: jax.Array, lead: tuple[int, ...]) -> None:
    if jnp.shape(array)[:-1] != lead:
        raise InvalidArgumentError(
            f"{name} must have the leading dims of tokens {lead}, got {jnp.shape(array)[:-1]}",
            argument=name,
        )


def as_weights(call: Call, weights: jax.Array | None) -> jax.Array | None:
    if weights is None:
        return None
    _check_lead("topk_weights", weights, call.layout.lead)
    if jnp.shape(weights)[-1] != call.layer.top_k:
        raise InvalidArgumentError(
            f"topk_weights must end in top_k={call.layer.top_k}, got {list(jnp.shape(weights))}",
            argument="topk_weights",
        )
    if not jnp.issubdtype(jnp.result_type(weights), jnp.floating):
        raise InvalidArgumentError(
            f"topk_weights must be f32, got {jnp.result_type(weights)}", argument="topk_weights"
        )
    return weights if weights.dtype == jnp.float32 else weights.astype(jnp.float32)
