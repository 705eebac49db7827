"""fd.sock under attack: one user's actions do not affect other users."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time

import pytest
from fuse_files import fuse_file
from harness import as_uid, eventually
from raw_client import connect, hello, make_spec, receive

from ep_runtime import errors
from ep_runtime.v1 import fd_socket_pb2, types_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.sockets import descriptor_child
from ep_runtime_server.sockets.spare_child import END_S

LINGER_S = 2
STALL_S = 0.3  # until then only the packet holds the descriptor
MOST_S = 1.0  # for an answer while a close waits


def packet(**kinds) -> bytes:
    return fd_socket_pb2.FdRequest(**kinds).SerializeToString()


HELLO = packet(hello=fd_socket_pb2.Hello(api_versions=["v1"]))


def longest_answer_s(daemon, for_s: float = LINGER_S / 2) -> float:
    slowest, until = 0.0, time.monotonic() + for_s
    while time.monotonic() < until:
        asked = time.monotonic()
        daemon.status()
        slowest = max(slowest, time.monotonic() - asked)
    return slowest


@pytest.mark.parametrize("ahead", [[], [b"nonsense"], [HELLO]], ids=["alone", "second", "third"])
def test_a_close_that_waits_does_not_stop_the_daemon(daemon, ahead):
    process = daemon.process()
    daemon.stall(STALL_S)
    process.do("linger", daemon.directory, LINGER_S, [*ahead, HELLO])
    assert longest_answer_s(daemon) < MOST_S
    hello(daemon.directory)


def test_nor_does_it_where_a_stranger_is_turned_away(start_daemon):
    daemon = start_daemon(peer_of=as_uid(lambda: 4242))
    process = daemon.process()
    daemon.stall(STALL_S)
    process.do("linger", daemon.directory, LINGER_S, [HELLO])
    assert longest_answer_s(daemon) < MOST_S


def test_descriptors_that_a_member_returns_are_closed_beside_the_loop(daemon):
    client = daemon.client(process=True)
    group = client.ready(make_spec())
    item = types_pb2.WindowDescriptor(world_rank=0, bytes=4096, generation=group.generation)
    request = fd_socket_pb2.ReturnWindows(
        session_token=client.token, group="moe", descriptors=[item]
    )
    data = packet(return_windows=request)
    daemon.stall(STALL_S)
    client.process.do("linger", daemon.directory, LINGER_S, [data])
    assert longest_answer_s(daemon) < MOST_S


def test_more_than_its_queue_takes_ends_the_process_that_closes_them(daemon):
    process = daemon.process()
    fds = daemon.status().num_fds
    for _ in range(8):
        process.do("linger", daemon.directory, 600, [HELLO])
    with open("/dev/null") as harmless:
        for _ in range(600):
            with connect(daemon.directory) as connection, contextlib.suppress(ConnectionError):
                socket.send_fds(connection, [HELLO], [harmless.fileno()])
    assert longest_answer_s(daemon, 0.5) < MOST_S
    eventually(lambda: daemon.status().num_fds <= fds + 1)


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="only root mounts in any place"
)
def test_a_file_whose_close_never_ends_holds_neither_daemon_nor_its_end(daemon_process, tmp_path):
    daemon = daemon_process()
    client, other = daemon.client(), daemon.client(process=True)
    group = client.create(make_spec()).group
    data = packet(
        return_windows=fd_socket_pb2.ReturnWindows(
            session_token=client.token,
            group="moe",
            descriptors=[types_pb2.WindowDescriptor(generation=group.generation)],
        )
    )

    def sent(fd: int):
        with connect(daemon.directory) as connection:
            socket.send_fds(connection, [data], [fd])
            return receive(connection)

    with fuse_file(tmp_path) as file:
        with pytest.raises(errors.InvalidArgumentError, match="it is not a memfd"):
            sent(file.fd)
        eventually(lambda: file.flushes == 1)
        with pytest.raises(errors.PoolExhaustedError, match="not all are closed yet"):
            sent(file.fd)
        assert file.flushes == 1
        assert longest_answer_s(daemon, 0.5) < MOST_S
        for session in (client, other):
            session.goodbye()
        daemon.popen.terminate()
        assert daemon.popen.wait(END_S + 10) == 0


def test_what_is_no_memory_is_told_from_it():
    with open("/dev/null") as null, tempfile.TemporaryFile() as file, socket.socket() as other:
        assert not any(descriptor_child.is_memory(x.fileno()) for x in (null, file, other))
    memory = os.memfd_create("x")
    assert descriptor_child.is_memory(memory)
    os.close(memory)


class TestPlaces:
    """One user may have four of the eight connections."""

    @pytest.fixture
    def at_door(self, start_daemon, monkeypatch, tmp_path):
        """Returns (open a connection as this uid, daemon); the daemon serves uids 1001 and 1002."""
        monkeypatch.setattr(limits, "MAX_FD_CONNECTIONS", 8)
        monkeypatch.setattr(limits, "MAX_FD_CONNECTIONS_PER_UID", 4)
        now = [os.geteuid()]
        daemon = start_daemon(
            peer_of=as_uid(lambda: now[0]),
            directory=tmp_path / "d",
            allow_uids=frozenset({1001, 1002}),
        )
        with contextlib.ExitStack() as held:

            def open_as(uid: int) -> socket.socket:
                now[0] = uid
                connection = held.enter_context(connect(daemon.directory))
                daemon.status()  # the loop has accepted it
                now[0] = os.geteuid()
                return connection

            yield open_as, daemon

    def test_a_stranger_takes_none(self, at_door):
        open_as, daemon = at_door
        for connection in [open_as(4242) for _ in range(20)]:
            with pytest.raises(errors.PermissionDeniedError, match="--allow-uid 4242"):
                receive(connection)
            with pytest.raises(ConnectionError):
                receive(connection)
        hello(daemon.directory)

    def test_a_user_takes_no_more_than_its_own(self, at_door):
        open_as, daemon = at_door
        held = [open_as(1001) for _ in range(5)]
        with pytest.raises(errors.RuntimeUnavailableError, match="as many as one user may"):
            receive(held[4])
        held[0].send(HELLO)
        receive(held[0])
        hello(daemon.directory)

    def test_where_all_are_taken_who_has_most_loses_its_oldest(self, at_door):
        open_as, daemon = at_door
        first = open_as(1001)
        for uid in (1001, 1001, 1001, 1002, 1002, 1002):
            open_as(uid)
        ours = open_as(os.geteuid())
        hello(daemon.directory)
        with pytest.raises(ConnectionError):
            receive(first)
        ours.send(HELLO)
        receive(ours)
