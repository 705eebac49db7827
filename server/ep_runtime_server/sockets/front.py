"""Fronts of api.sock and admin.sock, which identify callers through the kernel; gRPC cannot.

A front accepts each connection and relays its bytes to gRPC's own socket. It binds its end of the
relay to a unique name, which gRPC reports as the call's peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import Callable

from ep_runtime import wire
from ep_runtime.errors import EpRuntimeError, PermissionDeniedError, PoolExhaustedError
from ep_runtime_server.base import limits, open_files
from ep_runtime_server.callers import credentials
from ep_runtime_server.callers.turns import Turns
from ep_runtime_server.runtime import Runtime
from ep_runtime_server.sockets.disposal import Disposal

LISTEN_BACKLOG = 512
_PART_BYTES = 64 << 10
# How many connections that a limit refused may wait at a time. Each is tried once more after
# ACCEPT_PAUSE_S, and then dropped.
MAX_LATE = 16


class Front:
    """Serves an already bound SOCK_STREAM socket until `close`."""

    name = wire.API_SOCKET
    door = "api"  # the socket's name in events

    def __init__(
        self,
        runtime: Runtime,
        listener: socket.socket,
        inner_path: str,
        disposal: Disposal,
        turns: Turns,
        *,
        peer_of: Callable[..., credentials.Peer] = credentials.peer_of,
    ) -> None:
        """`inner_path` is gRPC's socket; `peer_of` identifies callers, and tests replace it."""
        self._runtime = runtime
        self._listener = listener
        self._inner_path = inner_path
        self._disposal = disposal
        self._turns = turns
        self._peer_of = peer_of
        self._name = f"ep-runtime-{secrets.token_hex(8)}"
        self._num_accepted = 0
        self._late: set[socket.socket] = set()
        self._calls: dict[str, _Call] = {}  # by the peer name that gRPC reports
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(LISTEN_BACKLOG)
        self._loop.add_reader(listener, self._accept)

    def caller_of(self, peer: str) -> credentials.Caller | None:
        """Returns the caller for a `ServicerContext.peer()`; None if the connection has ended."""
        call = self._calls.get(peer)
        return call.caller if call is not None else None

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._disposal.close_listener(self._listener)
        for call in list(self._calls.values()):
            call.end()
        while self._late:
            self._disposal.drop(self._late.pop())

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors; pause, because the listener stays readable
            told = open_files.exhausted(f"{self.name} cannot accept", error)
            self._runtime.tell_refused(self.door, told)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(limits.ACCEPT_PAUSE_S, self._resume)
            return
        accepted.setblocking(False)
        try:
            self._enter(accepted)
        except (EpRuntimeError, OSError) as error:
            if not isinstance(error, PoolExhaustedError) or len(self._late) >= MAX_LATE:
                self._drop(accepted, error)
                return
            # Try once more: a client that reconnects has closed its old connection, but the daemon
            # may not have noticed that yet.
            self._late.add(accepted)
            self._loop.call_later(limits.ACCEPT_PAUSE_S, self._enter_late, accepted)

    def _enter_late(self, accepted: socket.socket) -> None:
        if accepted not in self._late:
            return
        self._late.remove(accepted)
        try:
            with contextlib.suppress(BlockingIOError):
                if not accepted.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError(errno.ECONNRESET, "the client is gone")
            self._enter(accepted)
        except (EpRuntimeError, OSError) as error:
            self._drop(accepted, error)

    def _enter(self, accepted: socket.socket) -> None:
        self._pass_on(accepted, self._admit(accepted))

    def _drop(self, accepted: socket.socket, error: EpRuntimeError | OSError) -> None:
        if isinstance(error, OSError) and open_files.is_shortage(error):
            error = open_files.exhausted(self.name, error)
        if isinstance(error, EpRuntimeError):
            self._runtime.tell_refused(self.door, error)
        self._disposal.drop(accepted)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, accepted: socket.socket) -> credentials.Caller:
        """Returns the process that connected, or refuses the connection.

        Raises:
            PermissionDeniedError: the daemon does not serve the user, or the user has too many
                connections.
            PoolExhaustedError: the user has no descriptor left for another connection.
        """
        peer = self._peer_of(accepted, accepted_s=credentials.boottime_s())
        peer.close()
        settings = self._runtime.settings
        settings.check_served(peer)
        held = self._runtime.connections.api[peer.uid]
        if held >= settings.per_user.sessions + limits.SPARE_API_CONNECTIONS:
            raise PermissionDeniedError(
                f"uid {peer.uid} has {held} connections to api.sock", uid=peer.uid, pid=peer.pid
            )
        self._runtime.admit(peer.uid, api=1)
        return credentials.Caller(peer.uid, peer.pid)

    def _count(self, uid: int, more: int) -> None:
        self._runtime.connections.api[uid] += more

    def _pass_on(self, accepted: socket.socket, caller: credentials.Caller) -> None:
        self._num_accepted += 1
        name = f"{self._name}-{self._num_accepted}"
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.bind(b"\0" + name.encode())
            inner.connect(self._inner_path)
        except OSError:
            inner.close()
            raise
        peer = f"unix-abstract:{name}"

        def ended() -> None:
            del self._calls[peer]
            self._count(caller.uid, -1)
            inner.close()
            self._disposal.drop(accepted)

        self._count(caller.uid, 1)
        self._calls[peer] = _Call(self._loop, self._turns, caller, accepted, inner, ended)


