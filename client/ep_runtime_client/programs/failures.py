"""Converts errors of compiled programs, which have XLA's error type and our text.

A handler of the native library fails a program with one line of text, `EP_RUNTIME/<class>: ...`,
which XLA wraps in its own error type. These two functions find our error in it. Between nodes rows
cross in XLA collectives, which fail with XLA's own text if a process is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ep_runtime import errors
from ep_runtime_client.base.layers import live_groups

# Every node learns of a dead process within this time.
TOLD_S = 2.0
# Words in the error of a failed collective.
_COLLECTIVES = ("Gloo ", "NCCL ")


def error_of(exc: BaseException) -> errors.EpRuntimeError | None:
    """Finds the runtime's error in an exception: itself, in its text, or among its causes.

    Args:
        exc: any exception; its text and its `__cause__` chain are read.

    Returns:
        An EpRuntimeError of the class that the text names, or None.

    Cost: reads the text; never raises.
    """
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, errors.EpRuntimeError):
            return current
        found = errors.parse(str(current))
        if found is not None:
            return found
        current = current.__cause__  # not __context__: a handler may have dealt with that error
    return None


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Turns an XLA error from a compiled program into the runtime's own error class.

    A context manager; each error is raised `from` the one of XLA. Programs run asynchronously, so
    call `block_until_ready`, or read the result, inside the block.

    Raises:
        EpRuntimeError: the class named in the text of XLA's error. After a failed collective of
            XLA, the context manager waits up to 2 s for the daemon's report.
        PeerLostError: a group of this process has ended because another process was lost.
        StaleHandleError: a group of this process was reclaimed or replaced.
        SessionFencedError: this process was fenced.

    The last three are raised even if the block raised nothing, because the last values of a group
    that has ended may be NaN.

    Cost: no RPC; it reads what the daemon has reported to this process.
    """
    try:
        yield
        _require_whole()
    except errors.EpRuntimeError:
        raise
    except Exception as error:
        found = error_of(error) or _ended_group(error)
        if found is None:
            raise
        raise found from error


def _require_whole() -> None:
    for group in live_groups.all():
        group.require_whole()


def _ended_group(error: Exception) -> errors.EpRuntimeError | None:
    """Converts any failure after a group's end, NaN assertions included, to that end's error.

    A collective sees a connection close before the daemons report whose connection it was.
    """
    told = any(word in str(error) for word in _COLLECTIVES)
    deadline, pause = time.monotonic() + TOLD_S, threading.Event()
    while True:
        try:
            _require_whole()
        except errors.EpRuntimeError as ended:
            return ended
        if not told or not live_groups.all() or time.monotonic() > deadline:
            return None
        pause.wait(0.01)
