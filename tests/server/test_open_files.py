"""Descriptors of the daemon: no user can use up those of other users or of operators."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import cluster_places
import pytest
from harness import DaemonProcess, eventually
from hoarding import KINDS, SAYS_NOTHING
from raw_client import Stubs, close_fds, make_spec

from ep_runtime import errors, wire
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_client import cli
from ep_runtime_server.main import EXIT_USAGE

GREEDY, GREEDY_TOO = 65534, 65533
LIMIT = 256
# The kernel counts descriptors that root sends, but limits nobody who may raise limits.
AS_A_USER = ("setpriv", "--bounding-set=-sys_resource,-sys_admin", "--inh-caps=-all")
MOST_S = 3.0  # of an answer; without a descriptor gRPC alone waits for 13 s

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


def at_most(number: int) -> tuple[str, ...]:
    """Launches a program that may have that many files open."""
    return ("sh", "-c", f'ulimit -n {number}; exec "$@"', "sh")


@pytest.fixture
def served(daemon_process):
    """A daemon that may open LIMIT files and serves two users besides ours."""
    with tempfile.TemporaryDirectory(prefix="epu-") as name:
        os.chmod(name, 0o755)
        allowed = [word for uid in (GREEDY, GREEDY_TOO) for word in ("--allow-uid", str(uid))]
        yield daemon_process(
            *allowed, directory=Path(name) / "d", launcher=(*AS_A_USER, *at_most(LIMIT))
        )


def take_all(daemon: DaemonProcess, uid: int, kind: str):
    process = daemon.process()
    process.do("call", "hoarding", "become", uid)
    return process, process.do("call", "hoarding", "hoard", daemon.directory, kind)


def fill(daemon: DaemonProcess) -> None:
    """Takes the descriptors that two users left over."""
    for _ in range(LIMIT):
        daemon.client()


def operator_is_served(daemon: DaemonProcess) -> pb.GetStatusResponse:
    """Checks that every list, on a connection of its own, and the probe get answers."""
    for method in ("ListSessions", "ListGroups", "ListBuffers", "ListEvents", "ListRanks"):
        stubs = Stubs(daemon.directory, wire.ADMIN_SOCKET)
        request = getattr(pb, f"{method}Request")()
        stubs.call(getattr(stubs.admin, method), request, timeout=MOST_S)
        stubs.close()
    where = ["--address", f"unix://{daemon.directory}", "--timeout", str(MOST_S)]
    assert cli.main(["status", "--ready", *where]) == cli.OK
    return daemon.status()


def test_descriptors_that_a_user_does_not_read_are_bounded(served):
    process = served.process()
    process.do("call", "hoarding", "become", GREEDY)
    process.do("call", "hoarding", "leave_unread", served.directory, 30)
    ours = served.client()
    close_fds(ours.fetch(ours.create(make_spec(ranks=8)).group))
    (refused, *_) = process.do("call", "hoarding", "read_all")
    assert "read these descriptors first" in refused
    process.do("call", "hoarding", "leave_unread", served.directory, 3)
    assert process.do("call", "hoarding", "read_all") == []


def test_a_limit_that_leaves_nothing_for_users_is_said_at_the_start(daemon_process):
    daemon = daemon_process(launcher=at_most(64), ready=False)
    code, said = daemon.ended()
    assert (code, said.count("\n")) == (EXIT_USAGE, 1)
    assert "limit of open files must be 128 or more, got 64" in said


def test_other_nodes_take_no_more_than_is_kept_for_them(daemon_process):
    host, port = cluster_places.loopback(), cluster_places.PORT
    options = ("--coordinator", f"{host}:{port}", *cluster_places.plain_tcp())
    daemon = daemon_process(*options, launcher=at_most(LIMIT))
    with contextlib.ExitStack() as held:
        for _ in range(LIMIT):
            connection = held.enter_context(socket.create_connection((host, port), MOST_S))
            with contextlib.suppress(OSError):  # it was refused
                connection.sendall(SAYS_NOTHING)
        operator_is_served(daemon)
        daemon.client().ready(make_spec(ranks=2))


@pytest.mark.parametrize("kind", KINDS)
def test_who_opens_all_he_may_takes_nothing_from_others(served, kind):
    take_all(served, GREEDY, kind)
    status = operator_is_served(served)
    held = {user.uid: user.num_fds for user in status.users}.get(GREEDY, 0)
    assert held <= status.user_limits.max_fds
    assert status.num_fds <= LIMIT - 50  # the daemon's reserve, and half of the rest
    ours = served.client()
    ours.ready(make_spec(ranks=2))
    assert operator_is_served(served).num_groups >= 1


def test_who_finds_none_left_is_told_the_numbers_and_so_is_the_operator(served):
    greedy, told = take_all(served, GREEDY, "sessions")
    assert f"uid {GREEDY} holds" in told[0]
    assert told[1]["resource"] == "fds"
    take_all(served, GREEDY_TOO, "sessions")
    with pytest.raises(errors.PoolExhaustedError, match=f"open files, {LIMIT} ") as caught:
        fill(served)
    fields = caught.value.fields
    assert fields["held"] + fields["asked"] > fields["limit"] > 0
    status = operator_is_served(served)
    most = status.user_limits.max_fds_of_all
    assert sum(user.num_fds for user in status.users) <= most < LIMIT
    assert "fd.denied" in served.event_kinds()
    greedy.kill()
    eventually(served.client)
