"""`maxtext_steps.py RESULT NAME=VALUE...`: MaxText's trainer with every step waited for and timed.

One path, in this process; `maxtext_figures.py` starts it. RESULT is a file for a JSON document: the
seconds of every step, the last loss, bytes of the fullest device, or the error that ended it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integrations import maxtext_stubs
from integrations.maxtext_sources import CONFIG
from integrations.train_maxtext import TRAINER


class TimedStep:
    """MaxText's compiled step; a call returns when it has ended on every device."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.lower = step.lower
        self.seconds: list[float] = []
        self.loss = float("nan")

    def __call__(self, *args: Any) -> Any:
        import jax

        jax.block_until_ready(args)
        started = time.perf_counter()
        state, metrics = jax.block_until_ready(self._step(*args))
        self.seconds.append(time.perf_counter() - started)
        self.loss = float(metrics["scalar"]["learning/loss"])
        return state, metrics


def train(settings: Sequence[str]) -> dict[str, Any]:
    """Runs MaxText's own loop; only the step in it is wrapped."""
    maxtext_stubs.install()
    trainer = importlib.import_module(TRAINER)
    utils: Any = importlib.import_module("maxtext.utils.train_utils")
    steps: list[TimedStep] = []
    compiles = utils.jit_train_and_eval_step

    def timed(*args: Any, **kwargs: Any) -> tuple[TimedStep, Any]:
        train_step, eval_step = compiles(*args, **kwargs)
        steps.append(TimedStep(train_step))
        return steps[-1], eval_step

    utils.jit_train_and_eval_step = timed
    trainer.main(["", CONFIG, *settings])
    (step,) = steps
    return {
        "seconds": step.seconds,
        "loss": step.loss,
        "xla_bytes": xla_bytes(),
        "runtime_bytes": runtime_bytes() if "ep_runtime=True" in settings else None,
    }


def xla_bytes() -> int | None:
    """Most that the fullest device held so far; None where devices do not say."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def runtime_bytes() -> int:
    """Bytes that our daemon holds for the rank with the most; XLA does not count them."""
    import ep_runtime as ep
    from ep_runtime_client.cli.daemon import source

    with source.open_source(ep.connect().address, timeout_s=10) as daemon:
        by_rank: dict[int, int] = {}
        for buffer in daemon.buffers():
            rank = buffer["world_rank"]
            by_rank[rank] = by_rank.get(rank, 0) + buffer["bytes"]
    return max(by_rank.values(), default=0)


def reason(error: BaseException) -> str:
    """The error's name and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def main() -> int:
    result = Path(sys.argv[1])
    try:
        found = train(sys.argv[2:])
    except Exception as error:
        result.write_text(json.dumps({"error": reason(error)}), encoding="utf-8")
        raise
    result.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
