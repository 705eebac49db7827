"""The body of `ep.moe` that is composed of the separate ops: it supports every call, on any
platform, and is the reference for the other bodies.

Rows are XLA arrays here, with room for the worst case. Forward saves the received rows and the
result of the first matmul. The gradient is always computed as if weights multiplied the
activations: sum w * (act @ wo) equals sum (w * act) @ wo within rounding, and this form needs no
output of the experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ep_runtime_client.moe.bodies.protocol import (
    Experts,
    Forwarded,
    Given,
    Gradients,
    Over,
    WeightGrads,
)
from ep_runtime_client.moe.copies import at_home, with_copies
from ep_runtime_client.moe.resolved import ResolvedCall, Saved
from ep_runtime_client.ops.activation import plain as activation
from ep_runtime_client.ops.activation import quantized_plain
from ep_runtime_client.ops.activation.function import Activation, Learned
from ep_runtime_client.ops.activation.quantized_plain import QuantizedActivation
from ep_runtime_client.ops.gemm import plain as gemm
from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.row_blocks import RowBlock
from ep_runtime_client.ops.movement import quantized_rows
from ep_runtime_client.ops.movement.dispatch import exchange
from ep_runtime_client.ops.quantize import plain as quantize
from ep_runtime_client.ops.quantize.amax import over as largest
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.row_bytes import from_bytes, to_bytes
from ep_runtime_client.ops.tracing import slack
from ep_runtime_client.ops.tracing.varying import Axes
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.protocol import DeviceCall


class _Rows(NamedTuple):
    """Rows of this device's experts.

    Attributes:
        values: [1, C, H], or quantized.
        weights: f32 [1, C], 0 in padding.
    """

    values: jax.Array | QuantizedTensor
    weights: jax.Array


def saved(call: ResolvedCall) -> tuple[Saved, ...]:
    return (*(("rows",) if call.sent_by is None else ("data", "scales")), "weights", "hidden")


def multiple(call: ResolvedCall, *, paired: bool) -> int:
    # A scale's block must not cross a shard of M. A learned function needs exactly its M.
    function = call.activation.function
    width = function.given[0].shape[1] if isinstance(function, Learned) else 1
    return max(width, *(format_of(recipe).tile for recipe in call.recipes))


def forward(call: ResolvedCall, given: Given, experts: Experts, over: Over) -> Forwarded:
    call, rows_over = _bound(call, experts), over.rows
    given, experts, over = _with_copies(call, given, experts, over)
    rows, sizes, product = _dispatched(call, given), _sizes(given), _gemm(call)
    scales = iter(given.scales)
    taken, first = _first_operand(call, rows, sizes, over, scales)
    hidden = gemm.forward(product, taken, experts.wi, experts.wi_bias, sizes)
    weights = rows.weights if call.weighted == "hidden" else None
    taken, second = _activated(call, hidden, weights, sizes, over, next(scales, None))
    out = gemm.forward(product, taken, experts.wo, experts.wo_bias, sizes)
    at, weights = _at(call, given), rows.weights[0] if call.weighted == "output" else None
    y = _ops(call, given).combine(at, out[0], weights, given.plan, **_sums(call))
    values = rows.values
    kept = (
        [values] if not isinstance(values, QuantizedTensor) else [bits(values.data), values.scale]
    )
    made = tuple(x[0] for x in (*kept, rows.weights, slack.cleared(hidden, sizes)))
    amax = tuple(x[0] for x in (first, second) if x is not None)
    if given.copies is not None:
        amax = at_home(_at(call, given), given.copies, amax, jnp.maximum)
        amax = tuple(largest(x, rows_over) for x in amax)
    return Forwarded(y, made if call.saved else (), amax)


def backward(
    call: ResolvedCall,
    given: Given,
    experts: Experts,
    saved: tuple[jax.Array, ...],
    dy: jax.Array,
    grads: WeightGrads,
    over: Over,
) -> Gradients:
    call = _bound(call, experts)
    given, experts, over = _with_copies(call, given, experts, over)
    sizes, product = _sizes(given), _gemm(call)
    count, to_input = experts.wo.shape[0], call.weighted == "input"
    rows = _rows_of(call, saved, sizes) if saved else _dispatched(call, given)
    taken, _ = _first_operand(call, rows, sizes, over, iter(given.scales))
    if saved:
        hidden = saved[-1][None]
    else:
        hidden = gemm.forward(product, taken, experts.wi, experts.wi_bias, sizes)
    # Weighted activations need their own scales: the given scales are of unweighted activations.
    weights = None if to_input else rows.weights
    scale = given.scales[-1] if call.delayed[1] and call.weighted != "output" else None
    act, _ = _activated(call, hidden, weights, sizes, over, scale)
    # Gradients of the experts' outputs, unweighted.
    at, ops, plan = _at(call, given), _ops(call, given), given.plan
    d_out = ops.combine_bwd(at, dy, None, None, plan)[0][None]
    wanted = hidden.dtype if grads.dtype is None else grads.dtype
    dtype = wanted if given.copies is None else call.activation.wide
    pulled, _ = _quantized(call.recipes[1], d_out, sizes, over.rows, gradient=True)
    d_act, d_wo = gemm.pullback(product, act, experts.wo, pulled, sizes, dtype)
    d_values: tuple[jax.Array | None, ...] = ()
    if experts.values:
        d_values = activation.value_grads(call.activation, hidden, weights, sizes, d_act)
    # Other readers of hidden, above, must run first: the pullback overwrites its memory.
    after = activation.after(sizes, bits(act.data) if isinstance(act, QuantizedTensor) else act)
    d_hidden, d_weights = activation.pullback(call.activation, hidden, weights, after, d_act)
    axes = over.rows + over.inner
    pulled, _ = _quantized(call.recipes[0], d_hidden, sizes, axes, gradient=True)
    d_rows, d_wi = gemm.pullback(
        product, taken, experts.wi, pulled, sizes, dtype, paired=grads.paired
    )
    if to_input:
        assert not isinstance(rows.values, QuantizedTensor)
        d_rows, d_weights = activation.pullback(
            _linear(call), rows.values, rows.weights, sizes, d_rows
        )
    assert d_weights is not None
    d_wi_bias = d_wo_bias = None
    if experts.wi_bias is not None:
        d_wi_bias = gemm.bias_grad(product, d_hidden, sizes, count)
    if experts.wo_bias is not None and to_input:
        d_wo_bias = gemm.bias_grad(product, d_out, sizes, count)
    elif experts.wo_bias is not None:
        d_wo_bias, d_weights = _of_weighted_bias(
            experts.wo_bias, d_out, rows.weights, d_weights, sizes
        )
    if given.copies is not None:
        # Gradients of copies stay wide until they are summed.
        made = (d_wi, d_wo, d_wi_bias, d_wo_bias)
        made = at_home(_at(call, given), given.copies, made, jnp.add)
        d_wi, d_wo, d_wi_bias, d_wo_bias = made
        d_wi, d_wo = jax.tree.map(lambda x: x.astype(wanted), (d_wi, d_wo))
    d_tokens, d_topk = ops.dispatch_bwd(at, d_rows[0], d_weights[0], plan, **_sums(call))
    return Gradients(d_tokens, d_topk, d_wi, d_wo, d_wi_bias, d_wo_bias, d_values)


def _with_copies(
    call: ResolvedCall, given: Given, experts: Experts, over: Over
) -> tuple[Given, Experts, Over]:
    """Appends the weights and scales of copies of experts to those of a rank's own experts.

    A slot may hold another expert in each EP domain, so its scale covers one domain's rows.
    """
    if given.copies is None:
        return given, experts, over
    moved = (experts._replace(values=()), given.scales)
    moved = with_copies(_at(call, given), given.copies, moved)
    experts = moved[0]._replace(values=experts.values)
    return given._replace(scales=moved[1]), experts, over._replace(rows=())


def _bound(call: ResolvedCall, experts: Experts) -> ResolvedCall:
    """Returns the call with the experts' values bound to its activation."""
    bound = dataclasses.replace(call.activation, values=experts.values)
    return dataclasses.replace(call, activation=bound)


