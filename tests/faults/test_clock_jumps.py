"""The wall clock of the daemon and its clients jumps by hours and years, with no effect."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

import pytest
from child_programs import Start
from harness import eventually, memfds_of, preloaded
from raw_client import make_spec
from raw_jobs import come_back, ready_pair

HOUR_S = 3600
YEAR_S = 365 * 24 * HOUR_S
JUMPS = (HOUR_S, -HOUR_S, YEAR_S, -YEAR_S)


class Clock:
    """The wall clock of the processes that have `environment`."""

    def __init__(self, folder: Path) -> None:
        library = preloaded("jumping_clock", folder)
        file = folder / "jumping_clock"
        file.write_bytes(bytes(4096))
        with file.open("r+b") as opened:
            self._offset = mmap.mmap(opened.fileno(), 4096)
        self.environment = {"LD_PRELOAD": library, "JUMPING_CLOCK": str(file)}
        self.launcher = ["env", *(f"{name}={value}" for name, value in self.environment.items())]

    def jump(self, seconds: int) -> None:
        self._offset[:8] = struct.pack("q", seconds)


@pytest.fixture
def clock(tmp_path) -> Clock:
    return Clock(tmp_path)


def newest_event_s(daemon) -> float:
    return daemon.ask("ListEvents").events[-1].time.seconds


def test_nothing_ends_and_nothing_lasts_longer(daemon_process, clock):
    daemon = daemon_process(launcher=clock.launcher)
    clients, _, _ = ready_pair(daemon)
    gone = daemon.client(process=True)
    gone.fetch(gone.create(make_spec("kept", ranks=1, retain_s=4.0)).group)
    gone.process.kill()
    eventually(lambda: daemon.group_states()["kept"] == "RETAINED")
    kept_s = time.monotonic()
    for seconds in JUMPS:
        ticket = clients[0].ticket(clients[0].create(make_spec(retain_s=60.0), [0]).group).ticket
        before = daemon.status()
        clock.jump(seconds)
        daemon.client().goodbye()
        assert abs(newest_event_s(daemon) - time.time() - seconds) < 60  # the clock did jump
        clients[0].process.do("redeem", daemon.directory, clients[0].token, ticket)
        for client in clients:
            client.beat()
            assert daemon.session_state(client.session_id) == "ACTIVE"
        assert daemon.group_states()["moe"] == "READY"
        passed_s = daemon.status().uptime.ToTimedelta() - before.uptime.ToTimedelta()
        assert 0 <= passed_s.total_seconds() < 60
        if time.monotonic() - kept_s < 3.5:
            assert daemon.group_states()["kept"] == "RETAINED"
    eventually(lambda: "kept" not in daemon.group_states(), within_s=6.0)
    assert daemon.healthy()


@pytest.mark.parametrize("seconds", [-HOUR_S, YEAR_S])
def test_a_daemon_that_starts_again_in_another_year_has_everything(
    daemon_process, restarted, clock, seconds
):
    daemon = daemon_process(launcher=clock.launcher)
    clients, group, layers = ready_pair(daemon)
    memory = memfds_of(daemon.pid)
    daemon.kill()
    clock.jump(seconds)
    again = daemon_process(directory=daemon.directory, launcher=clock.launcher)
    assert come_back(clients, group, layers).group.generation == group.generation
    assert again.group_states() == {"moe": "READY"}
    assert memfds_of(again.pid) == memory
    ages = [item.age.ToTimedelta().total_seconds() for item in again.ask("ListGroups").groups]
    ages += [item.age.ToTimedelta().total_seconds() for item in again.ask("ListSessions").sessions]
    assert min(ages) >= 0


_LIVES = """
import json, sys, time
import ep_runtime as ep
from ep_runtime import specs
from ep_runtime_client.groups import forming

spec = specs.make_group_spec(
    name="g", mesh_axes=(("ep", 2),), ep_axis="ep", num_experts=8, hidden_size=64,
    max_tokens_per_rank=64, max_top_k=2, retain_s=0.0)
session = ep.connect(job="jumps", timeout_s=10)
while True:
    formed = forming.form(session._client, spec, forming.Claim((0, 1)), replace=False)
    forming.leave(session._client, "g", formed.generation, formed.native_group)
    formed.memory.close()
    print(json.dumps([formed.generation, time.time()]), flush=True)
    if json.loads(sys.stdin.readline()) == "end":
        break
session.close()
"""


def test_waits_and_deadlines_of_a_client_are_what_they_were(
    daemon_process, run_program: Start, clock
):
    daemon = daemon_process()
    address = {"EP_RUNTIME_ADDRESS": f"unix://{daemon.directory}"}
    program = run_program(_LIVES, prologue="", **address, **clock.environment)
    generation, _ = program.heard()
    (session,) = daemon.ask("ListSessions").sessions
    for seconds in JUMPS:
        clock.jump(seconds)
        asked_s = time.monotonic()
        program.tell("again")
        later, wall_s = program.heard(10.0)
        assert later > generation
        assert abs(wall_s - time.time() - seconds) < 60  # the clock did jump
        assert time.monotonic() - asked_s < 5.0
        assert daemon.session_state(session.session_id) == "ACTIVE"
    os.kill(session.pid, 0)
    program.tell("end")
    assert program.finish() == 0
