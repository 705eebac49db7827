"""Plans one call of `moe`, chooses its body, and resolves the call for its op."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ep_runtime import device_layout, workspace
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.moe import bodies, copies, gradient
from ep_runtime_client.moe.bodies.cuda import scaling_of
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.moe.resolved import Operands, ResolvedCall, Weighted, WorkspaceRows
from ep_runtime_client.moe.state import MoEState
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.gemm import kernels_32, quantized_operands
from ep_runtime_client.ops.gemm.api import entries_of_bias, with_whole_blocks
from ep_runtime_client.ops.gemm.checks import check_experts
from ep_runtime_client.ops.gemm.quantized_operands import origin_of, settled, with_gradient
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.kernels.slots import as_int32
from ep_runtime_client.ops.movement import per_device, quantized_rows
from ep_runtime_client.ops.movement.prepare import check_width, known_specs, make_call, make_plan
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.roles import entries_of, gather, padded
from ep_runtime_client.ops.quantize import delayed
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.pair import Pair, is_pair, of_each, paired
from ep_runtime_client.ops.quantize.quantized_tensor import Kernel, QuantizedTensor
from ep_runtime_client.ops.routing.api import Routing
from ep_runtime_client.ops.tracing import again, eager
from ep_runtime_client.ops.tracing.scopes import COPIED, scope
from ep_runtime_client.ops.tracing.varying import Axes


@dataclasses.dataclass(frozen=True)
class Block:
    """The experts of one call.

    Attributes:
        activation: activation between the matmuls; its dtype is the dtype of rows everywhere.
        recipes: recipes of wi and wo, or None.
        specs: PartitionSpec of each parameter by name, None if unknown.
        token_axes: the group's token axes.
        values: traced values that the activation reads.
    """

    activation: Activation
    recipes: tuple[Recipe | None, Recipe | None]
    specs: Mapping[str, PartitionSpec | None]
    token_axes: Axes
    values: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Moved:
    """The tokens that one call moves, their routing, and how they are laid out.

    Attributes:
        index: int32 [1], number of the layer in its stack.
        mesh: the mesh of the layer's open group.
        tokens: [..., H], in the dtype of rows.
        routed: their routing.
        handle, capacity, tokens_spec: as in `dispatch`.
        remedy: advice in the error if tokens do not divide over the ranks.
    """

    index: jax.Array
    mesh: Mesh
    tokens: jax.Array
    routed: Routing
    handle: int
    capacity: int | None
    tokens_spec: PartitionSpec | None
    remedy: str


class Chosen(NamedTuple):
    """How one call runs.

    Attributes:
        call: the call, before experts have copies.
        body: name of the body.
        why: why it is not the fast one, a name in `bodies.REASONS`; empty for the fast one.
        spread: whether rows of overfull ranks go to copies of experts.
    """

    call: Call
    body: str
    why: str
    spread: bool


class SavedRows(NamedTuple):
    """The rows that forward saves for backward: `keep` and `keep_factor` of `ep.moe`."""

    keep: str
    factor: float


def weighted(
    layer: EpLayer, block: Block, params: MoEParams, weights_at: Weighted | None
) -> Weighted:
    """Chooses what the router's weights multiply; `weights_at` as in `moe`."""
    if weights_at is None:
        # The GPU kernels multiply weights into activations; "memfd" groups are on CPU.
        on_gpu = layer.group_spec.transport != "memfd"
        weights_at = (
            "hidden" if on_gpu and activation_kernels.supports(block.activation) else "output"
        )
    # A bias of wo must be weighted too, so weights are applied in combine if there is one.
    return "output" if weights_at == "hidden" and params.wo_bias is not None else weights_at


