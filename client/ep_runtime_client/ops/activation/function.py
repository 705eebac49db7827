"""Describes the experts' activation: a function by name, or a user's own."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.activation.identity import Fixed, Learned, identified

Function = str | Callable[..., jax.Array]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}
# Names that other libraries give to gated activations, and the function each applies to the gate.
GATED_UNITS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}


@dataclasses.dataclass(frozen=True)
class Activation:
    """Describes what an activation computes from a row. Hashable: a static argument.

    Attributes:
        function: a name in ACTIVATIONS, or f(gate), f(gate, up), or f(h) if not gated.
        gated: whether rows hold gate and up.
        dtype: of the result; the computation is in f32, or in f64 if dtype is f64.
        values: operands that a Learned function reads; set only inside the op with these operands.
    """

    function: str | Fixed | Learned
    gated: bool
    dtype: Any
    values: tuple[jax.Array, ...] = dataclasses.field(default=(), hash=False, compare=False)

    def __repr__(self) -> str:
        """Returns a text that is equal for functions that compute the same, in every process."""
        return f"Activation({self.function}, gated={self.gated}, {jnp.dtype(self.dtype).name})"

    @property
    def wide(self) -> Any:
        return sum_dtype(self.dtype)

    def rows(self, hidden: jax.Array) -> jax.Array:
        """Activates [block, 2, M], [block, 2M] or, if not gated, [block, M] -> [block, M], wide."""
        given = self.function
        function: Callable[..., jax.Array] = ACTIVATIONS[given] if isinstance(given, str) else given
        if isinstance(given, Learned):
            function = functools.partial(given, self.values)
        pairs = isinstance(given, Fixed | Learned) and len(given.given) == 2
        hidden = hidden.astype(self.wide)
        if not self.gated:
            return function(hidden)
        gate, up = jnp.split(hidden, 2, axis=1)
        gate, up = (x.reshape(x.shape[0], -1) for x in (gate, up))
        return function(gate, up) if pairs else function(gate) * up


def activation_of(
    function: Function, gated: bool, dtype: Any, width: int
) -> tuple[Activation, tuple[jax.Array, ...]]:
    """Returns the activation of a call with M = `width`, and the traced values that it reads.

    The activation computes what `function` computes now.
    """
    if isinstance(function, str):
        return Activation(function, gated, dtype), ()
    operands = 2 if gated and _takes_two(function) else 1
    made, values = identified(function, operands, width, sum_dtype(dtype))
    return Activation(made, gated, dtype), values


def _takes_two(function: Callable[..., jax.Array]) -> bool:
    """Whether `function` wants (gate, up) instead of (gate)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(required) == 2
