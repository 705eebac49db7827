"""The daemon as a process: start, second start, signals, parents, systemd."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import fuzz_frames
import grpc
import pytest
from child_programs import run_python
from cluster_places import loopback, make_certificates, tls_flags
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import Watcher, eventually
from raw_client import WAIT_S, Stubs, close_fds, hello, make_spec

from ep_runtime import errors, services, wire
from ep_runtime.v1 import nccl_service_pb2, session_service_pb2


def test_it_says_when_and_where_it_is_ready(daemon_process):
    daemon = daemon_process()
    assert daemon.ready == {"directory": str(daemon.directory), "pid": daemon.pid}
    with open(f"/proc/{daemon.pid}/cmdline", "rb") as cmdline:
        assert cmdline.read().rstrip(b"\0 ").startswith(b"ep-runtimed")
    assert daemon.status().pid == daemon.pid


def test_it_loads_no_jax():
    code = "import sys, ep_runtime_server.main; sys.exit('jax' in sys.modules)"
    run_python("-c", code)


def test_a_second_daemon_on_the_directory_ends_and_harms_nothing(daemon_process):
    first = daemon_process()
    client = first.client()
    before = (first.directory / wire.API_SOCKET).stat().st_ino
    second = daemon_process(directory=first.directory)
    assert second.ready is None
    code, text = second.ended(within_s=5.0)
    assert code == 2
    assert f"another daemon (pid {first.pid}) serves {first.directory}" in text
    assert "Traceback" not in text
    assert (first.directory / wire.API_SOCKET).stat().st_ino == before
    client.create(make_spec())


def test_sigterm_without_sessions_ends_it_cleanly(daemon_process):
    daemon = daemon_process()
    daemon.popen.terminate()
    code, text = daemon.ended(within_s=5.0)
    assert code == 0
    assert [n for n in os.listdir(daemon.directory) if n.endswith(".sock")] == []
    kinds = [json.loads(line)["event"] for line in text.splitlines()]
    assert kinds == ["server.serving", "server.draining", "server.stopped"]


def test_sigterm_tells_sessions_and_waits_for_them(daemon_process):
    daemon = daemon_process("--drain-s", "60")
    client = daemon.client()
    client.ready(make_spec())
    watcher = Watcher(client)
    daemon.popen.terminate()
    eventually(lambda: watcher.kinds() == ["drain"])
    assert 55 < watcher.events[0].drain.deadline.ToSeconds() <= 60
    with pytest.raises(errors.RuntimeUnavailableError, match="drained"):
        hello(daemon.directory)
    assert daemon.popen.poll() is None
    client.goodbye()
    assert daemon.ended(within_s=5.0)[0] == 0
    assert watcher.ended()
    assert watcher.code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_a_session_that_stays_does_not_hold_it_for_ever(daemon_process, how):
    daemon = daemon_process("--drain-s", "0.2" if how == "deadline" else "60")
    client = daemon.client()
    client.ready(make_spec())
    daemon.popen.terminate()
    if how == "second signal":
        eventually(lambda: daemon.status().state == 2)
        daemon.popen.send_signal(signal.SIGTERM)
    assert daemon.ended(within_s=5.0)[0] == 0


@pytest.fixture
def endless_library(tmp_path, monkeypatch):
    """A libnccl whose loading never ends: opening a FIFO waits for its other end."""
    os.mkfifo(tmp_path / "libnccl.so.2")
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))


@pytest.mark.usefixtures("endless_library")
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("claims", r"while group 'moe' formed: ranks \[0\] of 2 were not claimed"),
        ("attachment", r"while group 'moe' formed: ranks \[1\] of 2 did not attach"),
        ("unique ids", "before it answered GetUniqueIds"),
    ],
)
def test_who_waits_for_a_daemon_that_ends_hears_what_for(daemon_process, what, told):
    daemon = daemon_process("--drain-s", "0")
    client, other = daemon.client(), daemon.client()
    method = client.groups.CreateGroup
    request = client.create_request(make_spec(), [1])
    if what != "claims":
        other_request = other.create_request(make_spec(), [1])
        formed = other.groups.CreateGroup.future(other_request, **other.how())
        group = client.create(make_spec(), [0]).group
        formed.result(WAIT_S)
        close_fds(client.fetch(group))
        method, request = client.groups.ReportAttached, client.attached_request(group)
    if what == "unique ids":
        method = services.stub(client.channel, nccl_service_pb2.DESCRIPTOR).GetUniqueIds
        request = nccl_service_pb2.GetUniqueIdsRequest(name="moe", generation=group.generation)
    call = method.future(request, **client.how())
    client.beat()  # the daemon has started
    daemon.popen.terminate()
    with pytest.raises(grpc.RpcError) as caught:
        call.result(WAIT_S)
    error = wire.error_from_rpc(caught.value)
    assert isinstance(error, errors.RuntimeUnavailableError)
    assert re.search(f"the daemon ended {told}", str(error))
    assert not error.fields  # as for a daemon that is away: clients look for the next one
    code, text = daemon.ended()
    assert code == 0
    assert "Traceback" not in text


def test_a_daemon_that_recovers_ends_when_told(daemon_process):
    first = daemon_process()
    client = first.client(process=True)
    client.ready(make_spec())
    first.kill()
    second = daemon_process("--drain-s", "0", directory=first.directory)
    eventually(lambda: second.status().recovery.num_awaited == 1)
    second.popen.terminate()
    assert second.ended(within_s=5.0)[0] == 0


def test_drain_with_shutdown_ends_it_when_the_sessions_are_gone(daemon_process):
    daemon = daemon_process()
    client = daemon.client(process=True)
    daemon.ask("Drain", shutdown=True)
    assert daemon.popen.poll() is None
    client.process.kill()
    assert daemon.ended(within_s=5.0)[0] == 0


def test_a_drain_holds_over_restarts_until_it_is_taken_back(daemon_process, restarted):
    daemon = daemon_process()
    daemon.client().goodbye()
    daemon.ask("Drain")
    asked = daemon.status().drain
    assert "with ep-runtime drain on host " in asked.by
    daemon = restarted(restarted(daemon))  # the journal that the second daemon writes also has it
    status = daemon.status()
    assert status.state == session_service_pb2.SERVER_STATE_DRAINING
    assert (status.drain.by, status.drain.HasField("ends_in")) == (asked.by, False)
    assert status.drain.since.ToNanoseconds() > asked.since.ToNanoseconds()
    with pytest.raises(errors.RuntimeUnavailableError, match="ep-runtime undrain"):
        hello(daemon.directory)
    assert daemon.ask("Undrain").was_drained
    daemon.client()
    assert not restarted(daemon).status().HasField("drain")


def test_an_end_that_was_ordered_is_not_held_and_a_signal_is_not_taken_back(
    daemon_process, restarted
):
    daemon = daemon_process("--drain-s", "60")
    client = daemon.client(process=True)
    daemon.ask("Drain", shutdown=True, deadline=duration_pb2.Duration(seconds=60))
    assert daemon.status().drain.HasField("ends_in")
    daemon.ask("Undrain")
    daemon.client().goodbye()
    daemon.ask("Drain", shutdown=True, deadline=duration_pb2.Duration(seconds=60))
    daemon = restarted(daemon)
    assert not daemon.status().HasField("drain")
    client.resume()
    daemon.popen.terminate()
    eventually(lambda: daemon.status().HasField("drain"))
    with pytest.raises(errors.InvalidArgumentError, match="signal"):
        daemon.ask("Undrain")
    client.process.kill()
    assert daemon.ended(within_s=5.0)[0] == 0


def test_a_drain_that_the_journal_does_not_hold_says_so_and_is_kept_later(
    daemon_process, restarted
):
    daemon = daemon_process("--testing", "failpoint:journal.before_write=enospc:1")
    with pytest.raises(errors.PoolExhaustedError, match=r"wanted, .* free\); retry"):
        daemon.ask("Drain")
    eventually(lambda: not daemon.status().journal.error, within_s=3.0)
    assert restarted(daemon).status().HasField("drain")


def test_it_ends_with_the_process_that_started_it(daemon_process):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(parent.pid)
    try:
        daemon = daemon_process("--parent-pidfd", str(pidfd), pass_fds=(pidfd,))
        daemon.client().ready(make_spec())  # a session, which would keep the daemon alive
        parent.kill()
        code, text = daemon.ended(within_s=2.0)
        assert code == 0
        assert "server.parent_gone" in text
    finally:
        parent.communicate(timeout=WAIT_S)
        os.close(pidfd)


def test_it_ends_after_its_last_session(daemon_process):
    daemon = daemon_process("--idle-exit-s", "0.5")
    client = daemon.client()
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.ended(within_s=1.0)
    client.goodbye()
    assert daemon.ended(within_s=5.0)[0] == 0


def test_it_is_not_idle_while_it_retains_memory(daemon_process):
    daemon = daemon_process("--idle-exit-s", "1")
    first = daemon.client()  # holds it while the other process starts
    client = daemon.client(process=True)
    client.ready(make_spec(retain_s=4.0))
    first.goodbye()
    client.process.kill()
    eventually(lambda: daemon.group_states() == {"moe": "RETAINED"})
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.ended(within_s=2.0)
    assert daemon.ended(within_s=10.0)[0] == 0


def test_systemd_is_told(daemon_process, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        daemon = daemon_process()
        assert notified.recv(1000).decode().splitlines()[0] == "READY=1"
        daemon.popen.terminate()
        assert notified.recv(1000).decode() == "STOPPING=1"
        monkeypatch.setenv("WATCHDOG_USEC", "3000")
        daemon_process()
        heard = iter(lambda: notified.recv(1000).decode(), "")
        assert [next(text for text in heard if text == "WATCHDOG=1") for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (["--max-host-bytes", "lots"], "'lots'", 1),
        (["--coordinator", "127.0.0.1:7700"], "--insecure", 1),
        (["--dir", "/" + "x" * 150], "at most", 1),
        (["--dir", "/proc/none"], "cannot use", 2),
    ],
)
def test_what_it_cannot_do_is_said_without_a_traceback(daemon_process, options, message, code):
    daemon = daemon_process(*options)
    ended, text = daemon.ended()
    assert (ended, message in text) == (code, True), text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (0o777, [], "could replace the daemon's sockets"),
        (0o700, ["--allow-uid", "4242"], "chmod 0755"),
    ],
)
def test_a_directory_that_is_not_safe_or_not_reachable_is_left_as_it_is(
    daemon_process, tmp_path, mode, options, message
):
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(mode)
    code, text = daemon_process(*options, directory=directory).ended()
    assert code == 2
    assert message in text
    assert directory.stat().st_mode & 0o777 == mode


def test_a_directory_with_odd_characters_serves(daemon_process, tmp_path):
    directory = tmp_path / "a b%41"
    daemon = daemon_process(directory=directory)
    assert daemon.ready is not None
    assert (directory / wire.API_SOCKET).exists()
    hello(directory)


@pytest.mark.slow
def test_a_daemon_with_certificates_ends_once_it_says_so(daemon_process, tmp_path):
    host = loopback()
    pki = make_certificates(tmp_path / "pki", a=host)
    daemon = daemon_process("--coordinator", f"{host}:7700", "--node", "a", *tls_flags(pki, "a"))
    daemon.popen.terminate()
    code, text = daemon.ended()
    ended_s = time.time()
    last = json.loads(text.splitlines()[-1])
    assert (code, last["event"]) == (0, "server.stopped")
    assert ended_s - last["ts"] < 1.5


def test_it_says_that_clients_refuse_a_directory_which_others_can_swap(daemon_process, tmp_path):
    tmp_path.chmod(0o777)
    daemon = daemon_process(directory=tmp_path / "d")
    daemon.popen.terminate()
    _, text = daemon.ended()
    assert f"{tmp_path} has mode 0777" in text
    assert f"unix://{tmp_path}/d?uid={os.geteuid()}" in text


def test_callers_who_went_away_are_no_failures_in_the_log(daemon_process):
    """Deadlines end while answers and refusals are on their way."""
    daemon = daemon_process()
    stranger = Stubs(daemon.directory, wire.API_SOCKET)
    health = health_pb2_grpc.HealthStub(stranger.channel)
    requests = [
        (stranger.sessions.GetServerInfo, session_service_pb2.GetServerInfoRequest()),
        (stranger.sessions.Heartbeat, session_service_pb2.HeartbeatRequest()),
        (health.Check, health_pb2.HealthCheckRequest(service="of nobody")),
    ]
    for number in range(400):
        calls = [
            method.future(request, timeout=0.0005 * (1 + number % 8))
            for method, request in requests * 4
        ]
        for call in calls:
            call.exception(WAIT_S)
    stranger.close()
    daemon.popen.send_signal(signal.SIGTERM)
    code, text = daemon.ended()
    assert code == 0
    assert '"level": "error"' not in text, text[-3000:]


def test_frames_of_callers_write_no_lines_beside_the_log(daemon_process):
    daemon = daemon_process()
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/grpc.health.v1.Health/Check"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"grpc-timeout", b"soon"),
    ]
    call = [
        fuzz_frames.PREFACE,
        fuzz_frames.frame(fuzz_frames.SETTINGS, 0, 0, b""),
        fuzz_frames.frame(
            fuzz_frames.HEADERS, fuzz_frames.END_HEADERS, 1, fuzz_frames.header_block(headers)
        ),
        fuzz_frames.frame(fuzz_frames.GOAWAY, 0, 0, struct.pack(">II", 1, 2) + b"why"),
        fuzz_frames.frame(fuzz_frames.PING, 0, 0, b"answered"),
    ]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(daemon.directory / wire.API_SOCKET))
        connection.sendall(b"".join(call))
        came = b""
        while b"answered" not in came:  # everything before it has been read then
            came += connection.recv(1 << 16) or pytest.fail(f"the connection ended after {came!r}")
    daemon.popen.terminate()
    code, text = daemon.ended()
    assert code == 0
    assert [line for line in text.splitlines() if not line.startswith('{"')] == []
