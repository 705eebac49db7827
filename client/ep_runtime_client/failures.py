"""Errors that come out of compiled programs: XLA's own type around our text.

A handler of the native library fails a program with one line of text, `EP_RUNTIME/<class>: ...`,
which XLA wraps in an error type of its own. These two functions find our error in it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ep_runtime import errors


def error_of(exc: BaseException) -> errors.EpRuntimeError | None:
    """The runtime's error that `exc` is, carries in its text, or was raised from; else None."""
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, errors.EpRuntimeError):
            return current
        found = errors.parse(str(current))
        if found is not None:
            return found
        current = current.__cause__  # not __context__: that error may have been dealt with
    return None


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Re-raises our errors out of compiled programs as their class, `from` the original.

    Programs run asynchronously: keep the `block_until_ready`, or whatever else waits for the
    result, inside the block.

    Raises:
        EpRuntimeError: the class named in the text of the original error.
    """
    try:
        yield
    except errors.EpRuntimeError:
        raise
    except Exception as error:
        found = error_of(error)
        if found is None:
            raise
        raise found from error
