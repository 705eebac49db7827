"""A process that is late is shown and waited for; one that never comes ends the wait in time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from daemon_fixtures import wait_until
from multiprocess.launch import Job

from ep_runtime_client import cli

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
    """What `ep-runtime status` says: lines, or JSON."""

    def ask(*words: str) -> Any:
        assert cli.main(["status", "--address", address, *words]) == 0
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
        assert "rank 1" in line
        assert str(pids[1]) in line
        job.workers[1].tell()
        assert [row["error"] for row in job.heard()] == [None, None]
        assert status("-o", "json")["late_ranks"] == []
        job.tell()
        job.finish()


def test_a_rank_that_never_comes_ends_the_wait_at_the_budget(address: str) -> None:
    environment = {"EP_RUNTIME_ADDRESS": address, "TEST_OP_TIMEOUT_S": "3"}
    with Job(_JOB + "os._exit(0)", processes=2, devices=1, **environment) as job:
        job.heard()
        said = job.workers[0].heard()
        assert said["error"] == "OpTimeoutError"
        assert (said["rank"], said["layer"], said["op"]) == (1, "moe/0", "prepare")
        assert 2.9 < said["took_s"] < 10
        job.workers[0].tell()
        job.workers[1].tell()
        job.workers[1].heard()
        job.workers[1].tell()
        job.finish()


@pytest.mark.slow
def test_a_minute_of_silence_is_no_error(address: str) -> None:
    """As compiling on one process only; the default budget is ten minutes."""
    environment = {"EP_RUNTIME_ADDRESS": address, "TEST_OP_TIMEOUT_S": "600"}
    sleeps = _JOB.replace("    hear()\nstarted", "    time.sleep(60)\nstarted")
    with Job(sleeps, processes=2, devices=1, **environment) as job:
        job.heard()
        said = job.heard()
        assert [row["error"] for row in said] == [None, None]
        assert said[0]["took_s"] > 55
        job.tell()
        job.finish()
