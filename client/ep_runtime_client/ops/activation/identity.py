"""Makes a user's function of rows a static argument: equal functions compute the same.

All processes of a job must give a program the same name, or a persistent cache never hits. And a
function that now reads another value must not get the program compiled for the old value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ep_runtime.errors import InvalidArgumentError

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
