"""The router: which experts a token goes to, with which weights, and what keeps them balanced.

Plain JAX over any leading dims; every function works per token, so a sharded batch stays where
it is. Letters: `ops/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.arguments import as_int
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import stored
from ep_runtime_client.ops.kernels.slots import as_int32
from ep_runtime_client.ops.partitioning.roles import say_once
from ep_runtime_client.ops.routing.options import RouteOptions, check
from ep_runtime_client.ops.routing.search import largest, pick
from ep_runtime_client.ops.tracing import eager

# What keeps a sum of scores from being zero: DeepSeek's, and of softmax shares Ernie's smallest.
_ADDED, _LEAST_SHARES = 1e-20, 1e-12
# Below it softplus(x) is exp(x) in f32, whose root has a derivative down to 0.
_SOFTPLUS_IS_EXP = -20.0


@stored.pytree()
class Routing(NamedTuple):
    """The experts of every token and their weights, from `route` or from your own router.

    Attributes:
        topk_idx: [..., K] int32. Experts in falling order of their (biased) score. In a routing of
            your own, -1 is an unused slot.
        topk_weights: [..., K] f32, differentiable in the logits.
        probs: [..., E] f32. Every expert's share, without bias, which `aux_loss` reads. May be None
            in a routing of your own, if no such loss is needed.
        logits: [..., E] f32, the router logits, for losses of your own; or None.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    probs: jax.Array | None = None
    logits: jax.Array | None = None


def route(
    logits: jax.Array,
    top_k: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    expert_bias: jax.Array | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    normalize_weights: bool | None = None,
    scaling_factor: float = 1.0,
) -> Routing:
    """Picks the top_k experts of every token from router logits; ties go to the lower index.

    Args:
        logits: [..., E]; computed on in f32.
        top_k: K.
        score_function: the score of an expert: "softmax" is its logit (with use_pre_softmax its
            share of the softmax over all E), "sigmoid" is sigmoid(logit), and "sqrtsoftplus" is
            sqrt(log(1 + exp(logit))).
        use_pre_softmax: softmax over all E before the choice. With top_k=1 the router has a
            gradient only with it, because the softmax over one logit is 1; a warning says so once.
        expert_bias: [E] f32, added to the scores for the choice only; has no gradient.
        num_groups: number of routing groups of E / num_groups experts each; needs group_topk.
        group_topk: number of routing groups that a token may use; those of the highest score.
        group_score_topk: a group's score is the sum of this many of its highest biased scores.
            None is K // group_topk, which must divide. DeepSeek-V3 has 2, V2 1.
        normalize_weights: whether the K weights of a token are divided by their sum. False: a
            weight is the expert's score, or with "softmax" its share of the softmax over all E.
            True: that divided by the sum over the K (+ 1e-20; with use_pre_softmax at least 1e-12).
            None: True, except with use_pre_softmax, and with "sigmoid" and "sqrtsoftplus" if K is
            1.
        scaling_factor: multiplies the weights, after they are normalised.

    Returns:
        Routing with topk_idx [..., K] int32, topk_weights [..., K] f32, probs [..., E] f32 (the
        softmax over all E, or each score over the sum of all + 1e-20), logits [..., E] f32.

    Raises:
        InvalidArgumentError: an argument does not fit E, or does not fit another argument.

    Cost: K passes over E per token, each an argmax and a masked sum; no sort and no collective.

    Source: a softmax over the picked logits is from Shazeer et al. 2017 (arXiv:1701.06538). Routing
    groups, sigmoid scores and the bias are DeepSeek-V3's (arXiv:2412.19437), "sqrtsoftplus" is
    DeepSeek-V4's, 1e-20 DeepSeek's, and 1e-12 Ernie-4.5's `moe_norm_min`. Arguments are named as in
    Transformer Engine's fused router.

    Examples:
        >>> ep.route(jnp.array([[0.0, 2.0, 1.0, 2.0]]), 2).topk_idx.tolist()
        [[1, 3]]
    """
    options = RouteOptions(
        as_int("top_k", top_k),
        score_function,
        use_pre_softmax,
        num_groups,
        group_topk,
        group_score_topk,
        normalize_weights,
        scaling_factor,
    )
    logits = jnp.asarray(logits)
    expert_bias = None if expert_bias is None else jnp.asarray(expert_bias)
    if not logits.shape:
        raise InvalidArgumentError("logits must be [..., E], got a scalar", argument="logits")
    check(logits.shape[-1], options, expert_bias)
    if options.top_k == 1 and options.normalizes:
        say_once(
            "route with top_k=1 gives every token the weight 1, and the router no gradient but "
            "aux_loss's: use_pre_softmax=True, without normalize_weights=True, weighs by the "
            "expert's share of the softmax over all"
        )
    routing: Routing = eager.run(_route, options, logits, expert_bias)
    return routing


