"""The gradient of the op of `ep.moe`: the arrays it saves, and the gradients it returns.

`prepare` is not part of the op, so if `jax.checkpoint` saves the plan, the backward pass needs no
forward call and begins with tokens and plan. A large plan is not saved but made again in backward:
it has numbers for every row of the worst case, which grows with the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ep_runtime_client.moe.op import BlockBackward, BlockForward
from ep_runtime_client.moe.resolved import Operands, ResolvedCall
from ep_runtime_client.ops.calls.plan import arrays_type
from ep_runtime_client.ops.gemm.quantized_operands import for_backward
from ep_runtime_client.ops.movement.prepare import prepared
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.roles import Entries
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor, pack
from ep_runtime_client.ops.tracing import again, eager, first_order
from ep_runtime_client.ops.tracing.lean import unless_unused
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.tracing.varying import Axes

# For each matmul with a delayed recipe: amax of rows f32 [R, L] and of weights [E]; else None.
Amax = tuple[tuple[jax.Array, jax.Array] | None, ...]


def inner_axes(call: ResolvedCall, operands: Operands) -> Axes:
    """Returns the axes on M, over which y is summed; the layout of the weights must be known."""
    assert call.where.roles is not None
    packed, common = _packed(operands)
    op = BlockForward(call.where, call, **common)
    arrived, arrays = _arrived(op), jax.tree.leaves(packed)
    given = zip(arrays, arrived, strict=True)
    shapes = [regions.whole_shape(call.where, x.shape, entries) for x, entries in given]
    return op.place(call.where.roles, arrived, shapes).inner


def primal(call: ResolvedCall, operands: Operands) -> tuple[jax.Array, Amax]:
    """Returns y, sharded like tokens, and amax; as `block`, without a gradient."""
    of_weights: Sequence[Any] = (None, None)
    if any(call.recipes):
        operands, of_weights = _quantized(call, operands)
    y, *amax = _forward(call.saving_nothing(), operands)
    return y, _paired_amax(call, amax, of_weights)


def _paired_amax(call: ResolvedCall, rows: Sequence[jax.Array], weights: Sequence[Any]) -> Amax:
    of_rows = iter(rows)
    kinds = zip(call.delayed, weights, strict=True)
    return tuple((next(of_rows), weight) if delayed else None for delayed, weight in kinds)


def _quantized(call: ResolvedCall, given: Operands) -> tuple[Operands, list[Any]]:
    """Returns the operands with weights as matmuls read them, quantized once for both directions;
    and the amax of those with given scales."""
    made: list[Any] = []
    found: list[Any] = []
    for which, (kernel, entries) in enumerate(zip(given.kernels, call.sharding[:2], strict=True)):
        recipe, scales = call.recipes[which], given.scales[which]
        amax = None
        if recipe is not None and not isinstance(kernel, QuantizedTensor):
            scale = () if scales is None else scales[1:]
            with scope("block", call.moved.layer):
                kernel, amax = quantize_ops.weight(call.where, recipe, entries, kernel, *scale)
        made.append(kernel)
        found.append(amax)
    first, second = (None if each is None else each[:1] for each in given.scales)
    taken = given._replace(wi=made[0], wo=made[1], wi8=None, wo8=None, scales=(first, second))
    return taken, found


def _forward(
    call: ResolvedCall, operands: Operands, *, bare: bool = False
) -> tuple[jax.Array, ...]:
    """Returns y, the arrays saved for backward, and amax of rows; only the saved ones if `bare`."""
    packed, common = _packed(operands)
    op = BlockForward(call.where, call, **common, bare=bare)
    with scope("block", call.moved.layer):
        return on_mesh.run_on_mesh(op, _arrived(op), *jax.tree.leaves(packed))


def _without_tokens(call: ResolvedCall, operands: Operands) -> tuple[jax.Array, ...]:
    """Makes the arrays that backward reads, without y."""
    return _forward(call, operands, bare=True)


def _fwd(call: ResolvedCall, given: Operands) -> Any:
    operands, of_weights = given, (None, None)
    if any(call.recipes):
        operands, of_weights = eager.shared(_quantized, call, given)
        # Save unquantized weights as the very argument, so that a scan makes no copy of them.
        wi, wo = (
            mine if recipe is None or isinstance(mine, QuantizedTensor) else quantized
            for mine, quantized, recipe in zip(
                given.kernels, operands.kernels, call.recipes, strict=True
            )
        )
        operands = given._replace(wi=wi, wo=wo, wi8=None, wo8=None, scales=operands.scales)
    leaves, tree = jax.tree.flatten(operands)

    def way(function: Any, call: ResolvedCall) -> Callable[..., Any]:
        return lambda *leaves: eager.shared(function, call, jax.tree.unflatten(tree, leaves))

    saved = operands._replace(wi=for_backward(operands.wi), wo=for_backward(operands.wo))
    if call.plans_again:
        saved = saved._replace(plan=None, most=None)  # type: ignore[arg-type]
    names, full = call.saved, way(_forward, call)
    if not names or call.workspace is None:
        # XLA sees the separate ops and removes unused ones.
        y, *rows = full(*leaves)
    else:
        lean, bare = way(_forward, call.saving_nothing()), way(_without_tokens, call)
        y, *rows = unless_unused(full, lean, bare, *leaves)
    amax = _paired_amax(call, rows[len(names) :], of_weights)
    kept = zip(rows, names, strict=False)
    return (y, amax), (saved, [checkpoint_name(x, _tag(call, name)) for x, name in kept])


def _tag(call: ResolvedCall, name: str) -> str:
    """Returns the name of a saved array in checkpoint policies."""
    if call.workspace is not None:
        return "ep_kept"
    return "ep_wi" if name == "hidden" else "ep_recv"


def _bwd(call: ResolvedCall, saved: Any, grads: tuple[jax.Array, Any]) -> Any:
    return eager.shared(_pullback, call, *saved, grads[0])


def _pullback(
    call: ResolvedCall, operands: Operands, saved: list[jax.Array], dy: jax.Array
) -> tuple[Operands]:
    """Returns gradients of all operands; None for integers."""
    operands = operands._replace(layer_index=again.marked(operands.layer_index))
    if operands.plan is None:
        with scope("prepare", call.moved.layer):
            made = prepared((call.moved, True), operands.layer_index, operands.topk_idx)
        plan = arrays_type(call.moved.group)(*made[:-1])
        operands = operands._replace(plan=plan, most=made[-1])
    packed, common = _packed(operands, columns=True)
    of_wi, of_wo = (operands.tokens.dtype if x is None else x for x in call.dtypes)
    found = call if saved else call.saving_nothing()
    op = BlockBackward(call.where, found, **common, dtypes=(of_wi, of_wo))
    slab: Entries = (call.moved.group.token_axes,)
    arrived = [*_arrived(op), *[slab] * len(saved), call.moved.layout.entries()]

    def way(op: BlockBackward) -> Callable[..., Any]:
        return lambda *arrays: on_mesh.run_on_mesh(op, arrived, *arrays)

    arrays = (*jax.tree.leaves(packed), *saved, dy)
    with scope("block_bwd", call.moved.layer):
        if call.workspace is None:
            made = way(op)(*arrays)  # XLA sees the separate ops and removes unused ones
        else:
            frozen = way(dataclasses.replace(op, frozen=True))
            made = unless_unused(way(op), frozen, None, *arrays)
    return (_by_operand(call, operands, made),)


def _by_operand(call: ResolvedCall, operands: Operands, made: Sequence[jax.Array]) -> Operands:
    """Maps the results of the backward op to the operands whose gradients they are."""
    d_tokens, d_weights, *others = made
    wo, last = others.pop(), others.pop()
    wi: Any = Pair(others.pop(), last) if call.paired else last
    rest = iter(others)
    nothing: Any = None
    wi_bias = None if operands.wi_bias is None else next(rest)
    wo_bias = None if operands.wo_bias is None else next(rest)
    inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands.values]
    grads = Operands(
        layer_index=nothing,
        topk_idx=nothing,
        tokens=d_tokens,
        weights=d_weights,
        most=nothing,
        plan=nothing,
        wi=None if call.dtypes[0] is None else wi,
        wo=None if call.dtypes[1] is None else wo,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        values=tuple(d if is_so else nothing for d, is_so in zip(rest, inexact, strict=True)),
    )
    typed: Operands = regions.typed_tree(grads, call.types)
    return typed


def _packed(operands: Operands, *, columns: bool = False) -> tuple[Operands, dict[str, Any]]:
    """Returns operands with packed weights, and the packings; `columns` as in `pack`."""
    kernels = (quantize_ops.from_raw(x, rows=False) for x in operands.kernels)
    (wi, of_wi), (wo, of_wo) = (pack(x, rows=False, columns=columns) for x in kernels)
    scales = tuple(x for each in operands.scales if each is not None for x in each[:1])
    packed = operands._replace(wi=tuple(wi), wo=tuple(wo), wi8=None, wo8=None, scales=scales)
    return packed, {"wi": of_wi, "wo": of_wo, "tree": jax.tree.structure(packed)}


def _arrived(op: BlockForward | BlockBackward) -> list[Entries]:
    """Returns entries of the shared operands, as far as known."""
    call = op.call
    assert call.where.roles is not None
    return op.entries(call.where.roles, *call.multiplied, *call.sharding[2:])


# Like `primal`, but differentiable in tokens, weights, wi, wo and the biases.
block = jax.custom_vjp(primal, nondiff_argnums=(0,))
first_order.defvjp("moe", block, _fwd, _bwd)
