"""Receives descriptors from clients, and refuses those that could block the daemon.

Closing a file of a user's own file system (FUSE) may hang for as long as the user likes, and no
signal ends that. So a child process receives all descriptors, and passes on only those of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from ep_runtime.errors import EpRuntimeError, InvalidArgumentError, PoolExhaustedError
from ep_runtime_server.callers.turns import FairQueue
from ep_runtime_server.sockets import descriptor_child
from ep_runtime_server.sockets.spare_child import SpareChild

ANSWER_WITHIN_S = 5.0

# A callback that gets an error, or the descriptors, which it then owns.
Then = Callable[[list[int] | EpRuntimeError], None]


class _Asked(NamedTuple):
    connection: socket.socket
    uid: int
    then: Then


class Descriptors:
    """Receives descriptors packet by packet, and serves users in turn. For the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: FairQueue[_Asked] = FairQueue()
        self._asked: _Asked | None = None
        self._child = SpareChild(descriptor_child.__file__)
        self._late: asyncio.TimerHandle | None = None
        self._closing: dict[int, subprocess.Popen[bytes]] = {}  # by uid

    def check(self, uid: int) -> None:
        """Raises PoolExhaustedError while a process still closes bad descriptors of this user."""
        before = self._closing.get(uid)
        if before is not None and before.poll() is None:
            raise PoolExhaustedError(
                f"uid {uid} sent descriptors that are not memory, and not all are closed yet; retry"
            )
        self._closing.pop(uid, None)

    def take(self, connection: socket.socket, uid: int, then: Then) -> None:
        """Passes the next packet's descriptors to `then`; do not read `connection` before that."""
        self._waiting.put(uid, _Asked(connection, uid, then))
        self._next()

    def _next(self) -> None:
        while self._asked is None and self._waiting:
            asked = self._waiting.take()
            if asked.connection.fileno() < 0:  # dropped while it waited
                continue
            self._asked = asked
            try:
                socket.send_fds(self._started(), [b"."], [asked.connection.fileno()])
            except OSError as error:
                self._end()
                self._answer(PoolExhaustedError(f"cannot look at descriptors: {error.strerror}"))
            else:
                self._late = self._loop.call_later(ANSWER_WITHIN_S, self._heard)

    def _started(self) -> socket.socket:
        new = self._child.inbox is None
        inbox = self._child.start()
        if new:
            self._loop.add_reader(inbox, self._heard)
        return inbox

    def _heard(self) -> None:
        """Handles the process's answer, its end, or its missing answer after ANSWER_WITHIN_S."""
        asked, word = self._asked, b""
        fds: list[int] = []
        if self._child.inbox is not None:
            with contextlib.suppress(OSError):
                word, fds, flags, _ = socket.recv_fds(
                    self._child.inbox, 16, descriptor_child.MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
                if flags & socket.MSG_CTRUNC:
                    word = b""
        if word == descriptor_child.MEMORY and asked is not None:
            self._answer(fds)
        else:
            for fd in fds:  # of memory, so closing does not block
                os.close(fd)
            process = self._end()  # the process may hang from now on
            if asked is not None and process is not None:
                self._closing[asked.uid] = process
            self._answer(_refusal(word))
        self._next()

    def _answer(self, found: list[int] | EpRuntimeError) -> None:
        asked, self._asked = self._asked, None
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if asked is not None:
            asked.then(found)

    def _end(self) -> subprocess.Popen[bytes] | None:
        """Gives up the process, so that a new one receives the next packets."""
        if self._child.inbox is not None:
            self._loop.remove_reader(self._child.inbox)
        return self._child.end()

    async def close(self) -> None:
        """Ends the child processes."""
        self._end()
        if self._late is not None:
            self._late.cancel()
        await self._child.close()


def _refusal(word: bytes) -> EpRuntimeError:
    if word == descriptor_child.FOREIGN:
        return InvalidArgumentError(
            "the descriptor is not the group's memory: it is not a memfd", argument="fd"
        )
    if word == descriptor_child.TOO_MANY:
        return InvalidArgumentError(
            f"a packet has at most {descriptor_child.MAX_FDS} descriptors", argument="descriptors"
        )
    return PoolExhaustedError("the daemon could not take the descriptors; retry")
