"""The training loop: one model, or a model and its twin whose losses must agree."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ep_runtime_client.demo.config import DemoConfig

if TYPE_CHECKING:
    from ep_runtime_client.demo.together import Stop
    from ep_runtime_client.demo.trainer import StepResult


# Steps between which a twin that may differ by rounding keeps parameters of its own: training grows
# the last bit of an f32 to a tenth of a percent within ten steps. A second step's loss tells of the
# first one's gradients.
STEPS_ALONE = 2


class Steps(Protocol):
    """What the loop needs of a trainer."""

    def step(self, window: npt.NDArray[Any]) -> StepResult: ...

    def follow(self, other: Any) -> None:
        """Goes on from the state of `other`, another of its kind."""


class Progress(Protocol):
    """Who is told about every step."""

    def step(self, done: int, result: StepResult, tokens_per_s: float, dropped: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first step whose loss differed between a model and its twin; steps count from 1."""

    step: int
    loss: np.float32
    twin_loss: np.float32


@dataclasses.dataclass
class TrainingReport:
    """What the loop did so far.

    Attributes:
        steps: finished.
        seconds: of the loop.
        tokens: trained on, by one model.
        dropped: slots dropped, all layers and steps.
        losses: of every step, nats per byte.
        loads: [layers, E], slots per expert of the last step; None before the first.
        stopped: somebody asked to stop before the last step.
        difference: None where every compared loss agreed, or nothing was compared.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    dropped: int = 0
    losses: list[np.float32] = dataclasses.field(default_factory=list)
    loads: npt.NDArray[Any] | None = None
    stopped: bool = False
    difference: Difference | None = None


def train(
    config: DemoConfig,
    trainers: Sequence[Steps],
    batches: Iterable[npt.NDArray[Any]],
    progress: Progress,
    stop: Stop,
) -> TrainingReport:
    """Steps every trainer on the same batches.

    Args:
        config: of the demo; `steps` and the batch are read.
        trainers: one, or a model and its twin. The loop ends at the first loss that differs.
        batches: endless.
        progress: told about every step.
        stop: asked before every step.
    """
    report = TrainingReport()
    started = time.perf_counter()
    for _, window in zip(range(config.steps), batches, strict=False):
        if stop.requested:
            report.stopped = True
            break
        results = [trainer.step(window) for trainer in trainers]
        _note(report, results, config)
        report.seconds = time.perf_counter() - started
        speed = config.tokens_per_step / results[0].seconds
        progress.step(report.steps, results[0], speed, report.dropped)
        if report.difference is not None:
            break
        if config.loss_tolerance and report.steps % STEPS_ALONE == 0:
            for twin in trainers[1:]:
                twin.follow(trainers[0])
    return report


def _note(report: TrainingReport, results: Sequence[StepResult], config: DemoConfig) -> None:
    first = results[0]
    report.steps += 1
    report.tokens += config.tokens_per_step
    report.dropped += first.dropped
    report.losses.append(first.loss)
    report.loads = first.loads
    for twin in results[1:]:
        if not _agree(first.loss, twin.loss, config.loss_tolerance):
            report.difference = Difference(report.steps, first.loss, twin.loss)


def _agree(ours: np.float32, twins: np.float32, tolerance: float) -> bool:
    # Bits, not values: a NaN equals itself here and -0.0 differs from 0.0.
    if tolerance == 0:
        return ours.tobytes() == twins.tobytes()
    return bool(abs(ours - twins) <= tolerance * abs(twins))