def _sizes(given: Given) -> jax.Array:
    return given.plan.group_sizes[None]


def _linear(call: ResolvedCall) -> Activation:
    return Activation("linear", False, call.activation.dtype)


def _first_operand(
    call: ResolvedCall, rows: _Rows, sizes: jax.Array, over: Over, scales: Any
) -> tuple[Any, jax.Array | None]:
    """Returns rows as the first matmul reads them, and their amax if scales are given."""
    values = rows.values
    if isinstance(values, QuantizedTensor):
        return values, None
    scale = next(scales) if call.delayed[0] else None
    if call.weighted == "input":
        operands = (_linear(call), call.recipes[0], values, rows.weights)
        return _made(*operands, sizes, over.rows, scale)
    return _quantized(call.recipes[0], values, sizes, over.rows, scale)


def _activated(
    call: ResolvedCall,
    hidden: jax.Array,
    weights: jax.Array | None,
    sizes: jax.Array,
    over: Over,
    scale: jax.Array | None,
) -> tuple[Any, jax.Array | None]:
    """Returns activations [1, C, M] as the second matmul reads them, and their amax if scales are
    given."""
    operands = (call.activation, call.recipes[1], hidden, weights)
    return _made(*operands, sizes, over.rows + over.inner, scale)


def _made(
    function: Activation,
    recipe: Recipe | None,
    rows: jax.Array,
    weights: jax.Array | None,
    sizes: jax.Array,
    axes: Axes,
    scale: jax.Array | None,
) -> tuple[Any, jax.Array | None]:
    """Activates rows and quantizes them by `recipe`: in one pass on GPUs unless `scale` is set."""
    if recipe is None or scale is not None:
        made = activation.forward(function, rows, weights, sizes)
        return _quantized(recipe, made, sizes, axes, scale)
    quantized = QuantizedActivation(function, _current(recipe), sizes.shape[-1], axes)
    return quantized_plain.forward(quantized, rows, weights, sizes), None


