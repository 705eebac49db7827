"""The block as one call forward and one backward, where `ops/block/takes.py` has it so."""

from __future__ import annotations

import math

import jax

from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.block import moe_checks
from ep_runtime_client.block.moe_experts import Block, Moved, Weighted, bias_of, operand
from ep_runtime_client.block.params import MoEParams
from ep_runtime_client.ops.block import api, takes
from ep_runtime_client.ops.block.api import Kept, Weights
from ep_runtime_client.ops.calls.plan import Plan
from ep_runtime_client.ops.movement.dispatch import open_call
from ep_runtime_client.ops.movement.prepare import make_plan_with_most
from ep_runtime_client.ops.quantize.pair import is_pair


def refused(
    layer: EpLayer, block: Block, moved: Moved, params: MoEParams, weighted: Weighted
) -> str:
    """Why a call of `moe` keeps to slabs: a name in `takes.REASONS`, or nothing."""
    group = layer.group_spec
    return takes.refused(
        takes.Asked(
            group=group,
            tokens=math.prod(moved.tokens.shape[:-1]),
            hidden=group.hidden_size,
            inner=params.wo.shape[1],
            experts=group.experts_per_rank,
            activation=block.activation,
            recipes=moe_checks.quantizing(block.recipes),
            paired=is_pair(getattr(params.wi, "origin", params.wi)),
            input_weights=weighted == "rows",
        )
    )


def run(
    layer: EpLayer | TracedLayer,
    block: Block,
    moved: Moved,
    params: MoEParams,
    weighted: Weighted,
    kept: Kept,
) -> tuple[jax.Array, Plan]:
    """(y like the tokens, the plan)."""
    routed, dtype = moved.routed, block.activation.dtype
    call, index, weights = open_call(
        layer,
        moved.tokens,
        routed.topk_idx,
        routed.topk_weights,
        handle=moved.handle,
        capacity=moved.capacity,
        tokens_spec=moved.tokens_spec,
    )
    assert weights is not None
    plan, most = make_plan_with_most(call, index, routed.topk_idx)
    recipe = moe_checks.quantizing(block.recipes)[0]
    experts = Weights(
        operand(params.wi, recipe, dtype),
        operand(params.wo, recipe, dtype),
        bias_of(block, "wi_bias", params),
        bias_of(block, "wo_bias", params),
        block.specs["wi"],
        block.specs["wo"],
    )
    y = api.run(
        layer,
        moved.tokens,
        routed.topk_idx,
        weights,
        plan,
        most,
        experts,
        activation=block.activation,
        early=weighted == "activations",
        kept=kept,
        recipe=recipe,
    )
    return y, plan
