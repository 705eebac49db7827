"""What no vmap may batch."""

from __future__ import annotations

from typing import Any

import jax
from jax.custom_batching import custom_vmap


@custom_vmap
def not_batched(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """`operands`, with a NotImplementedError that gives the reason should vmap batch any."""
    return operands


@not_batched.def_vmap
def _refuse(axis_size: int, in_batched: Any, *operands: jax.Array) -> Any:
    raise NotImplementedError(
        "ep ops cannot run under vmap: one call moves the tokens of all ranks at once, and its "
        "buffers have one capacity. Put the batch into the token dims ([B, S, H]) instead."
    )
