"""Ends a process that hangs because a group of its job has ended.

XLA's own collectives wait up to 30 minutes for a process that is dead, or whose calls ended before
the collective, and JAX waits again at exit. No other thread can interrupt a thread that waits
there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import functools
import logging
import os
import queue
import sys
import threading
import time
from typing import Any

from ep_runtime.errors import EpRuntimeError
from ep_runtime_client.base import jax_state
from ep_runtime_client.base.layers import LiveGroup, live_groups
from ep_runtime_client.programs.failures import TOLD_S

_log = logging.getLogger("ep_runtime")

EXIT_CODE = 1
_FLUSH_S = 0.5


class Watchdog:
    """Counts down after a group of the session ended that other processes share. Thread-safe."""

    def __init__(self, grace_s: float | None) -> None:
        """Starts no countdown; with `grace_s` None it never ends the process."""
        self._grace_s = grace_s
        if grace_s is not None and jax_state.num_processes() > 1:
            _name_aborts()
        self._lock = threading.Lock()
        self._words: queue.SimpleQueue[_Word] | None = None  # to the running countdown

    def over(self, group: LiveGroup, error: EpRuntimeError, patience_s: float | None) -> None:
        """Logs the group's end and starts a countdown of at least `patience_s`.

        None for `patience_s`: no other process shares the group, so no call waits for one.
        """
        name = type(error).__name__
        if self._grace_s is None or patience_s is None:
            _log.error("%s: %s", name, error)
            return
        within_s = max(self._grace_s, patience_s)
        _log.error(
            "%s: %s; this process ends within %g s unless it makes another group",
            name,
            error,
            within_s,
        )
        with self._lock:
            if self._words is not None:
                return
            words = self._words = queue.SimpleQueue()
        thread = threading.Thread(
            target=_count,
            args=(group, error, within_s, words),
            name="ep-runtime-watchdog",
            daemon=True,
        )
        thread.start()

    def stop(self) -> None:
        """Stops the countdown, because the program has made another group."""
        with self._lock:
            if self._words is not None:
                self._words.put(_Word.GOES_ON)
            self._words = None

    def closed(self) -> None:
        """Pauses the countdown until the process exits, because JAX may then wait for others."""
        with self._lock:
            if self._words is not None:
                self._words.put(_Word.CLOSED)
                atexit.register(self._words.put, _Word.EXITS)  # it runs before JAX's handler
            self._words = None


class _Word(enum.Enum):
    GOES_ON = enum.auto()
    CLOSED = enum.auto()
    EXITS = enum.auto()


def _count(
    group: LiveGroup, error: EpRuntimeError, grace_s: float, words: queue.SimpleQueue[_Word]
) -> None:
    try:
        if words.get(timeout=grace_s) is _Word.CLOSED:
            words.get()
            words.get(timeout=grace_s)
    except queue.Empty:
        _end(group, error, grace_s)


def _end(group: LiveGroup, error: EpRuntimeError, grace_s: float) -> None:
    try:
        group.require_whole()
    except EpRuntimeError as found:  # a waiting call may have reported layer and op
        error = found
    text = f"{type(error).__name__}: {error}"
    _exit(text, f"process {os.getpid()} still runs {grace_s:g} s later and ends now")


@functools.cache  # the cache keeps the handler alive
def _name_aborts() -> Any:
    """Makes std::terminate print the group's end first; returns the handler, None if impossible.

    If collectives are out of step after a peer's death, Gloo throws on its own thread, which ends
    the process at once by std::terminate, without naming the cause.
    """
    try:  # jaxlib's library, because ours is linked separately
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        install = library["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return None
    install.restype = handler_type = ctypes.CFUNCTYPE(None)
    before: list[Any] = []

    def terminate() -> None:
        deadline, pause = time.monotonic() + TOLD_S, threading.Event()
        while time.monotonic() < deadline:
            for group in live_groups.all():
                try:
                    group.require_whole()
                except EpRuntimeError as error:
                    text = f"{type(error).__name__}: {error}"
                    _exit(text, "what waited for other processes in C++ gave up")
            pause.wait(0.01)
        before[0]()

    handler = handler_type(terminate)
    before.append(install(handler))
    return handler


def _exit(text: str, ends: str) -> None:
    os.write(2, f"ep-runtime: {text}; {ends}, with exit code {EXIT_CODE}\n".encode())
    # A hanging thread may hold the stream's lock.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    os._exit(EXIT_CODE)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
