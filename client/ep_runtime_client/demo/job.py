"""Runs the demo: runtime, training, report."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

import ep_runtime as ep
from ep_runtime_client import cli
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.reporter import Report, Reporter
from ep_runtime_client.demo.trainer import StepResult, Trainer, make_mesh
from ep_runtime_client.jobs.members import INTERRUPTED, Member, start_jax
from ep_runtime_client.sessions.session import Session

Step = Callable[[], list[StepResult]]
DIFFERENT = 3
# Includes the time that create_group waits for other processes, which may still import JAX.
CONNECT_TIMEOUT_S = 120.0
# If losses may differ (`loss_tolerance`), twins copy the first trainer's state every so many steps:
# training amplifies the last bit of an f32 to a tenth of a percent within ten steps. Two steps,
# because the second step's loss depends on the first step's gradients.
STEPS_ALONE = 2


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first SIGINT in the block sets; a second one raises
    KeyboardInterrupt."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        # Write to the descriptor, because the signal may have interrupted a write to the stream.
        os.write(2, b"\nstopping after what is under way; Ctrl-C again ends at once\n")

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


class Death:
    """Makes the last process kill itself in a step half way; the others report it.

    Attributes:
        every: number of steps between copies of the state. Death comes two steps after a copy, so
            that a step is repeated and its losses can be compared.
    """

    def __init__(self, config: DemoConfig, member: Member, reporter: Reporter) -> None:
        self.every = max(config.steps // 10, 2)
        self._step = config.steps // 2 // self.every * self.every + 1
        self._member, self._reporter = member, reporter
        self._word = Path(member.directory) / "died.json"
        self._before: list[np.float32] = []
        self._making_s: float | None = None  # time to make group and step after the loss

    def strike(self, done: int) -> None:
        """Kills the last process at its step. `done`: steps so far."""
        if done == self._step and self._member.index == self._member.processes - 1:
            self._word.write_text(json.dumps({"pid": os.getpid(), "at": time.monotonic()}))
            os.kill(os.getpid(), signal.SIGKILL)

    def say_who(
        self, generation: ep.distributed.Generation, fitted: ep.distributed.FittedMesh
    ) -> None:
        """Reports which process died and how many continue."""
        live = {device.process_index for device in generation.devices}
        idle = f", {len(fitted.idle)} idle" if fitted.idle else ""
        self._reporter.say(
            f"process {self._member.processes - 1} (pid {self._told()['pid']}) was killed in step "
            f"{self._step + 1}; {len(live)} processes go on with {fitted.mesh.size} devices{idle}"
        )

    def made(self, report: Report, seconds: float) -> None:
        """Records the training so far, and the time that the new group and step took."""
        self._before, self._making_s = list(report.losses), seconds

    def say_how_it_went_on(self, step: int, loss: np.float32) -> None:
        """Reports the time of the recovery, after the first new step, which has the number
        `step`."""
        if self._making_s is None:
            return
        seconds = time.monotonic() - self._told()["at"]
        again = f", the first time {self._before[step - 1]:.3f}" if step <= self._step else ""
        self._reporter.say(
            f"step {step} is done {seconds:.1f} s after the kill, {self._making_s:.1f} s of them "
            f"for the new step: loss {loss:.3f}{again}; last loss before {self._before[-1]:.3f}"
        )
        self._making_s = None

    def show_events(self, address: str) -> None:
        """Runs the operators' commands that show the death."""
        since = math.ceil(time.monotonic() - self._told()["at"]) + 1
        kinds = ["--type=session.dead", "--type=group.broken", "--type=group.formed"]
        for words in (["sessions", "--all"], ["events", *kinds, "--since", f"{since}s"]):
            self._reporter.say(f"$ ep-runtime {' '.join(words)}")
            cli.main([*words, "--address", address])

    def _told(self) -> dict[str, float]:
        told: dict[str, float] = json.loads(self._word.read_text())
        return told


def run(config: DemoConfig, member: Member | None = None) -> int:
    """Runs the demo, or one process's part of it.

    Returns:
        The exit code: 0, 3 if a twin's loss differed, or 130 after Ctrl-C.
    """
    member = member or Member()
    start_jax(config.devices, member, config.platform, survive=config.survive)
    reporter = Reporter(config)
    death = Death(config, member, reporter)
    alone = member.processes == 1  # several processes cannot stop at the same step
    with (
        stop_on_interrupt() if alone else contextlib.nullcontext(threading.Event()) as stop,
        ep.connect(
            config.address,
            timeout_s=CONNECT_TIMEOUT_S,
            job=member.name if config.survive else None,
            on_loss="continue" if config.survive else "end",
        ) as session,
        ep.translate_errors(),
    ):
        if config.survive:
            report = _train_surviving(config, session, reporter, death)
        else:
            report = _train(config, session, reporter, stop)
        if session.address != "none" and member.index == 0:
            # The layers of a twin have the same names; the wide output shows the groups.
            wide = ["-o", "wide"] if config.compare else []
            cli.main(["handles", "--address", session.address, *wide])
            if config.survive:
                death.show_events(session.address)
    reporter.summary(report)
    if report.difference is not None:
        return DIFFERENT
    return INTERRUPTED if stop.is_set() else 0