class OrdersFront(Front):
    """The front of admin.sock; the socket's mode decides who may connect and give orders."""

    name = wire.ADMIN_SOCKET
    door = "admin"

    def _admit(self, accepted: socket.socket) -> credentials.Caller:
        return credentials.caller_of(accepted)

    def _count(self, uid: int, more: int) -> None:
        """Does not count connections of operators, which use the daemon's reserve."""


class _Call:
    """One connection, relayed to gRPC and back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turns: Turns,
        caller: credentials.Caller,
        outer: socket.socket,
        inner: socket.socket,
        ended: Callable[[], None],
    ) -> None:
        self.caller = caller
        self._ended = ended
        self._over = False

        def in_turn(work: Callable[[], None]) -> bool:
            return turns.now(caller.uid, work)

        self._ways = (
            _Way(loop, in_turn, outer, inner, _bytes_alone, self.end),
            _Way(loop, in_turn, inner, outer, lambda side: side.recv(_PART_BYTES), self.end),
        )

    def end(self) -> None:
        """Ends both directions; a second call does nothing."""
        if not self._over:
            self._over = True
            for way in self._ways:
                way.stop()
            self._ended()


class _Way:
    """Relays one direction of a connection; stops reading while the target is full."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        in_turn: Callable[[Callable[[], None]], bool],
        source: socket.socket,
        target: socket.socket,
        take: Callable[[socket.socket], bytes],
        end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._in_turn = in_turn
        self._over = False
        self._source = source
        self._target = target
        self._take = take
        self._end = end
        self._left = b""
        self._listening = False
        # Pass file numbers to the loop: for a socket object it formats and drops an error text,
        # which takes longer than relaying a heartbeat.
        self._source_fd, self._target_fd = source.fileno(), target.fileno()
        self._listen()

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            self._loop.add_reader(self._source_fd, self._readable)

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._source_fd)

    def _readable(self) -> None:
        if not self._in_turn(self._read):
            self._pause()  # until the queued turn has read

    def stop(self) -> None:
        self._over = True
        self._pause()
        if self._left:
            self._loop.remove_writer(self._target_fd)

    def _read(self) -> None:
        if self._over:
            return
        try:
            data = self._take(self._source)
        except BlockingIOError:
            self._listen()
            return
        except OSError:
            data = b""
        if data:
            self._send(data)
        else:
            self._end()

    def _send(self, data: bytes) -> None:
        sent = 0
        try:
            with contextlib.suppress(BlockingIOError):
                sent = self._target.send(data)
        except OSError:
            self._end()
            return
        waited, self._left = bool(self._left), data[sent:]
        if self._left and not waited:
            self._pause()
            self._loop.add_writer(self._target_fd, self._write)
        elif not self._left:
            if waited:
                self._loop.remove_writer(self._target_fd)
            self._listen()

    def _write(self) -> None:
        self._send(self._left)


def _bytes_alone(source: socket.socket) -> bytes:
    """Reads data; refuses descriptors, because a plain read would close them and may block."""
    data, _, flags, _ = source.recvmsg(_PART_BYTES, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise OSError("descriptors on api.sock")
    return source.recv(len(data)) if data else b""
