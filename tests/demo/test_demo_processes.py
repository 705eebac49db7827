"""`ep-runtime demo --processes P`: one job, one report, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_programs import command, run_to_end
from daemon_fixtures import wait_gone

WORDS = ["demo", "--platform", "cpu", "--devices", "4", "--seq", "32", "--layers", "1"]
WORDS += ["--processes", "2", "--steps"]
TIMEOUT_S = 240.0
Endless = Callable[[str], subprocess.Popen[str]]


def test_two_processes_train_together_and_one_reports(directory: Path) -> None:
    done = run_to_end(*command(*WORDS, 3), RUNTIME_DIRECTORY=str(directory))
    assert done.stdout.count("step 3/3  loss ") == 1
    assert "/node, transport memfd" in done.stdout
    assert "Gloo" not in done.stdout
    assert "block0/moe" in done.stdout.split("step 3/3")[1]


def test_the_others_train_on_after_the_last_process_has_died(directory: Path) -> None:
    done = run_to_end(*command(*WORDS, 8, "--survive"), RUNTIME_DIRECTORY=str(directory))
    before, _, after = done.stdout.partition("process 1 (pid ")
    assert before.splitlines()[-1].startswith("step 5/8  loss ")
    victim = after.split(")")[0]
    assert "was killed in step 6; 1 processes go on with 2 devices" in after
    went_on = r"^step (3|5) is done \d+\.\d s after the kill, .* loss (\S+), the first time (\S+);"
    found = re.search(went_on, after, re.M)
    assert found is not None, done.stdout
    assert abs(float(found[2]) - float(found[3])) < 0.1  # fewer ranks may drop other tokens
    assert "step 8/8  loss " in after
    assert re.search(rf"session\.dead .* process {victim} ended without goodbye", after)
    assert after.splitlines()[-1].startswith("8 steps in ")


@pytest.fixture
def endless(directory: Path) -> Iterator[Endless]:
    """endless(start): a demo of two processes that has said a line which starts so."""
    with contextlib.ExitStack() as running:

        def run(start: str) -> subprocess.Popen[str]:
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            words = command(*WORDS, 100000)
            variables = {**os.environ, "RUNTIME_DIRECTORY": str(directory)}
            process = running.enter_context(
                subprocess.Popen(words, text=True, start_new_session=True, env=variables, **how)
            )
            running.callback(process.kill)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(start):
                    break
            return process

        yield run


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(pid) for pid in children if "demo.processes" in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def test_ctrl_c_ends_every_process(endless: Endless) -> None:
    demo = endless("step ")
    workers = workers_of(demo)
    assert len(workers) == 2
    os.killpg(demo.pid, signal.SIGINT)  # to the whole group, as a terminal does
    output, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 130, output + errors
    assert errors == ""
    for pid in workers:
        wait_gone(pid)


def test_a_killed_process_ends_the_demo_with_its_code(endless: Endless) -> None:
    demo = endless("step ")
    workers = workers_of(demo)
    os.kill(workers[1], signal.SIGKILL)
    output, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 128 + signal.SIGKILL, output + errors
    assert "process 1 ended with -9" in errors
    # A call that waited names its op and layer too.
    lost = rf"PeerLostError: (\w+ of layer \S+: )?process {workers[1]} of rank 2 in group '?demo"
    assert re.search(lost, errors)
    for pid in workers:
        wait_gone(pid)


def test_workers_end_with_a_killed_parent(endless: Endless) -> None:
    demo = endless("runtime: ")
    workers = workers_of(demo)
    assert len(workers) == 2
    demo.kill()
    for pid in workers:
        wait_gone(pid)
