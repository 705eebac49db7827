"""Repeats each fault around the daemon, and kills at any change: nothing is left behind.

Kills of clients are in `tests/e2e/test_kills.py`.
"""

from __future__ import annotations

import os
import random
import signal
import time

import grpc
import pytest
from fuzzing import held_at_rest
from harness import DaemonProcess, eventually, memfds_of
from raw_client import WAIT_S, Client, make_spec, new_op_id
from raw_jobs import attached, come_back, created, ready_pair

from ep_runtime import errors, layer_specs


class Footprint:
    """What a daemon with one job holds, as it reports and as the kernel reports."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.memfds = memfds_of(daemon.pid)
        self.used = daemon.used_bytes
        self.fds = daemon.status().num_fds

    def check(self, daemon: DaemonProcess) -> None:
        eventually(lambda: daemon.used_bytes == self.used, what="bytes")
        assert memfds_of(daemon.pid) == self.memfds
        # One connection more or less may be closing; a leak would show after a few rounds.
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
        # A cut exactly between two records would look whole, as if the rest had never existed.
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


GROWTH_BYTES = 24 << 20  # the last thousand ended sessions, and the stored answers
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


PAIR = make_spec(ranks=2)
LAYERS = [layer_specs.LayerSpec(f"moe/{i}", top_k=2, in_flight=2) for i in range(3)]
# Every failpoint, and how often it is reached between hello and goodbye.
POINTS = {
    "journal.before_write": 6,
    "journal.after_write": 6,
    "journal.torn_write": 6,
    "rpc.before_answer": 6,
    "fd.before_send": 1,
    "fd.after_send": 1,
    "journal.before_rename": 1,
}


class Life:
    """One process from hello to goodbye; its daemon is restarted whenever it has died."""

    def __init__(self, daemon_process, directory, *options: str) -> None:
        self._start = daemon_process
        self._directory = directory
        self.restarts = 0
        self.daemon = daemon_process(*options, directory=directory)
        self.process = self.daemon.process()
        self.client = None
        self.group = None
        self.fetched = False
        self.layers = ()

    def restart(self, *options: str) -> None:
        if self.daemon.popen.poll() is None:
            self.daemon.popen.wait(WAIT_S)  # the daemon kills itself
        self.restarts += 1
        assert self.restarts < 5
        self.daemon = self._start(*options, directory=self._directory)
        if self.daemon.ready is None:
            self.restart()

    def come_back(self) -> None:
        if self.client is None:
            return
        assert self.client.resume() or self.restarts == 0
        if self.group is not None and self.fetched:
            answer = self.client.restore(self.group, layers=self.layers)
            assert answer.group.generation == self.group.generation
            if answer.wanted_ranks:
                assert self.client.give_back(self.group) == (3, [])

    def step(self, work):
        """Does `work`; repeats it after a restart if the daemon died meanwhile."""
        while True:
            try:
                return work()
            except (errors.RuntimeUnavailableError, OSError, grpc.RpcError):
                self.restart()
                self.come_back()

    def hello(self) -> None:
        self.client = self.daemon.client(process=self.process, job=None)

    def form(self) -> None:
        """Creates, fetches and reports; starts over if the daemon died in between."""
        op_id = new_op_id()
        self.group, self.fetched = None, False
        self.group = self.client.create(PAIR, op_id=op_id).group
        self.client.fetch(self.group)
        self.fetched = True
        self.client.attached(self.group)

    def register(self) -> None:
        op_id = new_op_id()
        self.layers, _ = self.step(lambda: self.client.register(self.group, LAYERS, op_id=op_id))

    def run_to_registered(self) -> None:
        self.step(self.hello)
        self.step(lambda: self.client.open("job"))
        self.step(self.form)
        self.register()

    def check(self) -> None:
        """The daemon's lists, the kernel's descriptors and our own counts agree."""
        status = self.daemon.status()
        held = self.group.board_bytes + 2 * self.group.window_bytes
        assert status.num_sessions == 1
        assert (status.num_groups, status.num_layers, status.num_handles) == (1, 3, 6)
        assert [layer.handle_base for layer in self.layers] == [0, 2, 4]
        eventually(lambda: self.daemon.used_bytes == held)
        assert memfds_of(self.daemon.pid) == set(self.process.do("inodes"))
        assert self.process.do("board")[:2] == (self.group.generation, 0)
        assert self.daemon.group_states() == {"moe": "READY"}

    def end(self) -> None:
        """Says goodbye; then the daemon and the kernel must report that nothing is left."""
        self.process.do("close")
        self.fetched = False
        self.step(lambda: self.client.close_group(self.group))
        self.step(self.client.goodbye)
        eventually(lambda: self.daemon.used_bytes == 0)
        eventually(lambda: memfds_of(self.daemon.pid) == set())
        status = self.daemon.status()
        assert (status.num_sessions, status.num_groups) == (0, 0)


def live(daemon_process, directory, point: str, times: int) -> int:
    """A whole life with one kill; returns how often the daemon was restarted."""
    switch = f"failpoint:{point}=kill:{times}"
    life = Life(daemon_process, directory, "--testing", switch)
    life.run_to_registered()
    life.check()
    life.end()
    life.daemon.kill()
    return life.restarts


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("journal.after_write", 1),
        ("journal.before_write", 2),
        ("journal.before_write", 5),
        ("journal.after_write", 3),
        ("journal.after_write", 5),
        ("journal.torn_write", 4),
        ("journal.torn_write", 6),
        *(("rpc.before_answer", times) for times in range(1, 7)),
        ("fd.before_send", 1),
        ("fd.after_send", 1),
    ],
)
def test_a_kill_at_a_change_costs_nothing(daemon_process, tmp_path, point, times):
    assert live(daemon_process, tmp_path, point, times) == 1


@pytest.mark.slow
@pytest.mark.doses(ci=0, full=1000)
def test_many_kills_at_changes_cost_nothing(daemon_process, tmp_path, dose):
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed)
    restarts = 0
    for number in range(dose):
        point = chosen.choice([name for name in POINTS if name != "journal.before_rename"])
        times = chosen.randint(1, POINTS[point])
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            restarts += live(daemon_process, directory, point, times)
        except BaseException as error:
            error.add_note(f"seed {seed}, life {number}: {point} at time {times}")
            raise
    assert restarts > dose // 2


@pytest.mark.parametrize("point", ["recovery.restored", "recovery.adopted"])
def test_a_kill_while_it_recovers_costs_nothing(daemon_process, tmp_path, point):
    life = Life(daemon_process, tmp_path)
    life.run_to_registered()
    life.daemon.kill()
    life.restart("--testing", f"failpoint:{point}=kill")
    life.step(life.come_back)
    life.check()
    assert life.restarts == 2
    life.end()


def test_a_kill_while_the_journal_is_compacted_costs_nothing(daemon_process, tmp_path):
    life = Life(daemon_process, tmp_path)
    life.run_to_registered()
    life.daemon.kill()
    life.restart("--testing", "failpoint:journal.before_rename=kill")
    life.come_back()
    life.check()
    assert sorted(os.listdir(tmp_path)) == [
        "admin.sock",
        "api.sock",
        "events",
        "fd.sock",
        "journal",
        "lock",
        "ops.sock",
        "rpc.sock",
    ]
    life.end()


@pytest.mark.doses(ci=5, full=100)
def test_kills_in_a_row_leak_nothing(daemon_process, tmp_path, dose):
    life = Life(daemon_process, tmp_path)
    life.run_to_registered()
    held = []
    for _ in range(dose):
        life.daemon.kill()
        life.restarts = 0
        life.restart()
        life.come_back()
        life.check()
        # Only for a daemon that got windows back: otherwise no process has windows to give.
        held.append(life.daemon.status().num_fds)
        assert os.stat(tmp_path / "journal").st_size < 1 << 20
    assert max(held) == held[0], held
    life.end()
