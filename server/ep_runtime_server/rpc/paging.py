"""Splits lists into pages. A page token is the index of the next item."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.base.clock import paced

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
# A page ends with the row that reaches this size, because rows of large groups are long.
PAGE_BYTES = 2 << 20

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Message)


async def page(
    kind: type[Answer],
    field: str,
    items: Iterable[T],
    request: Any,
    to_row: Callable[[T], Message | None],
) -> Answer:
    """Makes an answer with one page of `items`, and the next page's token ("" after the last).

    Args:
        kind: the class of the answer, which has next_page_token.
        field: the answer's field of rows.
        items: must not change during the call, which awaits between rows.
        request: has page_size and page_token.
        to_row: converts an item, or omits it by None; called only for the items of the page.

    Raises:
        InvalidArgumentError: the size is out of range, or the token is not from an answer.
    """
    page_size, page_token = request.page_size, request.page_token
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
    rest = itertools.islice(items, start, None)
    rows: list[Message | None] = []
    left_bytes = PAGE_BYTES

    def of_page() -> Iterator[T]:
        for item in itertools.islice(rest, size):
            yield item
            if left_bytes <= 0:
                return

    async for item in paced(of_page()):
        rows.append(row := to_row(item))
        left_bytes -= row.ByteSize() if row is not None else 0
    more = next(rest, None) is not None
    answer: dict[str, Any] = {field: filter(None, rows)}
    return kind(**answer, next_page_token=str(start + len(rows)) if more else "")
