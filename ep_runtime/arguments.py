"""Checks arguments of users: known keywords, and numbers of the right kind and size."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from ep_runtime import allowed_names
from ep_runtime.errors import InvalidArgumentError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def suggests(
    also: Iterable[str] = (), *, removed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function so that its TypeError for an unknown keyword suggests a known one.

    Args:
        also: keywords that the function accepts through `**arguments`.
        removed: former keywords, and what to write instead; see `refuse_removed`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(function).parameters.values()
        known = {*also, *(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)}

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in known:
                    refuse_removed(name, removed)
                    raise TypeError(
                        f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                        + allowed_names.hint(name, known)
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse_removed(name: str, removed: Mapping[str, str]) -> None:
    """Raises InvalidArgumentError, with what to write instead, for a removed keyword."""
    if name in removed:
        raise InvalidArgumentError(
            f"{name}= is gone since version 0.2; write {removed[name]}", argument=name
        )


def check_whole(argument: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int.

    Raises:
        InvalidArgumentError: `value` is not an integer, or less than `least`.
    """
    whole = as_int(argument, value)
    check_at_least(argument, whole, least)
    return whole


def as_int(argument: str, value: Any) -> int:
    """Returns `value` as an int. Raises InvalidArgumentError if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(
            f"{argument} must be an integer, got {value!r}", argument=argument
        ) from None


def check_at_least(argument: str, value: Any, least: float) -> None:
    """Raises InvalidArgumentError unless `value` is a number (not NaN) of at least `least`."""
    if not isinstance(value, numbers.Real) or math.isnan(value):
        raise InvalidArgumentError(f"{argument} must be a number, got {value!r}", argument=argument)
    if value < least:
        raise InvalidArgumentError(
            f"{argument} must be at least {least}, got {value}", argument=argument
        )
