"""Times how soon `skew` names a slow process, and `status` a stopped one, while the job steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.jobs import layouts
from harness import eventually

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.readers import tallies

# The last process is late by the share of a step that the file contains.
_SCRIPT = """
from pathlib import Path
from gpu.jobs import gpu_steps
session = ep.connect(timeout_s=60)
steps = gpu_steps.of("dispatch and combine", session, "g", jax.devices(), op_timeout_s=600.0)
for _ in range(gpu_steps.WARM_STEPS):
    steps.run()
started = time.monotonic()
for _ in range(100):
    steps.run()
step_s = (time.monotonic() - started) / 100
say(step_ms=1e3 * step_s)
orders = Path(os.environ["TEST_ORDERS"])
last = index == jax.process_count() - 1
while True:
    steps.run()
    late_s = float((orders / "late").read_text()) * step_s if last else 0.0
    until = time.monotonic() + late_s
    while time.monotonic() < until:
        pass
"""
LAYOUT = "one GPU each, visible alone"
INTERVAL_S = 5.0  # of `ep-runtime skew`
SLOW_WITHIN_S, STOPPED_WITHIN_S = 60.0, 12.0
_pause = threading.Event()  # never set: waits of a given length


def _named_after(admin: source.Source, within_s: float) -> tuple[float, tallies.Slow]:
    """Returns seconds until reads of the boards name a rank, and their report."""
    started = time.monotonic()
    before = tallies.sample_boards(admin, "g", None)
    while time.monotonic() - started < within_s:
        _pause.wait(INTERVAL_S)
        after = tallies.sample_boards(admin, "g", None)
        slow = tallies.slow_rank(tallies.between(before, after))
        if slow is not None:
            return time.monotonic() - started, slow
        before = after
    raise AssertionError(f"nobody was named within {within_s:g} s")


def test_a_slow_and_a_stopped_process_are_named(
    job_gpus: int,
    address: str,
    admin: source.Source,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    (tmp_path / "late").write_text("0")
    environment = {"EP_RUNTIME_ADDRESS": address, "TEST_ORDERS": str(tmp_path)}
    with layouts.job(_SCRIPT, LAYOUT, job_gpus, **environment) as job:
        steps_ms = [row["step_ms"] for row in job.heard(240)]
        record_property("a step takes", f"{max(steps_ms):.2f} ms")
        last = job.workers[-1]
        for share in (0.05, 0.5):
            if share < 0.5 and (layouts.RANKS or layouts.TRIAL):
                continue  # processes that share a GPU or cores have larger differences
            (tmp_path / "late").write_text(str(share))
            seconds, slow = _named_after(admin, SLOW_WITHIN_S)
            assert (slow.world_rank, slow.layer) == (job_gpus - 1, "moe/0")
            record_property(f"slow by {100 * share:g}%, named after", f"{seconds:.1f} s")
        last.send(signal.SIGSTOP)
        stopped = time.monotonic()
        told: list[dict[str, Any]] = []
        eventually(
            lambda: told.extend(admin.status()["late_ranks"]) or told,
            within_s=STOPPED_WITHIN_S,
            what="the stopped rank is named",
        )
        seconds = time.monotonic() - stopped
        assert [row["world_rank"] for row in told] == [job_gpus - 1], (told, admin.ranks())
        record_property("stopped, named after", f"{seconds:.1f} s")
