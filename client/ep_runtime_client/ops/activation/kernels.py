"""The experts' activation on a GPU: custom calls of the CUDA library.

They serve the named functions on rows of one dtype, f32, bf16 or f16, whose M is a multiple of 16
bytes. Letters as in `plain.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.kernels.ffi import targets

if TYPE_CHECKING:
    from ep_runtime_client.ops.activation.function import Activation

TARGETS = targets("ep_activation_v1", "ep_activation_bwd_v1")
# Numbers of csrc/cuda/rows/values/activation_function.h.
FUNCTIONS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "relu": 2,
    "squared_relu": 3,
    "sigmoid": 4,
    "tanh": 5,
    "linear": 6,
}


def supports(
    static: Activation, hidden: jax.Array | None = None, group_sizes: jax.Array | None = None
) -> bool:
    """Whether the GPU kernels support `static` in a program that is lowered for a GPU.

    Without rows: whether the kernels have the function, and this process's GPUs support them.
    """
    if static.function not in FUNCTIONS or not kernels_serve.available():
        return False
    if hidden is None or group_sizes is None:
        return True
    if hidden.dtype not in kernels_serve.FLOATS or hidden.dtype != static.dtype:
        return False
    width = width_of(static, hidden)
    return width > 0 and kernels_serve.supports(group_sizes.shape, hidden, width=width)


def forward(
    static: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """Like `plain.forward`, but rows past the last zone are undefined."""
    rows = math.prod(hidden.shape[:2])
    result = jax.ShapeDtypeStruct((rows, width_of(static, hidden)), hidden.dtype)
    sizes = kernels_serve.sizes_of(group_sizes)
    operands = (sizes, hidden.reshape(rows, -1), weights_of(row_weights))
    (out,) = kernels_serve.call(TARGETS[0], (result,), operands, attributes_of(static))
    return out.reshape(*hidden.shape[:2], -1)


def pullback(
    static: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Like `plain.pullback`. The gradient of hidden reuses hidden's memory."""
    rows = math.prod(hidden.shape[:2])
    given = (hidden.reshape(rows, -1), weights_of(row_weights))
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)
    sizes = kernels_serve.sizes_of(group_sizes)
    operands = (sizes, *given, grad.astype(hidden.dtype).reshape(rows, -1))
    attributes = attributes_of(static)
    d_hidden, d_weights = kernels_serve.call(TARGETS[1], results, operands, attributes, {1: 0})
    d_hidden = d_hidden.reshape(hidden.shape)
    if row_weights is None:
        return d_hidden, None
    return d_hidden, d_weights.reshape(row_weights.shape).astype(row_weights.dtype)


def width_of(static: Activation, hidden: jax.Array) -> int:
    """Returns M, the number of values in an activated row."""
    return math.prod(hidden.shape[2:]) // (2 if static.gated else 1)


def weights_of(row_weights: jax.Array | None) -> jax.Array:
    """Returns row_weights as an operand of the kernels: f32 [S * C], or [0] for None."""
    if row_weights is None:
        return jnp.zeros(0, jnp.float32)
    return row_weights.astype(jnp.float32).reshape(-1)


def attributes_of(static: Activation) -> dict[str, int]:
    """Returns the attributes that describe the computation."""
    assert isinstance(static.function, str)
    return {"function": FUNCTIONS[static.function], "gated": int(static.gated)}
