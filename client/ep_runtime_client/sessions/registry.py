"""The sessions of this process: one per daemon, dropped in a forked child, released at exit."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from ep_runtime_client.base import jax_internals
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.daemons.addresses import Address
from ep_runtime_client.daemons.pending_goodbyes import pending_goodbyes
from ep_runtime_client.sessions.open_session import OpenSession


class OpenSessions:
    """Open sessions by daemon, each with the number of its `connect()` calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[str, tuple[OpenSession, int]] = {}
        self._inherited: list[OpenSession] = []
        self._installed = False

    def acquire(
        self,
        address: Address,
        check: Callable[[OpenSession], None],
        make: Callable[[Address], OpenSession],
    ) -> OpenSession:
        """Returns the open session with that daemon, or makes one."""
        with self._lock:
            self._install()
            session, count = self._open.get(address.key, (None, 0))
            if session is not None and not session.client.alive:
                session.end()
                session, count = None, 0
            if session is None:
                session = make(address)
            else:
                check(session)
            self._open[address.key] = (session, count + 1)
            return session

    def find(self, address: Address) -> OpenSession | None:
        """Returns the open session with that daemon, without counting a call."""
        with self._lock:
            session, _ = self._open.get(address.key, (None, 0))
            return session if session is not None and session.client.alive else None

    def release(self, session: OpenSession) -> bool:
        """Counts one `close()`; returns whether it was the last one.

        Under tracing it counts nothing, because `connect()` there does not count either.
        """
        if jax_internals.under_tracing():
            return False
        with self._lock:
            for key, (found, count) in self._open.items():
                if found is session:
                    if count > 1:
                        self._open[key] = (session, count - 1)
                        return False
                    del self._open[key]
                    return True
        return False

    def ids(self) -> list[str]:
        """Returns the daemons' names of the open sessions."""
        with self._lock:
            return [x.client.session_id for x, _ in self._open.values() if x.client.session_id]

    def end_peer(self, session_id: str, reason: str) -> list[str]:
        """Asks each daemon to fence another session of the job and to kill its process if it may;
        returns the actions of the daemon that has that session.

        Raises:
            EpRuntimeError: a daemon does not answer, or refuses.
        """
        with self._lock:
            clients = [x.client for x, _ in self._open.values() if x.client.session_id]
        answers = [client.end_peer(session_id, reason) for client in clients]
        return [
            f"process {answer.pid} is fenced"
            + (" and killed" if answer.killed else ", and the daemon may not kill it")
            + (f"; {answer.awaited}" if answer.awaited else "")
            for answer in answers
            if answer.pid
        ]

    def embedded(self) -> bool:
        """Whether this process has a private daemon."""
        with self._lock:
            return "embedded" in self._open

    def _install(self) -> None:
        if not self._installed:
            self._installed = True
            os.register_at_fork(after_in_child=self._after_fork)
            atexit.register(self._at_exit)

    def _after_fork(self) -> None:
        """Forgets the sessions in a forked child; does not destroy them, as the parent has them.

        Another thread may have held the lock during the fork, and a process without gRPC's threads
        must not tear down a channel.
        """
        self._lock = threading.RLock()
        self._inherited += [session for session, _ in self._open.values()]
        self._open = {}
        live_groups.clear()
        pending_goodbyes.forget()

    def _at_exit(self) -> None:
        with self._lock:
            sessions = [session for session, _ in self._open.values()]
            self._open = {}
        for session in sessions:
            session.at_exit()


sessions = OpenSessions()
