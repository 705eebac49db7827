"""A user's function of rows as a static argument: by what it computes, not by where it lies.

Every process of a job must name a program alike, or a persistent cache never hits. And a function
that reads something else by now must not get the program of what it read before.
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
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ep_runtime.errors import InvalidArgumentError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+| id=\d+")


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A function of rows, and what it computed of them when the call was made. Hashable.

    Attributes:
        function: the user's.
        given: the types that it was traced with, [2, M] each.
        digest: of what it computes and of its derivative.
    """

    function: Callable[..., jax.Array] = dataclasses.field(hash=False)
    given: tuple[jax.ShapeDtypeStruct, ...]
    digest: str

    def __repr__(self) -> str:
        """Equal in every process of a job, and for functions that compute the same."""
        return f"{_name(self.function)} {self.digest}"

    def __call__(self, *rows: jax.Array) -> jax.Array:
        """The function of `rows`, traced at any time after the call was made.

        Raises:
            InvalidArgumentError: it computes something else by now.
        """
        if _digest(self.function, self.given) != self.digest:
            raise InvalidArgumentError(
                f"activation {_name(self.function)} reads a value that changed after the call "
                "began, and JAX compiles or differentiates the call with the old value; use a "
                "function of its own for each value",
                argument="activation",
            )
        return self.function(*rows)


def fixed(function: Callable[..., jax.Array], operands: int, width: int, dtype: Any) -> Fixed:
    """`function` of so many arrays [rows, width].

    Raises:
        InvalidArgumentError: it closes over a value that JAX traces, which would be a constant to
            it, without a gradient.
    """
    given = (jax.ShapeDtypeStruct((2, width), dtype),) * operands
    return Fixed(function, given, _digest(function, given))


def _digest(function: Callable[..., jax.Array], given: tuple[jax.ShapeDtypeStruct, ...]) -> str:
    def with_derivative(*rows: jax.Array) -> Any:
        out, pull = jax.vjp(function, *rows)
        return out, pull(out)

    try:
        traced = jax.make_jaxpr(with_derivative)(*given)
    except Exception:  # noqa: BLE001 - no derivative; what else it lacks it says without
        traced = jax.make_jaxpr(function)(*given)
    closed_over = [x for x in traced.consts if isinstance(x, jax.core.Tracer)]
    if closed_over:
        raise InvalidArgumentError(_refusal(function, closed_over), argument="activation")
    digest = hashlib.sha256(_ADDRESS.sub("", str(traced.jaxpr)).encode())
    for value in map(np.asarray, _constants(traced)):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    return digest.hexdigest()[:16]


def _constants(traced: ClosedJaxpr) -> Iterator[Any]:
    """Values that the text of a program only names, those of functions inside too."""
    yield from traced.consts
    for equation in traced.jaxpr.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                yield from _constants(value)


def _refusal(function: Callable[..., jax.Array], tracers: list[Any]) -> str:
    known = _read_by(function)
    found = []
    for tracer in tracers:
        names = (n for n, x in known.items() if any(y is tracer for y in jax.tree.leaves(x)))
        found.append(f"{next(names, 'a value')} ({jax.typeof(tracer).str_short()})")
    return (
        f"activation {_name(function)} must not close over values that JAX traces, which would be "
        f"constants to it, without gradients; it reads {', '.join(found)}. Apply them to params "
        "instead (x * sigmoid(beta * x) is silu with the gate of wi times beta and wo over beta), "
        "or compute them outside jit, grad and vmap"
    )


def _read_by(function: Any) -> dict[str, Any]:
    """Values that a function reads by name, as far as Python can tell."""
    if isinstance(function, functools.partial):
        return {**_read_by(function.func), **function.keywords}
    found = dict(getattr(getattr(function, "__self__", function), "__dict__", {}))
    plain = inspect.unwrap(function)
    plain = plain if inspect.isroutine(plain) else type(plain).__call__
    try:
        outside = inspect.getclosurevars(plain)
        parameters = inspect.signature(plain).parameters
    except (TypeError, ValueError):
        return found
    defaults = {name: each.default for name, each in parameters.items()}
    return {**outside.globals, **outside.nonlocals, **defaults, **found}


def _name(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
