"""Decides when kernels of the CUDA library replace XLA: activation, quantization, row moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime_client.ops.kernels import platform
from ep_runtime_client.ops.kernels.ffi import bound, once

VECTOR_BYTES = 16  # of one load: the bytes of a row are a multiple of it
CONVERTED_MULTIPLE = 8  # of the last dim: values that one lane converts to 8 bits or back
MAX_GROUPS = 1024  # of one slab
MAX_SLABS = 65535
Result = TypeVar("Result")
FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


def available() -> bool:
    """Whether this process has GPUs, and the kernels support all of them."""
    return bool(platform.gpus())


def multiplying() -> bool:
    """Whether the kernels, including matmul kernels, support all GPUs of this process."""
    return available() and {*(platform.gpus() or ())} <= {platform.PRODUCTS}


def supports(groups: tuple[int, ...], *arrays: Any, width: int | None = None) -> bool:
    """Whether slabs of groups [L] or [S, L] and arrays [S * C, ...] are within the limits.

    Args:
        groups: shape of group_sizes.
        arrays: with .shape and .dtype; nonempty, with `width` values a multiple of 16 bytes.
        width: values of a row; None is the last dim.
    """
    if not 1 <= groups[-1] <= MAX_GROUPS or math.prod(groups[:-1]) > MAX_SLABS:
        return False
    sizes = [math.prod(x.shape) for x in arrays]
    widths = [(x.shape[-1] if width is None else width) * x.dtype.itemsize for x in arrays]
    aligned = not any(size % VECTOR_BYTES for size in widths)
    return aligned and 0 not in sizes and math.prod(arrays[0].shape[: len(groups)]) < 2**31


def either(
    served: bool,
    kernel: Callable[..., Result],
    plain: Callable[..., Result],
    *operands: Any,
) -> Result:
    """Calls `kernel(*operands)` if it is supported and the program is for a GPU, else `plain`."""
    return platform.choose(kernel, plain, *operands) if served else plain(*operands)


def call(
    target: str,
    results: tuple[jax.ShapeDtypeStruct, ...],
    operands: tuple[jax.Array, ...],
    attributes: dict[str, int] | None = None,
    aliases: dict[int, int] | None = None,
    stacked: int = 0,
) -> tuple[jax.Array, ...]:
    """Makes a custom call; under vmap one call per element, in order.

    The first `stacked` results may only be stacked by a scan; XLA then writes them directly into
    the stack.
    """
    made = jax.ffi.ffi_call(
        target, results, vmap_method="sequential", input_output_aliases=aliases or {}
    )
    values = {name: np.int64(value) for name, value in (attributes or {}).items()}
    outs = tuple(made(*bound(*operands), **values))
    return (*outs[:stacked], *once(outs[stacked:]))


def sizes_of(group_sizes: jax.Array) -> jax.Array:
    """Returns group sizes [L] or [S, L] as int32 [S, L]."""
    return group_sizes.astype(jnp.int32).reshape(-1, group_sizes.shape[-1])
