"""run: tokens to their experts on all ranks and back, as one op forward and one backward."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ep_runtime import workspace
from ep_runtime.workspace import BlockSizes
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.block import takes, vjp
from ep_runtime_client.ops.block.call import Static, scaling_of
from ep_runtime_client.ops.block.vjp import BlockCall, Operands
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import Plan
from ep_runtime_client.ops.gemm import weight_entries
from ep_runtime_client.ops.gemm.checks import check_experts
from ep_runtime_client.ops.gemm.quantized_operands import origin_of, settled
from ep_runtime_client.ops.movement import per_device, token_watch
from ep_runtime_client.ops.partitioning import regions, spread
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.packing import Kernel, Matrix
from ep_runtime_client.ops.quantize.pair import Pair, of_each
from ep_runtime_client.ops.tracing import again
from ep_runtime_client.ops.tracing.ambient import open_layer


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of the experts, and how they lie where one is told.

    In the dtype of rows but for the biases, and what a recipe quantizes or has quantized.

    Attributes:
        wi: [E, H, *N'], or a Pair, or quantized in one array.
        wo: [E, M, H], or quantized.
        wi_bias: [E, *N'], or None.
        wo_bias: [E, H], or None; weights do not multiply activations then.
        wi_spec: PartitionSpec of wi, or of each of a pair, or None.
        wo_spec: likewise.
    """

    wi: Kernel
    wo: Matrix
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None
    wi_spec: PartitionSpec | None = None
    wo_spec: PartitionSpec | None = None


class Kept(NamedTuple):
    """What forward keeps for backward: `keep` and `keep_factor` of `ep.moe`."""

    keep: str
    factor: float


def run(
    layer: EpLayer | TracedLayer,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    plan: Plan,
    most: jax.Array,
    weights: Weights,
    *,
    activation: Activation,
    early: bool,
    kept: Kept,
    recipe: Recipe | None = None,
) -> jax.Array:
    """Tokens' experts' answers, summed.

    Args:
        layer: of the plan.
        tokens: [..., H] in the activation's dtype.
        topk_idx: [..., K] that the plan was made of.
        topk_weights: [..., K].
        plan: of `make_plan_with_most`, with `most`.
        most: int32 [R, 1].
        weights: of the experts.
        activation: between the products.
        early: whether weights multiply activations instead of outputs.
        kept: for backward.
        recipe: that quantizes the operands of both products, or None.

    Returns:
        Like tokens. Differentiable in tokens, topk_weights and the weights.
    """
    static, index, mesh = open_layer(layer)
    group = static.group_spec
    lies = (_entries(weights.wi, weights.wi_spec), _entries(weights.wo, weights.wo_spec))
    arrays = (weights.wi, weights.wo, weights.wi_bias, weights.wo_bias)
    of_weights = [x for x in arrays if x is not None]
    operands = [tokens, topk_weights, topk_idx, plan.arrays, *of_weights]
    where = regions.of_layer(layer, operands, known=None not in lies)
    moved = per_device.varied(Call(plan.meta, mesh, where.manual), index, *operands)
    rows = _rows(moved, activation, weights, kept, recipe)
    on_device = Static(moved, activation, early, *rows, recipe)
    placed = _placed(where, lies, weights)
    biases = (weights.wi_bias, weights.wo_bias)
    graded: tuple[Any, ...] = (origin_of(weights.wi), origin_of(weights.wo), *biases)
    given = Operands(
        again.told(index, plan.arrays.kept),
        _on_tokens(moved, "topk_idx", _narrow(group.num_experts, topk_idx)),
        token_watch.watched(moved, _on_tokens(moved, "tokens", tokens)),
        _on_tokens(moved, "topk_weights", topk_weights.astype(jnp.float32)),
        most,
        plan.arrays,
        *(
            spread.settle(where, x, of_each(each) if isinstance(x, Pair) else each)
            for x, each in zip(graded, placed, strict=True)
        ),
        *(settled(where, x, each) for x, each in zip(arrays[:2], placed[:2], strict=True)),
    )
    types = tuple(map(regions.type_of, jax.tree.leaves((tokens, topk_weights, *graded))))
    dtypes = tuple(None if x is None else jnp.dtype(x.dtype) for x in graded[:2])
    paired = isinstance(graded[0], Pair)
    call = BlockCall(where, on_device, takes.on_gpu(group), placed, types, paired, dtypes)
    check_experts(where, _num_experts(call, given), plan.arrays.group_sizes, group.num_experts)
    y = vjp.run(call, given)
    if not where.manual:
        return y
    # Over a manual axis JAX's own sum is taken, which knows how its gradient is counted.
    split = tuple(axis for axis in vjp.inner_axes(call, given) if axis in where.manual)
    return lax.psum(y, split) if split else y


