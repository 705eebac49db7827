"""permute and unpermute: sort tokens by expert within every shard of the batch, and back.

For experts that are all on every shard, so that no token moves between devices: each shard of the
batch sorts its own tokens, with its own counts, offsets and padding. For experts on other devices
use dispatch and combine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import stored
from ep_runtime_client.ops.permutation import batch_shards, checks
from ep_runtime_client.ops.permutation import plan as permutation_plan
from ep_runtime_client.ops.permutation import rows as local
from ep_runtime_client.ops.permutation.plan import (
    PermutationArrays,
    PermutationMeta,
    PermutationPlan,
)
from ep_runtime_client.ops.tracing import eager
from ep_runtime_client.ops.tracing.varying import spread_over


@stored.pytree()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Permuted:
    """The tokens of every shard sorted by expert, as `permute` returns them.

    Attributes:
        tokens: [n * rows, H]. The rows of each shard are sorted by expert; rows without a token,
            the tail included, are zero.
        probs: [n * rows] or None. The probability of each row's slot, 0 in rows without a token.
        group_sizes: [n, E] int32. Aligned rows per expert; feeds grouped_gemm as it is.
        plan: the row of every slot, for unpermute and backward; `plan.dropped` counts slots without
            a row.
    """

    tokens: jax.Array
    probs: jax.Array | None
    group_sizes: jax.Array
    plan: PermutationPlan


def permute(
    tokens: jax.Array,
    topk_idx: jax.Array | None = None,
    *,
    num_experts: int,
    routing_map: jax.Array | None = None,
    num_out_tokens: int | None = None,
    align_size: int | None = None,
    probs: jax.Array | None = None,
    tokens_spec: batch_shards.Spec | None = None,
) -> Permuted:
    """Copies each token once per expert it is routed to, and sorts the copies by expert.

    Each shard of the batch is sorted on its own: no token moves to another device
    (docs/reference/permutation.md).

    Args:
        tokens: [T, H] or [B, S, H], any dtype of 1 to 8 bytes. Any mesh axes may shard the leading
            dims, and others H.
        topk_idx: [T, K] or [B, S, K] int, the expert of each slot; an index out of range, such as
            -1, is an unused slot. Each slot is a row, also if a token names an expert twice.
        num_experts: E.
        routing_map: [T, E] or [B, S, E] bool, instead of topk_idx; slots are then the experts.
        num_out_tokens: number of slots of one shard that get a row, without padding. None has room
            for every slot.
        align_size: each expert's rows are padded to a multiple of it; None is 1. An expert without
            tokens has no rows.
        probs: like topk_idx or routing_map, float; sorted with the tokens.
        tokens_spec: PartitionSpec of tokens on the ambient mesh, or a NamedSharding. Required under
            plain jit in Auto mode, because traced arrays do not carry the number of shards there.

    Returns:
        Permuted with tokens [n * rows, H], probs [n * rows], group_sizes [n, E] for n shards, and
        the plan. Differentiable in tokens and probs.

    Raises:
        InvalidArgumentError: shapes, dtypes or sizes do not fit, or there is no mesh with the axes
            of tokens_spec.

    Cost: two sorts of the T * K slots of a shard, or a prefix sum over T * E and one sort of the
    rows. Then one gather of n * rows * H. No collective and no host sync.

    Source: the row order of Transformer Engine's `moe_permute` and Megatron-Core's dropless
    dispatcher, padded as in MegaBlocks (arXiv:2211.15841).

    Examples:
        >>> x = jnp.array([[1.0], [2.0], [3.0]])
        >>> p = ep.permute(x, jnp.array([[1], [0], [1]]), num_experts=2)
        >>> p.tokens[:, 0].tolist(), p.group_sizes.tolist()
        ([2.0, 1.0, 3.0], [[1, 2]])
    """
    choice, from_map = checks.check_choice(topk_idx, routing_map, num_experts)
    checks.check_operands(tokens, choice, probs)
    lead = jnp.shape(tokens)[:-1]
    shards = batch_shards.find(tokens_spec, len(lead), (tokens, choice, probs))
    batch_shards.check_divides(shards, lead)
    alignment = checks.alignment_of(align_size)
    rows = checks.rows_of(shards, choice.shape, num_experts, num_out_tokens, alignment, from_map)
    meta = PermutationMeta(shards, num_experts, rows, alignment, from_map)
    with jax.named_scope("ep_permute"):
        arrays, group_sizes = eager.run(_make_plan, meta, choice)
        arrays = jax.tree.map(lambda x: checkpoint_name(x, "ep_plan"), arrays)
        specs = (shards.token_spec(feature=True), shards.token_spec())
        tokens, probs = batch_shards.settled(shards, (tokens, probs), specs)
        operands = (tokens, probs, _varied(shards, arrays))
        moved, row_probs = eager.run(_permute_primal, meta, *operands, traced=_permute)
    return Permuted(
        tokens=checkpoint_name(moved, "ep_recv"),
        probs=None if row_probs is None else checkpoint_name(row_probs, "ep_recv"),
        group_sizes=group_sizes,
        plan=PermutationPlan(arrays, meta),
    )


def unpermute(
    rows: jax.Array, p: Permuted | PermutationPlan, *, merging_probs: jax.Array | None = None
) -> jax.Array:
    """Sums the rows that `permute` made of each token, and returns one row per token.

    Args:
        rows: [n * rows, H'], a float dtype, sharded as the permuted tokens; any H'.
        p: the result of `permute`, or its plan.
        merging_probs: float, like topk_idx or routing_map of permute; multiplies each slot's row.

    Returns:
        [T, H'] or [B, S, H'] in the dtype of rows: the sum of each token's rows in slot order, in
        f32 (f64 for f64 rows) and rounded once; zero for a token without rows. Rows without a token
        have no effect, even if they are NaN. Differentiable in rows and merging_probs.

    Raises:
        InvalidArgumentError: shapes or dtypes do not fit the plan.

    Cost: one gather of T * K * H', or of T times the most rows of a token. No collective, except
    one psum of [rows] in the gradient of merging_probs if mesh axes shard H'.

    Source: Transformer Engine's `moe_unpermute` with merging probabilities.
    """
    plan = p.plan if isinstance(p, Permuted) else p
    if not isinstance(plan, PermutationPlan):
        raise InvalidArgumentError(
            f"p must be a result of ep.permute, got {type(p).__name__}", argument="p"
        )
    meta = checks.check_unpermute(plan, rows, merging_probs)
    with jax.named_scope("ep_unpermute"):
        shards = meta.shards
        specs = (shards.row_spec(feature=True), shards.token_spec())
        rows, merging_probs = batch_shards.settled(shards, (rows, merging_probs), specs)
        operands = (rows, merging_probs, _varied(shards, plan.arrays))
        total: jax.Array = eager.run(_unpermute_primal, meta, *operands, traced=_unpermute)
    return total


def _varied(shards: batch_shards.BatchShards, arrays: PermutationArrays) -> PermutationArrays:
    """Returns the plan typed as varying over all axes that an operand varies over."""
    return jax.tree.map(lambda x: spread_over(x, shards.varying), arrays)


def _make_plan(meta: PermutationMeta, choice: jax.Array) -> tuple[PermutationArrays, jax.Array]:
    """Makes plan arrays and group sizes [n, E] from choice [..., S]."""
    shards = meta.shards
    block = _block(shards, choice.shape[:-1])

    def body(choice: jax.Array) -> tuple[PermutationArrays, jax.Array]:
        made, sizes = permutation_plan.make(meta, choice.reshape(-1, choice.shape[-1]))
        return made.with_lead(block), sizes

    specs = (_plan_specs(meta), shards.row_spec())
    return batch_shards.per_shard(shards, body, (choice,), (shards.token_spec(),), specs)


def _plan_specs(meta: PermutationMeta) -> Any:
    """Returns the specs of a plan's arrays."""
    rows, slots = meta.shards.row_spec(trailing=0), meta.shards.token_spec()
    per_map = (rows, PartitionSpec(*slots[:-1])) if meta.from_map else (None, None)
    specs: tuple[Any, ...] = (rows, slots, rows, *per_map)
    return PermutationArrays(*specs)


def _block(shards: batch_shards.BatchShards, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the leading dims of one shard's block."""
    return tuple(size // parts for size, parts in zip(lead, shards.per_dim, strict=True))


def _per_shard(
    meta: PermutationMeta,
    body: Callable[..., Any],
    arrays: PermutationArrays,
    given: Sequence[tuple[jax.Array | None, PartitionSpec]],
    out_specs: Any,
) -> Any:
    """Runs `body(plan of the shard, *given)` once per shard; a None in `given` stays None."""
    present = [pair for pair in given if pair[0] is not None]
    leaves, tree = jax.tree.flatten(arrays)
    plan_specs = jax.tree.leaves(_plan_specs(meta), is_leaf=lambda x: isinstance(x, PartitionSpec))

    def unpacked(*blocks: jax.Array) -> Any:
        queue = list(blocks[len(leaves) :])
        plan = jax.tree.unflatten(tree, blocks[: len(leaves)]).flat()
        return body(plan, *(None if array is None else queue.pop(0) for array, _ in given))

    operands = [*leaves, *(array for array, _ in present)]
    in_specs = [*plan_specs, *(spec for _, spec in present)]
    return batch_shards.per_shard(meta.shards, unpacked, operands, in_specs, out_specs)


def _flat(x: jax.Array) -> jax.Array:
    """Reshapes [..., D] to [T, D]."""
    return x.reshape(-1, x.shape[-1])


def _permute_primal(
    meta: PermutationMeta, tokens: jax.Array, probs: jax.Array | None, arrays: PermutationArrays
) -> tuple[jax.Array, jax.Array | None]:
    """Copies tokens [..., H] to rows [n * rows, H], and probs [..., S], if given, to [n * rows]."""
    shards = meta.shards

    def body(plan: PermutationArrays, tokens: jax.Array, probs: jax.Array | None) -> Any:
        rows = local.placed(_flat(tokens), plan)
        return rows, None if probs is None else local.copied(probs.reshape(-1), plan.source, 1)

    given = ((tokens, shards.token_spec(feature=True)), (probs, shards.token_spec()))
    prob_spec = None if probs is None else shards.row_spec(trailing=0)
    return _per_shard(meta, body, arrays, given, (shards.row_spec(feature=True), prob_spec))


def _permute_fwd(
    meta: PermutationMeta, tokens: jax.Array, probs: jax.Array | None, arrays: PermutationArrays
) -> Any:
    moved = eager.run(_permute_primal, meta, tokens, probs, arrays)
    # Residuals cannot hold dtypes, so scalars carry them.
    return moved, (jnp.zeros((), tokens.dtype), arrays)


def _permute_bwd(meta: PermutationMeta, saved: Any, grads: tuple[Any, Any]) -> Any:
    of_dtype, arrays = saved
    d_rows, d_row_probs = grads
    if not jnp.issubdtype(of_dtype.dtype, jnp.floating):
        d_rows = None
    with jax.named_scope("ep_permute_bwd"):
        d_tokens, d_probs = eager.run(_permute_pullback, meta, d_rows, d_row_probs, arrays)
    return d_tokens, d_probs, None


def _permute_pullback(
    meta: PermutationMeta,
    d_rows: jax.Array | None,
    d_row_probs: jax.Array | None,
    arrays: PermutationArrays,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Sums d_rows [n * rows, H] to d_tokens [..., H]; copies d_row_probs to d_probs [..., S]."""
    shards = meta.shards
    lead = _block(shards, arrays.slot_row.shape[:-1])

    def body(
        plan: PermutationArrays, d_rows: jax.Array | None, d_row_probs: jax.Array | None
    ) -> Any:
        d_tokens = d_probs = None
        if d_rows is not None:
            d_tokens = local.summed(d_rows, plan).reshape(*lead, d_rows.shape[1])
        if d_row_probs is not None:
            picked = local.of_slots(d_row_probs, plan.slot_row)
            d_probs = picked.reshape(*lead, picked.shape[-1])
        return d_tokens, d_probs

    given = (
        (d_rows, shards.row_spec(feature=True)),
        (d_row_probs, shards.row_spec(trailing=0)),
    )
    specs = (
        None if d_rows is None else shards.token_spec(feature=True),
        None if d_row_probs is None else shards.token_spec(),
    )
    return _per_shard(meta, body, arrays, given, specs)


_permute = jax.custom_vjp(_permute_primal, nondiff_argnums=(0,))
_permute.defvjp(_permute_fwd, _permute_bwd)


def _unpermute_primal(
    meta: PermutationMeta, rows: jax.Array, weights: jax.Array | None, arrays: PermutationArrays
) -> jax.Array:
    """Sums rows [n * rows, H'] with weights [..., S] or None -> tokens [..., H']."""
    shards = meta.shards
    lead = _block(shards, arrays.slot_row.shape[:-1])

    def body(plan: PermutationArrays, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
        total = local.summed(rows, plan, None if weights is None else _flat(weights))
        return total.reshape(*lead, rows.shape[1])

    given = ((rows, shards.row_spec(feature=True)), (weights, shards.token_spec()))
    return _per_shard(meta, body, arrays, given, shards.token_spec(feature=True))


def _unpermute_fwd(
    meta: PermutationMeta, rows: jax.Array, weights: jax.Array | None, arrays: PermutationArrays
) -> Any:
    total = eager.run(_unpermute_primal, meta, rows, weights, arrays)
    # Without weights the gradient needs only the dtype of the rows, which is the gradient's own.
    return total, (None if weights is None else rows, weights, arrays)


def _unpermute_bwd(meta: PermutationMeta, saved: Any, grad: jax.Array) -> Any:
    with jax.named_scope("ep_unpermute_bwd"):
        d_rows, d_weights = eager.run(_unpermute_pullback, meta, grad, *saved)
    return d_rows, d_weights, None


def _unpermute_pullback(
    meta: PermutationMeta,
    grad: jax.Array,
    rows: jax.Array | None,
    weights: jax.Array | None,
    arrays: PermutationArrays,
) -> tuple[jax.Array, jax.Array | None]:
    """Pulls back grad [..., H'] -> d_rows [n * rows, H'], d_weights [..., S] or None."""
    shards = meta.shards
    lead = _block(shards, arrays.slot_row.shape[:-1])

    def body(
        plan: PermutationArrays,
        grad: jax.Array,
        rows: jax.Array | None,
        weights: jax.Array | None,
    ) -> Any:
        slots, grad = plan.slot_row.shape[1], _flat(grad)
        if rows is None or weights is None:
            return local.placed(grad, plan), None
        d_rows, of_rows = local.weighed_with_products(rows, grad, plan, weights)
        if shards.feature:
            of_rows = lax.psum(of_rows, shards.feature)
        picked = local.of_slots(of_rows, plan.slot_row).astype(weights.dtype)
        return d_rows, picked.reshape(*lead, slots)

    wide, slot = shards.token_spec(feature=True), shards.token_spec()
    row = shards.row_spec(feature=True)
    given = ((grad, wide), (rows, row), (weights, slot))
    out_specs = (row, None if weights is None else slot)
    return _per_shard(meta, body, arrays, given, out_specs)


_unpermute = jax.custom_vjp(_unpermute_primal, nondiff_argnums=(0,))
_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)
