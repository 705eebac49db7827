"""The two sockets of a daemon: gRPC on api.sock, identity and file descriptors on fd.sock."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

import ep_runtime
from ep_runtime import services, wire
from ep_runtime.errors import (
    EpRuntimeError,
    RuntimeUnavailableError,
    SessionFencedError,
)
from ep_runtime.v1 import (
    fd_socket_pb2,
    group_service_pb2,
    layer_service_pb2,
    nccl_service_pb2,
    session_service_pb2,
    types_pb2,
)
from ep_runtime_client.daemons.addresses import SocketDirectory, path_of
from ep_runtime_client.daemons.departures import departures

READ_TIMEOUT_S = 5.0
MUTATE_TIMEOUT_S = 10.0

# Many concurrent calls on one channel sometimes end with a spurious CANCELLED.
_MAX_IN_FLIGHT = 64

Metadata = tuple[tuple[str, str], ...]
_Response = TypeVar("_Response")


class RpcChannel:
    """A channel to one of a daemon's gRPC sockets, which never connects to another directory.

    gRPC reconnects when a connection breaks. By then the directory's path may belong to another
    user's daemon. So gRPC gets the path of an open descriptor of the directory.
    """

    def __init__(self, place: SocketDirectory, socket_name: str, timeout_s: float) -> None:
        """Raises the errors of `SocketDirectory.open` and `SocketDirectory.check_listener`."""
        self._pinned = place.open()
        try:
            place.check_listener(self._pinned, socket_name, timeout_s)
        except BaseException:
            os.close(self._pinned)
            raise
        target = "unix:" + path_of(self._pinned, socket_name)
        self.channel = grpc.insecure_channel(target, options=wire.channel_options())
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends running calls. Idempotent."""
        self.channel.close()
        with self._lock:
            pinned, self._pinned = self._pinned, -1
        if pinned >= 0:
            os.close(pinned)


def fd_socket(
    place: SocketDirectory, timeout_s: float
) -> contextlib.AbstractContextManager[socket.socket]:
    """Connects to fd.sock. Raises as `SocketDirectory.connected`."""
    return place.connected(wire.FD_SOCKET, socket.SOCK_SEQPACKET, timeout_s)


def _ask(
    connection: socket.socket,
    place: SocketDirectory,
    request: fd_socket_pb2.FdRequest,
    fds: Sequence[int] = (),
) -> tuple[fd_socket_pb2.FdReply, list[int]]:
    try:
        # The daemon's reason may still be readable.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                socket.send_fds(connection, [request.SerializeToString()], list(fds))
            else:
                connection.send(request.SerializeToString())
        try:
            return _receive(connection, place)
        except ConnectionResetError:  # the reset is reported before earlier packets
            return _receive(connection, place)
    except TimeoutError as error:
        raise place.unavailable(f"{wire.FD_SOCKET} gave no answer in time") from error
    except OSError as error:
        raise place.unavailable(error.strerror or str(error)) from error


def _receive(
    connection: socket.socket, place: SocketDirectory
) -> tuple[fd_socket_pb2.FdReply, list[int]]:
    """Receives one packet with its descriptors, which the caller owns (close-on-exec)."""
    size = array.array("i").itemsize
    packet, ancillary, flags, _ = connection.recvmsg(
        wire.MAX_PACKET_BYTES,
        socket.CMSG_SPACE(wire.MAX_FDS_PER_PACKET * size),
        socket.MSG_CMSG_CLOEXEC,
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % size])
    held = list(fds)
    try:
        if not packet:
            raise place.unavailable(f"{wire.FD_SOCKET} was closed by the daemon")
        if flags & socket.MSG_CTRUNC:
            raise EpRuntimeError(
                "the kernel cut off file descriptors of the daemon; raise this process's limit "
                "of open files (ulimit -n)"
            )
        reply = fd_socket_pb2.FdReply.FromString(packet)
        if reply.WhichOneof("reply") == "error":
            raise wire.error_from_detail(reply.error)
    except BaseException:
        close_all(held)
        raise
    return reply, held


def close_all(fds: list[int]) -> None:
    """Closes file descriptors."""
    for fd in fds:
        os.close(fd)


def hello(
    place: SocketDirectory, timeout_s: float, *, resume_token: str = ""
) -> fd_socket_pb2.Welcome:
    """Says hello to the daemon, which gets this process's uid and pid from the kernel.

    Args:
        place: directory of the daemon's sockets.
        timeout_s: longest time to wait for the answer.
        resume_token: token of the session to continue after a restart of the daemon.

    Raises:
        RuntimeUnavailableError: no daemon runs, or the daemon drains.
        PermissionDeniedError: the daemon does not serve this uid.
        SessionFencedError: the session to resume was fenced.
        VersionSkewError: no common protocol version.
    """
    greeting = fd_socket_pb2.Hello(
        api_versions=[wire.API_VERSION],
        client_version=ep_runtime.__version__,
        pid=os.getpid(),
        resume_token=resume_token,
    )
    with fd_socket(place, timeout_s) as connection:
        reply, fds = _ask(connection, place, fd_socket_pb2.FdRequest(hello=greeting))
    close_all(fds)
    return reply.welcome


