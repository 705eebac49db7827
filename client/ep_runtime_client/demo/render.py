"""What the demo writes: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from ep_runtime.units import iec
from ep_runtime_client.demo.config import DemoConfig

if TYPE_CHECKING:
    from ep_runtime_client.demo.trainer import StepResult

# Without a terminal, a training prints this many lines in the place of a bar.
PLAIN_LINES = 20
BAR_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first step whose loss differed between a model and its twin; steps count from 1."""

    step: int
    loss: np.float32
    twin_loss: np.float32


@dataclasses.dataclass
class Report:
    """Results of a training up to now.

    Attributes:
        recipe: of the experts' matmuls.
        losses: of every step, nats per byte.
        step_seconds: of every step, one number for the model and one for its twin.
        seconds: of the loop.
        dropped: slots dropped, all layers and steps.
        held_out: loss on held-out text, once measured.
        difference: None if every compared loss agreed, or nothing was compared.
    """

    recipe: str = ""
    losses: list[np.float32] = dataclasses.field(default_factory=list)
    step_seconds: list[list[float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    dropped: int = 0
    held_out: float | None = None
    difference: Difference | None = None

    def tokens_per_s(self, tokens_per_step: int) -> list[float]:
        """Speeds of the model and of its twin; they leave out the first step, which warms up."""
        steps = self.step_seconds[1:] or self.step_seconds
        return [tokens_per_step * len(steps) / sum(each) for each in zip(*steps, strict=True)]


class _Clock(ProgressColumn):
    """Seconds that compiling takes so far, then the time that is left."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.elapsed or 0:.0f} s")
        left = task.time_remaining
        return Text("" if left is None else f"{datetime.timedelta(seconds=math.ceil(left))} left")


class Reporter:
    """Writes to standard output."""

    def __init__(self, config: DemoConfig) -> None:
        self._config = config
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(BAR_WIDTH),
            _Clock(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[extras]}", table_column=Column(no_wrap=True)),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def say(self, text: str) -> None:
        self._console.print(text)

    def announce(self) -> None:
        """Says what the training will do and about how long it takes."""
        c = self._config
        minutes = math.ceil(c.seconds_on_two_cores / 60)
        about = f", about {minutes} min on two cores" if c.platform == "cpu" else ""
        twice = " next to a twin on plain JAX collectives" if c.compare else ""
        each = f" for each of {len(c.recipes)} recipes" if len(c.recipes) > 1 else ""
        self.say(
            f"training a {c.num_parameters:,}-parameter mixture-of-experts language model on "
            f"{c.devices} {c.platform.upper()} devices{twice}: {c.steps} steps{each}{about}"
        )

    def runtime(self, text: str, address: str, transport: str, window_bytes: int) -> None:
        """Shows model, mesh and recipe, and the runtime that serves them."""
        c = self._config
        mesh = " x ".join(f"{axis} {size}" for axis, size in c.axes.items())
        self.say(
            f"model: {c.num_layers} layers, top-{c.top_k} of {c.num_experts} experts, recipe "
            f"{', '.join(c.recipes)}, {c.combine_precision} sums, optimizer {c.optimizer}"
        )
        self.say(f"mesh: {mesh}, layout {c.rules}; a step is {c.tokens_per_step:,} bytes of {text}")
        self.say(
            f"runtime: {address}, transport {transport}, {iec(window_bytes)} of windows per device"
        )

    def hint(self, address: str | None) -> None:
        """How to look at the runtime; with its address unless it is the one that is found."""
        at = "" if address is None else f" --address {shlex.quote(address)}"
        self.say(f"in a second terminal: {self._config.program} handles{at} --watch 1")

    @contextlib.contextmanager
    def training(self, recipe: str) -> Iterator[None]:
        """Around compiling and the steps of one recipe: shows the bar."""
        what = "compiling" if len(self._config.recipes) == 1 else f"recipe {recipe}: compiling"
        if self._progress.disable:
            self.say(what)
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task(what, total=None, extras="")
        with self._progress:
            yield

    def step(self, report: Report, result: StepResult) -> None:
        done, steps = len(report.losses), self._config.steps
        speed = self._config.tokens_per_step / result.seconds
        extras = [f"{speed:,.0f} tokens/s", f"dropped {report.dropped:,}", _busiest(result)]
        (task,) = self._progress.tasks
        if task.total is None:
            self._progress.reset(task.id, total=steps)
        description = f"step {done}/{steps}  loss {result.loss:.3f}"
        # What a narrow terminal has no room for goes, and the first three columns stay.
        room = self._console.width - len(description) - BAR_WIDTH - len(" 0:00:00 left ") - 2
        shown = ""
        for extra in extras:
            longer = f"{shown}  {extra}" if shown else extra
            shown = longer if len(longer) <= room else shown
        self._progress.update(task.id, description=description, completed=done, extras=shown)
        every = max(1, steps // PLAIN_LINES)
        if self._progress.disable and (done % every == 0 or done == 1):
            self.say("  ".join([description, *extras]))

    def summary(self, report: Report, entropy_nats: float) -> None:
        """Shows steps, time, drops and the held-out loss."""
        steps, tokens = len(report.losses), self._config.tokens_per_step
        stopped = steps < self._config.steps and report.difference is None
        self.say(
            f"{'stopped after ' if stopped else ''}{steps} steps in {report.seconds:.1f} s, "
            f"{report.dropped:,} of "
            f"{steps * tokens * self._config.top_k * self._config.num_layers:,} slots dropped"
        )
        if report.held_out is not None:
            self.say(
                f"held-out loss {report.held_out:.3f} nats per byte; knowing only how often each "
                f"byte occurs gives {entropy_nats:.2f}"
            )

    def end(self, reports: Sequence[Report]) -> None:
        """Several recipes next to each other, or how the comparison with the twin ended."""
        if len(reports) > 1:
            self._console.print(self._table(reports))
        report = reports[0]
        if self._config.compare and report.losses:
            self._compared(report)
        elif len(reports) == 1 and not self._config.compare:
            self.say(
                f"{self._config.program} demo --compare checks every loss against plain JAX "
                "collectives, bit by bit, and measures both"
            )

    def _compared(self, report: Report) -> None:
        steps, tolerance = len(report.losses), self._config.loss_tolerance
        if (found := report.difference) is not None:
            ours, twins = _bits(found.loss), _bits(found.twin_loss)
            self.say(
                f"step {found.step} is the first whose loss differs: {ours}, on plain JAX "
                f"collectives {twins}"
            )
            return
        agrees = f"within {tolerance:.1%} of" if tolerance else "bit-equal to"
        self.say(f"loss {agrees} plain JAX collectives in {steps} of {steps} steps")
        here, there = report.tokens_per_s(self._config.tokens_per_step)
        self.say(
            f"tokens per second: {here:,.0f} here, {there:,.0f} on plain JAX collectives "
            f"({len(report.step_seconds[1:]) or 1} steps each, compiling not counted)"
        )

    def _table(self, reports: Sequence[Report]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("recipe")
        for title in ("steps", "last loss", "held-out loss", "against the first", "tokens/s"):
            table.add_column(title, justify="right")
        first = reports[0].held_out
        for report in reports:
            loss = report.held_out
            speed = report.tokens_per_s(self._config.tokens_per_step)
            table.add_row(
                report.recipe,
                str(len(report.losses)),
                f"{report.losses[-1]:.3f}" if report.losses else "-",
                "-" if loss is None else f"{loss:.3f}",
                "-" if loss is None or first is None else f"{loss - first:+.3f}",
                f"{speed[0]:,.0f}" if speed else "-",
            )
        return table


def _bits(loss: np.float32) -> str:
    return f"{loss:.9g} (0x{loss.tobytes()[::-1].hex()})"


def _busiest(result: StepResult) -> str:
    """Slots of the busiest expert over the mean, the worst layer: 1.0 is perfect balance."""
    means = np.maximum(result.loads.mean(axis=1), 1e-9)
    return f"busiest expert {(result.loads.max(axis=1) / means).max():.2f}x"
