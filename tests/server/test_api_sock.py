"""api.sock: identifies callers through the kernel, and limits what each may read and order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import fuzz_frames
import pytest
from harness import as_uid, eventually
from raw_client import WAIT_S, Stubs, make_spec

from ep_runtime import errors, layer_specs, wire
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime.v1 import session_service_pb2
from ep_runtime_server import config
from ep_runtime_server.base import limits
from ep_runtime_server.rpc import admin_servicer
from ep_runtime_server.rpc.admin_servicer import READINGS, ReadingServicer

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["AdminService"].methods]
ORDERS = sorted(set(METHODS) - READINGS)


class Users:
    """A daemon that serves uids 1001 and 1002, and connections of any user."""

    def __init__(self, start_daemon, directory):
        self.uid = os.geteuid()
        self.daemon = start_daemon(
            peer_of=as_uid(lambda: self.uid),
            directory=directory,
            allow_uids=frozenset({1001, 1002}),
        )

    def client(self, uid, job="job"):
        """A session of that user, connected to both sockets."""
        self.uid = uid
        return self.daemon.client(job=job)

    def with_token_of(self, client, uid) -> Stubs:
        """Stubs of another user who uses the client's token."""
        self.uid = uid
        stubs = Stubs(self.daemon.directory, wire.API_SOCKET, client.metadata)
        self.daemon._open.append(stubs.close)
        return stubs


@pytest.fixture
def users(start_daemon, tmp_path):
    return Users(start_daemon, tmp_path / "d")


def ask(client, method, **fields):
    request = getattr(pb, f"{method}Request", None) or getattr(pb, f"AdminService{method}Request")
    return client.call(getattr(client.admin, method), request(**fields))


def test_a_token_is_worth_nothing_to_another_user(users):
    owner = users.client(1001)
    thief = users.with_token_of(owner, 1002)
    for method, request in (
        (thief.sessions.CloseSession, session_service_pb2.CloseSessionRequest()),
        (thief.sessions.Heartbeat, session_service_pb2.HeartbeatRequest()),
        (thief.admin.GetStatus, pb.GetStatusRequest()),
    ):
        with pytest.raises(errors.PermissionDeniedError, match="belongs to uid 1001, not to uid"):
            thief.call(method, request)
    assert users.daemon.session_state(owner.session_id) == "ACTIVE"
    assert "session.token_denied" in users.daemon.event_kinds()


def test_a_stranger_is_turned_away_at_accept(users):
    stranger = users.with_token_of(users.client(1001), 4242)
    with pytest.raises(errors.RuntimeUnavailableError):
        stranger.call(
            stranger.sessions.GetServerInfo, session_service_pb2.GetServerInfoRequest(), timeout=1
        )
    assert "api.denied" in users.daemon.event_kinds()


def test_a_users_connections_are_counted(users, monkeypatch):
    monkeypatch.setattr(limits, "SPARE_API_CONNECTIONS", 2 - config.UserLimits().sessions)
    held = [users.client(1001) for _ in range(2)]
    with pytest.raises(errors.RuntimeUnavailableError):
        users.client(1001)
    users.client(1002)
    held[0].close()
    eventually(lambda: ask(held[1], "GetStatus").num_sessions == 2)
    users.client(1001)


def test_what_does_not_come_through_the_front_is_refused(users):
    client = users.client(os.geteuid())
    past = Stubs(users.daemon.directory, "rpc.sock", client.metadata)
    with pytest.raises(errors.PermissionDeniedError, match="not to uid None"):
        past.call(past.admin.GetStatus, pb.GetStatusRequest())
    past.close()


def test_a_connection_that_ended_before_its_call_is_no_stolen_token(daemon):
    client = daemon.client()
    headers = [
        *((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost")),
        (b":path", b"/ep_runtime.v1.SessionService/Heartbeat"),
        *((b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"grpc-timeout", b"9S")),
        (wire.TOKEN_KEY.encode(), client.token.encode()),
    ]
    call = fuzz_frames.PREFACE + fuzz_frames.frame(fuzz_frames.SETTINGS, 0, 0, b"")
    for stream in range(1, 100, 2):
        call += fuzz_frames.frame(
            fuzz_frames.HEADERS, fuzz_frames.END_HEADERS, stream, fuzz_frames.header_block(headers)
        )
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(daemon.directory / wire.API_SOCKET))
            connection.sendall(call)
    daemon.status()
    assert "session.token_denied" not in daemon.event_kinds()


def test_descriptors_end_a_connection_and_stay_nowhere(daemon):
    fds = daemon.status().num_fds
    with socket.socket(socket.AF_UNIX) as connection, open("/dev/null") as file:
        connection.settimeout(WAIT_S)
        connection.connect(str(daemon.directory / wire.API_SOCKET))
        connection.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        socket.send_fds(connection, [b"x"], [file.fileno()])
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):  # until it ends; earlier calls may be answered
                pass
    eventually(lambda: daemon.status().num_fds <= fds + 1)


def test_large_answers_pass_whole(daemon):
    client = daemon.client()
    group = client.ready(make_spec())
    names = [f"layer-{'x' * 90}-{i}" for i in range(4000)]
    client.register(group, [layer_specs.LayerSpec(name, top_k=1) for name in names])
    found = ask(client, "ListLayers", page_size=4000).layers
    assert [layer.layer.spec.name for layer in found] == names


def test_readings_are_the_services_own():
    assert set(METHODS) >= READINGS
    assert ORDERS == ["Drain", "Fence", "Reclaim", "Undrain"]


@pytest.mark.parametrize("method", ORDERS)
def test_an_order_needs_admin_sock_whoever_gives_it(users, method):
    for uid in (os.geteuid(), 1001):
        with pytest.raises(
            errors.PermissionDeniedError, match=f"{method} is an order, .* admin.sock"
        ):
            ask(users.client(uid), method)
    assert users.daemon.status().state == session_service_pb2.SERVER_STATE_SERVING


def test_an_rpc_that_nobody_allowed_is_an_order(monkeypatch):
    monkeypatch.setattr(admin_servicer, "READINGS", READINGS - {"ListRanks"})

    class Later(ReadingServicer):
        """The service after a new RPC was added."""

    admin_servicer.refuse_orders(Later)
    refused = {name for name in METHODS if name in vars(Later)}
    assert refused == {*ORDERS, "ListRanks"}
    with pytest.raises(errors.PermissionDeniedError, match="ListRanks is an order"):
        asyncio.run(Later(None).ListRanks(pb.ListRanksRequest(), None))


def test_a_reader_sees_what_is_his(users):
    ours, theirs = users.client(1001), users.client(1002, job="theirs")
    for uid, client in ((1001, ours), (1002, theirs)):
        users.uid = uid
        client.ready(make_spec())
    asks = users.client(1001)
    status = ask(asks, "GetStatus")
    assert (status.num_sessions, status.num_groups) == (1, 1)
    assert [user.uid for user in status.users] == [1001]
    assert [s.session_id for s in ask(asks, "ListSessions").sessions] == [ours.session_id]
    assert {g.group.uid for g in ask(asks, "ListGroups").groups} == {1001}
    assert {b.job for b in ask(asks, "ListBuffers").buffers} == {"job"}
    assert "theirs" not in str(ask(asks, "ListEvents"))
    for method in ("ListHandles", "ListLayers", "ListRanks"):
        assert "theirs" not in str(ask(asks, method))
    everything = ask(users.client(os.geteuid()), "GetStatus")
    assert (everything.num_sessions, everything.num_groups) == (3, 2)
