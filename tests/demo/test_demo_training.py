"""The demo's loop and verdict, with trainers that compute nothing."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.demo.cli import add_arguments, make_config
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.job import train
from ep_runtime_client.demo.render import Difference, Report
from ep_runtime_client.demo.trainer import StepResult

LOADS = np.array([[3, 1]])


def config_of(*options: str) -> DemoConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return make_config(parser.parse_args(options))


class Scripted:
    """A trainer whose losses are given."""

    def __init__(self, losses: Sequence[float]) -> None:
        self._losses = iter(losses)
        self.steps = 0
        self.followed: list[tuple[int, Any]] = []

    def step(self, window: Any) -> StepResult:
        self.steps += 1
        return StepResult(np.float32(next(self._losses)), LOADS, 2, 0.5)

    def follow(self, other: Any) -> None:
        self.followed.append((self.steps, other))


class Silent:
    """Hears of every step and says nothing; asks to stop after `stop_at` of them."""

    def __init__(self, stop_at: int = 100) -> None:
        self.seen, self._stop_at = 0, stop_at

    def step(self, report: Report, result: StepResult) -> None:
        self.seen += 1

    @property
    def requested(self) -> bool:
        return self.seen >= self._stop_at


def run(
    *losses: Sequence[float], steps: int = 3, stop_at: int = 100, platform: str = "cpu"
) -> tuple[Report, list[Scripted]]:
    config = DemoConfig(steps=steps, batch=8, seq=4, platform=platform)
    trainers = [Scripted(values) for values in losses]
    windows = itertools.repeat(np.zeros((1, 2), np.int32))
    silent = Silent(stop_at)
    return train(config, trainers, windows, silent, silent), trainers


def test_the_loop_counts_steps_drops_and_seconds() -> None:
    report, _ = run([3.0, 2.0, 1.0])
    np.testing.assert_array_equal(report.losses, np.float32([3, 2, 1]))
    assert (report.dropped, report.step_seconds) == (6, [[0.5]] * 3)
    assert report.tokens_per_s(32) == [64.0]
    assert report.difference is None


def test_a_stop_request_ends_the_loop_between_steps() -> None:
    assert len(run([3.0, 2.0, 1.0], stop_at=2)[0].losses) == 2


def test_bit_equal_twins_have_no_difference_even_with_nan() -> None:
    assert run([1.0, np.nan], [1.0, np.nan], steps=2)[0].difference is None


def test_the_first_differing_step_ends_a_comparison() -> None:
    last_bit = float(np.nextafter(np.float32(2.0), np.float32(3.0)))
    report, _ = run([3.0, 2.0, 1.0], [3.0, last_bit, 1.0])
    assert report.difference == Difference(2, np.float32(2.0), np.float32(last_bit))
    assert len(report.losses) == 2


def test_twins_on_gpus_agree_within_a_tolerance() -> None:
    assert run([2.0, 4.0], [2.001, 4.003], platform="gpu", steps=2)[0].difference is None
    for far in (2.003, np.nan):
        report, _ = run([2.0, 2.0], [2.0, far], platform="gpu", steps=2)
        assert report.difference is not None
        assert report.difference.step == 2


@pytest.mark.parametrize(("platform", "steps"), [("gpu", [2, 4]), ("cpu", [])])
def test_a_twin_that_may_differ_goes_on_from_the_models_state(
    platform: str, steps: list[int]
) -> None:
    _, (model, twin) = run([2.0] * 5, [2.0] * 5, steps=5, platform=platform)
    assert twin.followed == [(step, model) for step in steps]
    assert not model.followed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--devices 6 --mesh ep=4", "--mesh must be axes whose product is devices=6, got 'ep=4'"),
        ("--experts 6", "--experts must be a multiple of ep=4 of the mesh, got 6"),
        ("--batch 12", "--batch must be a multiple of devices=8, got 12"),
        ("--top-k 9", "--top-k must be 1 to experts=8, got 9"),
        ("--seq 1", "--seq must be 2 to 1024, got 1"),
        ("--hidden 30", "--hidden must be a multiple of the 4 heads, got 30"),
        ("--compare --transport xla", "--transport must be auto with --compare"),
        ("--transport nvlink", "--transport must be one of ['auto', 'memfd', 'xla'] with --plat"),
        ("--mesh dp=4,fsdp=2", "--mesh must be axes with an ep among them, got"),
        ("--mesh dp=8,ep", "--mesh must be as dp=2,fsdp=2,ep=2 with axes of ('dp', 'fsdp',"),
        ("--mesh ep=2,ep=4", "--mesh must be as dp=2,fsdp=2,ep=2 with axes of"),
        ("--mesh pp=2,ep=4", "--mesh must be as dp=2,fsdp=2,ep=2 with axes of"),
        (
            "--mesh fsdp=2,ep=4 --rules shard-exp-on-fsdp --experts 12",
            "--experts must be a multiple of ep=4 x fsdp=2 of the mesh, got 12",
        ),
        ("--recipe bf16,fp4", "--recipe must be of ('f32', 'bf16', 'fp8', 'fp8-block', 'mxfp8')"),
        ("--recipe fp8,fp8", "--recipe must be one with --compare, else different ones, got"),
        ("--recipe bf16,fp8 --compare", "--recipe must be one with --compare"),
        ("--plot /nowhere/at/all.png", "--plot must be a file in a directory that exists, got"),
        ("--processes 3", "--processes must be a divisor of devices=8, got 3"),
        ("--nodes 2 --processes 1", "--processes must be a multiple of nodes=2, got 1"),
        ("--nodes 2 --transport nvlink", "--transport must be one of ['auto', 'memfd', 'xla']"),
        ("--nodes 2 --address node", "--address must be left out with --nodes"),
    ],
)
def test_options_that_do_not_fit_are_named(options: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        config_of("--platform", "cpu", *options.split())
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(("devices", "ep"), [(1, 1), (2, 2), (4, 2), (8, 4), (3, 3)])
def test_two_groups_share_the_devices_by_default(devices: int, ep: int) -> None:
    assert DemoConfig(devices=devices).axes == {"dp": devices // ep, "ep": ep}
    assert DemoConfig(devices=devices, nodes=2).axes == {"dp": 1, "ep": devices}


@pytest.fixture
def gpus_found(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """gpus_found(n): JAX and this package can use n GPUs."""

    def set_up(count: int) -> None:
        monkeypatch.setattr(gpus, "usable", lambda: count)

    set_up(0)
    return set_up


@pytest.mark.parametrize(
    ("found", "options", "platform", "devices"),
    [
        (0, [], "cpu", 8),
        (1, [], "gpu", 1),
        (4, [], "gpu", 4),
        (6, [], "gpu", 4),
        (16, [], "gpu", 8),
        (4, ["--devices", "2"], "gpu", 2),
        (4, ["--devices", "8"], "cpu", 8),
        (4, ["--mesh", "fsdp=2,ep=2"], "gpu", 4),
        (4, ["--platform", "cpu"], "cpu", 8),
        (2, ["--platform", "gpu"], "gpu", 2),
        (0, ["--platform", "gpu", "--devices", "2"], "gpu", 2),
    ],
)
def test_gpus_are_taken_where_enough_are_there(
    gpus_found: Callable[[int], None],
    found: int,
    options: list[str],
    platform: str,
    devices: int,
) -> None:
    gpus_found(found)
    config = config_of(*options)
    assert (config.platform, config.devices) == (platform, devices)


def test_gpus_that_are_wanted_and_not_there_are_an_error_that_says_why(
    gpus_found: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = gpus.GpuFinding("WARN", "JAX has a plugin, this package has no CUDA", "build it")
    monkeypatch.setattr(gpus, "check", lambda: state)
    with pytest.raises(InvalidArgumentError, match=r"--platform gpu .*no CUDA \(build it\)"):
        config_of("--platform", "gpu")


def test_the_number_of_parameters_is_what_the_model_has() -> None:
    import jax

    from ep_runtime_client.demo import model

    config = DemoConfig(hidden_size=32, mlp_dim=24, num_layers=3, num_experts=8)
    specs = [LayerSpec(f"{i}", top_k=2, num_experts=8, hidden_size=32) for i in range(3)]
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), config, specs))
    assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_muon_gets_every_matrix_and_nothing_else() -> None:
    import jax

    from ep_runtime_client.demo import model, optimizers

    config = DemoConfig(num_layers=1, hidden_size=16, mlp_dim=8, optimizer="muon")
    spec = LayerSpec("moe", top_k=2, num_experts=4, hidden_size=16)
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), config, [spec]))
    found = optimizers.matrices(params)["blocks"][0]
    wi, wo = params["blocks"][0]["moe"].wi, params["blocks"][0]["moe"].wo
    for dims, array in ((found["moe"].wi, wi), (found["moe"].wo, wo)):
        shape = (array.shape[dims.reduction_axis[0]], array.shape[dims.output_axis[0]])
        assert shape in ((16, 8), (8, 16))
    assert found["moe"].router is None
    assert found["moe_norm"] is None
    optimizer = optimizers.make_optimizer(config)
    jax.eval_shape(optimizer.init, params)