def redeem(
    place: SocketDirectory, token: str, attach_token: str, timeout_s: float
) -> list[tuple[types_pb2.WindowDescriptor, int]]:
    """Gets the descriptors for an attach token, in the token's order; the caller closes them.

    Raises:
        PermissionDeniedError: the attach token is used, expired or another process's.
        StaleHandleError: the group is gone.
    """
    order = fd_socket_pb2.RedeemTicket(session_token=token, ticket=attach_token)
    request = fd_socket_pb2.FdRequest(redeem_ticket=order)
    found: list[tuple[types_pb2.WindowDescriptor, int]] = []
    try:
        with fd_socket(place, timeout_s) as connection:
            reply, fds = _ask(connection, place, request)
            while True:
                batch = reply.fd_batch
                if len(fds) != len(batch.descriptors):
                    close_all(fds)
                    raise EpRuntimeError(
                        f"the daemon named {len(batch.descriptors)} descriptors and sent {len(fds)}"
                    )
                found += zip(batch.descriptors, fds, strict=True)
                if batch.first + len(fds) >= batch.total or not fds:
                    return found
                reply, fds = _receive(connection, place)
    except BaseException:
        close_all([fd for _, fd in found])
        raise


def return_windows(
    place: SocketDirectory,
    token: str,
    group: str,
    held: Sequence[tuple[types_pb2.WindowDescriptor, int]],
    timeout_s: float,
) -> None:
    """Gives a restarted daemon the descriptors it wants; ours stay open.

    Raises:
        StaleHandleError, PermissionDeniedError, InvalidArgumentError: the daemon rejects them.
    """
    with fd_socket(place, timeout_s) as connection:
        for first in range(0, len(held), wire.MAX_FDS_PER_PACKET):
            chunk = held[first : first + wire.MAX_FDS_PER_PACKET]
            order = fd_socket_pb2.ReturnWindows(
                session_token=token, group=group, descriptors=[item for item, _ in chunk]
            )
            request = fd_socket_pb2.FdRequest(return_windows=order)
            close_all(_ask(connection, place, request, [fd for _, fd in chunk])[1])


class ControlChannel:
    """The RPCs of one session. Thread-safe.

    Attributes:
        channel, metadata: for calls to other services.
        lost: whether a call got no answer, or the daemon does not know the session; later calls on
            this channel would fail too.
    """

    def __init__(self, place: SocketDirectory, token: str) -> None:
        self._place = place
        self._rpc = RpcChannel(place, wire.API_SOCKET, READ_TIMEOUT_S)
        self.channel = channel = self._rpc.channel
        self.metadata: Metadata = ((wire.TOKEN_KEY, token), (wire.PID_KEY, str(os.getpid())))
        self._slots = threading.BoundedSemaphore(_MAX_IN_FLIGHT)
        self.lost = False
        self.sessions = services.stub(channel, session_service_pb2.DESCRIPTOR)
        self.groups = services.stub(channel, group_service_pb2.DESCRIPTOR)
        self.layers = services.stub(channel, layer_service_pb2.DESCRIPTOR)
        self.nccl = services.stub(channel, nccl_service_pb2.DESCRIPTOR)

    def call(
        self,
        method: Callable[..., _Response],
        request: Any,
        *,
        timeout_s: float = READ_TIMEOUT_S,
        for_all: bool = False,
    ) -> _Response:
        """Makes one unary RPC. `for_all`: in it the daemon waits for all processes of a group.

        Raises:
            PeerLostError: with `for_all`, a process of the job has died.
            EpRuntimeError: the class that the daemon names; RuntimeUnavailableError if it gives no
                answer within the timeout.
        """
        try:
            with self._slots:
                if for_all:
                    call = method.future(request, timeout=timeout_s, metadata=self.metadata)  # type: ignore[attr-defined]
                    with departures.ending(call):
                        answer: _Response = call.result()
                        return answer
                return method(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            ours = self.translated(error)
            self.lost = self.lost or _ends_channel(error, ours)
            raise ours from None  # our error has all data of gRPC's error
        except ValueError as error:  # gRPC's error for a channel that was closed meanwhile
            self.lost = True
            raise self._place.unavailable(str(error)) from None

    def stream(self, method: Callable[..., Any], request: Any) -> Any:
        """Starts a server stream without a deadline; iterate it, `cancel()` ends it."""
        return method(request, metadata=self.metadata)

    def translated(self, error: grpc.RpcError) -> EpRuntimeError:
        """Converts a failed call to our error, with the address if the daemon did not answer."""
        ours = wire.error_from_rpc(error)
        if isinstance(ours, RuntimeUnavailableError) and not ours.fields:
            return self._place.unavailable(str(ours))
        return ours

    def close(self) -> None:
        """Closes the channel; running calls end with RuntimeUnavailableError."""
        self._rpc.close()


def _ends_channel(error: grpc.RpcError, ours: EpRuntimeError) -> bool:
    """Whether an error ends the channel; errors of a slow or draining daemon do not."""
    if isinstance(ours, SessionFencedError):
        return True
    code = error.code() if isinstance(error, grpc.Call) else None
    unanswered = isinstance(wire.error_from_rpc(error), RuntimeUnavailableError)
    without_fields = not wire.error_from_rpc(error).fields
    return unanswered and without_fields and code is not grpc.StatusCode.DEADLINE_EXCEEDED
