"""Serves fd.sock: answers each request packet with one or more packets, and never waits.

Users that the daemon does not serve are refused right after `accept`. The server takes descriptors
only from a session that may return windows, and only descriptors of memory, because closing other
files may block.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import errno
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable

from google.protobuf.message import DecodeError

from ep_runtime import wire
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
)
from ep_runtime.v1 import fd_socket_pb2 as pb
from ep_runtime_server.base import limits, open_files
from ep_runtime_server.callers import credentials
from ep_runtime_server.callers.credentials import Peer
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.callers.turns import Turns
from ep_runtime_server.runtime import Runtime
from ep_runtime_server.sockets import fd_requests
from ep_runtime_server.sockets.descriptors import Descriptors
from ep_runtime_server.sockets.disposal import Disposal

LISTEN_BACKLOG = 512

_LIMITS = (
    f"a packet is at most {wire.MAX_PACKET_BYTES} bytes and {wire.MAX_FDS_PER_PACKET} descriptors, "
    "and the daemon's limit of open files must have room for them"
)


@dataclasses.dataclass(eq=False)
class _Connection:
    socket: socket.socket
    accepted_s: float  # time of the accept, on CLOCK_BOOTTIME
    uid: int
    idle_timer: asyncio.TimerHandle | None = None
    unread: bool = False  # whether the packet's descriptors are not received yet
    awaited: bool = False  # whether a child process reads this socket now
    sent_fds: int = 0  # descriptors sent since the client had last read everything

    def unread_fds(self) -> int:
        """Returns how many sent descriptors the client may not have read yet."""
        if self.sent_fds and not _bytes_on_way(self.socket):
            self.sent_fds = 0
        return self.sent_fds


def _bytes_on_way(connection: socket.socket) -> int:
    """Returns the kernel's number of bytes that were sent but not read yet."""
    told = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(told, sys.byteorder)


