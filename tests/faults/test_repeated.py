"""Each fault of the daemon's world many times in a row, with nothing left behind.

Kills of the daemon are in `test_daemon_kills.py`, kills of clients in `tests/e2e/test_kills.py`.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from fuzzing import held_at_rest
from harness import DaemonProcess, eventually, memfds_of
from raw_client import Client, make_spec
from raw_jobs import attached, come_back, created, ready_pair

from ep_runtime import errors, layer_specs


class Footprint:
    """What a daemon with one job holds, by its own word and by the kernel's."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.memfds = memfds_of(daemon.pid)
        self.used = daemon.used_bytes
        self.fds = daemon.status().num_fds

    def check(self, daemon: DaemonProcess) -> None:
        eventually(lambda: daemon.used_bytes == self.used, what="bytes")
        assert memfds_of(daemon.pid) == self.memfds
        # A connection more or less is being closed; a leak would show after a few rounds.
        eventually(lambda: daemon.status().num_fds <= self.fds + 4, what="descriptors")


@pytest.mark.doses(ci=2, full=50)
def test_stopped_processes_and_restarts(daemon_process, restarted, dose):
    daemon = daemon_process("--log-level", "error")
    clients, group, layers = ready_pair(daemon)
    footprint = Footprint(daemon)
    for number in range(dose):
        victim = clients[number % 2]
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            daemon = restarted(daemon, "--log-level", "error")
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        assert come_back(clients, group, layers).group.generation == group.generation
        footprint.check(daemon)


@pytest.mark.doses(ci=2, full=100)
def test_torn_journals(daemon_process, restarted, dose):
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed)
    daemon = daemon_process("--log-level", "error")
    clients, group, layers = ready_pair(daemon)
    footprint = Footprint(daemon)
    for _ in range(dose):
        daemon.kill()
        path = daemon.directory / "journal"
        size = len(path.read_bytes().rstrip(b"\0"))
        # Cut exactly between two records it would look whole, as if the rest had never been.
        path.write_bytes(path.read_bytes()[: chosen.randrange(size)] + b"\xff")
        daemon = restarted(daemon, "--log-level", "error")
        for rank, client in enumerate(clients):
            client.resume()
            if client.restore(group, [rank], layers).wanted_ranks:
                assert client.give_back(group)[1] == [], f"seed {seed}"
        assert daemon.group_states() == {"moe": "READY"}, f"seed {seed}"
        footprint.check(daemon)


@pytest.mark.doses(ci=2, full=50)
def test_full_disks(daemon_process, restarted, dose):
    daemon = daemon_process("--log-level", "error")
    clients, group, layers = ready_pair(daemon)
    footprint = Footprint(daemon)
    for number in range(dose):
        full = ("--log-level", "error", "--testing", "failpoint:journal.reserve=enospc:3")
        daemon = restarted(daemon, *full)
        come_back(clients, group, layers)
        wanted = [layer_specs.LayerSpec(f"new/{number}", top_k=1)]
        with pytest.raises(errors.PoolExhaustedError, match="journal"):
            clients[0].register(group, wanted)
        eventually(lambda: not daemon.status().journal.error, within_s=12.0)  # noqa: B023
        (added,), _ = clients[0].register(group, wanted)
        layers = [*layers, added]
        footprint.check(daemon)
    assert [x.handle_base for x in layers] == sorted({x.handle_base for x in layers})


@pytest.mark.doses(ci=2, full=50)
def test_killed_peers_that_come_back(daemon_process, dose):
    daemon = daemon_process("--log-level", "error")
    clients, group, _ = ready_pair(daemon)
    footprint = Footprint(daemon)
    generation = group.generation
    for number in range(dose):
        gone = number % 2
        clients[gone].process.kill()
        clients[gone].close()
        eventually(lambda: daemon.group_states() == {"moe": "BROKEN"}, within_s=1.0)
        clients[gone] = daemon.client(process=True)
        answers = created(clients)
        assert all(answer.reattached for answer in answers)
        assert answers[0].group.generation > generation
        generation = answers[0].group.generation
        attached(clients, answers)
        footprint.check(daemon)


GROWTH_BYTES = 24 << 20  # the last thousand sessions that ended, and the answers that are kept
SPEC = make_spec(ranks=1)


@pytest.mark.doses(ci=100, full=100_000)
def test_sessions_that_come_and_go_leave_nothing(daemon_process, dose, record_property):
    daemon = daemon_process("--log-level", "error")

    def come_and_go(times: int) -> None:
        for _ in range(times):
            client = Client(daemon.directory)
            client.close_group(client.ready(SPEC))
            client.goodbye()
            client.close()

    come_and_go(50)
    before, started_s = held_at_rest(daemon, None), time.monotonic()
    come_and_go(dose)
    took_s = time.monotonic() - started_s
    after = held_at_rest(daemon, before)
    record_property("sessions a second", f"{dose / took_s:.0f}")
    growth = after.rss_bytes - before.rss_bytes
    record_property("growth", f"{growth / 1e6:.1f} MB of {before.rss_bytes / 1e6:.0f} MB")
    assert memfds_of(daemon.pid) == set()
    assert growth < GROWTH_BYTES
