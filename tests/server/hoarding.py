"""Opens everything that one user can open at a daemon, in a process of that user."""

from __future__ import annotations

import contextlib
import os
import socket

import fuzz_frames
from raw_client import WAIT_S, Client, hello, make_spec
from raw_packets import connect, receive

from ep_runtime import errors, wire
from ep_runtime.v1 import fd_socket_pb2

MOST = 256  # number of every kind
# A connection that gRPC accepted.
SAYS_NOTHING = fuzz_frames.PREFACE + fuzz_frames.frame(fuzz_frames.SETTINGS, 0, 0, b"")


def become(state, uid):
    """Changes the user after all imports, because the user may not read root's Python files."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def _api(state, directory) -> None:
    for _ in range(MOST):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(WAIT_S)
        connection.connect(str(directory / wire.API_SOCKET))
        with contextlib.suppress(OSError):  # it was refused
            connection.sendall(SAYS_NOTHING)
        state.append(connection)


def _fd(state, directory) -> None:
    for _ in range(MOST):
        state.append(connect(directory))


def _sessions(state, directory) -> None:
    with contextlib.suppress(errors.PoolExhaustedError):
        for _ in range(MOST):
            state.append(Client(directory))


def _groups(state, directory) -> None:
    state.append(client := Client(directory))
    with contextlib.suppress(errors.PoolExhaustedError):
        for number in range(MOST):
            client.create(make_spec(f"g{number}", ranks=8))


KINDS = {"api": (_api,), "fd": (_fd,), "sessions": (_sessions,), "groups": (_groups,)}
KINDS["all"] = (_sessions, _fd, _api)


def leave_unread(state, directory, tickets):
    """Redeems tickets for nine descriptors each, and never reads the answers."""
    client = Client(directory)
    group = client.create(make_spec(f"unread{tickets}", ranks=8)).group
    state["held"] = [client, *(connect(directory) for _ in range(tickets))]
    for connection in state["held"][1:]:
        redeem = fd_socket_pb2.RedeemTicket(
            session_token=client.token, ticket=client.ticket(group).ticket
        )
        connection.send(fd_socket_pb2.FdRequest(redeem_ticket=redeem).SerializeToString())


def read_all(state):
    """Returns the errors among the unread answers."""
    found = []
    for connection in state.pop("held")[1:]:
        with connection:
            try:
                for fd in receive(connection)[1]:
                    os.close(fd)
            except errors.EpRuntimeError as error:
                found.append(str(error))
    return found


def hoard(state, directory, kind):
    """Opens all that a user can of this kind, then one session; returns (error, its fields)."""
    for open_them in KINDS[kind]:
        open_them(state.setdefault("held", []), directory)
    try:
        hello(directory)
    except errors.PoolExhaustedError as error:
        return str(error), error.fields
    return None