def _train(
    config: DemoConfig, session: Session, reporter: Reporter, stop: threading.Event
) -> Report:
    mesh = make_mesh(config)
    trainers = [Trainer(config, session, mesh, name="demo", transport=config.transport)]
    reporter.runtime(session, trainers[0].group)
    if config.compare:
        trainers.append(Trainer(config, session, mesh, name="demo-xla", transport="xla"))
    with reporter.training():
        for trainer in trainers:
            trainer.compile()
        return train(config, trainers, _batches(config), reporter, stop, Report())


def _train_surviving(
    config: DemoConfig, session: Session, reporter: Reporter, death: Death
) -> Report:
    report, state = Report(), ep.distributed.State(session, retain_s=0)
    sizes: dict[str, Any] = {"num_experts": config.num_experts, "batch": config.batch}
    with reporter.training():
        for generation in ep.distributed.generations():
            with generation:
                fitted = ep.distributed.fit_mesh(generation.devices, {"ep": None}, **sizes)
                if not fitted.mesh.local_devices:
                    generation.wait()
                started = time.perf_counter()
                name, transport = f"demo-{generation.number}", config.transport
                trainer = Trainer(config, session, fitted.mesh, name=name, transport=transport)
                if state.committed is None:
                    reporter.runtime(session, trainer.group)
                    trainer.compile()
                    state.commit(0, trainer.state)
                else:
                    death.say_who(generation, fitted)
                    done = trainer.compile(state.restore)
                    death.made(report, time.perf_counter() - started)
                    report.rewind(done)
                run = functools.partial(_step, generation, trainer, state, report, death)
                train(config, [trainer], _batches(config), reporter, threading.Event(), report, run)
    state.release()
    return report


def _step(
    generation: ep.distributed.Generation,
    trainer: Trainer,
    state: ep.distributed.State,
    report: Report,
    death: Death,
    step: Step,
) -> list[StepResult]:
    """Runs a step in all processes or none, and sometimes copies the state."""
    death.strike(len(report.losses))
    results, done = generation.step(step), len(report.losses) + 1
    if done % death.every == 0:
        state.commit(done, trainer.state)
    death.say_how_it_went_on(done, results[0].loss)
    return results


def train(
    config: DemoConfig,
    trainers: Sequence[Trainer],
    batches: Iterable[npt.NDArray[Any]],
    reporter: Reporter,
    stop: threading.Event,
    report: Report,
    run: Callable[[Step], list[StepResult]] = operator.call,
) -> Report:
    """Runs every trainer on the same batches: one, or a model and its twin; `run` runs a step.

    Continues after the steps in `report`. Ends at the first loss that differs. Checks `stop` before
    every step.
    """
    started = time.perf_counter() - report.seconds
    for window in itertools.islice(batches, len(report.losses), config.steps):
        if stop.is_set():
            break
        results = run(lambda: [trainer.step(window) for trainer in trainers])  # noqa: B023
        report.losses.append(results[0].loss)
        report.drops.append(results[0].dropped)
        report.step_seconds.append([result.seconds for result in results])
        report.seconds = time.perf_counter() - started
        reporter.step(report, results[0])
        for twin in results[1:]:
            ours, twins, tolerance = results[0].loss, twin.loss, config.loss_tolerance
            # Compare bits, not values: a NaN equals itself here, and -0.0 differs from 0.0.
            same = ours.tobytes() == twins.tobytes()
            if not (abs(ours - twins) <= tolerance * abs(twins) if tolerance else same):
                report.difference = ours, twins
                return report
        if config.loss_tolerance and len(report.losses) % STEPS_ALONE == 0:
            for other in trainers[1:]:
                other.follow(trainers[0])
    return report


def _batches(config: DemoConfig) -> Iterator[npt.NDArray[np.int32]]:
    return training_batches(load_text(), batch=config.batch, seq=config.seq, seed=config.seed)


def load_text() -> npt.NDArray[np.uint8]:
    """Returns text to train on, as bytes: Python's help topics without repeated paragraphs."""
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Repeated paragraphs may differ in indentation and line breaks.
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return np.frombuffer("\n\n".join(paragraphs.values()).encode(), dtype=np.uint8)


def training_batches(
    text: npt.NDArray[np.uint8], *, batch: int, seq: int, seed: int
) -> Iterator[npt.NDArray[np.int32]]:
    """Yields endless batches of random windows, [batch, seq + 1] int32, the same per seed."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(seq + 1)
    while True:
        starts = rng.integers(0, len(text) - seq, size=(batch, 1))
        yield text[starts + offsets].astype(np.int32)
