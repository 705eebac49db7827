"""What the demo writes: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ep_runtime.units import iec
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.corpus import Corpus

if TYPE_CHECKING:
    from ep_runtime_client.demo.trainer import StepResult
    from ep_runtime_client.demo.training import Difference, TrainingReport

# Lines that a whole training writes where there is no terminal to draw a bar on.
PLAIN_LINES = 20


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Where the runtime is: what `announce_runtime` says about it."""

    address: str
    transport: str
    staging_bytes: int
    has_daemon: bool


def balance(loads: npt.NDArray[Any]) -> float:
    """Slots of the busiest expert over the mean, the worst layer: 1.0 is perfect balance."""
    return float((loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9)).max())


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training: its recipe, what the loop did, the held-out loss or None."""

    recipe: str
    report: TrainingReport
    held_out: float | None


class Reporter:
    """Writes to standard output. Context manager around a training loop: owns the bar."""

    def __init__(self, config: DemoConfig) -> None:
        self._config = config
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=config.steps, numbers="")

    def __enter__(self) -> Reporter:
        self._progress.reset(self._task)
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text)

    def stopping(self) -> None:
        self.say("stopping after what is under way; Ctrl-C again leaves at once")

    def announce(self, corpus: Corpus) -> None:
        """What is about to be trained, and on what."""
        c = self._config
        mesh = " x ".join(f"{axis} {size}" for axis, size in c.axes.items())
        self.say(
            f"model: {c.num_layers} MoE layers, top-{c.top_k} of {c.num_experts} experts, hidden "
            f"{c.hidden_size}, {c.num_parameters:,} parameters; {c.steps} steps of "
            f"{c.tokens_per_step:,} bytes on {c.devices} {c.platform.upper()} devices as {mesh}"
        )
        self.say(
            f"layout {c.rules}, optimizer {c.optimizer}, recipe {', '.join(c.recipes)}, "
            f"{c.combine_precision} sums"
        )
        self.say(
            f"text: {corpus.source}, {len(corpus.train):,} bytes to train on, "
            f"{len(corpus.held_out):,} held out"
        )

    def announce_runtime(self, place: Announcement) -> None:
        """Which runtime serves the job, and how to look at it."""
        self.say(
            f"runtime: {place.address}, transport {place.transport}, "
            f"{iec(place.staging_bytes)} of windows per device"
        )
        if place.has_daemon:
            self.say(
                f"in a second terminal: ep-runtime handles --address {place.address} --watch 1"
            )

    def step(self, done: int, result: StepResult, tokens_per_s: float, dropped: int) -> None:
        numbers = (
            f"loss {result.loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
            f"busiest expert {balance(result.loads):.2f}x  dropped {dropped:,}"
        )
        self._progress.update(self._task, completed=done, numbers=numbers)
        every = max(1, self._config.steps // PLAIN_LINES)
        if self._progress.disable and (done % every == 0 or done == 1):
            self.say(f"step {done}/{self._config.steps}  {numbers}")

    def summary(self, report: TrainingReport) -> None:
        """What the loop did, the last step's expert loads among it."""
        slots = report.tokens * self._config.top_k * self._config.num_layers
        self.say(
            f"{'stopped after ' if report.stopped else ''}{report.steps} steps in "
            f"{report.seconds:.1f} s: {report.tokens:,} tokens, "
            f"{report.tokens / max(report.seconds, 1e-9):,.0f} tokens/s, {report.dropped:,} of "
            f"{slots:,} slots dropped"
        )
        if report.loads is None:
            return
        for index, loads in enumerate(report.loads):
            shares = " ".join(f"{share:4.0%}" for share in loads / max(loads.sum(), 1))
            self.say(f"expert loads of block{index}/moe, last step: {shares}")

    def held_out(self, loss: float, corpus: Corpus) -> None:
        self.say(
            f"held-out loss {loss:.3f} nats per byte "
            f"(unigram entropy of the text: {corpus.entropy_nats:.2f})"
        )

    def runs(self, runs: Sequence[Run]) -> None:
        """A table of several recipes' losses, each beside the first one's."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("recipe")
        for title in ("steps", "last loss", "held-out loss", "against the first", "tokens/s"):
            table.add_column(title, justify="right")
        first = runs[0].held_out
        for run in runs:
            report, loss = run.report, run.held_out
            table.add_row(
                run.recipe,
                str(report.steps),
                f"{report.losses[-1]:.3f}" if report.losses else "-",
                "-" if loss is None else f"{loss:.3f}",
                "-" if loss is None or first is None else f"{loss - first:+.3f}",
                f"{report.tokens / max(report.seconds, 1e-9):,.0f}",
            )
        self._console.print(table)

    def continuation(self, prompt: bytes, text: bytes) -> None:
        self.say("sample continuation, after the bar:")
        self.say(f"{_readable(prompt)}|{_readable(text)}")

    def equal(self, report: TrainingReport, tolerance: float) -> None:
        agrees = f"within {tolerance:.1%} of" if tolerance else "bit-equal to"
        self.say(f"every step's loss is {agrees} transport xla: {report.steps} of {report.steps}")

    def different(self, difference: Difference) -> None:
        self.say(
            f"step {difference.step} is the first whose loss differs: "
            f"{difference.loss:.9g} (0x{difference.loss.tobytes()[::-1].hex()}), on transport xla "
            f"{difference.twin_loss:.9g} (0x{difference.twin_loss.tobytes()[::-1].hex()})"
        )


def _readable(text: bytes) -> str:
    """Bytes as text; what is no printable character becomes a dot."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "." for c in decoded)
