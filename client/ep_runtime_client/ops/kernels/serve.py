"""Decides when kernels of the CUDA library replace XLA: GPUs, sizes, the lowered program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime import native
from ep_runtime_client.ops.kernels.ffi import launch, once, register_for_gpus
from ep_runtime_client.ops.tracing.varying import spread_over, varied_axes

VECTOR_BYTES = 16  # bytes of one load; the bytes of a row are a multiple
CONVERTED_MULTIPLE = 8  # divides the last dim: one lane converts this many values
MAX_GROUPS = 1024  # of one slab
MAX_SLABS = 65535
Result = TypeVar("Result")
FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))
# Hopper: matmul kernels are written for its tensor cores. Other kernels are plain CUDA, and also
# compiled for later GPUs.
PRODUCTS = "9.0"


def installed() -> bool:
    """Whether this package has the CUDA library, which all other functions here need."""
    return native.library_path("cuda").exists()


def gpus() -> tuple[str, ...] | None:
    """Returns capabilities of this process's GPUs, if the kernels support all; there may be none.

    None without the CUDA library, or if the kernels do not support one of the GPUs.
    """
    if not installed():
        return None
    found = register_for_gpus()
    return found if all(_has_kernels(each) for each in {*found}) else None


def multiplying_gpus() -> tuple[str, ...] | None:
    """Like `gpus`, for matmul kernels."""
    found = gpus()
    return found if found is not None and {*found} <= {PRODUCTS} else None


def _has_kernels(capability: str) -> bool:
    # Every build has kernels for Hopper.
    return capability == PRODUCTS or native.library("cuda").has_kernels_for(capability)


def choose(kernel: Callable[..., Result], plain: Callable[..., Result], *operands: Any) -> Result:
    """Calls `kernel(*operands)` if the program is lowered for a GPU, else `plain(*operands)`."""
    axes = tuple(sorted(varied_axes(operands)))

    def typed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: jax.tree.map(lambda x: spread_over(x, axes), function(*given))

    branches = {"cuda": typed(kernel), "default": typed(plain)}
    return lax.platform_dependent(*operands, **branches)


def available() -> bool:
    """Whether this process has GPUs, and the kernels support all of them."""
    return bool(gpus())


def multiplying() -> bool:
    """Whether the kernels, including matmul kernels, support all GPUs of this process."""
    return available() and multiplying_gpus() is not None


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
    return choose(kernel, plain, *operands) if served else plain(*operands)


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
    way: dict[str, Any] = {"aliases": aliases, "vmap_method": "sequential", **(attributes or {})}
    outs = tuple(launch(target, results, *operands, **way))
    return (*outs[:stacked], *once(outs[stacked:]))


def sizes_of(group_sizes: jax.Array) -> jax.Array:
    """Returns group sizes [L] or [S, L] as int32 [S, L]."""
    return group_sizes.astype(jnp.int32).reshape(-1, group_sizes.shape[-1])
