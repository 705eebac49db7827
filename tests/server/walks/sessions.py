"""Processes as the daemon knows them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os

from ep_runtime_server.base import limits
from ep_runtime_server.callers.credentials import Caller, GivenOrder, Peer
from ep_runtime_server.callers.sessions import SessionRecord, Sessions, SessionState
from walks.walk import Walk, outcome


@dataclasses.dataclass
class _Session:
    record: SessionRecord
    exit_fd: int
    state: str = "CONNECTED"
    heard_s: float = 0.0
    ended_s: float = 0.0
    ends: int = 0  # times that the others are told of its end


class SessionsWalk(Walk):
    """Processes say hello, beat, fall silent, say goodbye, are fenced, and end."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.told: collections.Counter[str] = collections.Counter()
        self.sessions = Sessions(
            self.clock,
            self.events,
            admit=lambda uid: None,
            on_end=lambda session: self.told.update([session.session_id]),
        )
        self.known: list[_Session] = []

    async def step(self) -> None:
        moves = {self.hello: 2, self.open: 3, self.beat: 5, self.close: 1, self.fence: 1}
        moves |= {self.exits: 2, self.pass_time: 2}
        move = self.random.choices(list(moves), list(moves.values()))[0]
        if move in (self.hello, self.pass_time) or not self.known:
            await (move if move == self.pass_time else self.hello)()
        else:
            await move(self.random.choice(self.known))
        self.check()

    async def hello(self) -> None:
        if len(self.known) < 12:
            fd = os.eventfd(0)
            peer = Peer(os.getpid(), 7, frozenset(), os.dup(fd))
            record = self.sessions.hello(peer, os.getpid(), "1")
            self.known.append(_Session(record, fd, heard_s=self.clock.now_s))

    async def open(self, one: _Session) -> None:
        if one.state == "CONNECTED":  # as the runtime does, which names the job too
            one.record.state, one.state = SessionState.ACTIVE, "ACTIVE"

    async def beat(self, one: _Session) -> None:
        said = outcome(self.sessions.authenticate_live, one.record.token, None)
        live = one.state in ("CONNECTED", "ACTIVE", "SUSPECT")
        self.agree(said, "ok" if live else "SessionFencedError")
        self.seen[said] += 1
        if live:
            self.sessions.beat(one.record, 1)
            one.heard_s = self.clock.now_s
            one.state = "ACTIVE" if one.state == "SUSPECT" else one.state

    async def close(self, one: _Session) -> None:
        failed = self.random.random() < 0.3
        self.sessions.close(one.record, failed=failed)
        if one.state in ("CONNECTED", "ACTIVE", "SUSPECT"):
            self._ended(one, "DEAD" if failed else "CLOSED")

    async def fence(self, one: _Session) -> None:
        self.sessions.fence(one.record, "drill", GivenOrder(Caller(0, 1), "drill"))
        if one.state in ("CONNECTED", "ACTIVE", "SUSPECT"):
            one.state = "FENCED"
            one.ends += 1

    async def exits(self, one: _Session) -> None:
        os.eventfd_write(one.exit_fd, 1)
        for _ in range(3):  # the loop looks at what is readable
            await asyncio.sleep(0)
        if one.state not in ("CLOSED", "DEAD"):
            self._ended(one, "DEAD")

    def _ended(self, one: _Session, state: str) -> None:
        one.state, one.ended_s = state, self.clock.now_s
        one.ends += 1

    async def pass_time(self) -> None:
        self.clock.advance(self.random.choice([1.0, 4.0, 11.0, 301.0]))
        self.sessions.mark_suspects()
        self.sessions.prune()
        now = self.clock.now_s
        for one in list(self.known):
            if one.state == "ACTIVE" and now - one.heard_s > limits.SUSPECT_AFTER_S:
                one.state = "SUSPECT"
            over = one.state in ("CLOSED", "DEAD")
            if over and now - one.ended_s > limits.ENDED_SESSION_LIFE_S:
                self._forget(one)

    def _forget(self, one: _Session) -> None:
        self.known.remove(one)
        os.close(one.exit_fd)
        self.agree(self.sessions.get(one.record.session_id), None)
        said = outcome(self.sessions.authenticate, one.record.token, None)
        self.agree(said, "SessionFencedError")

    def check(self) -> None:
        self.agree(self.sessions.all(), [one.record for one in self.known])
        for one in self.known:
            self.agree(one.record.state.value, one.state)
            self.agree(self.told[one.record.session_id], one.ends)
            self.agree(one.record.pidfd >= 0, one.state not in ("CLOSED", "DEAD"))
            self.seen[one.state] += 1

    async def end(self) -> None:
        self.sessions.shut_down()
        for one in self.known:
            os.close(one.exit_fd)