def _route(options: RouteOptions, logits: jax.Array, expert_bias: jax.Array | None) -> Routing:
    logits = logits.astype(jnp.float32)
    scores, probs = _scores(options, logits)
    choice = scores if expert_bias is None else scores + expert_bias.astype(jnp.float32)
    choice = lax.stop_gradient(choice)
    # Kept with the plan: a backward pass of its own would search all experts again.
    topk_idx = checkpoint_name(
        largest(choice, options.top_k, _in_best_groups(choice, options))[1], "ep_plan"
    )
    weights = _weights(options, scores, probs, topk_idx)
    if options.scaling_factor != 1.0:
        weights = weights * options.scaling_factor
    return Routing(topk_idx, weights, probs, logits)


def _scores(options: RouteOptions, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What experts are chosen by, without bias, and every expert's share."""
    if options.score_function == "softmax":
        probs = jax.nn.softmax(logits, axis=-1)
        return (probs if options.use_pre_softmax else logits), probs
    of = jax.nn.sigmoid if options.score_function == "sigmoid" else _sqrt_softplus
    scores = of(logits)
    return scores, _part_of(_sum(scores) + _ADDED, scores)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    low = jnp.exp(jnp.minimum(logits, _SOFTPLUS_IS_EXP) / 2)
    high = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, _SOFTPLUS_IS_EXP)))
    return jnp.where(logits < _SOFTPLUS_IS_EXP, low, high)


def _weights(
    options: RouteOptions, scores: jax.Array, probs: jax.Array, topk_idx: jax.Array
) -> jax.Array:
    """Weights [..., K] of the chosen experts, before scaling."""
    normalize = options.normalizes
    if options.score_function == "softmax":
        if not options.use_pre_softmax and normalize:
            return jax.nn.softmax(pick(scores, topk_idx), axis=-1)
        shares = pick(probs, topk_idx)
        return _part_of(jnp.maximum(_sum(shares), _LEAST_SHARES), shares) if normalize else shares
    picked = pick(scores, topk_idx)
    return _part_of(_sum(picked) + _ADDED, picked) if normalize else picked


def _sum(values: jax.Array) -> jax.Array:
    return values.sum(-1, keepdims=True)


def _part_of(total: jax.Array, values: jax.Array) -> jax.Array:
    """values / total, whose gradient has no total**-2: of 1e-20 that is inf in f32."""
    scale = lax.stop_gradient(total)
    return values / scale / (total / scale)


