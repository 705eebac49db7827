"""`ep-runtime demo` as a user types it: exit codes, what it says, what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-P", "-m", "ep_runtime_client.cli", "demo"]
SMALL = [*("--platform", "cpu"), *("--devices", "4"), *("--seq", "32"), *("--layers", "1")]
TIMEOUT_S = 240.0


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *SMALL, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def runtime_directory(output: str) -> Path:
    found = re.search(r"runtime: unix://(\S+),", output)
    assert found is not None, output
    return Path(found[1])


def test_a_demo_trains_reports_lists_its_handles_and_is_bit_equal_to_plain_jax() -> None:
    done = demo("--steps", "4", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4  loss " in done.stdout
    assert done.stdout.startswith("training a ")
    ends = done.stdout.split("held-out loss")[1]
    assert "block0/moe" in ends
    assert "loss bit-equal to plain JAX collectives in 4 of 4 steps" in ends
    assert re.search(r"tokens per second: [\d,]+ here, [\d,]+ on plain .* \(3 steps each", ends)
    assert not runtime_directory(done.stdout).exists()


@pytest.mark.slow
def test_the_demo_runs_on_transport_xla() -> None:
    done = demo("--steps", "2", "--transport", "xla")
    assert done.returncode == 0, done.stderr
    assert "transport xla" in done.stdout


def test_the_demo_runs_without_a_daemon() -> None:
    done = demo("--steps", "1", "--address", "none")
    assert done.returncode == 0, done.stderr
    assert "runtime: none, transport xla" in done.stdout


@pytest.mark.slow
def test_mesh_rules_optimizer_and_picture_are_as_asked_for(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    layout = ["--mesh", "fsdp=2,ep=2", "--rules", "shard-exp-on-fsdp", "--optimizer", "muon"]
    layout += ["--combine-precision", "fp8"]
    done = demo("--steps", "2", *layout, "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipe f32, fp8 sums, optimizer muon" in done.stdout
    assert "mesh: fsdp 2 x ep 2, layout shard-exp-on-fsdp" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_recipes_are_trained_one_after_the_other_and_put_side_by_side() -> None:
    done = demo("--steps", "2", "--recipe", "bf16,fp8")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(bf16|fp8) +2 +(\d\.\d+) +\d\.\d+ +[+-]0\.\d+ ", done.stdout, re.M)
    assert [name for name, _ in rows] == ["bf16", "fp8"]
    losses = [float(loss) for _, loss in rows]
    assert abs(losses[0] - losses[1]) < 0.05


def test_wrong_options_are_exit_code_1_and_start_nothing() -> None:
    done = demo("--steps", "3", "--batch", "7")
    assert done.returncode == 1
    assert "--batch must be a multiple of devices=4, got 7" in done.stderr
    assert done.stdout == ""


def test_a_dead_address_is_exit_code_2(tmp_path: Path) -> None:
    done = demo("--steps", "1", "--address", f"unix://{tmp_path}")
    assert done.returncode == 2
    assert "no daemon answers" in done.stderr


def interrupted(line_start: str, signals: int) -> tuple[int, str, str]:
    """Exit code and output of a long demo that gets SIGINTs once a line starts so."""
    # In a group of its own, and the signal to all of it, as a terminal does.
    with subprocess.Popen(
        [*COMMAND, *SMALL, "--steps", "100000"],
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
    assert ("stopped after" in output) == ("held-out loss" in output) == (signals == 1)
    assert "Traceback" not in errors
    assert not runtime_directory(output).exists()


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_the_options_are_there_without_jax(command: str) -> None:
    code = (
        "import sys; from ep_runtime_client.cli import main; "
        f"code = main([{command!r}, '--help']); "
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
