"""The router's matmul with f32 accuracy, on a GPU's bf16 tensor cores if tokens are bf16.

A product of two bf16 values is exact in f32, and an f32 value is the sum of three bf16 values. So
f32 accuracy needs no f32 matmul, which takes several times longer than reading the tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.kernels.serve import choose
from ep_runtime_client.ops.partitioning.roles import explicit_mesh
from ep_runtime_client.ops.tracing.varying import spread_over, varied_axes

_NARROW = jnp.dtype(jnp.bfloat16)
_EXPONENT_BITS, _MANTISSA_BITS = 8, 7  # of bf16
_EXACT = 3  # bf16 parts of an f32
_GRADIENT = 2  # parts of the logits' gradient: 16 bits, as results are rounded to bf16


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Multiplies x [..., H] by router [H, E] in f32: [..., E]. Differentiable in both.

    Cost: on GPUs, with x in bf16, one pass over x, and forward and backward matmuls in bf16.
    """
    # If types carry shardings, a matmul over a sharded dim must name the result's.
    explicit = any(explicit_mesh(each) is not None for each in (x, router))
    if x.dtype != _NARROW or router.dtype not in (_NARROW, jnp.float32) or explicit:
        return _wide(x, router)
    axes = tuple(sorted(varied_axes(x, router)))
    return _matmul(spread_over(x, axes), spread_over(router, axes))


def _wide(x: jax.Array, router: jax.Array) -> jax.Array:
    operands = (x.astype(jnp.float32), router.astype(jnp.float32))
    return jnp.einsum("...h,he->...e", *operands, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def _matmul(x: jax.Array, router: jax.Array) -> jax.Array:
    return choose(_narrow, _wide, x, router)


def _fwd(x: jax.Array, router: jax.Array) -> Any:
    return _matmul(x, router), (x, router)


def _bwd(saved: Any, grad: jax.Array) -> Any:
    return choose(_narrow_grads, _wide_grads, *saved, grad)


_matmul.defvjp(_fwd, _bwd)


def _narrow(x: jax.Array, router: jax.Array) -> jax.Array:
    parts = _parts(router, _EXACT)
    made = _dot(x, jnp.concatenate(parts, axis=1), x.ndim - 1, 0)
    return _added(made, len(parts))


def _wide_grads(x: jax.Array, router: jax.Array, grad: jax.Array) -> Any:
    return jax.vjp(_wide, x, router)[1](grad)


def _narrow_grads(x: jax.Array, router: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    grads = _parts(grad, _GRADIENT)
    lead = tuple(range(x.ndim - 1))
    stacked = jnp.concatenate(grads, axis=-1)
    d_router = lax.dot_general(
        x, stacked, ((lead, lead), ((), ())), preferred_element_type=jnp.float32
    )
    first, *others = _parts(router, _GRADIENT)
    # The product of both second parts is below the rounding error of bf16.
    kernels = jnp.concatenate([first] * len(grads) + others, axis=1)
    pairs = jnp.concatenate([*grads, *([grads[0]] * len(others))], axis=-1)
    d_x = _dot(pairs, kernels, x.ndim - 1, 1, x.dtype)
    return d_x, _added(d_router, len(grads)).astype(router.dtype)


def _parts(values: jax.Array, count: int) -> list[jax.Array]:
    """Splits `values` into at most `count` bf16 arrays, largest first, with nearly that sum."""
    if values.dtype == _NARROW:
        return [values]
    found = []
    for _ in range(count):
        # A cast to bf16 and back is not enough: XLA may drop it, and the remainder would be zero.
        part = lax.reduce_precision(values, _EXPONENT_BITS, _MANTISSA_BITS)
        found.append(part.astype(_NARROW))
        values = values - part
    return found


def _dot(
    x: jax.Array, kernel: jax.Array, x_dim: int, kernel_dim: int, dtype: Any = jnp.float32
) -> jax.Array:
    dims = (((x_dim,), (kernel_dim,)), ((), ()))
    return lax.dot_general(x, kernel, dims, preferred_element_type=dtype)


def _added(stacked: jax.Array, count: int) -> jax.Array:
    """Returns the sum of `count` equal parts of the last dim, smallest first."""
    parts = jnp.split(stacked, count, axis=-1)
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = part + total
    return total
