"""Answers requests on fd.sock: hello, attach tokens to redeem, and returned windows.

The functions do not use the connection; the client gets the errors that they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import ep_runtime
from ep_runtime import wire
from ep_runtime.errors import InvalidArgumentError, VersionSkewError
from ep_runtime.text import check_printable
from ep_runtime.v1 import fd_socket_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.callers.credentials import Peer
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups import attachment
from ep_runtime_server.rpc import views
from ep_runtime_server.runtime import Runtime

# The reply and descriptors of one packet to the client.
Packet = tuple[pb.FdReply, list[int]]


def hello(runtime: Runtime, peer: Peer, asked: pb.Hello) -> pb.FdReply:
    """Makes a session for the process, or finds its session from before a restart."""
    if wire.API_VERSION not in asked.api_versions:
        raise VersionSkewError(
            f"the daemon speaks {wire.API_VERSION}, the client {list(asked.api_versions)}",
            client=list(asked.api_versions),
            daemon=[wire.API_VERSION],
        )
    check_printable("client_version", asked.client_version, limits.MAX_VERSION_BYTES)
    token = asked.resume_token
    session = runtime.sessions.resume(token, peer) if token else None
    resumed = session is not None
    if session is None:
        runtime.check_serving()
        runtime.recorder.admit()
        session = runtime.sessions.hello(peer, asked.pid, asked.client_version)
    welcome = pb.Welcome(
        session_token=session.token,
        session_id=session.session_id,
        incarnation=runtime.incarnation,
        server_version=ep_runtime.__version__,
        resumed=resumed,
    )
    runtime.recorder.flush()
    return pb.FdReply(welcome=welcome)


def redeem(
    runtime: Runtime, peer: Peer, request: pb.RedeemTicket, admit: Callable[[int], None]
) -> Generator[Packet, None, None]:
    """Yields packets with a group's descriptors, which stay open until the next iteration.

    `admit(count)` may raise to refuse the number of descriptors.
    """
    session = runtime.sessions.authenticate_peer(request.session_token, peer)
    buffers, generation = attachment.redeem(runtime.attach_tokens, session, request.ticket)
    admit(len(buffers))
    runtime.recorder.flush()
    runtime.failpoints.hit("fd.before_send")
    runtime.failpoints.hit("fd.answer")
    for first in range(0, len(buffers), wire.MAX_FDS_PER_PACKET):
        part = buffers[first : first + wire.MAX_FDS_PER_PACKET]
        batch = pb.FdBatch(
            first=first,
            total=len(buffers),
            descriptors=[views.descriptor(buffer, generation) for buffer in part],
        )
        with attachment.exported(part) as fds:
            yield pb.FdReply(fd_batch=batch), fds


def return_windows(
    runtime: Runtime, session: SessionRecord, request: pb.ReturnWindows, fds: list[int]
) -> pb.FdReply:
    """Adopts duplicates of returned descriptors; the caller must close the given ones."""
    if len(fds) != len(request.descriptors):
        raise InvalidArgumentError(
            f"{len(request.descriptors)} descriptors were named and {len(fds)} came",
            argument="descriptors",
        )
    taken, wanted = runtime.rejoin.return_windows(
        session,
        request.group,
        [(d.world_rank, d.generation, fd) for d, fd in zip(request.descriptors, fds, strict=True)],
    )
    runtime.recorder.flush()
    runtime.failpoints.hit("recovery.adopted")
    answer = pb.WindowsReturned(num_adopted=taken, wanted_ranks=wanted)
    return pb.FdReply(windows_returned=answer)
