"""The experts of one call of `moe`: its plan, its body, and the call resolved for its op."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ep_runtime import workspace
from ep_runtime.workspace import BlockSizes
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.moe import bodies, gradient
from ep_runtime_client.moe.bodies.cuda import scaling_of
from ep_runtime_client.moe.experts import Block, Moved, bias_of, operand
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.moe.resolved import Operands, ResolvedCall, Weighted, WorkspaceRows
from ep_runtime_client.moe.state import MoEState
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import Plan
from ep_runtime_client.ops.gemm import kernels_32, weight_entries
from ep_runtime_client.ops.gemm.api import blocks_of, with_whole_blocks
from ep_runtime_client.ops.gemm.checks import check_experts
from ep_runtime_client.ops.gemm.quantized_operands import origin_of, settled
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.movement import per_device, quantized_rows, token_watch
from ep_runtime_client.ops.movement.dispatch import open_call
from ep_runtime_client.ops.movement.prepare import make_plan, make_plan_with_most
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize.delayed import Delayed, check_state
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.packing import Kernel
from ep_runtime_client.ops.quantize.pair import Pair, is_pair, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing import again
from ep_runtime_client.ops.tracing.ambient import open_layer
from ep_runtime_client.ops.tracing.scopes import scope


class Kept(NamedTuple):
    """The rows that forward saves for backward: `keep` and `keep_factor` of `ep.moe`."""

    keep: str
    factor: float


def weighted(
    layer: EpLayer, block: Block, params: MoEParams, weights_at: Weighted | None
) -> Weighted:
    """Chooses what the router's weights multiply; `weights_at` as in `moe`."""
    if weights_at is None:
        # Kernels multiply weights into activations on GPUs, where windows are theirs.
        on_gpu = layer.group_spec.transport != "memfd"
        weights_at = (
            "hidden" if on_gpu and activation_kernels.supports(block.activation) else "output"
        )
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
    routed, opened = moved.routed, open_layer(layer)
    call, topk_weights = open_call(
        opened,
        moved.tokens,
        routed.topk_idx,
        routed.topk_weights,
        handle=moved.handle,
        capacity=moved.capacity,
        tokens_spec=moved.tokens_spec,
    )
    call = dataclasses.replace(call, own_alignment=bodies.own_alignment(body))
    if bodies.has_workspace(body):
        plan, most = make_plan_with_most(call, opened[1], routed.topk_idx)
    else:
        plan = make_plan(call, opened[1], routed.topk_idx)
        most = plan.arrays.num_recv
    if call.layout.tokens_per_rank == 0:
        return moved.tokens, plan, state
    assert topk_weights is not None
    recipes, dtype = block.recipes, block.activation.dtype
    given = Operands(
        opened[1],
        routed.topk_idx,
        moved.tokens,
        topk_weights,
        most,
        plan.arrays,
        # In the dtype of rows but for the biases, and what a recipe quantizes or has quantized.
        wi=operand(params.wi, recipes[0], dtype),
        wo=operand(params.wo, recipes[1], dtype),
        wi_bias=bias_of(block, "wi_bias", params),
        wo_bias=bias_of(block, "wo_bias", params),
        values=tuple(x.reshape(-1) for x in block.values),
    )
    with scope("experts", call.layer):
        y, states = _run_op(call, block, weighted, kept, body, given, state)
    return y, plan, None if state is None else MoEState(*states)


def _run_op(
    call: Call,
    block: Block,
    weighted: Weighted,
    kept: Kept,
    body: str,
    given: Operands,
    state: MoEState | None,
) -> tuple[jax.Array, MoEStates]:
    """Tokens' experts' answers, summed, and the next states."""
    resolved = _resolved(call, block, weighted, kept, body, given)
    where, sizes = resolved.where, given.plan.group_sizes
    histories = [
        _History.of(resolved, which, kernel, sizes, each)
        for which, (kernel, each) in enumerate(
            zip(given.kernels, (None, None) if state is None else (state.wi, state.wo), strict=True)
        )
    ]
    placed = _placed(resolved, given)._replace(scales=tuple(each.scales for each in histories))
    experts = on_mesh.whole_shape(where, given.wo.shape, resolved.sharding[1])[0]
    check_experts(where, experts, sizes, call.group.num_experts)
    y, amax = gradient.run(resolved, placed)
    first, second = (each.next(found) for each, found in zip(histories, amax, strict=True))
    if where.manual:
        # Over a manual axis JAX's own sum is taken, which knows how its gradient is counted.
        inner = gradient.inner_axes(resolved, placed)
        split = tuple(axis for axis in inner if axis in where.manual)
        y = lax.psum(y, split) if split else y
    return y, (first, second)


