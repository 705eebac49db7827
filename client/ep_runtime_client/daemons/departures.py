"""Tracks dead processes of the job, because a group that waits for one cannot form."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from ep_runtime.errors import PeerLostError


class Departures:
    """Cancels calls in which the daemon waits for all processes of a group. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: Mapping[int, int] = {}
        self._died: dict[int, int | None] = {}  # process: its incarnation as a member
        self._calls: set[Any] = set()

    def add(self, process: int) -> None:
        """Records a death: cancels running calls, and new calls until `keep`."""
        with self._lock:
            self._died[process] = self._members.get(process)
            calls = [*self._calls]
        for call in calls:
            call.cancel()

    def keep(self, members: Mapping[int, int]) -> None:
        """Forgets dead processes that the agreed `members` do not include.

        `members` has the incarnation of each process; a restarted process has another one.
        """
        with self._lock:
            self._members = members
            for process, incarnation in [*self._died.items()]:
                if process not in members or members[process] != incarnation:
                    del self._died[process]

    @contextlib.contextmanager
    def ending(self, call: Any) -> Iterator[None]:
        """Cancels the call if a process dies inside the block.

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
