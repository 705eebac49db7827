"""The router: which experts a token goes to, with which weights, and what keeps them balanced.

Plain JAX over any leading dims; every function works per token, so a sharded batch stays where
it is. Letters: `ops/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client import stored
from ep_runtime_client.ops.tracing import eager

SCORE_FUNCTIONS = ("softmax", "sigmoid")


@stored.pytree()
class Routing(NamedTuple):
    """A routing decision.

    Attributes:
        topk_idx: [..., K] int32. Experts in falling order of their (biased) score.
        topk_weights: [..., K] f32, differentiable in the logits.
        probs: [..., E] f32. Every expert's share, without bias; `aux_loss` reads it.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    probs: jax.Array


@dataclasses.dataclass(frozen=True)
class RouteOptions:
    """The static arguments of `route`."""

    top_k: int
    score_function: str
    use_pre_softmax: bool
    num_groups: int | None
    group_topk: int | None
    scaling_factor: float


def route(
    logits: jax.Array,
    top_k: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    expert_bias: jax.Array | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
) -> Routing:
    """Picks the top_k experts of every token; ties go to the lower index.

    Args:
        logits: [..., E]. Computed on in f32.
        top_k: K.
        score_function: "softmax": weights are a softmax over the K picked logits. "sigmoid":
            weights are the picked sigmoids over their sum + 1e-20 (as they are when K is 1).
        use_pre_softmax: softmax over all E first; the K picked shares are not renormalised.
        expert_bias: [E] f32, added to the scores for the choice only; has no gradient.
        num_groups: routing groups of E / num_groups experts each; give group_topk too.
        group_topk: how many routing groups a token may use. A group's score is the sum of its
            top (K // group_topk) biased scores.
        scaling_factor: multiplies the weights.

    Returns:
        Routing with topk_idx [..., K] int32, topk_weights [..., K] f32, probs [..., E] f32.

    Raises:
        InvalidArgumentError: an argument does not fit E; names it with both numbers.

    Cost: K passes over E per token, each an argmax and a masked sum; no sort and no collective, so
    that a sharded batch stays where it is.

    Source: a softmax over the picked logits is from Shazeer et al. 2017 (arXiv:1701.06538), routing
    groups, sigmoid scores and the bias from DeepSeek-V3 (arXiv:2412.19437); arguments are named as
    in Transformer Engine's fused router.

    Examples:
        >>> ep.route(jnp.array([[0.0, 2.0, 1.0, 2.0]]), 2).topk_idx.tolist()
        [[1, 3]]
    """
    options = RouteOptions(
        top_k, score_function, use_pre_softmax, num_groups, group_topk, scaling_factor
    )
    _check(logits.shape[-1], options, expert_bias)
    routing: Routing = eager.run(_route, options, logits, expert_bias)
    return routing


def _route(options: RouteOptions, logits: jax.Array, expert_bias: jax.Array | None) -> Routing:
    logits, top_k = logits.astype(jnp.float32), options.top_k
    if options.score_function == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probs = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    else:
        probs = jax.nn.softmax(logits, axis=-1)
        scores = probs if options.use_pre_softmax else logits
    choice = scores if expert_bias is None else scores + expert_bias.astype(jnp.float32)
    choice = lax.stop_gradient(choice)
    if options.num_groups is not None and options.group_topk is not None:
        choice = _within_best_groups(choice, options.num_groups, options.group_topk, top_k)
    # Kept with the plan: a backward pass of its own would search all experts again.
    topk_idx = checkpoint_name(_top_k(choice, top_k)[1], "ep_plan")
    picked = _pick(scores, topk_idx)
    if options.score_function == "sigmoid":
        weights = picked / (picked.sum(-1, keepdims=True) + 1e-20) if top_k > 1 else picked
    else:
        weights = picked if options.use_pre_softmax else jax.nn.softmax(picked, axis=-1)
    if options.scaling_factor != 1.0:
        weights = weights * options.scaling_factor
    return Routing(topk_idx, weights, probs)


