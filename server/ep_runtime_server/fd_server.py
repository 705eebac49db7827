"""fd.sock: hello, and tickets for descriptors. One packet in, packets out, no waiting anywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import socket
from collections.abc import Callable

from google.protobuf.message import DecodeError

import ep_runtime
from ep_runtime import wire
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    PoolExhaustedError,
    VersionSkewError,
)
from ep_runtime.v1 import fd_socket_pb2 as pb
from ep_runtime_server import attachment, config, credentials, views
from ep_runtime_server.credentials import Peer
from ep_runtime_server.runtime import Runtime
from ep_runtime_server.sessions import Session

ACCEPT_PAUSE_S = 0.2
LISTEN_BACKLOG = 512


@dataclasses.dataclass(eq=False)
class _Connection:
    socket: socket.socket
    accepted_s: float  # CLOCK_BOOTTIME
    idle_timer: asyncio.TimerHandle | None = None


class FdServer:
    """Serves an already bound SOCK_SEQPACKET socket until `close`."""

    def __init__(
        self,
        runtime: Runtime,
        listener: socket.socket,
        *,
        peer_of: Callable[..., Peer] = credentials.peer_of,
    ) -> None:
        """`peer_of` says who connected; tests put their own there."""
        self._runtime = runtime
        self._listener = listener
        self._peer_of = peer_of
        self._connections: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(LISTEN_BACKLOG)
        self._loop.add_reader(listener, self._accept)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            # The listener stays readable: without a pause this would spin until a descriptor
            # comes back.
            logging.getLogger(__name__).error("fd.sock cannot accept: %s", error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        if len(self._connections) >= config.MAX_FD_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        # SO_PEERCRED names who connected; a forked child may send on the same connection, so each
        # packet carries its sender too.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        connection = _Connection(accepted, credentials.boottime_s())
        self._connections.add(connection)
        self._arm(connection)
        self._loop.add_reader(accepted, self._readable, connection)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _arm(self, connection: _Connection) -> None:
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
        connection.idle_timer = self._loop.call_later(
            config.FD_CONNECTION_IDLE_S, self._drop, connection
        )

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._loop.remove_reader(connection.socket)
            connection.socket.close()
            if connection.idle_timer is not None:
                connection.idle_timer.cancel()

    def _readable(self, connection: _Connection) -> None:
        try:
            data, ancillary, flags, _ = connection.socket.recvmsg(
                wire.MAX_PACKET_BYTES, credentials.ancillary_bytes(), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        fds = credentials.message_fds(ancillary)
        try:
            if not data:
                self._drop(connection)
                return
            self._arm(connection)
            self._take(connection, data, flags, credentials.message_pid(ancillary), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(
        self,
        connection: _Connection,
        data: bytes,
        flags: int,
        sender_pid: int | None,
        fds: list[int],
    ) -> None:
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise InvalidArgumentError(
                    f"a packet is at most {wire.MAX_PACKET_BYTES} bytes and "
                    f"{wire.MAX_FDS_PER_PACKET} descriptors, and the daemon's limit of open files "
                    "must have room for them"
                )
            self._answer(connection, data, sender_pid, fds)
        except EpRuntimeError as error:
            self._refuse(connection, error)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                self._drop(connection)
                return
            self._refuse(connection, PoolExhaustedError("the daemon is out of file descriptors"))

    def _refuse(self, connection: _Connection, error: EpRuntimeError) -> None:
        if isinstance(error, PermissionDeniedError):
            self._runtime.events.add("fd.denied", str(error), level=logging.WARNING, **error.fields)
        self._send(connection, pb.FdReply(error=wire.error_to_detail(error)), [])

    def _answer(
        self, connection: _Connection, data: bytes, sender_pid: int | None, fds: list[int]
    ) -> None:
        try:
            request = pb.FdRequest.FromString(data)
        except DecodeError as error:
            raise InvalidArgumentError("the packet is not an FdRequest") from error
        peer = self._peer_of(
            connection.socket,
            accepted_s=connection.accepted_s,
            use_peer_pidfd="no-peer-pidfd" not in self._runtime.settings.testing,
        )
        try:
            if sender_pid is not None and sender_pid != peer.pid:
                raise PermissionDeniedError(
                    f"process {peer.pid} opened this connection, process {sender_pid} used it; "
                    "a forked child must connect on its own",
                    pid=sender_pid,
                )
            kind = request.WhichOneof("request")
            if fds and kind != "return_windows":
                raise InvalidArgumentError(f"a packet of {kind} carries no descriptors")
            if kind == "hello":
                self._hello(connection, peer, request.hello)
            elif kind == "redeem_ticket":
                self._redeem(connection, peer, request.redeem_ticket)
            elif kind == "return_windows":
                self._take_back(connection, peer, request.return_windows, fds)
            else:
                raise InvalidArgumentError("the packet holds no request that this daemon knows")
        finally:
            peer.close()

    def _hello(self, connection: _Connection, peer: Peer, hello: pb.Hello) -> None:
        if not self._runtime.settings.serves(peer.uid, peer.gids):
            raise PermissionDeniedError(
                f"uid {peer.uid} is not served here; start the daemon with --allow-uid {peer.uid} "
                "or --allow-gid",
                uid=peer.uid,
                pid=peer.pid,
            )
        if wire.API_VERSION not in hello.api_versions:
            raise VersionSkewError(
                f"the daemon speaks {wire.API_VERSION}, the client {list(hello.api_versions)}",
                client=list(hello.api_versions),
                daemon=[wire.API_VERSION],
            )
        session = self._session_before(peer, hello.resume_token)
        resumed = session is not None
        if session is None:
            self._runtime.check_serving()
            self._runtime.recorder.admit()
            session = self._runtime.sessions.hello(peer, hello.pid, hello.client_version)
        welcome = pb.Welcome(
            session_token=session.token,
            session_id=session.session_id,
            incarnation=self._runtime.incarnation,
            server_version=ep_runtime.__version__,
            resumed=resumed,
        )
        self._runtime.recorder.flush()
        self._send(connection, pb.FdReply(welcome=welcome), [])

    def _session_before(self, peer: Peer, token: str) -> Session | None:
        return self._runtime.sessions.resume(token, peer) if token else None

    def _take_back(
        self, connection: _Connection, peer: Peer, request: pb.ReturnWindows, fds: list[int]
    ) -> None:
        session = self._runtime.sessions.authenticate_peer(
            request.session_token, peer.pid, peer.uid
        )
        if len(fds) != len(request.descriptors):
            raise InvalidArgumentError(
                f"{len(request.descriptors)} descriptors were named and {len(fds)} came",
                argument="descriptors",
            )
        taken, wanted = self._runtime.rejoin.return_windows(
            session,
            request.group,
            [
                (d.world_rank, d.generation, fd)
                for d, fd in zip(request.descriptors, fds, strict=True)
            ],
        )
        self._runtime.recorder.flush()
        self._runtime.failpoints.hit("recovery.adopted")
        answer = pb.WindowsReturned(num_adopted=taken, wanted_ranks=wanted)
        self._send(connection, pb.FdReply(windows_returned=answer), [])

    def _redeem(self, connection: _Connection, peer: Peer, request: pb.RedeemTicket) -> None:
        sessions = self._runtime.sessions
        session = sessions.authenticate_peer(request.session_token, peer.pid, peer.uid)
        exported = attachment.redeem(self._runtime.tickets, session, request.ticket)
        self._runtime.recorder.flush()
        self._runtime.failpoints.hit("fd.before_send")
        try:
            for first in range(0, len(exported), wire.MAX_FDS_PER_PACKET):
                part = exported[first : first + wire.MAX_FDS_PER_PACKET]
                batch = pb.FdBatch(
                    first=first,
                    total=len(exported),
                    descriptors=[
                        views.descriptor(item.world_rank, item.size_bytes, item.generation)
                        for item in part
                    ],
                )
                self._send(connection, pb.FdReply(fd_batch=batch), [item.fd for item in part])
        finally:
            for item in exported:
                os.close(item.fd)
        self._runtime.failpoints.hit("fd.after_send")

    def _send(self, connection: _Connection, reply: pb.FdReply, fds: list[int]) -> None:
        """Never waits: who does not read its answers loses the connection."""
        if connection not in self._connections:
            return
        try:
            if fds:
                socket.send_fds(connection.socket, [reply.SerializeToString()], fds)
            else:
                connection.socket.send(reply.SerializeToString())
        except OSError:
            self._drop(connection)
