"""Processes of the job that have died: no group that waits for one of them can form."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from ep_runtime.errors import PeerLostError


class Departures:
    """Ends calls in which the daemon waits for all processes of a group. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: Mapping[int, int] = {}
        self._died: dict[int, int | None] = {}  # the incarnation that was a member
        self._calls: set[Any] = set()

    def add(self, process: int) -> None:
        """A process has died: ends the calls under way, and those that begin until `keep`."""
        with self._lock:
            self._died[process] = self._members.get(process)
            calls = [*self._calls]
        for call in calls:
            call.cancel()

    def keep(self, members: Mapping[int, int]) -> None:
        """Those who live have agreed on it: forgets processes that are none of them.

        `members` has the incarnation of each process, which is another one if it came back.
        """
        with self._lock:
            self._members = members
            for process, incarnation in [*self._died.items()]:
                if process not in members or members[process] != incarnation:
                    del self._died[process]

    @contextlib.contextmanager
    def ending(self, call: Any) -> Iterator[None]:
        """Inside, a death cancels the call.

        Raises:
            PeerLostError: a process has died.
        """
        with self._lock:
            self._calls.add(call)
            late = bool(self._died)
        if late:
            call.cancel()
        try:
            yield
        except grpc.FutureCancelledError:
            with self._lock:
                process = min(self._died, default=-1)
            raise PeerLostError(
                f"process {process} of the job died while others waited for it in create_group",
                process=process,
            ) from None
        finally:
            with self._lock:
                self._calls.discard(call)


departures = Departures()
