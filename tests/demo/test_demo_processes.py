"""`ep-runtime demo --processes P`: one job, one report, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_fixtures import directory, package_path, wait_gone  # noqa: F401 - a fixture by name

COMMAND = [sys.executable, "-P", "-m", "ep_runtime_client.cli", "demo"]
SMALL = ["--platform", "cpu", "--devices", "4", "--batch", "16"]
SMALL += ["--seq", "32", "--layers", "1"]
TIMEOUT_S = 240.0
Endless = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def environment(directory: Path) -> dict[str, str]:  # noqa: F811 - the fixture
    given = {name: value for name, value in os.environ.items() if name != "EP_RUNTIME_ADDRESS"}
    return {**given, "PYTHONPATH": package_path(), "RUNTIME_DIRECTORY": str(directory)}


def test_two_processes_train_together_and_one_reports(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, *SMALL, "--processes", "2", "--steps", "3", "--compare"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 3/3  loss ") == 1
    assert "loss bit-equal to plain JAX collectives in 3 of 3 steps" in done.stdout
    assert "/node, transport memfd" in done.stdout
    assert "Gloo" not in done.stdout
    assert "block0/moe" in done.stdout.split("held-out loss")[1]


@pytest.fixture
def endless(environment: dict[str, str]) -> Iterator[Endless]:
    """endless(start): a demo of two processes that has said a line which starts so."""
    with contextlib.ExitStack() as running:

        def run(start: str) -> subprocess.Popen[str]:
            process = running.enter_context(
                subprocess.Popen(
                    [*COMMAND, *SMALL, "--processes", "2", "--steps", "100000"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                    env=environment,
                )
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


@pytest.mark.slow
def test_nodes_of_one_machine_train_together(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, *SMALL, "--nodes", "2", "--steps", "2", "--compare"],
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 2/2  loss ") == 1
    assert "transport memfd per node of 2 ranks, between nodes xla" in done.stdout
    assert "loss within 0.1% of plain JAX collectives in 2 of 2 steps" in done.stdout
    assert "node0" in done.stdout.split("held-out loss")[1]
    place = done.stdout.split("runtime: unix://")[1].split(",")[0]
    assert not Path(place).exists()
