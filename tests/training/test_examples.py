"""The scripts of docs/examples: saved on one mesh and daemon, restored on others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from child_programs import CACHE, run_to_end
from doc_pages import ROOT
from harness import DaemonProcess

from ep_runtime_client.jobs.members import reserved_coordinator

EXAMPLES = ROOT / "docs/examples"
TIMEOUT_S = 240.0
COMPILED_BY = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # like the other tests' programs
SAVED_AT, STEPS = 4, 5
# Sums in bfloat16 differ in their last bits from mesh to mesh.
TOLERANCE = 1e-2


def variables(**more: str) -> dict[str, str]:
    return {
        **CACHE,
        **{name: os.environ[name] for name in COMPILED_BY if name in os.environ},
        "JAX_PLATFORMS": "cpu",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ["PYTHONPATH"],
        **more,
    }


def train(script: str, folder: Path, *options: str, **environment: str) -> dict[int, float]:
    """Returns losses by step of one run; the run may not warn."""
    sizes = ("--steps", str(STEPS), "--save-every", str(SAVED_AT))
    words = ["-W", "error", EXAMPLES / script, "--folder", folder, *sizes, *options]
    done = run_to_end(sys.executable, *words, env=variables(**environment))
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    losses = {int(step): float(loss) for step, loss in found}
    saved_now = SAVED_AT - 1 in losses
    assert bool(re.search(r"^held-out loss \d\.\d+$", done.stdout, re.MULTILINE)) == saved_now
    return losses


def check_goes_on(whole: dict[int, float], resumed: dict[int, float]) -> None:
    assert sorted(whole) == [*range(STEPS)]
    assert whole[STEPS - 1] < whole[0] / 2
    assert resumed == {
        step: pytest.approx(whole[step], rel=TOLERANCE) for step in range(SAVED_AT, STEPS)
    }


# train_nnx.py is what two_processes.py runs, below.
@pytest.mark.parametrize("script", ["train_linen.py", "train_jax.py"])
def test_a_job_goes_on_from_its_checkpoint_on_another_mesh_and_daemon(
    daemon_process: Callable[..., DaemonProcess],
    tmp_path: Path,
    script: str,
) -> None:
    first = daemon_process()
    at = {"EP_RUNTIME_ADDRESS": f"unix://{first.directory}", "EP_RUNTIME_JOB": "training"}
    whole = train(script, tmp_path, "--fsdp", "2", **at)
    first.kill()
    at["EP_RUNTIME_ADDRESS"] = f"unix://{daemon_process().directory}"
    check_goes_on(whole, train(script, tmp_path, **at))


def test_one_process_goes_on_from_the_checkpoint_of_two(
    directory: Path,
    tmp_path: Path,
) -> None:
    """The first run shards experts over both axes, the second as the rules do by default."""
    with reserved_coordinator() as coordinator:
        # RUNTIME_DIRECTORY: the node's daemon belongs to this test alone.
        whole = train(
            "two_processes.py",
            tmp_path,
            "--coordinator",
            coordinator,
            "--rules",
            "shard-exp-on-fsdp",
            "--fsdp",
            "2",
            RUNTIME_DIRECTORY=str(directory),
        )
    check_goes_on(whole, train("train_nnx.py", tmp_path, EP_RUNTIME_ADDRESS="embedded"))


def changed(script: str, diff: str) -> str:
    """Applies each part of the diff to the script, matching lines except for their indentation."""
    lines = script.splitlines()
    for part in diff.split("\n\n"):
        old = [line[1:].strip() for line in part.splitlines() if line[0] != "+"]
        new = [line[1:] for line in part.splitlines() if line[0] != "-"]
        stripped = [line.strip() for line in lines]
        [at] = [i for i in range(len(lines)) if stripped[i : i + len(old)] == old]
        lines[at : at + len(old)] = new
    return "\n".join(lines) + "\n"


def test_the_example_goes_on_with_fifteen_other_lines(
    directory: Path,
    tmp_path: Path,
) -> None:
    diff = (EXAMPLES / "going_on.diff").read_text(encoding="utf-8")
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 15
    script = changed((EXAMPLES / "train_jax.py").read_text(), diff)
    processes = 3
    with contextlib.ExitStack() as running:

        def start(*words: str, **more: str) -> subprocess.Popen[str]:
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", *words],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=variables(RUNTIME_DIRECTORY=str(directory), **more),
                )
            )
            running.callback(process.kill)
            return process

        service = start(
            *("-m", "ep_runtime_client.cli", "coordination", "--processes", str(processes))
        )
        assert service.stdout is not None
        address = service.stdout.readline().split()[-1]
        script = script.replace("node-0:8477", address).replace(
            'cpu_devices", 8', 'cpu_devices", 2'
        )
        (tmp_path / "train.py").write_text(script)
        slurm = {"JOB_ID": "7", "STEP_NODELIST": "node-0", "NTASKS": str(processes)}
        job = [
            start(
                *(str(tmp_path / "train.py"), "--folder", str(tmp_path)),
                *("--steps", "6", "--save-every", "2"),
                SLURM_PROCID=str(index),
                SLURM_LOCALID=str(index),
                **{f"SLURM_{name}": value for name, value in slurm.items()},
            )
            for index in range(processes)
        ]
        outputs = [process.stdout for process in job]
        assert outputs[0] is not None
        losses: list[tuple[int, float]] = []
        for line in outputs[0]:
            found = re.match(r"step (\d+) loss (\S+)$", line)
            if found is not None:
                losses.append((int(found[1]), float(found[2])))
                if len(losses) == 3:
                    job[1].send_signal(signal.SIGKILL)
        assert [process.wait(TIMEOUT_S) for process in job] == [0, -signal.SIGKILL, 0]
    again = next(i for i in range(1, len(losses)) if losses[i][0] <= losses[i - 1][0])
    first = dict(losses[:again])
    assert [step for step, _ in losses[again:]] == [*range(losses[again][0], 6)]
    assert losses[again][1] == pytest.approx(first[losses[again][0]], rel=TOLERANCE)
    assert losses[-1][1] < losses[0][1] / 2
