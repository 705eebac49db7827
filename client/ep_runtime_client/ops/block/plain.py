"""The block call composed of the ops that it is made of, on one device: what it means.

Slabs are rows of XLA's here. The gradient is that of weights which multiply activations, whichever
they multiply forward: sum w * (act @ wo) is sum (w * act) @ wo but for rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.activation import plain as activation
from ep_runtime_client.ops.activation import quantized_plain
from ep_runtime_client.ops.activation.quantized_plain import QuantizedActivation
from ep_runtime_client.ops.block.call import Experts, Given, Gradients, Static, WeightGrads
from ep_runtime_client.ops.calls.plan import PlanArrays
from ep_runtime_client.ops.gemm import plain as gemm
from ep_runtime_client.ops.gemm.plain import Gemm
from ep_runtime_client.ops.quantize import plain as quantize
from ep_runtime_client.ops.transports import windows
from ep_runtime_client.ops.transports.choice import per_device_ops


def forward(
    static: Static, given: Given, experts: Experts, sums: Any = None
) -> tuple[jax.Array, jax.Array]:
    """As `call.forward`."""
    ops, sizes, product = _ops(static, given), given.plan.group_sizes[None], _gemm(static)
    rows, weights = _dispatched(static, given)
    rows = _quantized(static, rows, sizes)
    hidden = gemm.forward(product, rows, experts.wi, experts.wi_bias, sizes)
    act = _activated(static, hidden, weights if static.early else None, sizes)
    out = gemm.forward(product, act, experts.wo, experts.wo_bias, sizes)
    late = None if static.early else weights[0]
    named = (static.call, given.rank, given.layer_index)
    y = ops.combine(*named, out[0], late, given.plan, **_summed(sums))
    return y, hidden[0, : static.kept]


def backward(
    static: Static,
    given: Given,
    experts: Experts,
    kept: jax.Array,
    made: jax.Array,
    dy: jax.Array,
    grads: WeightGrads,
    sums: Any = None,
) -> Gradients:
    """As `call.backward`."""
    ops, sizes, product = _ops(static, given), given.plan.group_sizes[None], _gemm(static)
    named = (static.call, given.rank, given.layer_index)
    rows, weights = _dispatched(static, given)
    rows = _quantized(static, rows, sizes)
    hidden = gemm.forward(product, rows, experts.wi, experts.wi_bias, sizes)
    again = hidden[0, : kept.shape[0]]
    hidden = hidden.at[0, : kept.shape[0]].set(jnp.where(made[0] != 0, kept, again))
    d_out, _ = ops.combine_bwd(*named, dy, None, None, given.plan)
    dtype = hidden.dtype if grads.dtype is None else grads.dtype
    act = _activated(static, hidden, weights, sizes)
    given_back = _quantized(static, d_out[None], sizes, gradient=True)
    d_act, d_wo = gemm.pullback(product, act, experts.wo, given_back, sizes, dtype)
    d_hidden, d_weights = activation.pullback(static.activation, hidden, weights, sizes, d_act)
    given_back = _quantized(static, d_hidden, sizes, gradient=True)
    d_rows, d_wi = gemm.pullback(
        product, rows, experts.wi, given_back, sizes, dtype, paired=grads.paired
    )
    assert d_weights is not None
    d_wi_bias = d_wo_bias = None
    if experts.wi_bias is not None:
        d_wi_bias = gemm.bias_grad(product, d_hidden, sizes, experts.wo.shape[0])
    if experts.wo_bias is not None:
        weighted = (d_out * weights[0][:, None]).astype(d_out.dtype)
        d_wo_bias = gemm.bias_grad(product, weighted[None], sizes, experts.wo.shape[0])
        d_weights = d_weights + _times_bias(d_out, experts.wo_bias, sizes[0])
    d_rows, d_weights = d_rows[0], d_weights[0]
    d_tokens, d_topk = ops.dispatch_bwd(*named, d_rows, d_weights, given.plan, **_summed(sums))
    return Gradients(d_tokens, d_topk, d_wi, d_wo, d_wi_bias, d_wo_bias)


def _quantized(static: Static, rows: jax.Array, sizes: jax.Array, *, gradient: bool = False) -> Any:
    """Rows [1, C, ...] as a product takes them."""
    if static.recipe is None:
        return rows
    options: dict[str, Any] = {"gradient": gradient, "num_experts": sizes.shape[-1]}
    return quantize.quantize_rows(static.recipe, rows, sizes, clear_slack=False, **options)


def _activated(
    static: Static, hidden: jax.Array, weights: jax.Array | None, sizes: jax.Array
) -> Any:
    """Activations [1, C, M] as a product takes them."""
    if static.recipe is None:
        return activation.forward(static.activation, hidden, weights, sizes)
    made = QuantizedActivation(static.activation, static.recipe, sizes.shape[-1])
    return quantized_plain.forward(made, hidden, weights, sizes)


def _times_bias(grads: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
    """[C], each row [C, H] times the bias [L, H] of its expert; 0 past the last."""
    ends = jnp.cumsum(sizes)
    expert = (jnp.arange(grads.shape[0])[:, None] >= ends).sum(1)
    of_rows = bias.at[expert].get(mode="fill", fill_value=0).astype(jnp.float32)
    rows = jnp.where((expert < len(sizes))[:, None], grads.astype(jnp.float32), 0)
    return (rows * of_rows).sum(1)


def _ops(static: Static, given: Given) -> Any:
    """A plan of one node is between ranks that map each other's windows."""
    if static.call.group.node_size and isinstance(given.plan, PlanArrays):
        return windows
    return per_device_ops(static.call)


def _summed(dtype: Any) -> dict[str, Any]:
    return {} if dtype is None else {"dtype": dtype}


def _dispatched(static: Static, given: Given) -> tuple[jax.Array, jax.Array]:
    """Rows [1, C, H] and their weights [1, C]."""
    ops = _ops(static, given)
    rows, weights = ops.dispatch(
        static.call, given.rank, given.layer_index, given.tokens, given.weights, given.plan
    )
    return rows[None], weights[None]


def _gemm(static: Static) -> Gemm:
    return Gemm(static.activation.dtype, static.call.layer.alignment)