def _resolved(
    call: Call, block: Block, weighted: Weighted, kept: Kept, body: str, given: Operands
) -> ResolvedCall:
    """What is static about a call on these operands."""
    mesh, recipes = call.where.mesh, block.recipes
    assert isinstance(mesh, Mesh)
    kernels = tuple(zip(given.kernels, (block.specs["wi"], block.specs["wo"]), strict=True))
    known = [_known(*each) for each in kernels]
    where = regions.of_opened(call.layer, mesh, given, known=None not in known)
    where = dataclasses.replace(where, tokens=call.layout.axes)
    if where.manual:
        told = (weight_entries.told(*each) for each in kernels)
        known = [weight_entries.with_manual_experts(where, each) for each in told]
    wi, wo = (each or padded((), x.ndim) for each, x in zip(known, given.kernels, strict=True))
    origins = (origin_of(given.wi), origin_of(given.wo))
    learned = [x for x in given.values if jnp.issubdtype(x.dtype, jnp.inexact)]
    graded = (given.tokens, given.weights, *origins, given.wi_bias, given.wo_bias, learned)
    return ResolvedCall(
        where,
        call.varied(given),
        body,
        block.activation,
        weighted,
        recipes,
        _sent_by(call.layer, recipes[0], body, weighted),
        (wi, wo, _of_bias(where, given.wi_bias, wi), _of_bias(where, given.wo_bias, wo)),
        (_taken(where, given.wi, wi, recipes[0]), _taken(where, given.wo, wo, recipes[1])),
        types=tuple(map(regions.type_of, jax.tree.leaves(graded))),
        paired=isinstance(origins[0], Pair),
        dtypes=tuple(None if x is None else jnp.dtype(x.dtype) for x in origins),
        saves=kept.keep == "first",
        tf32=kernels_32.allowed(),
        workspace=_workspace(call, block, given, kept) if bodies.has_workspace(body) else None,
    )


def _placed(call: ResolvedCall, given: Operands) -> Operands:
    """Operands typed and placed for the op."""
    moved, where = call.moved, call.where
    origins = (origin_of(given.wi), origin_of(given.wo), given.wi_bias, given.wo_bias)
    wi, wo, wi_bias, wo_bias = (
        on_mesh.settle(where, x, of_each(entries or ()) if isinstance(x, Pair) else entries or ())
        for x, entries in zip(origins, call.sharding, strict=True)
    )
    tokens = _on_tokens(moved, "tokens", given.tokens)
    return given._replace(
        layer_index=again.told(given.layer_index, given.plan.kept),
        topk_idx=_on_tokens(moved, "topk_idx", _narrow(moved.group.num_experts, given.topk_idx)),
        tokens=token_watch.watched(moved, tokens),
        weights=_on_tokens(moved, "topk_weights", given.weights),
        wi=wi,
        wo=wo,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        wi8=settled(where, given.wi, call.sharding[0]),
        wo8=settled(where, given.wo, call.sharding[1]),
        values=tuple(on_mesh.settle(where, x, ((),)) for x in given.values),
    )


MoEStates = tuple[DelayedState | None, DelayedState | None]


@dataclasses.dataclass(frozen=True)
class _History:
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
        call: ResolvedCall,
        which: int,
        kernel: Kernel,
        group_sizes: jax.Array,
        state: DelayedState | None,
    ) -> _History:
        if state is None:
            return cls()
        where, entries, recipe = call.where, call.sharding[which], call.recipes[which]
        assert recipe is not None
        assert where.roles is not None
        assert entries is not None
        experts = on_mesh.whole_shape(where, kernel.shape, entries)[0]
        rows = padded((where.roles.slab, (), entries[1]), 3)
        delayed = Delayed.of(where, recipe, experts, group_sizes.shape, rows, entries)
        check_state(recipe, state, experts)
        state = state if where.manual else on_mesh.settle(where, state, ())
        return cls(delayed, state, on_mesh.settle(where, delayed.scales(state), ()))

    def next(self, amax: tuple[jax.Array, jax.Array] | None) -> DelayedState | None:
        if self.delayed is None or self.state is None or amax is None:
            return None
        return self.delayed.next(self.state, *amax)


def _taken(where: Partitioning, weight: Kernel, entries: Entries, recipe: Recipe | None) -> Entries:
    """Entries of a weight as it is multiplied: off axes that leave a recipe no whole blocks."""
    if where.roles is None or recipe is None or isinstance(weight, QuantizedTensor):
        return entries
    shape = on_mesh.whole_shape(where, weight.shape, entries)
    return with_whole_blocks(where, entries, shape, blocks_of(recipe, weight))


def _workspace(call: Call, block: Block, given: Operands, kept: Kept) -> WorkspaceRows:
    group, layer, activation = call.group, call.layer, block.activation
    sizes = BlockSizes(
        tokens=group.num_nodes * call.layout.tokens_per_rank,
        top_k=layer.top_k,
        ep_size=group.ranks_per_node,
        nodes=group.num_nodes,
        experts=group.experts_per_rank,
        capacity=call.capacity,
        alignment=call.row_alignment,
        hidden_size=group.hidden_size,
        mlp_dim=given.wo.shape[1],
        gated=activation.gated,
        element_bytes=jnp.dtype(activation.dtype).itemsize,
        scaling=scaling_of(block.recipes[0]),
    )
    found = workspace.of_block(sizes, group.workspace, keep=kept.keep, keep_factor=kept.factor)
    return WorkspaceRows(sizes, found.rows, found.kept_rows)


def _known(weight: Kernel, spec: PartitionSpec | None) -> Entries | None:
    """Entries of a weight if they are known, per dim of the one array that a pair stands for."""
    if spec is None:
        return weight_entries.known(weight)
    return weight_entries.told(weight, spec)


def _of_bias(where: Partitioning, bias: jax.Array | None, weight: Entries) -> Entries | None:
    if bias is None:
        return None
    if where.manual:  # of as many experts as the weight here, elsewhere whole
        return padded(weight[:1], len(weight) - 1)
    # One of unknown layout is sharded as its weight.
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
