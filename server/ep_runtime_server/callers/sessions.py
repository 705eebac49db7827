"""Sessions of client processes, whose identity and end the daemon learns from the kernel.

A session's token is bound to one process. Only the pidfd shows that the process has ended: a closed
stream or a late heartbeat frees nothing, and a forked child that keeps the sockets open does not
hide the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import logging
import os
import secrets
import signal
from collections.abc import Callable
from typing import Any

from ep_runtime.errors import PermissionDeniedError, SessionFencedError
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.credentials import (
    GivenOrder,
    Peer,
    open_process,
    process_start_s,
    process_state,
)

MAX_QUEUED_EVENTS = 1000


class SessionState(enum.Enum):
    """States of a session; the values are the protocol's names."""

    CONNECTED = "CONNECTED"
    ACTIVE = "ACTIVE"
    SUSPECT = "SUSPECT"
    FENCED = "FENCED"
    CLOSED = "CLOSED"
    DEAD = "DEAD"


LIVE = (SessionState.CONNECTED, SessionState.ACTIVE, SessionState.SUSPECT)
OVER = (SessionState.CLOSED, SessionState.DEAD)


@dataclasses.dataclass(eq=False)
class SessionRecord:
    """One session, of one client process."""

    session_id: str
    token: str
    uid: int
    pid: int
    own_pid: int  # the pid that the process sees itself; differs in another pid namespace
    pidfd: int
    client_version: str
    created_s: float
    created_wall_s: float
    state: SessionState = SessionState.CONNECTED
    job: str = ""
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    process_index: int = 0
    last_beat_s: float | None = None
    restored_s: float | None = None  # when this daemon restored the session from the journal
    progress: int = 0
    ended_s: float | None = None
    fence_reason: str = ""  # who fenced the session, by which command, and why
    fenced_by: GivenOrder | None = None  # None: not fenced, or by a previous daemon
    watcher: asyncio.Queue[Any] | None = None
    token_digest: str = ""  # digest of the token, which the journal stores
    start_s: float | None = None  # the process's start, on CLOCK_BOOTTIME
    awaited: bool = False  # restored from the journal, and silent since

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def over(self) -> bool:
        return self.state in OVER

    def unheard_s(self, now_s: float) -> float:
        """Returns the time since the last heartbeat, or else since the restore or the hello."""
        return now_s - (self.last_beat_s or self.restored_s or self.created_s)

    def silent_s(self, now_s: float) -> float | None:
        """Returns `unheard_s` of a session that is SUSPECT and still late; else None."""
        unheard_s = self.unheard_s(now_s)
        late = self.state is SessionState.SUSPECT and unheard_s > limits.SUSPECT_AFTER_S
        return unheard_s if late else None

    def check_live(self) -> None:
        """Raises SessionFencedError if the session has ended or was fenced."""
        if not self.live:
            raise SessionFencedError(
                f"session {self.session_id} is over; connect again", session=self.session_id
            )

    def tell(self, event: Any) -> None:
        """Queues an event for the session's stream, or drops the event if there is no stream."""
        if self.watcher is None:
            return
        if self.watcher.qsize() >= MAX_QUEUED_EVENTS:
            self.watcher.get_nowait()  # a client that does not read loses its oldest event
        self.watcher.put_nowait(event)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Sessions:
    """All sessions of the daemon. Use it on the event loop's thread only.

    Attributes:
        on_change: called with the session after each change that a restarted daemon must know.
    """

    def __init__(
        self,
        clock: Clock,
        events: EventLog,
        *,
        admit: Callable[[int], None],
        on_end: Callable[[SessionRecord], None],
    ) -> None:
        """`admit(uid)` must raise if the user has as many sessions as allowed.

        `on_end(session)` runs after the state became FENCED, CLOSED or DEAD. It runs again for a
        fenced session when its process has ended.
        """
        self._clock = clock
        self._events = events
        self._admit = admit
        self._on_end = on_end
        self.on_change: Callable[[SessionRecord], None] = lambda session: None
        self._by_token: dict[str, SessionRecord] = {}  # by the token's digest
        self._by_id: dict[str, SessionRecord] = {}

    def all(self) -> list[SessionRecord]:
        """Returns all sessions, oldest first, including recently ended ones."""
        return list(self._by_id.values())

    def not_over(self) -> list[SessionRecord]:
        return [session for session in self._by_id.values() if not session.over]

    def silent(self) -> list[tuple[SessionRecord, float]]:
        """Returns sessions with late heartbeats and their silent time, the longest first."""
        now_s = self._clock.monotonic_s()
        found = [(session, session.silent_s(now_s)) for session in self._by_id.values()]
        late = [(session, silent_s) for session, silent_s in found if silent_s is not None]
        return sorted(late, key=lambda each: -each[1])

    def get(self, session_id: str) -> SessionRecord | None:
        return self._by_id.get(session_id)

    def hello(self, peer: Peer, own_pid: int, client_version: str) -> SessionRecord:
        """Makes a session for the connected process, and takes over the peer's pidfd.

        Raises:
            PoolExhaustedError: the user has as many sessions as allowed.
        """
        self._close_unanswered(peer)
        self._admit(peer.uid)
        token = secrets.token_hex(32)
        session = SessionRecord(
            session_id=f"s-{secrets.token_hex(6)}",
            token=token,
            token_digest=digest(token),
            start_s=process_start_s(peer.pid),
            uid=peer.uid,
            pid=peer.pid,
            own_pid=own_pid,
            pidfd=peer.take_pidfd(),
            client_version=client_version,
            created_s=self._clock.monotonic_s(),
            created_wall_s=self._clock.wall_s(),
        )
        self._add(session)
        self._log("session.hello", f"process {peer.pid} of uid {peer.uid} connected", session)
        return session

    def _close_unanswered(self, peer: Peer) -> None:
        """Closes the process's sessions whose OpenSession was journaled but never answered.

        Nobody has their tokens.
        """
        for session in self.not_over():
            unopened = session.awaited and session.state is SessionState.CONNECTED
            if unopened and (session.uid, session.pid) == (peer.uid, peer.pid):
                self.close(session)

    def _add(self, session: SessionRecord) -> None:
        self._by_token[session.token_digest] = session
        self._by_id[session.session_id] = session
        loop = asyncio.get_running_loop()
        loop.add_reader(session.pidfd, self._end, session, SessionState.DEAD)
        self.on_change(session)

    def restore(self, session: SessionRecord) -> bool:
        """Restores a session from the journal; returns False if its process has ended."""
        pidfd = open_process(session.pid, session.start_s)
        if pidfd is None:
            return False
        session.pidfd = pidfd
        session.restored_s = self._clock.monotonic_s()
        session.awaited = session.live
        self._add(session)
        return True

    def resume(self, token: str, peer: Peer) -> SessionRecord | None:
        """Finds the session that the process had before a restart of the daemon; None if unknown.

        Raises:
            SessionFencedError: the session was fenced or has ended.
            PermissionDeniedError: the session belongs to another process.
        """
        session = self._by_token.get(digest(token))
        if session is None:
            return None
        self.authenticate_peer(token, peer)
        session.token = token
        self.heard(session)
        self._log("session.resumed", f"process {session.pid} is back", session)
        return session

    def authenticate(self, token: str, own_pid: int | None) -> SessionRecord:
        """Finds the session of a token, even if the session has ended.

        Raises:
            SessionFencedError: no such token, or the session was fenced.
            PermissionDeniedError: another process uses it.
        """
        session = self._by_token.get(digest(token))
        if session is None:
            raise SessionFencedError("unknown session token; connect again")
        if own_pid is not None and own_pid != session.own_pid:
            raise self._foreign(session, own_pid)
        if session.state is SessionState.FENCED:
            raise SessionFencedError(
                f"session {session.session_id} was fenced {session.fence_reason}; connect again",
                session=session.session_id,
            )
        return session

    def authenticate_live(self, token: str, own_pid: int | None) -> SessionRecord:
        """Works as `authenticate`, but raises SessionFencedError if the session has ended."""
        session = self.authenticate(token, own_pid)
        session.check_live()
        return session

    def authenticate_peer(self, token: str, peer: Peer) -> SessionRecord:
        """Works as `authenticate_live`, and checks the pid and uid that the kernel gave."""
        session = self.authenticate_live(token, None)
        if (peer.pid, peer.uid) != (session.pid, session.uid):
            raise self._foreign(session, peer.pid)
        return session

    def check_user(self, session: SessionRecord, uid: int | None) -> None:
        """Checks that a connection's user may use the session: others cannot use a leaked token.

        Root and the daemon's user may, because they could read the token in its memory anyway.

        Raises:
            PermissionDeniedError: the session is another user's, or the connection ended (None).
        """
        if uid in (session.uid, 0, os.geteuid()):
            return
        if uid is None:  # the caller has disconnected, so do not report a theft
            raise PermissionDeniedError(
                f"session {session.session_id} belongs to uid {session.uid}, not to uid None",
                session=session.session_id,
            )
        raise self._stolen(session, f"uid {uid}", f"uid {session.uid}", uid=uid)

    def _foreign(self, session: SessionRecord, pid: int) -> PermissionDeniedError:
        hint = "; a forked child must connect on its own"
        return self._stolen(session, f"process {pid}", f"process {session.pid}", hint, pid=pid)

    def _stolen(
        self, session: SessionRecord, user: str, owner: str, hint: str = "", **fields: object
    ) -> PermissionDeniedError:
        """Reports that `user` sent the token of `owner`, and returns the error to raise."""
        self._events.deny(
            "session.token_denied",
            session.session_id,
            f"{user} used the token of {owner}",
            session_id=session.session_id,
            uid=session.uid,
            client_pid=session.pid,
        )
        return PermissionDeniedError(
            f"session {session.session_id} belongs to {owner}, not to {user}{hint}",
            session=session.session_id,
            **fields,
        )

    def beat(self, session: SessionRecord, progress: int) -> None:
        session.progress = max(session.progress, progress)
        self.heard(session)

    def heard(self, session: SessionRecord) -> None:
        """Notes a message of the process; a SUSPECT session becomes ACTIVE."""
        session.last_beat_s = self._clock.monotonic_s()
        session.awaited = False
        if session.state is SessionState.SUSPECT:
            session.state = SessionState.ACTIVE
            self._log("session.active", f"process {session.pid} is heard again", session)

    def mark_suspects(self) -> None:
        """Marks ACTIVE sessions with a late heartbeat SUSPECT, which frees nothing."""
        now = self._clock.monotonic_s()
        for session in self._by_id.values():
            unheard_s = session.unheard_s(now)
            if session.state is SessionState.ACTIVE and unheard_s > limits.SUSPECT_AFTER_S:
                session.state = SessionState.SUSPECT
                state = process_state(session.pid)
                self._log(
                    "session.suspect",
                    f"process {session.pid} sent no heartbeat for {unheard_s:.0f} s, "
                    f"state {state or 'unknown'}",
                    session,
                    level=logging.WARNING,
                )

    def close(self, session: SessionRecord, *, failed: bool = False) -> None:
        """Ends a session whose process closes it, or with `failed` leaves after an error."""
        if session.live:
            self._end(session, SessionState.DEAD if failed else SessionState.CLOSED)

    def fence(self, session: SessionRecord, order: GivenOrder) -> None:
        """Makes the token invalid; memory that the process maps stays until the process ends."""
        if session.live:
            session.state = SessionState.FENCED
            session.fence_reason = str(order)
            session.fenced_by = order
            self.on_change(session)
            self._log(
                "session.fenced",
                f"process {session.pid} was fenced {session.fence_reason}",
                session,
                level=logging.WARNING,
                **order.fields,
            )
            self._on_end(session)

    def kill(self, session: SessionRecord) -> bool:
        """Sends SIGKILL to the session's process; returns False if the daemon may not."""
        try:
            signal.pidfd_send_signal(session.pidfd, signal.SIGKILL)
        except PermissionError:
            return False
        except ProcessLookupError:
            pass  # it has ended, which the daemon is about to notice
        return True

    def _end(self, session: SessionRecord, state: SessionState) -> None:
        session.state = state
        session.ended_s = self._clock.monotonic_s()
        self._drop_pidfd(session)
        self.on_change(session)
        what = "ended without goodbye" if state is SessionState.DEAD else "said goodbye"
        self._log(f"session.{state.value.lower()}", f"process {session.pid} {what}", session)
        self._on_end(session)

    def _drop_pidfd(self, session: SessionRecord) -> None:
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1

    def prune(self) -> None:
        """Forgets sessions that ended long ago."""
        now = self._clock.monotonic_s()
        ended = [session for session in self._by_id.values() if session.ended_s is not None]
        surplus = len(ended) - limits.MAX_ENDED_SESSIONS
        for position, session in enumerate(ended):
            age = now - (session.ended_s or now)
            if position < surplus or age > limits.ENDED_SESSION_LIFE_S:
                del self._by_id[session.session_id]
                del self._by_token[session.token_digest]

    def shut_down(self) -> None:
        for session in self._by_id.values():
            self._drop_pidfd(session)

    def _log(
        self,
        kind: str,
        message: str,
        session: SessionRecord,
        *,
        level: int = logging.INFO,
        **fields: Any,
    ) -> None:
        self._events.add(
            kind,
            message,
            session_id=session.session_id,
            level=level,
            uid=session.uid,
            client_pid=session.pid,
            **fields,
        )