def _quantized(
    recipe: Recipe | None,
    rows: jax.Array,
    sizes: jax.Array,
    axes: Axes,
    scale: jax.Array | None = None,
    *,
    gradient: bool = False,
) -> tuple[Any, jax.Array | None]:
    """Returns rows [1, C, ...], or gradients of a matmul's result, as matmuls read them; and their
    amax if `scale` [L] is given."""
    if recipe is None:
        return rows, None
    given = None if scale is None else scale[None]
    options: dict[str, Any] = {"gradient": gradient, "num_experts": sizes.shape[-1], "scale": given}
    clear = slack.checked() and not gradient
    q = quantize.quantize_rows(recipe, rows, sizes, axes, clear_slack=clear, **options)
    return q, None if scale is None else q.amax


def _current(recipe: Recipe) -> Recipe:
    """Returns `recipe` with current scaling instead of delayed scaling."""
    return dataclasses.replace(recipe, delayed=False) if recipe.delayed else recipe  # type: ignore[call-arg]


def _of_weighted_bias(
    bias: jax.Array, d_out: jax.Array, weights: jax.Array, d_weights: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes gradients of `weights * bias` of each row's expert.

    Returns:
        The gradient of the bias [L, H], and `d_weights` plus the gradient of the weights [1, C].
    """
    capacity = d_out.shape[1]
    blocks = row_blocks.cut(capacity, sizes)
    wide = jnp.promote_types(d_out.dtype, jnp.float32)

    def step(block: RowBlock, made: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        expert = blocks.expert(block, bias.shape[0])
        grads = block.read(d_out[0]).astype(wide)
        weighted = grads * block.read(weights[0])[:, None]
        of_weights = (grads * row_blocks.pick(bias, expert).astype(wide)).sum(1)
        d_bias = row_blocks.add_at(made[0], expert, weighted.sum(0))
        return d_bias, block.write(made[1], block.read(made[1]) + of_weights)

    start = (jnp.zeros(bias.shape, wide), d_weights[0])
    d_bias, d_weights = row_blocks.loop(blocks, step, start, d_out, weights, bias)
    return d_bias, d_weights[None]


def _gemm(call: ResolvedCall) -> gemm.Gemm:
    return gemm.Gemm(
        call.activation.dtype,
        call.moved.row_alignment,
        clear_slack=slack.checked(),
        tf32=call.tf32,
    )


def _ops(call: ResolvedCall, given: Given) -> Any:
    return per_device_ops(call.moved.group, given.plan)


def _at(call: ResolvedCall, given: Given) -> DeviceCall:
    moved = dataclasses.replace(call.moved, clear_slack=slack.checked())
    return DeviceCall(moved, given.rank, given.layer_index)


def _dispatched(call: ResolvedCall, given: Given) -> _Rows:
    """Dispatches tokens to this device's experts; rows stay quantized if sent quantized."""
    recipe, sizes = call.sent_by, _sizes(given)
    if recipe is None:
        return _Rows(*_exchanged(call, given, given.tokens))
    tile, hidden = format_of(recipe).tile, given.tokens.shape[1]
    packed = to_bytes(*quantized_rows.quantized(recipe, given.tokens, given.plan), tile)
    raw, weights = _exchanged(call, given, packed)
    data, scale = from_bytes(raw[0], hidden, tile)
    return _Rows(_sent(recipe, data[None], scale[None], sizes), weights)


def _sent(recipe: Recipe, data: jax.Array, scale: jax.Array, sizes: jax.Array) -> QuantizedTensor:
    data = from_bits(data, recipe.data_dtype())
    return QuantizedTensor(data, scale, None, None, None, sizes, None, recipe)


def _rows_of(call: ResolvedCall, saved: tuple[jax.Array, ...], sizes: jax.Array) -> _Rows:
    """Returns the received rows and their weights, which forward saved."""
    first, *scales, weights, _ = (x[None] for x in saved)
    if call.sent_by is None:
        return _Rows(first, weights)
    return _Rows(_sent(call.sent_by, first, scales[0], sizes), weights)


def _exchanged(call: ResolvedCall, given: Given, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sends rows [T, X] and weights to the experts' devices; returns [1, C, X] and [1, C]."""
    received, weights = exchange(_at(call, given), rows, given.weights, given.plan)
    return received[None], weights[None]


def _sums(call: ResolvedCall) -> dict[str, Any]:
    return {} if call.sums is None else {"dtype": call.sums}