def _rows(
    call: Call, activation: Activation, weights: Weights, kept: Kept, recipe: Recipe | None
) -> tuple[BlockSizes, int, int]:
    """Sizes of a call with whole weights; rows of its workspace, and those it keeps."""
    group, layer = call.group, call.layer
    sizes = BlockSizes(
        tokens=group.num_nodes * call.layout.tokens_per_rank,
        top_k=layer.top_k,
        ep_size=group.ranks_per_node,
        nodes=group.num_nodes,
        experts=group.experts_per_rank,
        capacity=call.capacity,
        alignment=layer.alignment,
        hidden_size=group.hidden_size,
        mlp_dim=weights.wo.shape[1],
        gated=activation.gated,
        element_bytes=jnp.dtype(activation.dtype).itemsize,
        scaling=scaling_of(recipe),
    )
    found = workspace.of_block(sizes, group.workspace, keep=kept.keep, keep_factor=kept.factor)
    return sizes, found.rows, found.kept_rows


def _entries(weight: Kernel, spec: PartitionSpec | None) -> Entries | None:
    """Entries of a weight where they are known, per dim of the one array that a pair stands for."""
    if spec is None:
        return weight_entries.known(weight)
    return weight_entries.told(weight, spec)


def _placed(
    where: Where, lies: tuple[Entries | None, ...], weights: Weights
) -> tuple[Entries, Entries, Entries, Entries]:
    """Entries of wi, wo and their biases; nothing where they are not known."""
    arrays = (weights.wi, weights.wo)
    wi, wo = (each or padded((), x.ndim) for each, x in zip(lies, arrays, strict=True))
    if where.manual:
        specs = (weights.wi_spec, weights.wo_spec)
        told = (weight_entries.told(*each) for each in zip(arrays, specs, strict=True))
        wi, wo = (weight_entries.with_manual_experts(where, each) for each in told)
    return wi, wo, _of_bias(where, weights.wi_bias, wi), _of_bias(where, weights.wo_bias, wo)


def _of_bias(where: Where, bias: jax.Array | None, weight: Entries) -> Entries:
    if bias is None or where.manual:  # of as many experts as the weight here, elsewhere whole
        return padded(weight[:1], len(weight) - 1)
    # One of unknown layout lies as its weight does.
    known = regions.known_entries(bias, bias.ndim)
    return (weight[0], *weight[2:]) if known is None else known


def _on_tokens(call: Call, name: str, array: jax.Array) -> jax.Array:
    """`array` laid out and typed as tokens are."""
    return per_device.vary(call, per_device.place(call, name, array, call.layout.spec()))


def _narrow(experts: int, topk_idx: jax.Array) -> jax.Array:
    """int32; a 64-bit number must not wrap into range."""
    if topk_idx.dtype == jnp.int32:
        return topk_idx
    return jnp.clip(topk_idx, -1, experts).astype(jnp.int32)


def _num_experts(call: BlockCall, given: Operands) -> int:
    return spread.whole_shape(call.where, given.kernels[1].shape, call.lies[1])[0]
