"""The demo from start to end: runtime, training, report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import ep_runtime as ep
from ep_runtime.specs import GroupSpec
from ep_runtime_client import cli
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.corpus import Corpus, load_corpus, training_batches
from ep_runtime_client.demo.render import Difference, Report, Reporter
from ep_runtime_client.demo.trainer import StepResult, Trainer, make_mesh
from ep_runtime_client.jobs.members import INTERRUPTED, Member, start_jax
from ep_runtime_client.sessions.session import Session

DIFFERENT = 3
# Also how long create_group waits for the demo's other processes, which may still import JAX.
CONNECT_TIMEOUT_S = 120.0
FIND_TIMEOUT_S = 2.0
# Steps between which a twin that may differ by rounding keeps parameters of its own: training grows
# the last bit of an f32 to a tenth of a percent within ten steps. The second step's loss shows the
# first one's gradients.
STEPS_ALONE = 2


class Steps(Protocol):
    """The methods of a trainer that the training loop calls."""

    def step(self, window: npt.NDArray[Any]) -> StepResult: ...

    def follow(self, other: Any) -> None:
        """Goes on from the state of `other`, another of its kind."""


@dataclasses.dataclass
class Stop:
    """Whether Ctrl-C asked to end after what is under way."""

    requested: bool = False


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """The first SIGINT in the block sets `requested`; a second one raises KeyboardInterrupt."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        # Not through a stream: the signal may have come in the middle of a write to it.
        os.write(2, b"\nstopping after what is under way; Ctrl-C again ends at once\n")

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def run(config: DemoConfig, member: Member | None = None) -> int:
    """Runs the demo, or one process's part of it.

    Returns:
        Exit code. 0: done. 3: --compare found a step whose loss differs. 130: Ctrl-C, what was
        reported is partial.

    Raises:
        EpRuntimeError: of the runtime, by its own class.
    """
    member = member or Member()
    start_jax(config.devices, member, config.platform)
    corpus = load_corpus()
    reporter = Reporter(config)
    alone = member.processes == 1  # several processes cannot stop at one step; they end at once
    with (
        stop_on_interrupt() if alone else contextlib.nullcontext(Stop()) as stop,
        ep.connect(config.address, timeout_s=CONNECT_TIMEOUT_S) as session,
        ep.translate_errors(),
    ):
        reports: list[Report] = []
        for recipe in config.recipes:
            reports.append(_train_recipe(config, recipe, session, corpus, reporter, stop))
            if stop.requested:
                break
        if config.plot is not None and member.index == 0 and reports[0].losses:
            _plot(config.plot, config, reports, reporter)
        if session.has_daemon and member.index == 0:
            # Several groups have layers of the same names; wide shows the groups.
            wide = ["-o", "wide"] if config.compare or len(config.recipes) > 1 else []
            cli.main(["handles", "--address", session.address, *wide])
        reporter.end(reports)
    if reports[0].difference is not None:
        return DIFFERENT
    return INTERRUPTED if stop.requested else 0


def _train_recipe(
    config: DemoConfig,
    recipe: str,
    session: Session,
    corpus: Corpus,
    reporter: Reporter,
    stop: Stop,
) -> Report:
    """Trains one recipe from start to end; the last one's groups stay open to be looked at."""
    mesh = make_mesh(config)
    name = "demo" if len(config.recipes) == 1 else f"demo-{recipe}"
    trainers = [
        Trainer(config, session, mesh, name=name, transport=config.transport, recipe=recipe)
    ]
    if recipe == config.recipes[0]:
        group = trainers[0].group
        reporter.runtime(
            corpus.source, session.address, _travel(group.spec), group.staging_bytes_per_rank
        )
        if session.has_daemon:
            reporter.hint(None if _is_default(session) else session.address)
    if config.compare:
        trainers.append(
            Trainer(config, session, mesh, name="demo-xla", transport="xla", recipe=recipe)
        )
    batches = training_batches(corpus, batch=config.batch, seq=config.seq, seed=config.seed)
    with reporter.training(recipe):
        for trainer in trainers:
            trainer.compile()
        report = train(config, trainers, batches, reporter, stop)
    report.recipe = recipe
    if report.losses:
        losses = list(trainers[0].held_out_losses(corpus))
        report.held_out = float(np.mean(losses)) if losses else None
    reporter.summary(report, corpus.entropy_nats)
    if recipe != config.recipes[-1]:
        trainers[0].close()
    return report


def _travel(spec: GroupSpec) -> str:
    """How rows travel: the transport, and how far its windows reach if not to all ranks."""
    inside, between = ("nvlink", "nccl") if spec.transport == "nccl" else (spec.transport, "xla")
    if not spec.node_size or (between == "nccl" and spec.node_size == 1):
        return spec.transport
    return f"{inside} per node of {spec.node_size} ranks, between nodes {between}"


def _is_default(session: Session) -> bool:
    """Reading commands without --address ask the session's daemon."""
    try:
        return source.default_place(FIND_TIMEOUT_S).directory == session.directory
    except ep.EpRuntimeError:
        return False


def train(
    config: DemoConfig,
    trainers: Sequence[Steps],
    batches: Iterable[npt.NDArray[Any]],
    reporter: Reporter,
    stop: Stop,
) -> Report:
    """Steps every trainer on the same batches: one, or a model and its twin.

    Ends at the first loss that differs. `stop` is asked before every step.
    """
    report = Report()
    started = time.perf_counter()
    for _, window in zip(range(config.steps), batches, strict=False):
        if stop.requested:
            break
        results = [trainer.step(window) for trainer in trainers]
        report.losses.append(results[0].loss)
        report.dropped += results[0].dropped
        report.step_seconds.append([result.seconds for result in results])
        report.seconds = time.perf_counter() - started
        reporter.step(report, results[0])
        for twin in results[1:]:
            if not _agree(results[0].loss, twin.loss, config.loss_tolerance):
                report.difference = Difference(len(report.losses), results[0].loss, twin.loss)
                return report
        if config.loss_tolerance and len(report.losses) % STEPS_ALONE == 0:
            for other in trainers[1:]:
                other.follow(trainers[0])
    return report


def _agree(ours: np.float32, twins: np.float32, tolerance: float) -> bool:
    # Bits, not values: a NaN equals itself here and -0.0 differs from 0.0.
    if tolerance == 0:
        return ours.tobytes() == twins.tobytes()
    return bool(abs(ours - twins) <= tolerance * abs(twins))


def _plot(path: str, config: DemoConfig, reports: Sequence[Report], reporter: Reporter) -> None:
    # Only a picture needs matplotlib.
    from ep_runtime_client.demo.plot import write_plot

    write_plot(path, config, [report for report in reports if report.losses])
    reporter.say(f"loss curves: {path}")
