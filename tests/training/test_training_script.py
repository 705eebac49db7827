"""The training script: saved on one mesh and daemon, restored on others, the same next loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_fixtures import package_path
from harness import DaemonProcess, daemon_process  # noqa: F401 - a fixture by name

SCRIPT = Path(__file__).with_name("train.py")
TIMEOUT_S = 240.0
COMPILED_BY = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # as the other tests' programs


def train(daemon: DaemonProcess, *options: str) -> dict[int, float]:
    """Losses by step of one job; no warning may come up in it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *options],
        env={
            **{name: os.environ[name] for name in COMPILED_BY if name in os.environ},
            "EP_RUNTIME_ADDRESS": f"unix://{daemon.directory}",
            "EP_RUNTIME_JOB": "training",
            "PYTHONPATH": package_path(),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    if "--save" in options:
        assert re.search(r"^held-out loss \d\.\d+$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize(
    "rules", [pytest.param("fsdp+ep", marks=pytest.mark.slow), "shard-exp-on-fsdp"]
)
def test_a_job_goes_on_from_its_checkpoint_on_another_mesh_and_daemon(
    daemon_process: Callable[..., DaemonProcess],  # noqa: F811 - the fixture
    tmp_path: Path,
    rules: str,
) -> None:
    first, saved = daemon_process(), str(tmp_path / "saved")
    layout = ["--rules", rules, "--mesh"]
    whole = train(first, *layout, "dp=2,fsdp=2,ep=2", "--steps", "5", "--save", saved)
    assert sorted(whole) == [0, 1, 2, 3, 4]
    assert whole[4] < whole[0]
    first.kill()
    resumed = train(daemon_process(), *layout, "fsdp=2,ep=4", "--steps", "2", "--restore", saved)
    assert sorted(resumed) == [3, 4]
    for step, loss in resumed.items():
        assert loss == pytest.approx(whole[step], rel=2e-5)
