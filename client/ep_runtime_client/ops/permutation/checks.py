"""Checks the arguments of permute and unpermute, and counts the rows of a permutation."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.arguments import check_whole
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.permutation.batch_shards import BatchShards, last_axes
from ep_runtime_client.ops.permutation.plan import PermutationMeta, PermutationPlan, row_bound


def check_choice(
    topk_idx: jax.Array | None, routing_map: jax.Array | None, num_experts: int
) -> tuple[jax.Array, bool]:
    check_whole("num_experts", num_experts)
    if (topk_idx is None) == (routing_map is None):
        raise InvalidArgumentError(
            "permute needs one of topk_idx and routing_map, got "
            + ("none" if topk_idx is None else "both"),
            argument="topk_idx",
        )
    choice: Any = topk_idx if routing_map is None else routing_map
    name = "topk_idx" if routing_map is None else "routing_map"
    kinds = (jnp.integer,) if routing_map is None else (jnp.bool_, jnp.integer)
    if not any(jnp.issubdtype(jnp.result_type(choice), kind) for kind in kinds):
        wanted = "an integer dtype" if routing_map is None else "bool"
        raise InvalidArgumentError(
            f"{name} must have {wanted}, got {jnp.result_type(choice)}", argument=name
        )
    if routing_map is not None and jnp.shape(choice)[-1:] != (num_experts,):
        raise InvalidArgumentError(
            f"routing_map must end in num_experts={num_experts}, got {list(jnp.shape(choice))}",
            argument=name,
        )
    return jnp.asarray(choice), routing_map is not None


def check_operands(tokens: jax.Array, choice: jax.Array, probs: jax.Array | None) -> None:
    shape = jnp.shape(tokens)
    if len(shape) not in (2, 3):
        raise InvalidArgumentError(
            f"tokens must be [T, H] or [B, S, H], got {list(shape)}", argument="tokens"
        )
    if choice.ndim != len(shape) or choice.shape[:-1] != shape[:-1]:
        raise InvalidArgumentError(
            f"the slots must have the leading dims of tokens {shape[:-1]}, "
            f"got {list(choice.shape)}",
            argument="topk_idx",
        )
    if probs is not None:
        check_slots("probs", probs, choice.shape)


def check_slots(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if jnp.shape(array) != shape:
        raise InvalidArgumentError(
            f"{name} must be {list(shape)}, one per slot, got {list(jnp.shape(array))}",
            argument=name,
        )
    if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
        raise InvalidArgumentError(
            f"{name} must have a float dtype, got {jnp.result_type(array)}", argument=name
        )


def alignment_of(align_size: int | None) -> int:
    """Returns align_size as a whole number of at least 1, or raises InvalidArgumentError."""
    return 1 if align_size is None else check_whole("align_size", align_size)


def rows_of(
    shards: BatchShards,
    shape: tuple[int, ...],
    num_experts: int,
    num_out_tokens: int | None,
    alignment: int,
    from_map: bool,
) -> int:
    """Returns the number of rows of one shard for a choice of this shape, [..., S].

    Raises:
        InvalidArgumentError: num_out_tokens is negative, or slots or rows exceed int32.
    """
    tokens = prod(shape[:-1]) // shards.num_shards
    slots = tokens * shape[-1]
    if num_out_tokens is not None:
        check_whole("num_out_tokens", num_out_tokens, 0)
    if num_out_tokens is None:
        # A map names an expert once per token; slots may all name the same one.
        rows = row_bound(slots, num_experts, alignment, tokens if from_map else slots)
    else:
        rows = row_bound(num_out_tokens, num_experts, alignment, num_out_tokens)
    most = jnp.iinfo(jnp.int32).max
    if max(rows, slots) >= most:
        raise InvalidArgumentError(
            f"one shard must have less than {most} slots and rows (int32 counts them), got {slots} "
            f"slots and {rows} rows; a smaller num_out_tokens makes fewer rows",
            argument="num_out_tokens",
        )
    return rows


def check_unpermute(
    plan: PermutationPlan, rows: jax.Array, merging_probs: jax.Array | None
) -> PermutationMeta:
    """Checks the arguments of unpermute; returns the plan's meta as seen from here.

    Raises:
        InvalidArgumentError: rows or merging_probs do not fit the plan.
    """
    meta, arrays = plan.meta.here(rows, merging_probs, plan.arrays), plan.arrays
    wanted = arrays.source.shape[0]
    if wanted != meta.rows * meta.shards.num_shards:
        raise InvalidArgumentError(
            f"the plan has {wanted} rows here, and was made for {meta.shards.num_shards} shards of "
            f"{meta.rows}: use it where its permute was called, or inside a shard_map over more "
            "of the batch's axes",
            argument="p",
        )
    if jnp.ndim(rows) != 2 or jnp.shape(rows)[0] != wanted:
        raise InvalidArgumentError(
            f"rows must be [{wanted}, H'] as the permuted tokens are, got {list(jnp.shape(rows))}",
            argument="rows",
        )
    if not jnp.issubdtype(jnp.result_type(rows), jnp.floating):
        raise InvalidArgumentError(
            f"rows must have a float dtype, got {jnp.result_type(rows)}", argument="rows"
        )
    if merging_probs is not None:
        check_slots("merging_probs", merging_probs, arrays.slot_row.shape)
    shards = dataclasses.replace(meta.shards, feature=last_axes(meta.shards, rows))
    return dataclasses.replace(meta, shards=shards)
