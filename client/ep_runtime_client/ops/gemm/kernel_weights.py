"""Weights in the layout of the GPU kernels: one array, or gate and up of a pair.

A box that a kernel copies must not cross from gate to up, so each must be a multiple of MULTIPLE
wide. Other pairs are first copied into one array, and their gradients out of one; a warning reports
it once.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.quantize.pair import Pair

MULTIPLE = 64
Shapes = tuple[tuple[int, ...], ...]
_log = logging.getLogger(__name__)


def taken(rhs: jax.Array | Pair, cast: Any) -> tuple[jax.Array, ...]:
    """Returns kernels [G, K', N'], or gate and up [G, K', M], in dtype `cast` if one is given."""

    def narrowed(x: jax.Array) -> jax.Array:
        return x if cast is None else x.astype(cast)

    if not isinstance(rhs, Pair):
        return (narrowed(rhs).reshape(*rhs.shape[:2], -1),)
    halves = (narrowed(rhs.gate), narrowed(rhs.up))
    return halves if _apart(rhs.shape[-1]) else (jnp.concatenate(halves, 2),)


def made(
    call: Callable[[Shapes], Sequence[jax.Array]],
    experts: int,
    features: int,
    trailing: Sequence[int],
    paired: bool,
) -> jax.Array | Pair:
    """Makes the gradient of kernels [G, K', *N'], or of a Pair; `call` makes its arrays."""
    columns = math.prod(trailing)
    if paired and _apart(trailing[-1]):
        gate, up = call(((experts, features, columns // 2),) * 2)
        return Pair(gate, up)
    (whole,) = call(((experts, features, columns),))
    whole = whole.reshape(experts, features, *trailing)
    return Pair(whole[:, :, 0], whole[:, :, 1]) if paired else whole


def _apart(half: int) -> bool:
    if half % MULTIPLE and serve.multiplying_gpus():
        _say_copied(half)
    return half % MULTIPLE == 0


@functools.cache
def _say_copied(half: int) -> None:
    _log.warning(
        "a pair (gate, up) must have M in multiples of %d for the GPU kernels, got %d; every "
        "matmul then copies the pair into one array, and splits the gradient of that array",
        MULTIPLE,
        half,
    )
