"""The largest entries of the last dim, without a sort or a gather."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.arguments import as_int
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.tracing import eager


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
    found: tuple[jax.Array, jax.Array] = eager.run(_largest, k, jnp.asarray(x))
    return found


def _largest(k: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return largest(x, k)


def largest(
    scores: jax.Array, k: int, allowed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` along the last dim as k argmaxes: the partitioner keeps a sharded batch apart,
    where it gathers the operand of `lax.top_k` on every device (seen on CPU, JAX 0.10 to 0.12).
    Entries that are not `allowed` come last.
    """
    # Integers in the order of floats: NaNs first, -inf last, well over the least integer.
    wide = lax.stop_gradient(scores)
    wide = wide.astype(jnp.float64 if wide.dtype == jnp.float64 else jnp.float32)
    wide = jnp.where(wide == 0, jnp.zeros_like(wide), wide)  # -0.0 equals 0.0
    bits = lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    most = jnp.iinfo(bits.dtype).max
    left = jnp.where(jnp.isnan(wide), most, jnp.where(bits < 0, bits ^ most, bits))
    # The largest of what is left, k times.
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
    """scores [..., E] at topk_idx [..., K], as a masked sum: a gather would be resharded."""
    experts = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    chosen = topk_idx[..., None] == experts
    return jnp.where(chosen, scores[..., None, :], 0.0).sum(-1)