def _sent_by(layer: EpLayer, recipe: Recipe | None, body: str, weighted: Weighted) -> Recipe | None:
    """Returns the recipe that quantizes tokens before they are sent; None sends them unquantized.

    It is wi's recipe, if received rows have the same bits either way, which they do not if weights
    multiply them first. It is None on GPUs, because no kernel unpacks only the received rows.
    """
    group = layer.group_spec
    if recipe is None or bodies.has_workspace(body) or weighted == "input":
        return None
    if quantized_rows.unsupported_reason(recipe, group):
        return None
    on_cpu = group.transport == "memfd" or (group.transport == "xla" and not serve.available())
    return recipe if on_cpu else None


def chosen(
    layer: EpLayer, block: Block, moved: Moved, params: MoEParams, weighted: Weighted
) -> Chosen:
    """Checks a call of `moe`, and chooses how it runs."""
    group, tokens, routed = layer.group_spec, moved.tokens, moved.routed
    check_width("tokens", layer, tokens.dtype, one_byte=True)
    given = (moved.index, tokens, routed.topk_idx, routed.topk_weights)
    call = make_call(
        layer,
        moved.mesh,
        tokens.shape[:-1],
        known_specs(moved.tokens_spec, *given[1:]),
        given,
        handle=moved.handle,
        capacity=moved.capacity,
        remedy=moved.remedy,
    )
    body, why = bodies.chosen(
        bodies.Asked(
            group=group,
            tokens=math.prod(tokens.shape[:-1]),
            hidden=group.hidden_size,
            inner=params.wo.shape[1],
            experts=group.experts_per_rank,
            activation=block.activation,
            recipes=block.recipes,
            paired=is_pair(getattr(params.wi, "origin", params.wi)),
            to_input=weighted == "input",
        )
    )
    if bodies.has_workspace(body):
        call = dataclasses.replace(call, own_alignment=workspace.ROW_ALIGNMENT)
    slots = call.layout.tokens_per_rank * layer.top_k
    return Chosen(call, body, why, device_layout.spreads(group, slots, kernels=not why))


def run(
    block: Block,
    moved: Moved,
    params: MoEParams,
    weighted: Weighted,
    saved: SavedRows,
    chosen: Chosen,
    state: MoEState | None,
) -> tuple[jax.Array, AnyArrays, MoEState | None]:
    """Runs the experts; returns (y like the tokens, the plan, the next state)."""
    body = chosen.body
    call, plan, most, spread = _planned(chosen, moved.index, moved.routed.topk_idx)
    if call.layout.tokens_per_rank == 0:
        return moved.tokens, plan, state
    recipes, dtype = block.recipes, block.activation.dtype
    slabs = (call.num_slabs, call.layer.group_spec.experts_per_rank)
    given = Operands(
        moved.index,
        moved.routed.topk_idx,
        moved.tokens,
        moved.routed.topk_weights.astype(jnp.float32),
        most,
        plan,
        # In the dtype of rows, except biases, and weights that a recipe quantizes or has quantized.
        wi=operand(params.wi, recipes[0], dtype),
        wo=operand(params.wo, recipes[1], dtype),
        wi_bias=None if params.wi_bias is None else bias_of(block, "wi_bias", params),
        wo_bias=None if params.wo_bias is None else bias_of(block, "wo_bias", params),
        values=tuple(x.reshape(-1) for x in block.values),
        copies=spread,
    )
    copied = contextlib.nullcontext() if spread is None else jax.named_scope(COPIED)
    with scope("experts", call.layer), copied:
        resolved = _resolved(call, block, weighted, saved, body, given)
        where = resolved.where
        experts = regions.whole_shape(where, given.wo.shape, resolved.sharding[1])[0]
        check_experts(where, experts, slabs, call.layer.group_spec.num_experts)
        placed = _placed(resolved, given)
        if state is None:
            y, _ = eager.settled(gradient.primal, resolved, placed, traced=gradient.block)
        else:
            begun = [
                _begun(resolved, which, given.kernels[which], slabs, each)
                for which, each in enumerate((state.wi, state.wo))
            ]
            placed = placed._replace(scales=tuple(scales for scales, _ in begun))
            y, amax = eager.settled(gradient.primal, resolved, placed, traced=gradient.block)
            pairs = zip(begun, amax, strict=True)
            state = MoEState(*(after(*(found or ())) for (_, after), found in pairs))
        if where.manual:
            # JAX's own sum over a manual axis also counts the gradient correctly.
            inner = gradient.inner_axes(resolved, placed)
            split = tuple(axis for axis in inner if axis in where.manual)
            y = lax.psum(y, split) if split else y
    return y, plan, state


