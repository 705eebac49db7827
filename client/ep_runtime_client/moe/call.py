"""The experts of one call of `moe`: its plan, its body, and their op."""

from __future__ import annotations

import dataclasses
import math

import jax

from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.moe import bodies
from ep_runtime_client.moe import resolve as api
from ep_runtime_client.moe.bodies.protocol import Weighted
from ep_runtime_client.moe.experts import Block, Moved, bias_of, operand
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.moe.resolve import Kept, Weights
from ep_runtime_client.moe.state import MoEState
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.calls.plan import Plan
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.movement import quantized_rows
from ep_runtime_client.ops.movement.dispatch import open_call
from ep_runtime_client.ops.movement.prepare import make_plan, make_plan_with_most
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.pair import is_pair
from ep_runtime_client.ops.tracing.ambient import open_layer
from ep_runtime_client.ops.tracing.scopes import scope


def weighted(
    layer: EpLayer, block: Block, params: MoEParams, weights_at: Weighted | None
) -> Weighted:
    """Chooses what the router's weights multiply; `weights_at` as in `moe`."""
    if weights_at is None:
        # Kernels multiply weights into activations on GPUs, where windows are theirs.
        on_gpu = layer.group_spec.transport != "memfd"
        weights_at = "hidden" if on_gpu and activation_kernels.takes(block.activation) else "output"
    # A bias of wo is weighted too, so that with one the weights wait for combine.
    return "output" if weights_at == "hidden" and params.wo_bias is not None else weights_at


def _sent_by(layer: EpLayer, recipe: Recipe | None, body: str, weighted: Weighted) -> Recipe | None:
    """The recipe by which tokens are quantized before they are sent; None sends them as they are.

    It is wi's, where the rows that arrive have the same bits either way: not where weights multiply
    them before. On GPUs what arrives is not taken apart yet by a kernel that stops at the rows that
    are there.
    """
    group = layer.group_spec
    if recipe is None or bodies.has_workspace(body) or weighted == "input":
        return None
    if quantized_rows.refused(recipe, group):
        return None
    on_cpu = group.transport == "memfd" or (group.transport == "xla" and not serve.available())
    return recipe if on_cpu else None


def chosen(
    layer: EpLayer, block: Block, moved: Moved, params: MoEParams, weighted: Weighted
) -> tuple[str, str]:
    """(the body of a call of `moe`, why it is not the fast one)."""
    group = layer.group_spec
    return bodies.chosen(
        bodies.Asked(
            group=group,
            tokens=math.prod(moved.tokens.shape[:-1]),
            hidden=group.hidden_size,
            inner=params.wo.shape[1],
            experts=group.experts_per_rank,
            activation=block.activation,
            recipes=block.recipes,
            paired=is_pair(getattr(params.wi, "origin", params.wi)),
            to_input=weighted == "input",
        )
    )


def run(
    layer: EpLayer | TracedLayer,
    block: Block,
    moved: Moved,
    params: MoEParams,
    weighted: Weighted,
    kept: Kept,
    body: str,
    state: MoEState | None,
) -> tuple[jax.Array, Plan, MoEState | None]:
    """(y like the tokens, the plan, the next state)."""
    routed, dtype = moved.routed, block.activation.dtype
    opened = open_layer(layer)
    call, weights = open_call(
        opened,
        moved.tokens,
        routed.topk_idx,
        routed.topk_weights,
        handle=moved.handle,
        capacity=moved.capacity,
        tokens_spec=moved.tokens_spec,
    )
    assert weights is not None
    call = dataclasses.replace(call, own_alignment=bodies.own_alignment(body))
    if bodies.has_workspace(body):
        plan, most = make_plan_with_most(call, opened[1], routed.topk_idx)
    else:
        plan = make_plan(call, opened[1], routed.topk_idx)
        most = plan.arrays.num_recv
    if call.layout.tokens_per_rank == 0:
        return moved.tokens, plan, state
    recipes = block.recipes
    experts = Weights(
        operand(params.wi, recipes[0], dtype),
        operand(params.wo, recipes[1], dtype),
        bias_of(block, "wi_bias", params),
        bias_of(block, "wo_bias", params),
        block.specs["wi"],
        block.specs["wo"],
    )
    with scope("experts", call.layer):
        y, states = api.run(
            opened,
            call,
            moved.tokens,
            routed.topk_idx,
            weights,
            plan,
            most,
            experts,
            body=body,
            activation=block.activation,
            weighted=weighted,
            kept=kept,
            recipes=recipes,
            sent_by=_sent_by(call.layer, recipes[0], body, weighted),
            state=(None, None) if state is None else (state.wi, state.wo),
            values=block.values,
        )
    return y, plan, None if state is None else MoEState(*states)
