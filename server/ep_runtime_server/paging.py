"""Pages of a list. A token is the position behind the page; lists only grow at their ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

from ep_runtime.errors import InvalidArgumentError

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000

T = TypeVar("T")


def page(items: Iterable[T], page_size: int, page_token: str) -> tuple[list[T], str]:
    """One page of `items` and the token of the next; "" behind the last.

    Raises:
        InvalidArgumentError: a size or token that no answer carried.
    """
    if not 0 <= page_size <= MAX_PAGE:
        raise InvalidArgumentError(
            f"page_size must be 0 to {MAX_PAGE}, got {page_size}", argument="page_size"
        )
    if page_token and not (page_token.isdecimal() and len(page_token) < 12):
        raise InvalidArgumentError(
            f"page_token must come from the page before, got {page_token[:40]!r}",
            argument="page_token",
        )
    start = int(page_token or 0)
    size = page_size or DEFAULT_PAGE
    found = list(itertools.islice(items, start, start + size + 1))
    return found[:size], str(start + size) if len(found) > size else ""
