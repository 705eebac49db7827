"""Numbers that users give: of the right kind, and large enough."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from ep_runtime.errors import InvalidArgumentError


def check_whole(argument: str, value: Any, least: int = 1) -> int:
    """`value` as an int.

    Raises:
        InvalidArgumentError: no integer, or less than `least`.
    """
    whole = as_int(argument, value)
    check_at_least(argument, whole, least)
    return whole


def as_int(argument: str, value: Any) -> int:
    """`value` as an int. Raises InvalidArgumentError where it is no integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(
            f"{argument} must be an integer, got {value!r}", argument=argument
        ) from None


def check_at_least(argument: str, value: Any, least: float) -> None:
    """Raises InvalidArgumentError unless `value` is a number of at least `least`; no NaN."""
    if not isinstance(value, numbers.Real) or math.isnan(value):
        raise InvalidArgumentError(f"{argument} must be a number, got {value!r}", argument=argument)
    if value < least:
        raise InvalidArgumentError(
            f"{argument} must be at least {least}, got {value}", argument=argument
        )
