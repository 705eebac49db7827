"""Replaces the GPU's clock by the host's, for tests of the GPU benches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def host_clock(
    token: jax.Array, arrays: Sequence[jax.Array], hold_ns: int
) -> tuple[jax.Array, jax.Array]:
    """Reads the host's clock once the arrays are ready."""
    del hold_ns

    def read(token: Any, *arrays: Any) -> Any:
        now = time.perf_counter_ns()
        return np.asarray(token), np.array([now & 0xFFFFFFFF, now >> 32], np.uint32)

    shapes = (jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32))
    first = [array.reshape(-1)[:1] for array in arrays]
    after, now = jax.pure_callback(read, shapes, token, *first)
    return after, now
