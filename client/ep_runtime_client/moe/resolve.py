"""run: tokens to their experts on all ranks and back, as one op forward and one backward."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ep_runtime import workspace
from ep_runtime.workspace import BlockSizes
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.moe import bodies, gradient
from ep_runtime_client.moe.bodies.cuda import scaling_of
from ep_runtime_client.moe.bodies.protocol import Static, Weighted, WorkspaceRows
from ep_runtime_client.moe.gradient import BlockCall, Operands
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import Plan
from ep_runtime_client.ops.gemm import kernels_32, weight_entries
from ep_runtime_client.ops.gemm.api import blocks_of, with_whole_blocks
from ep_runtime_client.ops.gemm.checks import check_experts
from ep_runtime_client.ops.gemm.quantized_operands import origin_of, settled
from ep_runtime_client.ops.movement import per_device, token_watch
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize.delayed import Delayed, check_state
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.packing import Kernel, Matrix
from ep_runtime_client.ops.quantize.pair import Pair, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing import again


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
    opened: tuple[EpLayer, jax.Array, Mesh],
    call: Call,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    plan: Plan,
    most: jax.Array,
    weights: Weights,
    *,
    body: str,
    activation: Activation,
    weighted: Weighted,
    kept: Kept,
    recipes: tuple[Recipe | None, Recipe | None],
    sent_by: Recipe | None,
    state: MoEStates,
    values: tuple[jax.Array, ...],
) -> tuple[jax.Array, MoEStates]:
    """Tokens' experts' answers, summed.

    Args:
        opened: the layer, its index and its mesh.
        call: that the plan was made by.
        tokens: [..., H] in the activation's dtype.
        topk_idx: [..., K] that the plan was made of.
        topk_weights: [..., K].
        plan: of `make_plan`, or of `make_plan_with_most` for a body that has a workspace.
        most: int32 [R, 1], what that returned; any for other bodies.
        weights: of the experts.
        body: name of the body.
        activation: between the products.
        weighted: what the weights of slots multiply.
        kept: for backward.
        recipes: that quantize the operands of each product, or None.
        sent_by: recipe that quantizes tokens before they are sent, or None.
        state: of each product whose recipe is delayed, or None.
        values: that a learned activation reads.

    Returns:
        An array like tokens, differentiable in tokens, topk_weights, the weights and the values;
        and the next states.
    """
    static, index, mesh = opened
    group = static.group_spec
    lies = (_entries(weights.wi, weights.wi_spec), _entries(weights.wo, weights.wo_spec))
    arrays = (weights.wi, weights.wo, weights.wi_bias, weights.wo_bias)
    of_weights = [x for x in arrays if x is not None]
    values = tuple(x.reshape(-1) for x in values)
    operands = [index, tokens, topk_weights, topk_idx, plan.arrays, *of_weights, *values]
    where = regions.of_opened(static, mesh, operands, known=None not in lies)
    moved = call.varied(*operands)
    room = None
    if bodies.has_workspace(body):
        room = _workspace(moved, activation, weights, kept, recipes[0])
    on_device = Static(
        moved,
        body,
        activation,
        weighted,
        recipes,
        sent_by,
        saves=kept.keep == "first",
        tf32=kernels_32.allowed(),
        workspace=room,
    )
    placed = _placed(where, lies, weights)
    kernels = tuple(zip(arrays[:2], placed[:2], recipes, strict=True))
    taken = tuple(_taken(where, *each) for each in kernels)
    biases = (weights.wi_bias, weights.wo_bias)
    graded: tuple[Any, ...] = (origin_of(weights.wi), origin_of(weights.wo), *biases)
    histories = [
        _Histories.of(where, *each, plan.arrays.group_sizes)
        for each in zip(kernels, state, strict=True)
    ]
    wi, wo, wi_bias, wo_bias = (
        on_mesh.settle(where, x, of_each(each) if isinstance(x, Pair) else each)
        for x, each in zip(graded, placed, strict=True)
    )
    came = [settled(where, x, each) for x, each in zip(arrays[:2], placed[:2], strict=True)]
    given = Operands(
        again.told(index, plan.arrays.kept),
        _on_tokens(moved, "topk_idx", _narrow(group.num_experts, topk_idx)),
        token_watch.watched(moved, _on_tokens(moved, "tokens", tokens)),
        _on_tokens(moved, "topk_weights", topk_weights.astype(jnp.float32)),
        most,
        plan.arrays,
        wi,
        wo,
        wi_bias,
        wo_bias,
        came[0],
        came[1],
        (histories[0].scales, histories[1].scales),
        tuple(on_mesh.settle(where, x, ((),)) for x in values),
    )
    learned = [x for x in values if jnp.issubdtype(x.dtype, jnp.inexact)]
    types = tuple(map(regions.type_of, jax.tree.leaves((tokens, topk_weights, *graded, learned))))
    dtypes = tuple(None if x is None else jnp.dtype(x.dtype) for x in graded[:2])
    paired = isinstance(graded[0], Pair)
    block = BlockCall(where, on_device, placed, (taken[0], taken[1]), types, paired, dtypes)
    check_experts(where, _num_experts(block, given), plan.arrays.group_sizes, group.num_experts)
    y, amax = gradient.run(block, given)
    states = tuple(each.next(found) for each, found in zip(histories, amax, strict=True))
    if where.manual:
        # Over a manual axis JAX's own sum is taken, which knows how its gradient is counted.
        split = tuple(axis for axis in gradient.inner_axes(block, given) if axis in where.manual)
        y = lax.psum(y, split) if split else y
    return y, (states[0], states[1])


MoEStates = tuple[DelayedState | None, DelayedState | None]


@dataclasses.dataclass(frozen=True)
class _Histories:
    """The state of one product, if its recipe is delayed.

    Attributes:
        delayed: whose histories are used where.
        state: as the call got it.
        scales: of rows f32 [R, L] and of weights [E].
    """

    delayed: Delayed | None = None
    state: DelayedState | None = None
    scales: tuple[jax.Array, jax.Array] | None = None

    @classmethod
    def of(
        cls,
        where: Where,
        kernel: tuple[Kernel, Entries, Recipe | None],
        state: DelayedState | None,
        group_sizes: jax.Array,
    ) -> _Histories:
        if state is None:
            return cls()
        weight, entries, recipe = kernel
        assert recipe is not None
        assert where.roles is not None
        experts = on_mesh.whole_shape(where, weight.shape, entries)[0]
        rows = padded((where.roles.slab, (), entries[1]), 3)
        delayed = Delayed.of(where, recipe, experts, group_sizes.shape, rows, entries)
        check_state(recipe, state, experts)
        state = state if where.manual else on_mesh.settle(where, state, ())
        return cls(delayed, state, on_mesh.settle(where, delayed.scales(state), ()))

    def next(self, amax: tuple[jax.Array, jax.Array] | None) -> DelayedState | None:
        if self.delayed is None or self.state is None or amax is None:
            return None
        return self.delayed.next(self.state, *amax)


def _taken(where: Where, weight: Kernel, entries: Entries, recipe: Recipe | None) -> Entries:
    """Entries of a weight as it is multiplied: off axes that leave a recipe no whole blocks."""
    if where.roles is None or recipe is None or isinstance(weight, QuantizedTensor):
        return entries
    shape = on_mesh.whole_shape(where, weight.shape, entries)
    return with_whole_blocks(where, entries, shape, blocks_of(recipe, weight))


def _workspace(
    call: Call, activation: Activation, weights: Weights, kept: Kept, recipe: Recipe | None
) -> WorkspaceRows:
    group, layer = call.group, call.layer
    sizes = BlockSizes(
        tokens=group.num_nodes * call.layout.tokens_per_rank,
        top_k=layer.top_k,
        ep_size=group.ranks_per_node,
        nodes=group.num_nodes,
        experts=group.experts_per_rank,
        capacity=call.capacity,
        alignment=call.row_alignment,
        hidden_size=group.hidden_size,
        mlp_dim=weights.wo.shape[1],
        gated=activation.gated,
        element_bytes=jnp.dtype(activation.dtype).itemsize,
        scaling=scaling_of(recipe),
    )
    found = workspace.of_block(sizes, group.workspace, keep=kept.keep, keep_factor=kept.factor)
    return WorkspaceRows(sizes, found.rows, found.kept_rows)


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
    return per_device.place(call, name, array, call.layout.spec())


def _narrow(experts: int, topk_idx: jax.Array) -> jax.Array:
    """int32; a 64-bit number must not wrap into range."""
    if topk_idx.dtype == jnp.int32:
        return topk_idx
    return jnp.clip(topk_idx, -1, experts).astype(jnp.int32)


def _num_experts(call: BlockCall, given: Operands) -> int:
    return on_mesh.whole_shape(call.where, given.kernels[1].shape, call.lies[1])[0]
