"""Describes the experts' activation: a function by name, or a user's own, as a static argument.

Equal functions of a user compute the same. All processes of a job must give a program the same
name, or a persistent cache never hits. And a function that now reads another value must not get the
program compiled for the old value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.dtypes import sum_dtype

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
_ADDRESS = re.compile(r" at 0x[0-9a-f]+| id=\d+")


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A function of rows, with a digest of what it computed when the call was made. Hashable.

    Attributes:
        function: the user's function.
        given: the types that the function was traced with, [2, M] each.
        digest: of the function's computation and its derivative.
    """

    function: Callable[..., jax.Array] = dataclasses.field(hash=False)
    given: tuple[jax.ShapeDtypeStruct, ...]
    digest: str

    def __repr__(self) -> str:
        """Returns a text that is equal for functions that compute the same, in every process."""
        return f"{_name(self.function)} {self.digest}"

    def __call__(self, *rows: jax.Array) -> jax.Array:
        """Calls the function on `rows`, at any time after the call was made.

        Raises:
            InvalidArgumentError: it computes something else by now.
        """
        if _digest(self.function, self.given)[0] != self.digest:
            raise InvalidArgumentError(
                f"activation {_name(self.function)} reads a value that changed after the call "
                "began, and JAX compiles or differentiates the call with the old value; use a "
                "function of its own for each value",
                argument="activation",
            )
        return self.function(*rows)


@dataclasses.dataclass(frozen=True)
class Learned:
    """A function of rows that reads values which JAX traces; these are its operands. Hashable.

    Attributes:
        program: the function of one row, with the values it reads as constants.
        learned: for each constant, whether it is an operand.
        given: the types that the function was traced with, [1, M] each.
        digest: of the function's computation.
    """

    program: ClosedJaxpr = dataclasses.field(hash=False, compare=False)
    learned: tuple[bool, ...]
    given: tuple[jax.ShapeDtypeStruct, ...]
    digest: str

    def __repr__(self) -> str:
        """Returns a text that is equal for functions that compute the same, in every process."""
        return f"learned {self.digest}"

    def __call__(self, values: tuple[jax.Array, ...], *rows: jax.Array) -> jax.Array:
        """Calls the function on `rows` [block, M] and its operands, which are passed flat."""
        left, consts = iter(values), []
        variables = self.program.jaxpr.constvars
        for const, learned, var in zip(self.program.consts, self.learned, variables, strict=True):
            consts.append(next(left).reshape(var.aval.shape) if learned else const)
        run = jaxpr_as_fun(ClosedJaxpr(self.program.jaxpr, consts))
        made: jax.Array = jax.vmap(lambda *row: run(*row)[0])(*(x[:, None] for x in rows))
        return made[:, 0]


def identified(
    function: Callable[..., jax.Array], operands: int, width: int, dtype: Any
) -> tuple[Fixed | Learned, tuple[jax.Array, ...]]:
    """Returns `function` of arrays [rows, width], and the traced values that it reads."""
    given = (jax.ShapeDtypeStruct((2, width), dtype),) * operands
    digest, traced_values = _digest(function, given)
    if not traced_values:
        return Fixed(function, given, digest), ()
    row = (jax.ShapeDtypeStruct((1, width), dtype),) * operands
    program = jax.make_jaxpr(function)(*row)
    learned = tuple(isinstance(x, jax.core.Tracer) for x in program.consts)
    values = tuple(x for x, is_so in zip(program.consts, learned, strict=True) if is_so)
    held = [None if is_so else x for x, is_so in zip(program.consts, learned, strict=True)]
    return Learned(ClosedJaxpr(program.jaxpr, held), learned, row, digest), values


def _digest(
    function: Callable[..., jax.Array], given: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[str, bool]:
    """Returns a digest of a function and its derivative, and whether it reads traced values."""

    def with_derivative(*rows: jax.Array) -> Any:
        out, pull = jax.vjp(function, *rows)
        return out, pull(out)

    try:
        traced = jax.make_jaxpr(with_derivative)(*given)
    except Exception:  # noqa: BLE001 - no derivative; other errors appear again without it
        traced = jax.make_jaxpr(function)(*given)
    learned = any(isinstance(x, jax.core.Tracer) for x in traced.consts)
    digest = hashlib.sha256(_ADDRESS.sub("", str(traced.jaxpr)).encode())
    for constant in _constants(traced):
        if isinstance(constant, jax.core.Tracer):
            digest.update(jax.typeof(constant).str_short().encode())
            continue
        value = np.asarray(constant)
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    return digest.hexdigest()[:16], learned


def _constants(traced: ClosedJaxpr) -> Iterator[Any]:
    """Yields constants that the text of a program only names, also of the functions inside it."""
    yield from traced.consts
    for equation in traced.jaxpr.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                yield from _constants(value)


def _name(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


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
