"""Output of the demo: a progress bar on a terminal, otherwise some lines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ep_runtime.text import iec
from ep_runtime_client.demo.config import DemoConfig

if TYPE_CHECKING:
    from ep_runtime_client.demo.trainer import StepResult
    from ep_runtime_client.groups.group import Group
    from ep_runtime_client.sessions.session import Session

# Without a terminal, a training prints this many lines instead of a bar.
PLAIN_LINES = 20
BAR_WIDTH = 16


@dataclasses.dataclass
class Report:
    """Results of a training so far.

    Attributes:
        losses: loss of every step, nats per byte.
        step_seconds: for every step, seconds of the model and of its twin, if any.
        drops: for every step, the number of slots that got no row.
        seconds: total time of the steps.
        difference: last losses (model's, twin's) if they differ; None otherwise.
    """

    losses: list[np.float32] = dataclasses.field(default_factory=list)
    step_seconds: list[list[float]] = dataclasses.field(default_factory=list)
    drops: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    difference: tuple[np.float32, np.float32] | None = None

    @property
    def dropped(self) -> int:
        return sum(self.drops)

    def rewind(self, step: int) -> None:
        """Forgets the steps after `step`, which will be repeated."""
        for each in (self.losses, self.step_seconds, self.drops):
            del each[step:]

    def tokens_per_s(self, tokens_per_step: int) -> list[float]:
        """Returns speeds of the model and of its twin, without the first step, which warms up."""
        steps = self.step_seconds[1:] or self.step_seconds
        return [tokens_per_step * len(steps) / sum(each) for each in zip(*steps, strict=True)]


class Reporter:
    """Writes to standard output."""

    def __init__(self, config: DemoConfig) -> None:
        self._config = config
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(BAR_WIDTH),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def say(self, text: str) -> None:
        self._console.print(text)

    def announce(self) -> None:
        """Prints the training's plan and estimated time."""
        c = self._config
        minutes = math.ceil(c.seconds_on_two_cores / 60)
        about = f", about {minutes} min on two cores" if c.platform == "cpu" else ""
        twice = " next to a twin on plain JAX collectives" if c.compare else ""
        size = c.num_parameters(c.num_experts)
        self.say(
            f"training a {size:,}-parameter mixture-of-experts language model on "
            f"{c.devices} {c.platform.upper()} devices{twice}: {c.steps} steps{about}"
        )

    def runtime(self, session: Session, group: Group) -> None:
        """Prints model, mesh and recipe, the runtime, and a command to look at it."""
        c = self._config
        mesh = " x ".join(f"{axis} {size}" for axis, size in c.axes.items())
        self.say(
            f"model: {c.num_layers} layers, top-{c.top_k} of {c.num_experts} experts, recipe "
            f"{c.recipe}; mesh: {mesh}; a step is {c.tokens_per_step:,} bytes of Python's help"
        )
        windows = f"{iec(group.staging_bytes_per_rank)} of windows per device"
        self.say(f"runtime: {session.address}, transport {group.spec.transport}, {windows}")
        if session.address != "none":
            at = shlex.quote(session.address)
            self.say(f"in a second terminal: {c.program} handles --address {at} --watch 1")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Shows the progress bar around compilation and steps."""
        if self._progress.disable:
            self.say("compiling")
        self._progress.add_task("compiling", total=None)
        with self._progress:
            yield

    def step(self, report: Report, result: StepResult) -> None:
        """Shows the step, its loss and its speed."""
        done, steps = len(report.losses), self._config.steps
        (task,) = self._progress.tasks
        if task.total is None:
            self._progress.reset(task.id, total=steps)
        speed = self._config.tokens_per_step / result.seconds
        text = f"step {done}/{steps}  loss {result.loss:.3f}  {speed:,.0f} tokens/s"
        self._progress.update(task.id, description=text, completed=done)
        every = max(1, steps // PLAIN_LINES)
        if self._progress.disable and (done % every == 0 or done == 1):
            self.say(text)

    def summary(self, report: Report) -> None:
        """Prints steps, time and drops, and the result of the comparison with the twin."""
        c, steps = self._config, len(report.losses)
        stopped = "stopped after " if steps < c.steps and report.difference is None else ""
        slots = steps * c.tokens_per_step * c.top_k * c.num_layers
        self.say(
            f"{stopped}{steps} steps in {report.seconds:.1f} s, {report.dropped:,} of {slots:,} "
            "slots dropped"
        )
        if report.difference is not None:
            ours, twins = map(_bits, report.difference)
            self.say(
                f"step {steps} is the first whose loss differs: {ours}, on plain JAX collectives "
                f"{twins}"
            )
        elif c.compare and steps:
            agrees = f"within {c.loss_tolerance:.1%} of" if c.loss_tolerance else "bit-equal to"
            here, there = report.tokens_per_s(c.tokens_per_step)
            self.say(f"loss {agrees} plain JAX collectives in {steps} of {steps} steps")
            self.say(
                f"tokens per second: {here:,.0f} here, {there:,.0f} on plain JAX collectives "
                f"({len(report.step_seconds[1:]) or 1} steps each, compiling not counted)"
            )


def _bits(loss: np.float32) -> str:
    return f"{loss:.9g} (0x{loss.tobytes()[::-1].hex()})"
