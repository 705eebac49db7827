"""Packets of fd.sock without the client library."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from pathlib import Path

from ep_runtime import specs, wire
from ep_runtime.v1 import fd_socket_pb2

WAIT_S = 60.0  # the longest wait of any test, including a process's start on a busy machine


def make_spec(name: str = "moe", ranks: int = 2, **changes) -> specs.GroupSpec:
    arguments: dict = {
        "name": name,
        "mesh_axes": (("ep", ranks),),
        "ep_axis": "ep",
        "num_experts": 4 * ranks,
        "hidden_size": 16,
        "max_tokens_per_rank": 8,
        "max_top_k": 2,
        "alignment": 4,
        "retain_s": 0.0,
    }
    return specs.make_group_spec(**{**arguments, **changes})


def connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(WAIT_S), 0))
    connection.connect(str(Path(directory) / wire.FD_SOCKET))  # waits while the backlog is full
    connection.settimeout(WAIT_S)
    return connection


def receive(connection: socket.socket) -> tuple[fd_socket_pb2.FdReply, list[int]]:
    how = (wire.MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * wire.MAX_FDS_PER_PACKET), 0)
    try:
        data, ancillary, flags, _ = connection.recvmsg(*how)
    except ConnectionResetError:  # the error arrived before the answers to earlier packets
        data, ancillary, flags, _ = connection.recvmsg(*how)
    assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
    if not data:
        raise ConnectionResetError("fd.sock closed the connection")
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload)
    reply = fd_socket_pb2.FdReply.FromString(data)
    if reply.WhichOneof("reply") == "error":
        raise wire.error_from_detail(reply.error)
    return reply, list(fds)


def hello(directory: Path, **changes) -> fd_socket_pb2.Welcome:
    greeting = {"api_versions": ["v1"], "client_version": "raw", "pid": os.getpid(), **changes}
    with connect(directory) as connection:
        with contextlib.suppress(BrokenPipeError):  # a refused client already has its answer
            connection.send(
                fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(**greeting)).SerializeToString()
            )
        return receive(connection)[0].welcome


def redeem(directory: Path, token: str, ticket: str):
    """Redeems a ticket; returns [(descriptor, fd)], which the caller closes."""
    request = fd_socket_pb2.RedeemTicket(session_token=token, ticket=ticket)
    found = []
    with connect(directory) as connection:
        connection.send(fd_socket_pb2.FdRequest(redeem_ticket=request).SerializeToString())
        while True:
            reply, fds = receive(connection)
            batch = reply.fd_batch
            assert batch.first == len(found)
            found.extend(zip(batch.descriptors, fds, strict=True))
            if len(found) == batch.total:
                return found


def give_back(directory: Path, token: str, group: str, found) -> fd_socket_pb2.WindowsReturned:
    """Returns [(descriptor, fd)] to a restarted daemon; the caller keeps the fds."""
    answer = fd_socket_pb2.WindowsReturned()
    with connect(directory) as connection:
        for first in range(0, len(found), wire.MAX_FDS_PER_PACKET):
            part = found[first : first + wire.MAX_FDS_PER_PACKET]
            request = fd_socket_pb2.ReturnWindows(
                session_token=token, group=group, descriptors=[item for item, _ in part]
            )
            packet = fd_socket_pb2.FdRequest(return_windows=request).SerializeToString()
            socket.send_fds(connection, [packet], [fd for _, fd in part if fd is not None])
            answer = receive(connection)[0].windows_returned
    return answer


def close_fds(found) -> None:
    for descriptor, fd in (item for item in found if len(item) == 2):
        assert descriptor.bytes > 0
        os.close(fd)
