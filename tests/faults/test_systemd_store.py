"""systemd's file descriptor store: memory outlives the daemon and every client."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import sys

import pytest
from harness import eventually, memfds_of
from raw_client import WAIT_S, make_spec
from raw_jobs import ready_pair

# Puts descriptors where systemd puts them, names them, and becomes the daemon.
LAUNCHER = """
import os, sys
fds, names = sys.argv[1].split(","), sys.argv[2]
for position, fd in enumerate(map(int, filter(None, fds))):
    os.dup2(fd, 3 + position)
    os.close(fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(names.count(":") + 1),
                  LISTEN_FDNAMES=names)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Store:
    """Imitates what systemd does with FDSTORE and FDSTOREREMOVE."""

    def __init__(self, path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._fds: dict[str, int] = {}

    @property
    def fds(self) -> dict[str, int]:
        """Handles all waiting messages; returns the stored descriptors by name."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return self._fds
            told = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in told:
                assert told["FDPOLL"] == "0"
                ((_, _, payload),) = ancillary
                (fd,) = array.array("i", payload)
                self._fds[told["FDNAME"]] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200)
                os.close(fd)
            elif "FDSTOREREMOVE" in told:
                os.close(self._fds.pop(told["FDNAME"]))

    def given(self) -> dict[str, object]:
        """Passes the stored descriptors to the next daemon."""
        names, fds = ":".join(self.fds), tuple(self.fds.values())
        words = [sys.executable, "-c", LAUNCHER, ",".join(map(str, fds)), names]
        return {"launcher": words, "pass_fds": fds}

    def inodes(self) -> set[int]:
        return {os.fstat(fd).st_ino for fd in self.fds.values()}

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self._socket.close()


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    store = Store(tmp_path / "notify")
    yield store
    store.close()


def test_retained_memory_outlives_daemon_and_clients(daemon_process, store):
    daemon = daemon_process()
    spec, other = (make_spec(name, retain_s=60.0) for name in ("moe", "other"))
    clients, group, _ = ready_pair(daemon, spec)
    clients += ready_pair(daemon, other)[0]
    for client in clients:
        client.process.kill()
    eventually(lambda: set(daemon.group_states().values()) == {"RETAINED"})
    inodes = memfds_of(daemon.pid)
    assert store.inodes() == inodes
    assert len(inodes) == 6
    daemon.kill()
    again = daemon_process(directory=daemon.directory, **store.given())
    assert memfds_of(again.pid) == inodes
    status = again.status()
    assert (status.recovery.under_way, status.recovery.lost_bytes) == (False, 0)
    answer = again.client().create(spec)
    assert answer.reattached
    assert answer.group.generation > group.generation
    assert again.client().create(other).reattached
    assert memfds_of(again.pid) == inodes


def test_a_live_job_goes_on_without_giving_anything_back(daemon_process, store):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    daemon.kill()
    again = daemon_process(directory=daemon.directory, **store.given())
    assert again.status().state == 1
    assert again.healthy()
    clients[0].resume()
    assert list(clients[0].restore(group, [0], layers).wanted_ranks) == []
    clients[1].process.kill()
    eventually(lambda: clients[0].process.do("board")[2:] == ("PEER_LOST", 1))


def test_what_is_freed_leaves_the_store(daemon_process, store):
    daemon = daemon_process()
    client = daemon.client()
    group = client.create(make_spec()).group
    assert len(store.fds) == 3
    client.close_group(group)
    eventually(lambda: store.fds == {})


def test_descriptors_that_belong_to_nothing_are_let_go(daemon_process, store, tmp_path):
    daemon = daemon_process()
    client = daemon.client(process=True)
    client.create(make_spec(retain_s=60.0))
    daemon.kill()
    (daemon.directory / "journal").unlink()
    again = daemon_process(directory=daemon.directory, **store.given())
    assert memfds_of(again.pid) == set()
    eventually(lambda: store.fds == {}, within_s=WAIT_S)
