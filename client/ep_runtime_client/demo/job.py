"""The demo from start to end: runtime, training, report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

import ep_runtime as ep
from ep_runtime.specs import GroupSpec
from ep_runtime_client import cli
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.corpus import Corpus, load_corpus, prompt, training_batches
from ep_runtime_client.demo.interrupt import StopRequest
from ep_runtime_client.demo.render import Announcement, Reporter, Run
from ep_runtime_client.demo.together import AgreedStop, Stop
from ep_runtime_client.demo.trainer import Trainer, make_mesh
from ep_runtime_client.demo.training import TrainingReport, train
from ep_runtime_client.jobs.members import INTERRUPTED, Member, start_jax
from ep_runtime_client.sessions.session import Session

DIFFERENT = 3
PROMPT_BYTES = 64
# Also how long create_group waits for the demo's other processes, which may still import JAX.
CONNECT_TIMEOUT_S = 120.0


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
    reporter.announce(corpus)
    with (
        StopRequest(reporter.stopping) as interrupted,
        ep.connect(config.address, timeout_s=CONNECT_TIMEOUT_S) as session,
        ep.translate_errors(),
    ):
        stop = AgreedStop(interrupted, member)
        runs = []
        for recipe in config.recipes:
            runs.append(_train_recipe(config, recipe, session, corpus, reporter, stop))
            if runs[-1].report.stopped:
                break
        if len(runs) > 1:
            reporter.runs(runs)
        if config.plot is not None and member.index == 0 and runs[0].report.steps:
            _plot(config.plot, config, runs, reporter)
        if session.has_daemon and member.index == 0:
            # Several groups have layers of the same names; wide shows the groups.
            wide = ["-o", "wide"] if config.compare or len(config.recipes) > 1 else []
            cli.main(["handles", "--address", session.address, *wide])
    return verdict(config, runs[0].report, reporter, interrupted)


def _train_recipe(
    config: DemoConfig,
    recipe: str,
    session: Session,
    corpus: Corpus,
    reporter: Reporter,
    stop: Stop,
) -> Run:
    """Trains one recipe from start to end; the last one's groups stay open to be looked at."""
    last = recipe == config.recipes[-1]
    if len(config.recipes) > 1:
        reporter.say(f"recipe {recipe}")
    trainers = _start(config, recipe, session, reporter)
    batches = training_batches(corpus, batch=config.batch, seq=config.seq, seed=config.seed)
    with reporter:
        report = train(config, trainers, batches, reporter, stop)
    reporter.summary(report)
    held_out = _held_out(trainers[0], corpus, reporter) if report.steps else None
    if report.steps and last and not stop.requested:
        _sample(config, trainers[0], corpus, reporter, stop)
    if not last:
        trainers[0].close()
    return Run(recipe, report, held_out)


def _start(config: DemoConfig, recipe: str, session: Session, reporter: Reporter) -> list[Trainer]:
    mesh = make_mesh(config)
    name = "demo" if len(config.recipes) == 1 else f"demo-{recipe}"
    trainers = [
        Trainer(config, session, mesh, name=name, transport=config.transport, recipe=recipe)
    ]
    group = trainers[0].group
    if recipe == config.recipes[0]:
        reporter.announce_runtime(
            Announcement(
                session.address,
                _travel(group.spec),
                group.staging_bytes_per_rank,
                session.has_daemon,
            )
        )
    if config.compare:
        trainers.append(
            Trainer(config, session, mesh, name="demo-xla", transport="xla", recipe=recipe)
        )
    seconds = sum(trainer.compile() for trainer in trainers)
    reporter.say(f"compiled in {seconds:.1f} s")
    return trainers


def _travel(spec: GroupSpec) -> str:
    """How rows travel: the transport, and how far its windows reach where they do not reach all."""
    inside, between = ("nvlink", "nccl") if spec.transport == "nccl" else (spec.transport, "xla")
    if not spec.node_size or (between == "nccl" and spec.node_size == 1):
        return spec.transport
    return f"{inside} per node of {spec.node_size} ranks, between nodes {between}"


def _held_out(trainer: Trainer, corpus: Corpus, reporter: Reporter) -> float | None:
    losses = list(trainer.held_out_losses(corpus))
    if not losses:
        return None
    loss = float(np.mean(losses))
    reporter.held_out(loss, corpus)
    return loss


def _plot(path: str, config: DemoConfig, runs: Sequence[Run], reporter: Reporter) -> None:
    # Only a picture needs matplotlib.
    from ep_runtime_client.demo.plot import write_plot

    write_plot(path, config, [run for run in runs if run.report.steps])
    reporter.say(f"loss curves: {path}")


def _sample(
    config: DemoConfig, trainer: Trainer, corpus: Corpus, reporter: Reporter, stop: Stop
) -> None:
    start = prompt(corpus, PROMPT_BYTES)
    written = itertools.islice(trainer.continuation(start), config.sample_bytes)
    text = bytes(itertools.takewhile(lambda _: not stop.requested, written))
    if text:
        reporter.continuation(start, text)


def verdict(config: DemoConfig, report: TrainingReport, reporter: Reporter, stop: Stop) -> int:
    """Says how the comparison ended; gives the exit code of `run`."""
    if report.difference is not None:
        reporter.different(report.difference)
        return DIFFERENT
    if config.compare and report.steps:
        reporter.equal(report, config.loss_tolerance)
    return INTERRUPTED if stop.requested else 0