def _in_best_groups(choice: jax.Array, options: RouteOptions) -> jax.Array | None:
    """Which experts are in the token's best routing groups, bool [..., E]; None: all."""
    num_groups, group_topk = options.num_groups, options.group_topk
    if num_groups is None or group_topk is None:
        return None
    lead, experts = choice.shape[:-1], choice.shape[-1]
    grouped = choice.reshape(*lead, num_groups, experts // num_groups)
    score = largest(grouped, options.summed_scores)[0].sum(-1)
    best = largest(score, group_topk)[1]
    allowed = (best[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.broadcast_to(allowed[..., None], grouped.shape).reshape(choice.shape)


def tokens_per_expert(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Slots routed to each expert, [E] int32; unused slots (-1) count nowhere."""
    experts = lax.broadcasted_iota(jnp.int32, (*[1] * topk_idx.ndim, num_experts), topk_idx.ndim)
    chosen = as_int32(topk_idx)[..., None] == experts
    return chosen.sum(tuple(range(topk_idx.ndim)), dtype=jnp.int32)


def aux_loss(
    routing: Routing, *, coeff: float, axis_name: str | Sequence[str] | None = None
) -> jax.Array:
    """Computes the load-balancing loss of a router over the global batch.

    coeff * E / (K T^2) * sum over e of (sum over t of probs[t, e]) * (slots routed to e).

    Args:
        routing: the result of `route` for all tokens.
        coeff: weight of this loss in the total loss.
        axis_name: inside a shard_map, the axes over which the batch is split.

    Returns:
        Scalar f32, differentiable in the logits through probs; 1 * coeff when balanced.

    Raises:
        InvalidArgumentError: the routing has no probs, or probs of other tokens.

    Cost: one pass over probs; two all-reduces of [E] if the batch is sharded.

    Source: Switch Transformers (arXiv:2101.03961), equation 4, over K slots instead of one.
    """
    if routing.probs is None:
        raise InvalidArgumentError(
            "aux_loss needs routing.probs [..., E], every expert's share of every token, got None",
            argument="routing.probs",
        )
    lead = routing.topk_idx.shape[:-1]
    if routing.probs.shape[:-1] != lead:
        raise InvalidArgumentError(
            f"routing.probs must be {[*lead, 'E']} beside topk_idx {list(routing.topk_idx.shape)}, "
            f"got {list(routing.probs.shape)}",
            argument="routing.probs",
        )
    probs = routing.probs.astype(jnp.float32)
    experts, top_k = probs.shape[-1], routing.topk_idx.shape[-1]
    tokens: Any = prod(probs.shape[:-1])
    slots = tokens_per_expert(routing.topk_idx, experts).astype(jnp.float32)
    shares = probs.sum(tuple(range(probs.ndim - 1)))
    if axis_name is not None:
        shares, slots = lax.psum(shares, axis_name), lax.psum(slots, axis_name)
        tokens = tokens * lax.psum(1, axis_name)
    scale = coeff * experts / (top_k * float(tokens) ** 2) if tokens else 0.0
    return scale * (shares * lax.stop_gradient(slots)).sum()


def update_expert_bias(bias: jax.Array, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """Moves each expert's bias by `rate` so that its load gets closer to the mean.

    Args:
        bias: [E] f32 (f64 with x64).
        tokens_per_expert: [E] int, of the global batch, as `moe(..., return_stats=True)` gives it.
        rate: size of the step.

    Returns:
        The new bias, [E]: larger for experts under the mean load, smaller for experts over it.
        Loads are compared with their mean in integers, so one token of difference counts at any
        batch.

    Raises:
        InvalidArgumentError: the two arrays have different E, the bias has 16 bits (a step may be
            too small for them), or loads are not integers.

    Cost: E integer divisions and additions.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
    (arXiv:2408.15664).
    """
    bias, loads = jnp.asarray(bias), jnp.asarray(tokens_per_expert)
    if bias.ndim != 1 or bias.shape != loads.shape:
        raise InvalidArgumentError(
            "bias and tokens_per_expert must be [E] both, got "
            f"{list(bias.shape)} and {list(loads.shape)}",
            argument="tokens_per_expert",
        )
    if bias.dtype not in (jnp.float32, jnp.float64):
        raise InvalidArgumentError(
            f"bias must be float32, got {bias.dtype}, in which steps of the rate are lost",
            argument="bias",
        )
    if not jnp.issubdtype(loads.dtype, jnp.integer):
        raise InvalidArgumentError(
            f"tokens_per_expert must be integers, got {loads.dtype}: floats have no exact mean; "
            "stats.tokens_per_expert of moe is int32",
            argument="tokens_per_expert",
        )
    return bias + jnp.asarray(rate, bias.dtype) * _below_mean(as_int32(loads)).astype(bias.dtype)


def _below_mean(loads: jax.Array) -> jax.Array:
    """The sign of mean - load, exact: [E] int32. No sum passes int32, that of all loads may."""
    experts = loads.shape[0]
    rests = (loads % experts).sum(dtype=jnp.int32)
    whole = (loads // experts).sum(dtype=jnp.int32) + rests // experts  # of the mean
    return jnp.sign(jnp.where(loads == whole, rests % experts, whole - loads))


def pad_tokens(
    multiple: int,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Pads the number of tokens to a multiple, with zero tokens that go to no expert.

    The slots of these tokens are unused: index -1, weight 0.

    Args:
        multiple: usually R, `group.spec.num_slabs`.
        tokens: [T, ...].
        topk_idx: [T, ..., K].
        topk_weights: [T, ..., K] or None.

    Returns:
        The three, padded, topk_idx as int32; cut dim 0 of combine's result back to T.

    Raises:
        InvalidArgumentError: multiple is not an integer, or is below 1; arrays of different T.

    Cost: one copy of the arrays; nothing if T is a multiple already.
    """
    multiple = as_int("multiple", multiple)
    if multiple < 1:
        raise InvalidArgumentError(
            f"multiple must be at least 1, got {multiple}", argument="multiple"
        )
    for name, array in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if array is not None and array.shape[:1] != tokens.shape[:1]:
            raise InvalidArgumentError(
                f"{name} must have the T of tokens {list(tokens.shape)}, got {list(array.shape)}",
                argument=name,
            )
    missing = -tokens.shape[0] % multiple

    def pad(array: jax.Array, value: float) -> jax.Array:
        widths = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=value)

    weights = None if topk_weights is None else pad(topk_weights, 0.0)
    return pad(tokens, 0), pad(as_int32(topk_idx), -1), weights
