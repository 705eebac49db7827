"""The block as ops of their own: dispatch, products, activation and combine on slabs of rows."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime_client.base.layers import EpLayer, TracedLayer, resolve
from ep_runtime_client.block.moe_experts import Block, Moved, Weighted, bias_of, operand
from ep_runtime_client.block.params import MoEParams
from ep_runtime_client.block.state import MoEState, keeps
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation import quantized_op
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.activation.op import activate
from ep_runtime_client.ops.calls.plan import Dispatched, Plan
from ep_runtime_client.ops.gemm.api import multiply
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.movement import quantized_rows
from ep_runtime_client.ops.movement.combine import merge
from ep_runtime_client.ops.movement.dispatch import dispatch
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.packing import Matrix
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.tracing.varying import Axes


def run(
    layer: EpLayer | TracedLayer,
    block: Block,
    moved: Moved,
    params: MoEParams,
    weighted: Weighted,
    state: MoEState | None,
) -> tuple[jax.Array, Plan, MoEState | None]:
    """(y like the tokens, the plan, the next state)."""
    sent_by = _sent_by(resolve(layer)[0], block, weighted)
    dispatched = dispatch(
        layer,
        moved.tokens,
        moved.routed.topk_idx,
        moved.routed.topk_weights,
        handle=moved.handle,
        capacity=moved.capacity,
        tokens_spec=moved.tokens_spec,
        recipe=sent_by,
    )
    expert_out, state = _run_experts(layer, block, dispatched, params, weighted, state)
    weights = dispatched.weights if weighted == "outputs" else None
    # The gradients of slack go to matmuls that stop before it, and to dispatch, which reads rows.
    y = merge(layer, dispatched, expert_out, weights, clear_slack=False)
    return y, dispatched.plan, state


def weighted(
    layer: EpLayer, block: Block, params: MoEParams, early: bool | None, *, to_input: bool
) -> Weighted:
    """What the router's weights multiply; `early` and `to_input` as in `moe`."""
    if to_input:
        return "rows"
    if early is None:
        # Kernels multiply weights into activations on GPUs, where windows are theirs.
        on_gpu = layer.group_spec.transport != "memfd"
        early = on_gpu and activation_kernels.takes(block.activation)
    # A bias of wo is weighted too, so that beside one the weights wait for combine.
    return "activations" if early and params.wo_bias is None else "outputs"


def _sent_by(layer: EpLayer, block: Block, weighted: Weighted) -> Recipe | None:
    """The recipe by which tokens are quantized before they are sent; None sends them as they are.

    It is wi's, where the rows that arrive have the same bits either way: not where weights multiply
    them before. On GPUs what arrives is not taken apart yet by a kernel that stops at the rows that
    are there.
    """
    recipe, group = block.recipes[0], layer.group_spec
    if recipe is None or weighted == "rows" or quantized_rows.refused(recipe, group):
        return None
    on_cpu = group.transport == "memfd" or (group.transport == "xla" and not serve.available())
    return recipe if on_cpu else None


def _run_experts(
    layer: EpLayer | TracedLayer,
    block: Block,
    dispatched: Dispatched,
    params: MoEParams,
    weighted: Weighted,
    state: MoEState | None,
) -> tuple[jax.Array, MoEState | None]:
    """The two matmuls of every expert: ([R, C, H] -> [R, C, H], the next state)."""
    sizes, dtype = dispatched.group_sizes, block.activation.dtype
    (wi_recipe, wo_recipe), static = block.recipes, resolve(layer)[0]
    wi_bias, wo_bias = (bias_of(block, name, params) for name in ("wi_bias", "wo_bias"))
    with scope("experts", static):
        rows: Matrix = dispatched.tokens  # quantized, or arrays
        if weighted == "rows":
            linear, weights = Activation("linear", False, dtype), dispatched.weights
            rows = _activated(layer, linear, wi_recipe, dispatched.tokens, weights, sizes, ())
        hidden = multiply(
            rows,
            operand(params.wi, wi_recipe, dtype),
            sizes,
            layer=layer,
            bias=wi_bias,
            recipe=wi_recipe,
            out_dtype=dtype,
            rhs_spec=block.specs["wi"],
            clear_slack=False,  # the gradients of dispatch and of weighted rows do not read it
            state=None if state is None else state.wi,
            beside="dispatch",
        )
        hidden, wi_state = _and_state(hidden, wi_recipe)
        hidden = checkpoint_name(hidden, "ep_wi")
        inner = _activated(
            layer,
            block.activation,
            wo_recipe,
            hidden,
            dispatched.weights if weighted == "activations" else None,
            sizes,
            block.inner_axes,
        )
        out = multiply(
            inner,
            operand(params.wo, wo_recipe, dtype),
            sizes,
            layer=layer,
            bias=wo_bias,
            recipe=wo_recipe,
            out_dtype=dtype,
            rhs_spec=block.specs["wo"],
            clear_slack=False,  # the activation's does not
            state=None if state is None else state.wo,
            beside="combine",
        )
        out, wo_state = _and_state(out, wo_recipe)
        tagged: jax.Array = checkpoint_name(out, "ep_wo")
        return tagged, None if state is None else MoEState(wi_state, wo_state)


def _and_state(result: Any, recipe: Recipe | None) -> tuple[jax.Array, DelayedState | None]:
    """What `multiply` returned, whether or not its recipe keeps a state."""
    rows, state = result if keeps(recipe) else (result, None)
    return rows, state


def _activated(
    layer: EpLayer | TracedLayer,
    static: Activation,
    recipe: Recipe | None,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    sizes: jax.Array,
    inner_axes: Axes | None,
) -> Matrix:
    """What a matmul takes: rows, or quantized ones where that saves a pass."""
    operands = (hidden, row_weights, sizes)
    if recipe is not None and quantized_op.takes(static, recipe, hidden):
        return quantized_op.activate(layer, static, recipe, *operands, inner_axes=inner_axes)
    return activate(layer, static, *operands, inner_axes=inner_axes)
