"""A late process is shown and waited for; if it never comes, the wait ends in time."""

from __future__ import annotations

import json
import os
from typing import Any

import doc_pages
import numpy as np
import pytest
from daemon_fixtures import wait_until
from harness import memfds_of
from multiprocess.launch import Job

from ep_runtime_client import cli
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

_JOB = """
from multiprocess import programs_job
session = ep.connect(timeout_s=60)
world = programs_job.World(session, op_timeout_s=float(os.environ["TEST_OP_TIMEOUT_S"]))
layer = world.group.register_layer("moe/0", top_k=2)
tokens, idx = world.tokens(0), world.routing(0)
step = jax.jit(lambda tokens, idx: programs_job.round_trip(layer, tokens, idx, 1.0))

def run():
    got = step(tokens, idx)
    programs_job.check(got, tokens, 2)

run()
say(pid=os.getpid())
if index == 1:
    hear()
started = time.monotonic()
try:
    with ep.translate_errors():
        run()
    say(error=None, took_s=time.monotonic() - started)
except ep.EpRuntimeError as error:
    say(error=type(error).__name__, took_s=time.monotonic() - started,
        text=str(error), **{k: error.fields.get(k) for k in ("rank", "layer", "op")})
hear()
"""


@pytest.fixture
def status(address: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the output of `ep-runtime status` as lines, or as JSON."""

    def ask(*words: str) -> Any:
        assert cli.main(["status", "--address", address, *words]) in (cli.OK, cli.LATE)
        text = capsys.readouterr().out
        return json.loads(text) if words else text

    return ask


def test_a_late_rank_is_shown_after_ten_seconds_and_is_no_error(address: str, status: Any) -> None:
    environment = {"EP_RUNTIME_ADDRESS": address, "TEST_OP_TIMEOUT_S": "600"}
    with Job(_JOB + "session.close()", processes=2, devices=1, **environment) as job:
        pids = [row["pid"] for row in job.heard()]
        assert status("-o", "json")["late_ranks"] == []
        wait_until(lambda: status("-o", "json")["late_ranks"], "the late rank is shown")
        (late,) = status("-o", "json")["late_ranks"]
        assert (late["world_rank"], late["pid"]) == (1, pids[1])
        assert (late["waiting_ranks"], late["layer"], late["op"]) == ([0], "moe/0", "PREPARE")
        assert late["since_s"] >= 10
        (line,) = [row for row in status().splitlines() if row.startswith("LATE: ")]
        doc_pages.check_said("late", line)
        assert "rank 1" in line
        assert str(pids[1]) in line
        job.workers[1].tell()
        assert [row["error"] for row in job.heard()] == [None, None]
        assert status("-o", "json")["late_ranks"] == []
        job.end()


def test_a_rank_that_never_comes_ends_the_wait_at_the_budget(address: str) -> None:
    environment = {"EP_RUNTIME_ADDRESS": address, "TEST_OP_TIMEOUT_S": "3"}
    with Job(_JOB + "os._exit(0)", processes=2, devices=1, **environment) as job:
        job.heard()
        said = job.workers[0].heard()
        assert said["error"] == "OpTimeoutError"
        assert (said["rank"], said["layer"], said["op"]) == (1, "moe/0", "prepare")
        assert 2.9 < said["took_s"] < 10
        doc_pages.check_said("timeout", said["text"])
        job.workers[0].tell()
        job.workers[1].tell()
        job.workers[1].heard()
        job.workers[1].tell()
        job.finish()


_LATE = {
    "2 minutes of sleep": "time.sleep(120)",
    "a minute of compiling": "jax.jit(lambda x: (time.sleep(60), x)[1])(1.0)",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", list(_LATE))
def test_minutes_of_silence_at_default_settings_are_no_error(
    address: str, status: Any, how: str
) -> None:
    job = _JOB.replace(', op_timeout_s=float(os.environ["TEST_OP_TIMEOUT_S"])', "")
    late = job.replace("    hear()\nstarted", f"    say(late=True)\n    {_LATE[how]}\nstarted")
    assert late.count(_LATE[how]) == 1
    with Job(
        "from multiprocess import programs_job\n"
        "programs_job.SETTINGS.pop('op_timeout_s')  # the default\n" + late + "session.close()",
        processes=2,
        devices=1,
        EP_RUNTIME_ADDRESS=address,
    ) as started:
        started.heard()
        assert started.workers[1].heard() == {"late": True}
        wait_until(lambda: status("-o", "json")["late_ranks"], "the late rank is shown")
        (shown,) = status("-o", "json")["late_ranks"]
        assert shown["world_rank"] == 1
        said = started.heard(150)
        assert [row["error"] for row in said] == [None, None]
        assert said[0]["took_s"] > 55
        assert status("-o", "json")["late_ranks"] == []
        started.tell()
        started.finish()


_MANY = """
from multiprocess import programs_job
session = ep.connect(timeout_s=60)
world = programs_job.World(session, op_timeout_s=0.5)
layer = world.group.register_layer("moe/0", top_k=2)
tokens, idx = world.tokens(0), world.routing(0)
step = jax.jit(lambda tokens, idx: programs_job.round_trip(layer, tokens, idx, 1.0))

def run():
    try:
        with ep.translate_errors():
            programs_job.check(step(tokens, idx), tokens, 2)
    except ep.EpRuntimeError as error:
        return type(error).__name__
    return "right"

def held():
    maps = sum("memfd:" in line for line in open("/proc/self/maps"))
    return [len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))]

say(first=run())
while (order := hear()) != "end":
    say(got=run(), held=held())
session.close()
"""


@pytest.mark.doses(ci=2, full=50)
def test_ranks_that_time_out_again_and_again_leave_nothing(
    address: str, admin: source.Source, daemon: runtime.Child, dose: int
) -> None:
    with Job(
        _MANY, processes=2, devices=1, life_s=280.0 + 10.0 * dose, EP_RUNTIME_ADDRESS=address
    ) as job:
        assert job.heard() == [{"first": "right"}] * 2
        before = memfds_of(daemon.pid)
        held = []  # per turn: descriptors, mappings and threads of each process, the daemon's files
        for _ in range(dose):
            early, late = job.workers
            early.tell()
            assert early.heard()["got"] == "OpTimeoutError"
            late.tell()  # the other process sees that its run is over
            assert late.heard()["got"] == "OpTimeoutError"
            job.tell()
            said = job.heard()
            assert [row["got"] for row in said] == ["right", "right"]
            files = len(os.listdir(f"/proc/{daemon.pid}/fd"))
            held.append([*said[0]["held"], *said[1]["held"], files])
        first = min(5, dose - 1)  # threads and connections are made in the first turns
        assert (np.array(held[first:]) <= np.array(held[first]) + 1).all(), held
        assert memfds_of(daemon.pid) == before
        job.tell("end")
        job.finish()
