"""`ep-runtime demo` in one or several processes: exit codes, what it says, what it leaves."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_programs import command, run_to_end
from daemon_fixtures import wait_gone

SMALL = ["demo", "--platform", "cpu", "--devices", "4", "--seq", "32", "--layers", "1"]
TIMEOUT_S = 240.0


def runtime_directory(output: str) -> Path:
    found = re.search(r"runtime: unix://(\S+),", output)
    assert found is not None, output
    return Path(found[1])


def test_a_demo_trains_reports_lists_its_handles_and_is_bit_equal_to_plain_jax() -> None:
    done = run_to_end(*command(*SMALL, "--steps", 20, "--compare"))
    assert done.stdout.startswith("training a ")
    losses = [float(loss) for loss in re.findall(r"^step \d+/20  loss (\S+)", done.stdout, re.M)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    handles, _, end = done.stdout.partition("20 steps in")
    assert "block0/moe" in handles
    assert "loss bit-equal to plain JAX collectives in 20 of 20 steps" in end
    assert re.search(r"tokens per second: [\d,]+ here, [\d,]+ on plain .* \(19 steps each", end)
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


def interrupted(line_start: str, signals: int) -> tuple[int, str, str]:
    """Exit code and output of a long demo that gets SIGINTs once a line starts so."""
    # In a group of its own, and the signal to all of it, as a terminal does.
    with subprocess.Popen(
        command(*SMALL, "--steps", 100000),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = ""
        while not seen.rpartition("\n")[2].startswith(line_start):
            seen += "\n" + process.stdout.readline().rstrip("\n")
        os.killpg(process.pid, signal.SIGINT)
        if signals == 2:
            while "stopping" not in process.stderr.readline():
                pass
            os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, seen + "\n" + output, errors


@pytest.mark.parametrize(
    ("line_start", "signals"), [("step 1/", 1), ("compiling", 2)], ids=["once", "twice"]
)
def test_ctrl_c_ends_with_what_was_trained_and_leaves_no_daemon(
    line_start: str, signals: int
) -> None:
    code, output, errors = interrupted(line_start, signals)
    assert code == 130, errors
    assert ("stopped after" in output) == (signals == 1)
    assert "Traceback" not in errors
    assert not runtime_directory(output).exists()


WORDS = ["demo", "--platform", "cpu", "--devices", "4", "--seq", "32", "--layers", "1"]
WORDS += ["--processes", "2", "--steps"]
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
