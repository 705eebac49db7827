"""Losses that keep experts balanced and router logits small. Letters: `ops/__init__.py`.

Masked tokens are not counted: they have no slot, and shares of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.routing.api import (
    Routing,
    checked_mask,
    tokens_per_expert,
    without_masked,
)


def aux_loss(
    routing: Routing,
    *,
    coeff: float | jax.Array,
    token_mask: jax.Array | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> jax.Array:
    """Computes the load-balancing loss of a router over the global batch.

    coeff * E / (K T^2) * sum over e of (sum over t of probs[t, e]) * (slots routed to e), where T
    counts the tokens that are not masked.

    Args:
        routing: the result of `route` for all tokens. A token without slots and with probs of 0 is
            masked.
        coeff: weight of this loss in the total loss, f32 []; may be traced.
        token_mask: bool [...], further tokens to leave out, as in `route`.
        axis_name: inside a shard_map, the axes over which the batch is split.

    Returns:
        Scalar f32, differentiable in the logits through probs; 1 * coeff when balanced.

    Raises:
        InvalidArgumentError: the routing has no probs, or probs of other tokens.

    Cost: one pass over probs; all-reduces of 2 E + 1 numbers if the batch is sharded.

    Source: Switch Transformers (arXiv:2101.03961), equation 4, over K slots instead of one.
    """
    _check_probs("aux_loss", routing)
    routing, counted = _counted(routing, token_mask)
    return balance(routing, coeff, counted, axis_name)


def balance(
    routing: Routing,
    coeff: float | jax.Array,
    counted: jax.Array | None,
    axis_name: str | Sequence[str] | None,
) -> jax.Array:
    """Like `aux_loss`, for a routing without masked tokens; `counted` None counts all."""
    assert routing.probs is not None
    probs = routing.probs.astype(jnp.float32)
    experts, top_k = probs.shape[-1], routing.topk_idx.shape[-1]
    tokens: Any = prod(probs.shape[:-1]) if counted is None else counted.sum(dtype=jnp.int32)
    slots = tokens_per_expert(routing.topk_idx, experts).astype(jnp.float32)
    shares = probs.sum(tuple(range(probs.ndim - 1)))
    if axis_name is not None:
        shares, slots = lax.psum(shares, axis_name), lax.psum(slots, axis_name)
        tokens = lax.psum(tokens, axis_name)
    scale = _scalar(coeff) * experts / (top_k * _at_least_one(tokens) ** 2)
    return scale * (shares * lax.stop_gradient(slots)).sum()


def sequence_aux_loss(
    routing: Routing, *, coeff: float | jax.Array, token_mask: jax.Array | None = None
) -> jax.Array:
    """Computes a load-balancing loss within each sequence, and its mean over sequences.

    coeff * mean over b of E / (K S^2) * sum over e of (sum over s of probs[b, s, e]) * (slots of b
    routed to e). S counts the tokens of b that are not masked; a sequence without any is left out.

    Args:
        routing: the result of `route` for tokens [B, S]. A token without slots and with probs of 0
            is masked.
        coeff: weight of this loss in the total loss, f32 []; may be traced.
        token_mask: bool [B, S], further tokens to leave out, as in `route`.

    Returns:
        Scalar f32, differentiable in the logits through probs; 1 * coeff when balanced.

    Raises:
        InvalidArgumentError: the routing has no probs, or is not of tokens [B, S].

    Cost: one pass over probs; an all-reduce of two numbers if the batch is sharded, and of [B, E]
    if sequences are.

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 17 to 20.
    """
    probs = _check_probs("sequence_aux_loss", routing)
    if probs.ndim != 3:
        raise InvalidArgumentError(
            f"sequence_aux_loss needs a routing of tokens [B, S], got probs {list(probs.shape)}",
            argument="routing",
        )
    routing, counted = _counted(routing, token_mask)
    assert routing.probs is not None
    experts, top_k = probs.shape[-1], routing.topk_idx.shape[-1]
    length = _at_least_one(counted.sum(1, dtype=jnp.int32))[:, None]
    slots = jax.vmap(lambda idx: tokens_per_expert(idx, experts))(routing.topk_idx)
    load = slots.astype(jnp.float32) / length
    shares = routing.probs.astype(jnp.float32).sum(1) / length
    sequences = _at_least_one(counted.any(1).sum(dtype=jnp.int32))
    total = (shares * lax.stop_gradient(load)).sum()
    return _scalar(coeff) * (experts / top_k) * total / sequences


def z_loss(
    routing: Routing, *, coeff: float | jax.Array, token_mask: jax.Array | None = None
) -> jax.Array:
    """Computes a loss that keeps router logits small.

    coeff * mean over tokens that are not masked of (log of the sum over e of exp(logits[t, e]))^2.

    Args:
        routing: the result of `route` for all tokens. A token without slots and with probs of 0 is
            masked.
        coeff: weight of this loss in the total loss, f32 []; may be traced.
        token_mask: bool [...], further tokens to leave out, as in `route`.

    Returns:
        Scalar f32, differentiable in the logits.

    Raises:
        InvalidArgumentError: the routing has no logits.

    Cost: one pass over logits; an all-reduce of two numbers if the batch is sharded.

    Source: ST-MoE (arXiv:2202.08906), equation 5.
    """
    if routing.logits is None:
        raise InvalidArgumentError(
            "z_loss needs routing.logits [..., E], got None", argument="routing.logits"
        )
    routing, counted = _counted(routing, token_mask)
    assert routing.logits is not None
    squares = jnp.square(jax.nn.logsumexp(routing.logits.astype(jnp.float32), axis=-1))
    total = jnp.where(counted, squares, jnp.zeros_like(squares)).sum()
    return _scalar(coeff) * total / _at_least_one(counted.sum(dtype=jnp.int32))


def _scalar(coeff: float | jax.Array) -> float | jax.Array:
    """Returns a coefficient as an array. Raises InvalidArgumentError unless it is a scalar."""
    if isinstance(coeff, int | float):
        return coeff
    if jnp.shape(coeff):
        raise InvalidArgumentError(
            f"coeff must be a scalar, got {list(jnp.shape(coeff))}", argument="coeff"
        )
    return jnp.asarray(coeff).astype(jnp.float32)


def _at_least_one(count: Any) -> Any:
    """Returns a count of at least one as a float to divide by."""
    if isinstance(count, int):
        return max(float(count), 1.0)
    return jnp.maximum(count, jnp.ones_like(count)).astype(jnp.float32)


def _check_probs(loss: str, routing: Routing) -> jax.Array:
    """Returns routing.probs. Raises InvalidArgumentError if it is None or has other dims."""
    if routing.probs is None:
        raise InvalidArgumentError(
            f"{loss} needs routing.probs [..., E], every expert's share of every token, got None",
            argument="routing.probs",
        )
    lead = routing.topk_idx.shape[:-1]
    if routing.probs.shape[:-1] != lead:
        raise InvalidArgumentError(
            f"routing.probs must be {[*lead, 'E']} for topk_idx {list(routing.topk_idx.shape)}, "
            f"got {list(routing.probs.shape)}",
            argument="routing.probs",
        )
    return routing.probs


def _counted(routing: Routing, token_mask: jax.Array | None) -> tuple[Routing, jax.Array]:
    """Returns the routing without masked tokens, and bool [...]: the tokens that losses count."""
    token_mask = checked_mask(token_mask, routing.topk_idx.shape[:-1])
    if token_mask is not None:
        routing = without_masked(None, routing, token_mask)
    return routing, in_losses(routing, token_mask)


def in_losses(routing: Routing, token_mask: jax.Array | None = None) -> jax.Array:
    """Returns the tokens that losses count, bool [...]: those with a slot or a share."""
    if routing.probs is not None:
        return (routing.topk_idx >= 0).any(-1) | (routing.probs != 0).any(-1)
    if token_mask is not None:
        return token_mask
    return jnp.ones(routing.topk_idx.shape[:-1], bool)
