"""Chooses the CUDA library's kernels or plain JAX by the platform of the lowered program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from ep_runtime import native
from ep_runtime_client.ops.kernels.ffi import register_for_gpus
from ep_runtime_client.ops.tracing.varying import spread_over, varied_axes

# Hopper: matmul kernels are written for its tensor cores. Other kernels are plain CUDA, and also
# compiled for later GPUs.
PRODUCTS = "9.0"
Result = TypeVar("Result")


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
    """As `gpus`, for matmul kernels."""
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