class FdServer:
    """Serves an already bound SOCK_SEQPACKET socket until `close`."""

    def __init__(
        self,
        runtime: Runtime,
        listener: socket.socket,
        disposal: Disposal,
        turns: Turns,
        *,
        peer_of: Callable[..., Peer] = credentials.peer_of,
    ) -> None:
        """`peer_of` identifies a connection's process; tests replace it."""
        self._runtime = runtime
        self._listener = listener
        self._peer_of = peer_of
        self._connections: dict[_Connection, None] = {}  # least recently active first
        # Dropped connections whose last packets the client has not read yet.
        self._left: list[_Connection] = []
        self._disposal = disposal
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._descriptors = Descriptors(self._loop)
        listener.setblocking(False)
        # SO_PEERCRED names the process that connected, but a forked child may send on the same
        # connection, so each packet must name its sender too. Connections inherit SO_PASSCRED from
        # the listener; if set after `accept`, an earlier packet would not name its sender.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.listen(LISTEN_BACKLOG)
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._disposal.close_listener(self._listener)
        for connection in list(self._connections):
            self._drop(connection)
        for connection in self._left:
            self._end(connection)
        await self._descriptors.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            # Pause, because the listener stays readable, so that the loop would call this function
            # without end until a descriptor is free.
            told = open_files.exhausted(f"{wire.FD_SOCKET} cannot accept", error)
            self._runtime.tell_refused("fd", told)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(limits.ACCEPT_PAUSE_S, self._resume)
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, credentials.boottime_s(), -1)
        try:
            connection.uid = self._admit(connection)
        except EpRuntimeError as error:
            self._turn_away(connection, error)
            return
        except OSError as error:
            self._turn_away(connection, open_files.exhausted(wire.FD_SOCKET, error))
            return
        self._connections[connection] = None
        self._runtime.connections.fd[connection.uid] += 1
        self._arm(connection)
        self._listen(connection)

    def _admit(self, connection: _Connection) -> int:
        """Returns the uid of the connected process, or refuses the connection.

        Raises:
            PermissionDeniedError: the daemon does not serve this user.
            RuntimeUnavailableError: the user has as many connections as one user may have.
            PoolExhaustedError: the user has no descriptor left for another connection.
        """
        peer = self._peer(connection)
        peer.close()
        self._runtime.settings.check_served(peer)
        self._unread()
        held = self._runtime.connections.fd[peer.uid]
        if held >= limits.MAX_FD_CONNECTIONS_PER_UID:
            raise RuntimeUnavailableError(
                f"uid {peer.uid} has {held} connections to {wire.FD_SOCKET}, as many as "
                "one user may have; retry",
                answered=False,
            )
        if len(self._connections) >= limits.MAX_FD_CONNECTIONS:
            by_uid = collections.Counter(other.uid for other in self._connections)
            busiest = by_uid.most_common(1)[0][0]
            self._drop(next(other for other in self._connections if other.uid == busiest))
        self._runtime.admit(peer.uid, fd=1)
        return peer.uid

    def _turn_away(self, connection: _Connection, error: EpRuntimeError) -> None:
        self._runtime.tell_refused("fd", error)
        reply = pb.FdReply(error=wire.error_to_detail(error))
        with contextlib.suppress(OSError):
            connection.socket.send(reply.SerializeToString())
        self._disposal.drop(connection.socket)

    def _peer(self, connection: _Connection) -> Peer:
        return self._peer_of(
            connection.socket,
            accepted_s=connection.accepted_s,
            use_peer_pidfd="no-peer-pidfd" not in self._runtime.settings.testing,
        )

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _arm(self, connection: _Connection) -> None:
        self._connections[connection] = self._connections.pop(connection, None)
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
        connection.idle_timer = self._loop.call_later(
            limits.FD_CONNECTION_IDLE_S, self._drop, connection
        )

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._loop.remove_reader(connection.socket)
            if connection.idle_timer is not None:
                connection.idle_timer.cancel()
            if connection.unread_fds():
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)
                self._left.append(connection)
            else:
                self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._runtime.connections.fd[connection.uid] -= 1
        self._disposal.drop(connection.socket)

    def _unread(self) -> collections.Counter[int]:
        """Counts unread descriptors by uid; ends dropped connections that have none left."""
        left, self._left = self._left, []
        for connection in left:
            if connection.unread_fds():
                self._left.append(connection)
            else:
                self._end(connection)
        found: collections.Counter[int] = collections.Counter()
        for connection in (*self._connections, *self._left):
            found[connection.uid] += connection.unread_fds()
        return found

    def _listen(self, connection: _Connection) -> None:
        if connection in self._connections and not connection.awaited:
            self._loop.add_reader(connection.socket, self._readable, connection)

    def _readable(self, connection: _Connection) -> None:
        self._loop.remove_reader(connection.socket)
        self._turns.add(connection.uid, lambda: self._serve(connection))

    def _serve(self, connection: _Connection) -> None:
        if connection in self._connections:
            try:
                self._read(connection)
            finally:
                self._listen(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data, ancillary, flags, _ = connection.socket.recvmsg(
                wire.MAX_PACKET_BYTES, credentials.SENDER_BYTES, socket.MSG_PEEK
            )
            carries_fds = bool(flags & socket.MSG_CTRUNC)
            if data and not carries_fds:
                connection.socket.recv(1)  # removes the packet from the queue
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        if not data:
            self._drop(connection)
            return
        self._arm(connection)
        connection.unread = carries_fds
        sender_pid = credentials.message_pid(ancillary)
        self._try(connection, lambda: self._answer(connection, data, flags, sender_pid))
        if connection.unread:  # the packet's descriptors will not be received
            self._drop(connection)

    def _try(self, connection: _Connection, work: Callable[[], None]) -> None:
        """Calls `work()`, and reports its error to the client."""
        try:
            work()
        except EpRuntimeError as error:
            self._refuse(connection, error)
        except OSError as error:
            if not open_files.is_shortage(error):
                self._drop(connection)
                return
            self._refuse(connection, open_files.exhausted(wire.FD_SOCKET, error))
        except Exception:
            self._drop(connection)  # our bug; disconnect, so that the client does not wait
            raise

    def _refuse(self, connection: _Connection, error: EpRuntimeError) -> None:
        self._runtime.tell_refused("fd", error)
        self._send(connection, pb.FdReply(error=wire.error_to_detail(error)), [])

    def _answer(self, connection: _Connection, data: bytes, flags: int, sender_pid: int) -> None:
        if flags & socket.MSG_TRUNC:
            raise InvalidArgumentError(_LIMITS)
        try:
            request = pb.FdRequest.FromString(data)
        except DecodeError as error:
            raise InvalidArgumentError("the packet is not an FdRequest") from error
        self._runtime.failpoints.hit("fd.request")
        peer = self._peer(connection)
        try:
            if sender_pid != peer.pid:
                raise PermissionDeniedError(
                    f"process {peer.pid} opened this connection, process {sender_pid} used it; "
                    "a forked child must connect on its own",
                    pid=sender_pid,
                )
            kind = request.WhichOneof("request")
            if connection.unread and kind != "return_windows":
                raise InvalidArgumentError(f"a packet of {kind} carries no descriptors")
            if kind == "hello":
                reply = fd_requests.hello(self._runtime, peer, request.hello)
                self._runtime.failpoints.hit("fd.answer")
                self._send(connection, reply, [])
            elif kind == "redeem_ticket":
                self._redeem(connection, peer, request.redeem_ticket)
            elif kind == "return_windows":
                self._take_back(connection, peer, request.return_windows)
            elif kind == "probe":
                condition = pb.Condition(refusal=self._runtime.refusal)
                self._send(connection, pb.FdReply(condition=condition), [])
            else:
                raise InvalidArgumentError("the packet holds no request that this daemon knows")
        finally:
            peer.close()

    def _take_back(self, connection: _Connection, peer: Peer, request: pb.ReturnWindows) -> None:
        session = self._runtime.sessions.authenticate_peer(request.session_token, peer)
        if not connection.unread:
            self._give_back(connection, session, request, [])
            return

        def came(found: list[int] | EpRuntimeError) -> None:
            connection.awaited = False
            if isinstance(found, EpRuntimeError):
                self._refuse(connection, found)
                self._drop(connection)  # the packet may still be queued
            else:
                self._try(connection, lambda: adopt(found))
            self._listen(connection)

        def adopt(fds: list[int]) -> None:
            try:
                session.check_live()
                self._give_back(connection, session, request, fds)
            finally:
                for fd in fds:
                    os.close(fd)

        generations = [descriptor.generation for descriptor in request.descriptors]
        self._runtime.rejoin.check_return(session, request.group, generations)
        self._descriptors.check(peer.uid)
        connection.unread, connection.awaited = False, True
        self._descriptors.take(connection.socket, peer.uid, came)

    def _give_back(
        self,
        connection: _Connection,
        session: SessionRecord,
        request: pb.ReturnWindows,
        fds: list[int],
    ) -> None:
        reply = fd_requests.return_windows(self._runtime, session, request, fds)
        self._runtime.failpoints.hit("fd.answer")
        self._send(connection, reply, [])

    def _redeem(self, connection: _Connection, peer: Peer, request: pb.RedeemTicket) -> None:
        def admit(num_fds: int) -> None:
            self._runtime.quotas.check_unread(peer.uid, num_fds, self._unread())

        redeemed = fd_requests.redeem(self._runtime, peer, request, admit)
        with contextlib.closing(redeemed) as packets:
            for reply, fds in packets:
                connection.sent_fds += len(fds)
                self._send(connection, reply, fds)
        self._runtime.failpoints.hit("fd.after_send")

    def _send(self, connection: _Connection, reply: pb.FdReply, fds: list[int]) -> None:
        """Sends without waiting; drops a connection that does not read its answers."""
        if connection not in self._connections:
            return
        try:
            socket.send_fds(connection.socket, [reply.SerializeToString()], fds)
        except OSError:
            self._drop(connection)