def _pick(scores: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """scores [..., E] at topk_idx [..., K], as a masked sum: a gather would be resharded."""
    experts = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    chosen = topk_idx[..., None] == experts
    return jnp.where(chosen, scores[..., None, :], 0.0).sum(-1)


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` along the last dim as k argmaxes: the partitioner keeps a sharded batch apart,
    where it gathers the operand of `lax.top_k` on every device (seen on CPU, JAX 0.10 to 0.12).
    """
    # A picked entry becomes -inf; one that the caller masked stays above that.
    left = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
    entries = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    picked = []
    for _ in range(k):
        best = jnp.argmax(left, axis=-1, keepdims=True).astype(jnp.int32)
        picked.append(best)
        left = jnp.where(entries == best, -jnp.inf, left)
    index = jnp.concatenate(picked, axis=-1)
    return _pick(scores, index), index


def _within_best_groups(
    choice: jax.Array, num_groups: int, group_topk: int, top_k: int
) -> jax.Array:
    """`choice` [..., E] with -inf outside the token's best routing groups."""
    lead, experts = choice.shape[:-1], choice.shape[-1]
    grouped = choice.reshape(*lead, num_groups, experts // num_groups)
    score = _top_k(grouped, top_k // group_topk)[0].sum(-1)
    best = _top_k(score, group_topk)[1]
    allowed = (best[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _check(experts: int, options: RouteOptions, expert_bias: jax.Array | None) -> None:
    top_k, score_function = options.top_k, options.score_function
    num_groups, group_topk = options.num_groups, options.group_topk

    def fail(argument: str, message: str) -> None:
        raise InvalidArgumentError(message, argument=argument)

    if not 1 <= top_k <= experts:
        fail("top_k", f"top_k must be 1 to {experts} (the experts in logits), got {top_k}")
    if score_function not in SCORE_FUNCTIONS:
        fail(
            "score_function",
            f"score_function must be one of {SCORE_FUNCTIONS}, got {score_function!r}",
        )
    if expert_bias is not None and expert_bias.shape != (experts,):
        fail("expert_bias", f"expert_bias must be [{experts}], got {list(expert_bias.shape)}")
    if (num_groups is None) != (group_topk is None):
        fail("group_topk", f"give both, got num_groups={num_groups} and group_topk={group_topk}")
    if num_groups is None or group_topk is None:
        return
    if num_groups < 1 or experts % num_groups:
        fail("num_groups", f"num_groups={num_groups} does not divide the {experts} experts")
    if not 1 <= group_topk <= num_groups or top_k % group_topk:
        fail(
            "group_topk",
            f"group_topk must be 1 to num_groups={num_groups} and divide top_k={top_k}, "
            f"got {group_topk}",
        )
    if top_k // group_topk > experts // num_groups:
        fail(
            "group_topk",
            f"top_k={top_k} over group_topk={group_topk} routing groups asks for "
            f"{top_k // group_topk} experts of a group of {experts // num_groups}",
        )


def tokens_per_expert(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Slots routed to each expert, [E] int32; unused slots (-1) count nowhere."""
    experts = jnp.arange(num_experts, dtype=topk_idx.dtype)
    chosen = topk_idx[..., None] == experts
    return chosen.sum(tuple(range(topk_idx.ndim)), dtype=jnp.int32)


def aux_loss(
    routing: Routing, *, coeff: float, axis_name: str | Sequence[str] | None = None
) -> jax.Array:
    """The load-balancing loss over the global batch.

    coeff * E / (K T^2) * sum over e of (sum over t of probs[t, e]) * (slots routed to e).

    Args:
        routing: what `route` returned for all tokens.
        coeff: its weight in the loss.
        axis_name: inside a shard_map, the axes over which the batch is split.

    Returns:
        Scalar f32, differentiable in the logits through probs; 1 * coeff when balanced.

    Cost: one pass over probs; over a sharded batch one all-reduce of [E] twice.

    Source: Switch Transformers (arXiv:2101.03961), equation 4, over K slots instead of one.
    """
    experts, top_k = routing.probs.shape[-1], routing.topk_idx.shape[-1]
    tokens: Any = prod(routing.probs.shape[:-1])
    slots = tokens_per_expert(routing.topk_idx, experts).astype(jnp.float32)
    shares = routing.probs.sum(tuple(range(routing.probs.ndim - 1)))
    if axis_name is not None:
        shares, slots = lax.psum(shares, axis_name), lax.psum(slots, axis_name)
        tokens = tokens * lax.psum(1, axis_name)
    scale = coeff * experts / (top_k * float(tokens) ** 2) if tokens else 0.0
    return scale * (shares * lax.stop_gradient(slots)).sum()


def update_expert_bias(bias: jax.Array, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """One step of loss-free balancing: experts under the mean load gain `rate`, others lose it.

    Args:
        bias: [E] f32.
        tokens_per_expert: [E], of the global batch, as `moe(..., return_stats=True)` gives it.
        rate: size of the step.

    Returns:
        The new bias, [E].

    Cost: E additions.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
    (arXiv:2408.15664).
    """
    load = tokens_per_expert.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean() - load).astype(bias.dtype)


def pad_tokens(
    multiple: int,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Pads dim 0 to a multiple with zero tokens whose slots are unused (-1, weight 0).

    Args:
        multiple: usually R, `group.spec.num_slabs`.
        tokens: [T, ...].
        topk_idx: [T, ..., K].
        topk_weights: [T, ..., K] or None.

    Returns:
        The three, padded; cut dim 0 of combine's result back to T.

    Raises:
        InvalidArgumentError: multiple is below 1.

    Cost: one copy of the arrays; nothing where T is a multiple already.
    """
    if multiple < 1:
        raise InvalidArgumentError(
            f"multiple must be at least 1, got {multiple}", argument="multiple"
        )
    missing = -tokens.shape[0] % multiple

    def pad(array: jax.Array, value: float) -> jax.Array:
        widths = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=value)

    weights = None if topk_weights is None else pad(topk_weights, 0.0)
    return pad(tokens, 0), pad(topk_idx, -1), weights
