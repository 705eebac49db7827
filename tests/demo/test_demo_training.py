"""The demo's options and its loop, with trainers that compute nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client import cli
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.demo.cli import make_config
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.job import Stop, train
from ep_runtime_client.demo.reporter import Report, Reporter
from ep_runtime_client.demo.trainer import StepResult


def config_of(*options: str) -> DemoConfig:
    return make_config(cli.make_parser("demo").parse_args(options))


class Scripted:
    """A trainer whose losses are given."""

    def __init__(self, losses: Sequence[float]) -> None:
        self._losses = iter(losses)
        self.followed = 0

    def step(self, window: Any) -> StepResult:
        return StepResult(np.float32(next(self._losses)), 2, 0.5)

    def follow(self, other: Any) -> None:
        self.followed += 1


def run(*losses: Sequence[float], platform: str = "cpu") -> tuple[Report, list[Any]]:
    config = DemoConfig(steps=len(losses[0]), platform=platform)
    trainers: list[Any] = [Scripted(values) for values in losses]
    windows = itertools.repeat(np.zeros((1, 2), np.int32))
    reporter = Reporter(config)
    with reporter.training():
        return train(config, trainers, windows, reporter, Stop(), Report()), trainers


def test_the_loop_counts_steps_drops_and_seconds_and_prints_lines(capsys: Any) -> None:
    report, _ = run([3.0, 2.0])
    np.testing.assert_array_equal(report.losses, np.float32([3, 2]))
    assert (report.dropped, report.step_seconds) == (4, [[0.5]] * 2)
    assert report.tokens_per_s(32) == [64.0]
    lines = ["compiling", *(f"step {n}/2  loss {4 - n}.000  4,096 tokens/s" for n in (1, 2))]
    assert capsys.readouterr().out.splitlines() == lines


def test_the_first_differing_step_ends_a_comparison(capsys: Any) -> None:
    assert run([1.0, np.nan], [1.0, np.nan])[0].difference is None
    last_bit = float(np.nextafter(np.float32(2.0), np.float32(3.0)))
    report, _ = run([3.0, 2.0, 1.0], [3.0, last_bit, 1.0])
    assert report.difference == (np.float32(2.0), np.float32(last_bit))
    assert len(report.losses) == 2
    Reporter(DemoConfig(compare=True)).summary(report)
    assert "step 2 is the first whose loss differs: 2 (0x40000000)" in capsys.readouterr().out


def test_twins_on_gpus_agree_within_a_tolerance_and_go_on_from_the_models_state() -> None:
    report, (model, twin) = run([2.0, 4.0, 2.0], [2.001, 4.003, 2.0], platform="gpu")
    assert report.difference is None
    assert (model.followed, twin.followed) == (0, 1)
    for far in (2.003, np.nan):
        assert run([2.0, 2.0], [2.0, far], platform="gpu")[0].difference is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--devices 6 --mesh ep=4", "--mesh must be axes of product devices=6, got 'ep=4'"),
        ("--experts 6", "--experts must be a multiple of ep=4 of the mesh, got 6"),
        ("--top-k 9", "--top-k must be 1 to experts=8, got 9"),
        ("--compare --transport xla", "--transport must be auto with --compare"),
        ("--transport nvlink", "--transport must be one of ['auto', 'memfd', 'xla'] with --plat"),
        ("--mesh dp=4,fsdp=2", "--mesh must be axes with an ep among them, got"),
        ("--mesh pp=2,ep=4", "--mesh must be as dp=2,fsdp=2,ep=2 with axes of"),
        ("--processes 3", "--processes must be a divisor of devices=8, got 3"),
        ("--survive", "--processes must be at least 2 with --survive, got 1"),
        ("--survive --processes 2 --steps 7", "--steps must be at least 8 with --survive, got 7"),
        ("--survive --processes 2 --mesh ep=8", "--mesh must be left to fit_mesh with --survive"),
        ("--survive --processes 2 --compare", "--compare must be off with --survive, got True"),
        ("--survive --processes 2 --address none", "--address must be a daemon's, which keeps"),
    ],
)
def test_options_that_do_not_fit_are_named(options: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        config_of("--platform", "cpu", *options.split())
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("found", "options", "platform", "devices"),
    [
        (0, "", "cpu", 8),
        (1, "", "gpu", 1),
        (6, "", "gpu", 4),
        (4, "--devices 2", "gpu", 2),
        (4, "--devices 8", "cpu", 8),
        (4, "--mesh fsdp=2,ep=2", "gpu", 4),
        (4, "--platform cpu", "cpu", 8),
    ],
)
def test_gpus_are_taken_if_enough_are_there(
    monkeypatch: pytest.MonkeyPatch, found: int, options: str, platform: str, devices: int
) -> None:
    monkeypatch.setattr(gpus, "usable", lambda: found)
    config = config_of(*options.split())
    assert (config.platform, config.devices) == (platform, devices)
