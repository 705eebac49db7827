"""Which processes may use the daemon, and how it knows that they are alive."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from google.protobuf import duration_pb2
from harness import FakeClock, Watcher, eventually
from raw_client import WAIT_S, hello, make_spec, redeem
from raw_jobs import attached_pair
from raw_packets import connect, receive

from ep_runtime import errors, wire
from ep_runtime.v1 import admin_service_pb2, fd_socket_pb2, session_service_pb2
from ep_runtime_server.callers import credentials
from ep_runtime_server.callers.quotas import UserLimits
from ep_runtime_server.groups import attachment

KNOWN_DEAD_S = 0.1


def test_hello_names_this_process_by_the_kernels_word(daemon):
    client = daemon.client(job=None)
    opened = client.open("job", labels={"run": "7"}, process_index=3)
    assert (opened.uid, opened.pid) == (os.getuid(), os.getpid())
    (info,) = daemon.ask("ListSessions").sessions
    assert (info.job, dict(info.labels), info.process_index) == ("job", {"run": "7"}, 3)
    assert info.session_id == client.session_id == opened.session_id


def test_opening_twice_is_idempotent_and_another_job_is_a_mismatch(daemon):
    client = daemon.client()
    client.open("job")
    with pytest.raises(errors.SpecMismatchError, match="belongs to job 'job'"):
        client.open("other")


@pytest.mark.parametrize("token", [None, "", "0" * 64, "x" * 5000])
def test_a_missing_or_unknown_token_is_refused(daemon, token):
    client = daemon.client()
    client.metadata = () if token is None else ((wire.TOKEN_KEY, token),)
    with pytest.raises(errors.SessionFencedError):
        client.beat()


def test_a_token_of_a_dead_process_is_stale(daemon):
    client = daemon.client(process=True)
    client.process.kill()
    eventually(lambda: daemon.session_state(client.session_id) == "DEAD")
    with pytest.raises(errors.SessionFencedError, match="is over"):
        client.beat()


def test_a_token_in_a_forked_child_is_refused_by_its_pid(daemon):
    client = daemon.client()
    client.metadata = ((wire.TOKEN_KEY, client.token), (wire.PID_KEY, str(os.getpid() + 1)))
    with pytest.raises(errors.PermissionDeniedError, match="forked child must connect"):
        client.beat()
    assert "session.token_denied" in daemon.event_kinds()


def test_groups_need_an_opened_session(daemon):
    client = daemon.client(job=None)
    with pytest.raises(errors.InvalidArgumentError, match="OpenSession"):
        client.create(make_spec())


def test_a_connection_that_a_forked_child_uses_is_refused(daemon, monkeypatch):
    """Also if the child sends right after the daemon accepted the connection."""
    come, sent, accept = threading.Event(), threading.Event(), socket.socket.accept

    def accepted(listener):
        found = accept(listener)
        come.set()
        sent.wait(WAIT_S)
        return found

    monkeypatch.setattr(socket.socket, "accept", accepted)
    packet = fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(api_versions=["v1"]))
    sends = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).send(sys.argv[2].encode())"
    with connect(daemon.directory) as connection:
        assert come.wait(WAIT_S)
        child = [sys.executable, "-c", sends, str(connection.fileno()), packet.SerializeToString()]
        subprocess.run(child, check=True, pass_fds=[connection.fileno()], timeout=WAIT_S)
        sent.set()
        with pytest.raises(errors.PermissionDeniedError, match="forked child must connect"):
            receive(connection)


def test_another_process_cannot_redeem_a_ticket(daemon):
    client = daemon.client()
    ticket = client.ticket(client.create(make_spec()).group).ticket
    with pytest.raises(errors.PermissionDeniedError, match="belongs to process"):
        daemon.process().do("redeem", daemon.directory, client.token, ticket)


def test_a_ticket_works_once_for_its_session_and_for_ten_seconds(clocked):
    client, other = clocked.client(), clocked.client()
    group = client.create(make_spec()).group
    ticket = client.ticket(group).ticket
    for _, fd in redeem(clocked.directory, client.token, ticket):
        os.close(fd)
    with pytest.raises(errors.PermissionDeniedError, match="used or expired"):
        redeem(clocked.directory, client.token, ticket)
    with pytest.raises(errors.PermissionDeniedError, match="another session"):
        redeem(clocked.directory, other.token, client.ticket(group).ticket)
    late = client.ticket(group).ticket
    clocked.clock.advance(10.0)
    with pytest.raises(errors.PermissionDeniedError, match="used or expired"):
        redeem(clocked.directory, client.token, late)


def test_a_session_has_so_many_tickets_and_the_oldest_gives_way(daemon, monkeypatch):
    monkeypatch.setattr(attachment, "MAX_ATTACH_TOKENS_PER_SESSION", 2)
    client = daemon.client()
    group = client.create(make_spec()).group
    oldest, *kept = (client.ticket(group).ticket for _ in range(3))
    with pytest.raises(errors.PermissionDeniedError, match="used or expired"):
        redeem(daemon.directory, client.token, oldest)
    for ticket in kept:
        for _, fd in redeem(daemon.directory, client.token, ticket):
            os.close(fd)


class TestForeignUsers:
    @staticmethod
    def start(start_daemon, tmp_path, uid=4242, gids=frozenset({77}), **settings):
        def peer_of(connection, **more):
            peer = credentials.peer_of(connection, **more)
            peer.uid, peer.gids = uid, gids
            return peer

        directory = tmp_path / "d"
        return start_daemon(peer_of=peer_of, directory=directory, **settings)

    def test_are_refused_by_default(self, start_daemon, tmp_path):
        daemon = self.start(start_daemon, tmp_path)
        with pytest.raises(errors.PermissionDeniedError, match="--allow-uid 4242"):
            hello(daemon.directory)
        assert "fd.denied" in daemon.event_kinds()
        assert daemon.status().num_sessions == 0

    @pytest.mark.parametrize("allowed", [{"allow_uids": {4242}}, {"allow_gids": {5, 77}}])
    def test_are_served_when_allowed_but_order_nothing(self, start_daemon, tmp_path, allowed):
        daemon = self.start(start_daemon, tmp_path, **{k: frozenset(v) for k, v in allowed.items()})
        client = daemon.client()
        client.beat()
        with pytest.raises(errors.PermissionDeniedError, match="own admin.sock"):
            client.call(client.admin.Drain, admin_service_pb2.DrainRequest())
        modes = {
            n: (daemon.directory / n).stat().st_mode & 0o777 for n in os.listdir(daemon.directory)
        }
        assert (modes["api.sock"], modes["fd.sock"]) == (0o666, 0o666)
        assert (modes["admin.sock"], modes["rpc.sock"], modes["ops.sock"]) == (0o600,) * 3


def test_sockets_are_private_by_default(daemon):
    for name in ("api.sock", "fd.sock", "admin.sock", "rpc.sock", "ops.sock"):
        assert (daemon.directory / name).stat().st_mode & 0o777 == 0o600
    assert daemon.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("switches", [set(), {"no-peer-pidfd"}])
def test_a_killed_process_is_noticed_within_two_seconds(start_daemon, switches):
    daemon = start_daemon(testing=frozenset(switches))
    client = daemon.client(process=True)
    client.process.kill()
    eventually(lambda: daemon.session_state(client.session_id) == "DEAD", within_s=2.0)


@pytest.mark.doses(ci=3, full=100)
def test_a_forked_child_that_keeps_the_sockets_does_not_hide_the_death(
    daemon, dose, record_property
):
    took_s = []
    for _ in range(dose):
        client = daemon.client(process=True)
        client.ready(make_spec())
        grandchild = client.process.do("fork", daemon.directory)
        try:
            killed_s = time.monotonic()
            os.kill(client.pid, signal.SIGKILL)
            eventually(lambda: daemon.session_state(client.session_id) == "DEAD")  # noqa: B023
            took_s.append(time.monotonic() - killed_s)
            eventually(lambda: daemon.used_bytes == 0)
            os.kill(grandchild, 0)  # it is alive, and has every descriptor of its parent
        finally:
            os.kill(grandchild, signal.SIGKILL)
        client.close()
    record_property("known dead after, at worst", f"{1e3 * max(took_s):.0f} ms")
    assert sorted(took_s)[len(took_s) // 2] < KNOWN_DEAD_S


def test_the_fallback_refuses_a_recycled_pid():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = credentials.peer_of(ours, accepted_s=credentials.boottime_s(), use_peer_pidfd=False)
        assert peer.pid == os.getpid()
        peer.close()
        with pytest.raises(errors.PermissionDeniedError, match="is gone"):
            # The process that has the pid now started after the connection.
            credentials.peer_of(ours, accepted_s=0.0, use_peer_pidfd=False)
        theirs.close()
        with pytest.raises(errors.PermissionDeniedError, match="is gone"):
            credentials.peer_of(ours, accepted_s=credentials.boottime_s(), use_peer_pidfd=False)


def test_a_pid_is_the_same_process_only_with_its_start_time():
    started = credentials.process_start_s(os.getpid())
    for other in (started + 1, None):
        assert credentials.open_process(os.getpid(), other) is None
    os.close(credentials.open_process(os.getpid(), started))


def test_a_number_that_no_process_has_is_that_of_one_that_is_gone():
    """A journal may name such a pid, and a thread may have it now."""
    told, over = threading.Event(), threading.Event()
    numbers = [0, -1, 2**31, 2**64]

    def tell():
        numbers.append(threading.get_native_id())
        told.set()
        over.wait(10.0)

    thread = threading.Thread(target=tell)
    thread.start()
    assert told.wait(10.0)
    assert [credentials.open_process(number, 1.0) for number in numbers] == [None] * 5
    over.set()
    thread.join(10.0)


def test_a_late_heartbeat_makes_a_session_suspect_and_frees_nothing(clocked):
    client = clocked.client()
    client.ready(make_spec())
    client.beat(progress=5)
    used = clocked.used_bytes
    clocked.clock.advance(11)
    eventually(lambda: clocked.session_state(client.session_id) == "SUSPECT")
    assert clocked.used_bytes == used > 0
    (silent,) = clocked.status().silent_processes
    assert (silent.pid, silent.job, silent.since.seconds) == (client.pid, "job", 11)
    assert {rank.silent.seconds for rank in clocked.ask("ListRanks").ranks} == {11}
    client.beat(progress=6)
    assert clocked.session_state(client.session_id) == "ACTIVE"
    assert not clocked.status().silent_processes
    assert not any(rank.HasField("silent") for rank in clocked.ask("ListRanks").ranks)
    (info,) = clocked.ask("ListSessions").sessions
    assert info.progress == 6


def test_a_session_that_ended_tells_how_long_ago(clocked):
    client = clocked.client()
    (info,) = clocked.ask("ListSessions").sessions
    assert not info.HasField("since_end")
    client.goodbye()
    clocked.clock.advance(75)
    (info,) = clocked.ask("ListSessions").sessions
    assert info.since_end.seconds == 75


def test_goodbye_frees_at_once_and_is_idempotent(daemon):
    client = daemon.client()
    client.ready(make_spec(retain_s=60.0))
    client.goodbye()
    client.goodbye()
    eventually(lambda: daemon.used_bytes == 0)
    assert daemon.session_state(client.session_id) == "CLOSED"
    with pytest.raises(errors.SessionFencedError):
        client.beat()


@pytest.mark.parametrize("end", ["goodbye", "fence"])
def test_a_request_that_comes_after_its_sessions_end_changes_nothing(daemon, end):
    """Its call began earlier, with the token; nobody would ever release the claimed ranks."""
    client, answers = daemon.client(), []
    data = client.create_request(make_spec()).SerializeToString()
    come = threading.Event()

    def requests():
        assert come.wait(WAIT_S)
        yield data

    for path in ("GroupService/CreateGroup", "SessionService/WatchSession"):
        call = client.channel.stream_stream(f"/ep_runtime.v1.{path}")
        answers.append(call(requests(), timeout=WAIT_S, metadata=client.metadata))
    client.beat()  # the earlier calls have arrived
    if end == "fence":
        daemon.ask("Fence", session_id=client.session_id)
    else:
        client.goodbye()
    come.set()
    for answer in answers:
        assert answer.code() is grpc.StatusCode.UNAUTHENTICATED
    status = daemon.status()
    assert (status.num_groups, daemon.used_bytes) == (0, 0)


def test_ended_sessions_are_forgotten_after_ten_minutes(clocked):
    client = clocked.client()
    client.goodbye()
    clocked.clock.advance(601)
    eventually(lambda: clocked.session_state(client.session_id) == "FORGOTTEN")


def test_sessions_of_one_user_are_limited(start_daemon):
    daemon = start_daemon(per_user=UserLimits(sessions=2))
    first = daemon.client()
    daemon.client()
    with pytest.raises(errors.PoolExhaustedError, match="the limit of a user is 2"):
        hello(daemon.directory)
    first.goodbye()
    daemon.client()


def test_a_client_of_another_protocol_is_told_both_versions(daemon):
    with pytest.raises(errors.VersionSkewError) as caught:
        hello(daemon.directory, api_versions=["v2", "v3"])
    assert caught.value.fields == {"client": ["v2", "v3"], "daemon": ["v1"]}


def test_a_fence_reaches_the_stream_and_voids_the_token(daemon):
    client = daemon.client()
    client.ready(make_spec())
    watcher = Watcher(client)
    answer = daemon.ask("Fence", session_id=client.session_id, reason="drill")
    assert answer.groups == ["moe"]
    assert watcher.ended()
    (fence,) = [event.fence for event in watcher.events if event.HasField("fence")]
    host = socket.gethostname()
    who = f"by uid {os.getuid()} (pid {os.getpid()}) with ep-runtime fence on host {host}"
    assert fence.reason == f"{who}: drill"
    (told,) = [item for item in daemon.ask("ListEvents").events if item.kind == "session.fenced"]
    assert who in told.message
    fields = json.loads(told.fields_json)
    order = (fields["by_uid"], fields["by_pid"], fields["by_host"], fields["reason"])
    assert order == (os.getuid(), os.getpid(), host, "drill")
    assert watcher.code is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(errors.SessionFencedError, match="was fenced"):
        client.beat()
    with pytest.raises(errors.InvalidArgumentError):
        daemon.ask("Fence", session_id="s-none")


def test_a_newer_stream_ends_the_older_one(daemon):
    client = daemon.client()
    first = Watcher(client)
    second = Watcher(client)
    assert first.ended()
    assert first.code is grpc.StatusCode.ABORTED
    client.goodbye()
    assert second.ended()
    assert second.code is grpc.StatusCode.OK


def test_draining_is_told_and_refuses_what_is_new(daemon):
    client, greeted = daemon.client(), daemon.client(job=None)
    watcher = Watcher(client)
    assert daemon.ask("Drain").num_sessions == 2
    eventually(lambda: watcher.kinds() == ["drain"])
    assert not watcher.events[0].drain.HasField("deadline")  # no session ends
    assert client.beat().state == session_service_pb2.SERVER_STATE_DRAINING
    with pytest.raises(errors.RuntimeUnavailableError, match="drained"):
        client.create(make_spec())
    with pytest.raises(errors.RuntimeUnavailableError, match="drained"):
        greeted.open("job")
    with pytest.raises(errors.RuntimeUnavailableError, match="drained"):
        hello(daemon.directory)
    assert daemon.ask("Undrain").was_drained
    eventually(lambda: watcher.kinds() == ["drain", "drain"])
    assert watcher.events[1].drain.taken_back
    client.create(make_spec())
    assert not daemon.ask("Undrain").was_drained


def test_a_drain_that_is_refused_drains_nothing(daemon):
    with pytest.raises(errors.InvalidArgumentError, match="not a duration"):
        daemon.ask("Drain", deadline=duration_pb2.Duration(seconds=1 << 40), shutdown=True)
    assert daemon.status().state == session_service_pb2.SERVER_STATE_SERVING


def test_a_group_event_tells_a_member_that_another_died(daemon):
    spec = make_spec()
    first, second = daemon.client(process=True), daemon.client(process=True)
    attached_pair([first, second], spec)
    watcher = Watcher(first)
    second.process.kill()
    eventually(lambda: "group" in watcher.kinds())
    event = next(e.group for e in watcher.events if e.WhichOneof("event") == "group")
    assert (event.group, list(event.lost_ranks)) == ("moe", [1])


def test_streams_that_end_on_both_sides_at_once_log_nothing(daemon, caplog):
    client = daemon.client()
    request = session_service_pb2.WatchSessionRequest()

    def stream():
        opened = client.sessions.WatchSession(request, metadata=client.metadata)
        next(opened)
        return opened

    older = stream()
    for _ in range(100):
        newer = client.sessions.WatchSession(request, metadata=client.metadata)
        older.cancel()
        next(newer)
        older = newer
    older.cancel()
    daemon.status()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.doses(ci=4, full=50)
def test_stopped_processes_are_suspect_and_those_that_were_fenced_are_told(start_daemon, dose):
    daemon = start_daemon(max_host_bytes=1 << 30, clock=FakeClock())
    clients = [daemon.client(process=True, job=f"job{number}") for number in range(dose)]
    for client in clients:
        group = client.create(make_spec(ranks=1)).group
        client.fetch(group)
        client.attached(group)
    used, fenced, others = daemon.used_bytes, clients[::2], clients[1::2]
    for client in clients:
        os.kill(client.pid, signal.SIGSTOP)
    try:
        daemon.clock.advance(15)
        for client in clients:
            eventually(lambda: daemon.session_state(client.session_id) == "SUSPECT")  # noqa: B023
        assert {one.process_state for one in daemon.status().silent_processes} == {"T"}
        for client in fenced:
            daemon.ask("Fence", session_id=client.session_id, reason="drill")
        daemon.clock.advance(15)
        assert daemon.used_bytes == used  # no other process gets memory that it may still map
    finally:
        for client in clients:
            os.kill(client.pid, signal.SIGCONT)
    for client in fenced:
        with pytest.raises(errors.SessionFencedError, match="was fenced"):
            client.beat()
        assert client.process.do("board")[1] != 0  # its calls end with it, too
    for client in others:
        client.beat()
        assert daemon.session_state(client.session_id) == "ACTIVE"
        assert client.process.do("board")[1] == 0
    assert daemon.used_bytes == used
    for client in fenced:
        client.process.kill()
    eventually(lambda: daemon.used_bytes == used * len(others) // len(clients))
