"""Gate and up of gated experts: two arrays that are multiplied as one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from ep_runtime.errors import InvalidArgumentError

DIM = 2  # dim of gate and up if they are one array
Value = TypeVar("Value")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """Kernels of gate and up, [E, K', M] each, in place of one array [E, K', 2, M].

    A matmul reads both arrays without joining them and writes [..., 2, M]; its gradient is a Pair.
    `shape` and `ndim` are those of the joined array.
    """

    gate: jax.Array
    up: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return of_both(self.gate.shape, 2)

    @property
    def ndim(self) -> int:
        return len(self.gate.shape) + 1

    @property
    def dtype(self) -> Any:
        return self.gate.dtype

    def astype(self, dtype: Any) -> Pair:
        return Pair(self.gate.astype(dtype), self.up.astype(dtype))


def is_pair(given: Any) -> bool:
    """Whether a parameter is (gate, up): a tuple or list, but not a PartitionSpec."""
    plain = isinstance(given, tuple | list) and not isinstance(given, jax.sharding.PartitionSpec)
    return plain and not hasattr(given, "_fields")


def paired(given: Any, name: str, stack: int = 0) -> Any:
    """Makes a Pair of (gate, up); returns anything else unchanged.

    `stack`: number of leading dims for a stack of layers.

    Raises:
        InvalidArgumentError: not two arrays [E, K', M] of the same shape and dtype; names the
            argument.
    """
    if not is_pair(given):
        return given
    if len(given) != 2:
        raise InvalidArgumentError(
            f"{name} must be an array or a pair (gate, up), got {len(given)} values", argument=name
        )
    gate, up = given
    found = [f"{x.dtype}{list(x.shape)}" for x in given]
    if found[0] != found[1] or len(gate.shape) != stack + 3:
        raise InvalidArgumentError(
            f"{name} (gate, up) must be two arrays [E, K', M] of one shape and dtype, got "
            f"{found[0]} and {found[1]}",
            argument=name,
        )
    return Pair(gate, up)


def of_each(values: Sequence[Value], paired: bool) -> tuple[Value, ...]:
    """Converts values per dim of [E, K', 2, M] to values per dim of gate, and of up, if these are
    two arrays."""
    return (*values[:DIM], *values[DIM + 1 :]) if paired else tuple(values)


def of_both(values: Sequence[Value], between: Value) -> tuple[Value, ...]:
    """Converts values per dim of gate, or of up, to values per dim of [E, K', 2, M]."""
    return (*values[:DIM], between, *values[DIM:])