def _planned(
    chosen: Chosen, index: jax.Array, topk_idx: jax.Array
) -> tuple[Call, AnyArrays, jax.Array, jax.Array | None]:
    """Returns the call with its plan, the most rows of any rank's zones, int32 [R, 1], and the
    experts of slots for copies."""
    call = chosen.call
    if chosen.spread:
        return copies.spread(call, index, topk_idx)
    plan, most = make_plan(call, index, topk_idx, most=bodies.has_workspace(chosen.body))
    return call, plan.arrays, plan.arrays.num_recv if most is None else most, None


def _resolved(
    call: Call, block: Block, weighted: Weighted, saved: SavedRows, body: str, given: Operands
) -> ResolvedCall:
    """Computes the static part of a call on these operands."""
    mesh, recipes = call.where.mesh, block.recipes
    assert isinstance(mesh, Mesh)
    kernels = tuple(zip(given.kernels, (block.specs["wi"], block.specs["wo"]), strict=True))
    known = [quantized_operands.known(*each) for each in kernels]
    where = regions.of_opened(call.layer, mesh, given, known=None not in known)
    where = dataclasses.replace(where, tokens=call.layout.axes)
    if where.manual:
        told = (quantized_operands.told(*each) for each in kernels)
        known = [quantized_operands.with_manual_experts(where, each) for each in told]
    wi, wo = (each or padded((), x.ndim) for each, x in zip(known, given.kernels, strict=True))
    origins = (origin_of(given.wi), origin_of(given.wo))
    learned = [x for x in given.values if jnp.issubdtype(x.dtype, jnp.inexact)]
    graded = (given.tokens, given.weights, *origins, given.wi_bias, given.wo_bias, learned)
    first, second = (recipe is not None and recipe.delayed for recipe in recipes)
    multiplied = (
        with_whole_blocks(where, recipes[0], given.wi, wi),
        with_whole_blocks(where, recipes[1], given.wo, wo),
    )
    wi_bias, wo_bias = (
        None if bias is None else entries_of_bias(where, bias, weight)
        for bias, weight in ((given.wi_bias, wi), (given.wo_bias, wo))
    )
    resolved = ResolvedCall(
        where,
        call.varied(given),
        body,
        block.activation,
        weighted,
        recipes,
        (first, second),
        _sent_by(call.layer, recipes[0], body, weighted) if any(recipes) else None,
        (wi, wo, wi_bias, wo_bias),
        multiplied,
        types=tuple(map(regions.type_of, jax.tree.leaves(graded))),
        paired=isinstance(origins[0], Pair),
        dtypes=tuple(None if x is None else jnp.dtype(x.dtype) for x in origins),
        tf32=kernels_32.allowed(),
    )
    if bodies.has_workspace(body):
        resolved = _with_workspace(resolved, block, given, saved)
    if saved.keep == "nothing":
        return resolved
    return dataclasses.replace(resolved, saved=bodies.BODIES[body].saved(resolved))


def _placed(call: ResolvedCall, given: Operands) -> Operands:
    """Types and places the operands for the op."""
    moved, where = call.moved, call.where
    origins = (origin_of(given.wi), origin_of(given.wo), given.wi_bias, given.wo_bias)
    wi, wo, wi_bias, wo_bias = (
        regions.settle(where, x, of_each(entries or (), isinstance(x, Pair)))
        for x, entries in zip(origins, call.sharding, strict=True)
    )
    return given._replace(
        layer_index=again.told(given.layer_index, given.plan.kept),
        topk_idx=per_device.place(moved, "topk_idx", as_int32(given.topk_idx)),
        tokens=per_device.place_tokens(moved, given.tokens),
        weights=per_device.place(moved, "topk_weights", given.weights),
        wi=wi,
        wo=wo,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        wi8=settled(where, given.wi, call.sharding[0]),
        wo8=settled(where, given.wo, call.sharding[1]),
        values=tuple(regions.settle(where, x, ((),)) for x in given.values),
    )


