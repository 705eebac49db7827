"""Runs `ep-runtime demo` in one or several processes: exit codes, output, leftovers, losses."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_programs import command, run_to_end
from daemon_fixtures import wait_gone

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client import cli
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.demo.cli import make_config
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.job import train
from ep_runtime_client.demo.reporter import Report, Reporter
from ep_runtime_client.demo.trainer import StepResult

SMALL = ["demo", "--platform", "cpu", "--devices", "4", "--seq", "32", "--layers", "1"]
TIMEOUT_S = 240.0


def runtime_directory(output: str) -> Path:
    found = re.search(r"runtime: unix://(\S+),", output)
    assert found is not None, output
    return Path(found[1])


def test_a_demo_trains_reports_lists_its_handles_and_is_bit_equal_to_plain_jax() -> None:
    done = run_to_end(*command(*SMALL, "--steps", 10, "--compare"))
    assert done.stdout.startswith("training a ")
    losses = [float(loss) for loss in re.findall(r"^step \d+/10  loss (\S+)", done.stdout, re.M)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
    handles, _, end = done.stdout.partition("10 steps in")
    assert "block0/moe" in handles
    assert "loss bit-equal to plain JAX collectives in 10 of 10 steps" in end
    assert re.search(r"tokens per second: [\d,]+ here, [\d,]+ on plain .* \(9 steps each", end)
    assert not runtime_directory(done.stdout).exists()


def test_a_terminal_gets_a_bar_without_a_daemon_on_a_mesh_and_recipe_of_ones_own() -> None:
    words = ["--address", "none", "--mesh", "fsdp=2,ep=2", "--recipe", "bf16", "--transport", "xla"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(*SMALL, "--steps", 2, *words), stdout=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the program has ended
            os.close(ours)
        assert process.wait(TIMEOUT_S) == 0
    shown = " ".join(re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text.decode()).split())
    assert "runtime: none, transport xla" in shown
    assert "recipe bf16; mesh: fsdp 2 x ep 2" in shown
    assert re.search(r"step 2/2 loss \d\.\d+ [\d,]+ tokens/s ━+ 0:0", shown), shown


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ("--batch 7", 1, "--batch must be a multiple of devices=4, got 7"),
        ("--address unix:///nowhere", 2, "no daemon answers"),
    ],
)
def test_a_demo_that_cannot_start_says_why(options: str, code: int, text: str) -> None:
    done = run_to_end(*command(*SMALL, "--steps", 1, *options.split()), code=code)
    assert text in done.stderr


Endless = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def endless(directory: Path) -> Iterator[Endless]:
    """endless(start, *words): runs a demo and returns its output up to a line that starts so."""
    with contextlib.ExitStack() as running:

        def run(start: str, *words: str) -> tuple[subprocess.Popen[str], str]:
            how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            how["env"] = {**os.environ, "RUNTIME_DIRECTORY": str(directory)}
            whole = command(*SMALL, "--steps", 100000, *words)
            # In its own process group, because a terminal signals the whole group.
            process = subprocess.Popen(whole, text=True, start_new_session=True, **how)
            running.enter_context(process)
            running.callback(process.kill)
            assert process.stdout is not None
            seen = ""
            for line in process.stdout:
                seen += line
                if line.startswith(start):
                    break
            return process, seen

        yield run


@pytest.mark.parametrize(
    ("line_start", "signals"), [("step 1/", 1), ("compiling", 2)], ids=["once", "twice"]
)
def test_ctrl_c_ends_with_what_was_trained_and_leaves_no_daemon(
    endless: Endless, line_start: str, signals: int
) -> None:
    demo, seen = endless(line_start)
    os.killpg(demo.pid, signal.SIGINT)
    if signals == 2:
        assert demo.stderr is not None
        while "stopping" not in demo.stderr.readline():
            pass
        os.killpg(demo.pid, signal.SIGINT)
    output, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 130, errors
    assert ("stopped after" in output) == (signals == 1)
    assert "Traceback" not in errors
    assert not runtime_directory(seen).exists()


TWO = ["--processes", "2"]


def test_two_processes_train_together_and_one_reports(directory: Path) -> None:
    done = run_to_end(*command(*SMALL, *TWO, "--steps", 3), RUNTIME_DIRECTORY=str(directory))
    assert done.stdout.count("step 3/3  loss ") == 1
    assert "/node, transport memfd" in done.stdout
    assert "Gloo" not in done.stdout
    assert "block0/moe" in done.stdout.split("step 3/3")[1]


def test_the_others_train_on_after_the_last_process_has_died(directory: Path) -> None:
    done = run_to_end(
        *command(*SMALL, *TWO, "--steps", 8, "--survive"), RUNTIME_DIRECTORY=str(directory)
    )
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


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "demo.cli" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_ctrl_c_ends_every_process(endless: Endless) -> None:
    demo, _ = endless("step ", *TWO)
    workers = workers_of(demo)
    assert len(workers) == 2
    os.killpg(demo.pid, signal.SIGINT)
    output, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 130, output + errors
    assert errors == ""
    for pid in workers:
        wait_gone(pid)


def test_a_killed_process_ends_the_demo_with_its_code(endless: Endless) -> None:
    demo, _ = endless("step ", *TWO)
    workers = workers_of(demo)
    os.kill(workers[1], signal.SIGKILL)
    output, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 128 + signal.SIGKILL, output + errors
    assert "process 1 ended with -9" in errors
    # A call that was waiting also names its op and layer.
    lost = rf"PeerLostError: (\w+ of layer \S+: )?process {workers[1]} of rank 2 in group '?demo"
    assert re.search(lost, errors)
    for pid in workers:
        wait_gone(pid)


def test_workers_end_with_a_killed_parent(endless: Endless) -> None:
    demo, _ = endless("runtime: ", *TWO)
    workers = workers_of(demo)
    assert len(workers) == 2
    demo.kill()
    for pid in workers:
        wait_gone(pid)


_ENDS = """
import atexit, os
from ep_runtime_client.jobs.members import run_member

