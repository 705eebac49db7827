"""The router: chooses and weights the experts of each token.

Plain JAX over any leading dims; every function works per token, so a sharded batch is not moved.
Letters: `ops/__init__.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.arguments import as_int, suggests
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import stored
from ep_runtime_client.ops.kernels.slots import as_int32
from ep_runtime_client.ops.partitioning.roles import say_once
from ep_runtime_client.ops.routing.options import (
    REMOVED,
    Router,
    check,
    normalizes,
    summed_scores,
)
from ep_runtime_client.ops.tracing import eager

# Keep a sum of scores above zero: DeepSeek's addend, and Ernie's lower bound of softmax shares.
_ADDED, _LEAST_SHARES = 1e-20, 1e-12
# Below this value softplus(x) equals exp(x) in f32, whose root has a nonzero derivative.
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


@suggests(removed=REMOVED)
def route(
    logits: jax.Array,
    top_k: int,
    *,
    router: Router = Router(),
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
) -> Routing:
    """Picks the top_k experts of every token from router logits; ties go to the lower index.

    Args:
        logits: [..., E]; computed on in f32.
        top_k: K.
        router: how experts are chosen and weighted.
        expert_bias: [E] f32, added to the scores for the choice only; has no gradient.
        token_mask: bool [...], False for tokens that count nowhere, such as padding. Their slots
            are unused (-1), their weights, probs and logits are 0, and so is the gradient of their
            logits, which may be NaN.

    Returns:
        Routing with topk_idx [..., K] int32, topk_weights [..., K] f32, probs [..., E] f32 (the
        softmax over all E, or each score over the sum of all + 1e-20), logits [..., E] f32.

    Raises:
        InvalidArgumentError: an argument does not fit E, or does not fit another argument.

    Cost: K passes over E per token, each an argmax and a masked sum; no sort and no collective.

    Source: as `Router`.

    Examples:
        >>> ep.route(jnp.array([[0.0, 2.0, 1.0, 2.0]]), 2).topk_idx.tolist()
        [[1, 3]]
    """
    top_k = as_int("top_k", top_k)
    logits = jnp.asarray(logits)
    expert_bias = None if expert_bias is None else jnp.asarray(expert_bias)
    if not logits.shape:
        raise InvalidArgumentError("logits must be [..., E], got a scalar", argument="logits")
    check(logits.shape[-1], top_k, router, expert_bias)
    token_mask = checked_mask(token_mask, logits.shape[:-1])
    if top_k == 1 and normalizes(router, top_k):
        say_once(
            "route with top_k=1 gives every token the weight 1, and the router no gradient but "
            "aux_loss's: ep.Router(use_pre_softmax=True), without normalize_weights=True, weighs "
            "by the expert's share of the softmax over all"
        )
    return eager.run(_route, (router, top_k), logits, expert_bias, token_mask)


def checked_mask(token_mask: Any, lead: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask as an array; raises InvalidArgumentError unless None or bool [*lead]."""
    if token_mask is None:
        return None
    found, dtype = jnp.shape(token_mask), jnp.result_type(token_mask)
    if found != lead or dtype != jnp.bool_:
        raise InvalidArgumentError(
            f"token_mask must be bool {[*lead]}, one for each token, got {dtype}{[*found]}",
            argument="token_mask",
        )
    return jnp.asarray(token_mask)


def unmasked(token_mask: jax.Array, values: jax.Array, fill: float = 0) -> jax.Array:
    """Returns values [..., N] of unmasked tokens, and `fill` for others, whose gradient is 0."""
    return jnp.where(token_mask[..., None], values, jnp.asarray(fill, values.dtype))


def without_masked(_: None, routing: Routing, token_mask: jax.Array) -> Routing:
    """Returns the routing in which masked tokens have no slot, weight, share or logit."""
    idx, *others = routing
    kept = [None if each is None else unmasked(token_mask, each) for each in others]
    return Routing(unmasked(token_mask, idx, -1), *kept)  # type: ignore[arg-type]


def _route(
    call: tuple[Router, int],
    logits: jax.Array,
    expert_bias: jax.Array | None,
    token_mask: jax.Array | None,
) -> Routing:
    router, top_k = call
    logits = logits.astype(jnp.float32)
    if token_mask is not None:
        logits = unmasked(token_mask, logits)  # before any value is computed from a NaN
    scores, probs = _scores(router, logits)
    choice = scores if expert_bias is None else scores + expert_bias.astype(jnp.float32)
    choice = lax.stop_gradient(choice)
    # Saved with the plan, so that backward does not search all experts again.
    allowed = None if router.num_groups is None else _in_best_groups(choice, router, top_k)
    topk_idx = checkpoint_name(largest(choice, top_k, allowed)[1], "ep_plan")
    weights = _weights(router, scores, probs, topk_idx)
    if router.scaling_factor != 1.0:
        weights = weights * router.scaling_factor
    routing = Routing(topk_idx, weights, probs, logits)
    return routing if token_mask is None else without_masked(None, routing, token_mask)


def _scores(router: Router, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the scores that choose experts, without bias, and every expert's share."""
    if router.score_function == "softmax":
        probs = jax.nn.softmax(logits, axis=-1)
        return (probs if router.use_pre_softmax else logits), probs
    of = jax.nn.sigmoid if router.score_function == "sigmoid" else _sqrt_softplus
    scores = of(logits)
    return scores, _part_of(_sum(scores) + _ADDED, scores)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    low = jnp.exp(jnp.minimum(logits, _SOFTPLUS_IS_EXP) / 2)
    high = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, _SOFTPLUS_IS_EXP)))
    return jnp.where(logits < _SOFTPLUS_IS_EXP, low, high)