def _begun(
    call: ResolvedCall,
    which: int,
    kernel: Kernel,
    slabs: tuple[int, int],
    state: DelayedState | None,
) -> tuple[tuple[jax.Array, jax.Array] | None, Callable[..., DelayedState | None]]:
    """Returns what `delayed.begin` does for one matmul; no scales and no state if it has none."""
    if state is None:
        return None, lambda: None
    where, entries, recipe = call.where, call.sharding[which], call.recipes[which]
    assert recipe is not None
    assert where.roles is not None
    assert entries is not None
    experts = regions.whole_shape(where, kernel.shape, entries)[0]
    rows = padded((where.roles.slab, (), entries[1]), 3)
    return delayed.begin(where, recipe, experts, slabs, rows, entries, state)


def _with_workspace(
    resolved: ResolvedCall, block: Block, given: Operands, saved: SavedRows
) -> ResolvedCall:
    call, activation = resolved.moved, block.activation
    group, layer = call.group, call.layer
    sizes = workspace.BlockSizes(
        tokens=group.num_nodes * call.layout.tokens_per_rank,
        top_k=layer.top_k,
        ep_size=group.ranks_per_node,
        nodes=group.num_nodes,
        lane_rows=device_layout.lane_rows(group),
        experts=group.experts_per_rank,
        capacity=call.capacity,
        alignment=call.row_alignment,
        hidden_size=group.hidden_size,
        mlp_dim=given.wo.shape[1],
        gated=activation.gated,
        element_bytes=jnp.dtype(activation.dtype).itemsize,
        scaling=scaling_of(block.recipes[0]),
        spare=layer.group_spec.spare_experts if call.spread else 0,
    )
    # Spread rows need no more room than the capacity, because the ranks are balanced.
    setting = float(call.capacity) if call.spread else group.workspace
    count = sizes.node_chunks(group.on_overflow) if resolved.body == "cuda_nodes" else 1
    sizes = dataclasses.replace(sizes, tokens=sizes.tokens // count)
    found = workspace.of_block(sizes, setting, keep=saved.keep, keep_factor=saved.factor)
    room = WorkspaceRows(sizes, found.rows, found.kept_rows)
    return dataclasses.replace(resolved, workspace=room, chunks=count)


def bias_of(block: Block, name: str, params: MoEParams) -> jax.Array:
    """Returns a bias with its kernel's trailing dims, whole over manual axes of tokens."""
    bias: Any = getattr(params, name)
    if is_pair(bias):
        return jnp.stack([_gathered(block, name, each) for each in bias], 1)
    bias = _gathered(block, name, bias)
    wi: Any = params.wi
    if name == "wi_bias" and bias.ndim != wi.ndim - 1:
        bias = bias.reshape(bias.shape[0], *wi.shape[2:])
    return bias


def _gathered(block: Block, name: str, bias: jax.Array) -> jax.Array:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for dim, axes in enumerate(entries_of(block.specs[name], bias.ndim)):
        over = tuple(axis for axis in axes if axis in manual and axis in block.token_axes)
        if over and dim:
            bias = gather(bias, over, dim)
    return bias


def operand(kernel: Any, recipe: Recipe | None, dtype: Any) -> Any:
    """Returns a weight of experts as a matmul reads it.

    Without a recipe the weight is cast to `dtype`. With one it keeps its dtype, because recipes
    quantize the parameter itself. A weight that is already quantized stays as it is.
    """
    kernel = paired(kernel, "params.wi")
    if isinstance(kernel, QuantizedTensor):
        return with_gradient(kernel)
    return kernel.astype(dtype) if recipe is None else kernel