class Module:
    def __del__(self):
        os.write(2, b"Python ends")

kept = Module()
atexit.register(print, "exit functions run")
run_member(lambda order, member: order["code"], "ends")
"""


def test_a_process_ends_with_its_code_before_python_does(tmp_path: Path) -> None:
    """Threads of JAX and gRPC that still run may abort a process when Python ends."""
    order = json.dumps({"order": {"code": 3}, "member": {"directory": str(tmp_path)}})
    theirs, ours = os.pipe()  # the process ends with its standard input
    with open(theirs) as stdin, open(ours, "wb"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ENDS, order],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (3, "exit functions run\n", "")


def config_of(*options: str) -> DemoConfig:
    return make_config(cli.make_parser("demo").parse_args(options))


class Scripted:
    """A trainer that returns the given losses."""

    def __init__(self, losses: Sequence[float]) -> None:
        self._losses = iter(losses)
        self.followed = 0

    def step(self, window: Any) -> StepResult:
        return StepResult(np.float32(next(self._losses)), 2, 0.5)

    def follow(self, other: Any) -> None:
        self.followed += 1


def run(*losses: Sequence[float], platform: str = "cpu") -> tuple[Report, list[Any]]:
    config = DemoConfig(steps=len(losses[0]), platform=platform)
    trainers: list[Any] = [Scripted(values) for values in losses]
    windows = itertools.repeat(np.zeros((1, 2), np.int32))
    reporter = Reporter(config)
    with reporter.training():
        return train(config, trainers, windows, reporter, threading.Event(), Report()), trainers


def test_the_loop_counts_steps_drops_and_seconds_and_prints_lines(capsys: Any) -> None:
    report, _ = run([3.0, 2.0])
    np.testing.assert_array_equal(report.losses, np.float32([3, 2]))
    assert (report.dropped, report.step_seconds) == (4, [[0.5]] * 2)
    assert report.tokens_per_s(32) == [64.0]
    lines = ["compiling", *(f"step {n}/2  loss {4 - n}.000  4,096 tokens/s" for n in (1, 2))]
    assert capsys.readouterr().out.splitlines() == lines


def test_the_first_differing_step_ends_a_comparison(capsys: Any) -> None:
    assert run([1.0, np.nan], [1.0, np.nan])[0].difference is None
    last_bit = float(np.nextafter(np.float32(2.0), np.float32(3.0)))
    report, _ = run([3.0, 2.0, 1.0], [3.0, last_bit, 1.0])
    assert report.difference == (np.float32(2.0), np.float32(last_bit))
    assert len(report.losses) == 2
    Reporter(DemoConfig(compare=True)).summary(report)
    assert "step 2 is the first whose loss differs: 2 (0x40000000)" in capsys.readouterr().out


def test_twins_on_gpus_agree_within_a_tolerance_and_go_on_from_the_models_state() -> None:
    report, (model, twin) = run([2.0, 4.0, 2.0], [2.001, 4.003, 2.0], platform="gpu")
    assert report.difference is None
    assert (model.followed, twin.followed) == (0, 1)
    for far in (2.003, np.nan):
        assert run([2.0, 2.0], [2.0, far], platform="gpu")[0].difference is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--devices 6 --mesh ep=4", "--mesh must be axes of product devices=6, got 'ep=4'"),
        ("--experts 6", "--experts must be a multiple of ep=4 of the mesh, got 6"),
        ("--top-k 9", "--top-k must be 1 to experts=8, got 9"),
        ("--compare --transport xla", "--transport must be auto with --compare"),
        ("--transport nvlink", "--transport must be one of ['auto', 'memfd', 'xla'] with --plat"),
        ("--mesh dp=4,fsdp=2", "--mesh must be axes with an ep among them, got"),
        ("--mesh pp=2,ep=4", "--mesh must be as dp=2,fsdp=2,ep=2 with axes of"),
        ("--processes 3", "--processes must be a divisor of devices=8, got 3"),
        ("--survive", "--processes must be at least 2 with --survive, got 1"),
        ("--survive --processes 2 --steps 7", "--steps must be at least 8 with --survive, got 7"),
        ("--survive --processes 2 --mesh ep=8", "--mesh must be left to fit_mesh with --survive"),
        ("--survive --processes 2 --compare", "--compare must be off with --survive, got True"),
        ("--survive --processes 2 --address none", "--address must be a daemon's, which keeps"),
    ],
)
def test_options_that_do_not_fit_are_named(options: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        config_of("--platform", "cpu", *options.split())
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("found", "options", "platform", "devices"),
    [
        (0, "", "cpu", 8),
        (1, "", "gpu", 1),
        (6, "", "gpu", 4),
        (4, "--devices 2", "gpu", 2),
        (4, "--devices 8", "cpu", 8),
        (4, "--mesh fsdp=2,ep=2", "gpu", 4),
        (4, "--platform cpu", "cpu", 8),
    ],
)
def test_gpus_are_taken_if_enough_are_there(
    monkeypatch: pytest.MonkeyPatch, found: int, options: str, platform: str, devices: int
) -> None:
    monkeypatch.setattr(gpus, "usable", lambda: found)
    config = config_of(*options.split())
    assert (config.platform, config.devices) == (platform, devices)