def _weights(router: Router, scores: jax.Array, probs: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """Computes the weights [..., K] of the chosen experts, before scaling."""
    normalize = normalizes(router, topk_idx.shape[-1])
    if router.score_function == "softmax":
        if not router.use_pre_softmax and normalize:
            return jax.nn.softmax(pick(scores, topk_idx), axis=-1)
        shares = pick(probs, topk_idx)
        return _part_of(jnp.maximum(_sum(shares), _LEAST_SHARES), shares) if normalize else shares
    picked = pick(scores, topk_idx)
    return _part_of(_sum(picked) + _ADDED, picked) if normalize else picked


def _sum(values: jax.Array) -> jax.Array:
    return values.sum(-1, keepdims=True)


def _part_of(total: jax.Array, values: jax.Array) -> jax.Array:
    """Returns values / total; its gradient has no total**-2, which is inf in f32 for 1e-20."""
    scale = lax.stop_gradient(total)
    return values / scale / (total / scale)


def _in_best_groups(choice: jax.Array, router: Router, top_k: int) -> jax.Array:
    """Returns which experts are in the token's best routing groups, bool [..., E]."""
    num_groups, group_topk = router.num_groups, router.group_topk
    assert num_groups is not None
    assert group_topk is not None
    lead, experts = choice.shape[:-1], choice.shape[-1]
    grouped = choice.reshape(*lead, num_groups, experts // num_groups)
    score = largest(grouped, summed_scores(router, top_k))[0].sum(-1)
    best = largest(score, group_topk)[1]
    allowed = (best[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.broadcast_to(allowed[..., None], grouped.shape).reshape(choice.shape)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest entries of the last dim and their indices; ties go to the lower index.

    Like `jax.lax.top_k`, for routers of your own, but without a sort: XLA gathers the operand of a
    sort on every device, and here a sharded batch stays sharded.

    Args:
        x: [..., E], a float dtype. -inf entries come last, NaN first.
        k: how many, 1 to E.

    Returns:
        (values, idx): values [..., k] of x's dtype, in falling order; idx [..., k] int32, all
        different. Differentiable in x through values.

    Raises:
        InvalidArgumentError: k or the dtype does not fit.

    Cost: k passes over E, each an argmax and a masked sum; no collective.

    Examples:
        >>> values, idx = ep.top_k(jnp.array([[0.0, 2.0, 1.0, 2.0]]), 3)
        >>> values.tolist(), idx.tolist()
        ([[2.0, 2.0, 1.0]], [[1, 3, 2]])
    """
    shape, dtype = jnp.shape(x), jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InvalidArgumentError(f"x must have a float dtype, got {dtype}", argument="x")
    k = as_int("k", k)
    if not shape or not 1 <= k <= shape[-1]:
        raise InvalidArgumentError(
            f"k must be 1 to the last dim of x {list(shape)}, got {k}", argument="k"
        )
    return eager.run(_largest, k, jnp.asarray(x))


def _largest(k: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return largest(x, k)


def largest(
    scores: jax.Array, k: int, allowed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes `lax.top_k` along the last dim as k argmaxes, with entries that are not `allowed`
    last. The partitioner keeps a sharded batch sharded, but gathers the operand of `lax.top_k` on
    every device (seen on CPU, JAX 0.10 to 0.12).
    """
    # Integers in the order of floats: NaNs highest, -inf lowest, well above the least integer.
    wide = lax.stop_gradient(scores)
    wide = wide.astype(jnp.float64 if wide.dtype == jnp.float64 else jnp.float32)
    wide = jnp.where(wide == 0, jnp.zeros_like(wide), wide)  # -0.0 equals 0.0
    bits = lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    most = jnp.iinfo(bits.dtype).max
    left = jnp.where(jnp.isnan(wide), most, jnp.where(bits < 0, bits ^ most, bits))
    # Pick the largest remaining entry, k times.
    picked = []
    least = jnp.iinfo(left.dtype).min
    if allowed is not None:
        left = jnp.where(allowed, left, least + 1)
    entries = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    for _ in range(k):
        best = jnp.argmax(left, axis=-1, keepdims=True).astype(jnp.int32)
        picked.append(best)
        left = jnp.where(entries == best, least, left)
    index = jnp.concatenate(picked, axis=-1)
    return pick(scores, index), index


def pick(scores: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """Picks scores [..., E] at topk_idx [..., K] with a masked sum: a gather would be resharded."""
    experts = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    chosen = topk_idx[..., None] == experts
    return jnp.where(chosen, scores[..., None, :], 0.0).sum(-1)


def tokens_per_expert(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Counts the slots routed to each expert, [E] int32; unused slots (-1) are not counted."""
    experts = lax.broadcasted_iota(jnp.int32, (*[1] * topk_idx.ndim, num_experts), topk_idx.ndim)
    chosen = as_int32(topk_idx)[..., None] == experts
    return chosen.sum(tuple(range(topk_idx.ndim)), dtype=jnp.int32)


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
            f"bias must be float32, got {bias.dtype}, which rounds small updates to zero",
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
    """Returns the exact sign of mean - load: [E] int32. The sum of all loads may exceed int32."""
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
        The three arrays, padded, with topk_idx as int32. Slice dim 0 of combine's result to T.

    Raises:
        InvalidArgumentError: multiple is not an integer or is below 1, or the arrays have
            different T.

    Cost: one copy of the arrays; none if T already is a multiple.
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
