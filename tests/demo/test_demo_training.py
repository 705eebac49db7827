"""The demo's loop and verdict, with trainers that compute nothing."""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.demo.cli import add_arguments, make_config
from ep_runtime_client.demo.config import DemoConfig, default_ep_size
from ep_runtime_client.demo.interrupt import StopRequest
from ep_runtime_client.demo.trainer import StepResult
from ep_runtime_client.demo.training import TrainingReport, train

LOADS = np.array([[3, 1]])


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
    """Hears of every step and says nothing."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, done: int, result: StepResult, tokens_per_s: float, dropped: int) -> None:
        self.seen.append(done)


class StopAt:
    """Asks to stop once `progress` has seen that many steps."""

    def __init__(self, progress: Silent, steps: int) -> None:
        self._progress, self._steps = progress, steps

    @property
    def requested(self) -> bool:
        return len(self._progress.seen) >= self._steps


def windows() -> Iterator[np.ndarray]:
    return itertools.repeat(np.zeros((1, 2), np.int32))


def run(
    *losses: Sequence[float], steps: int = 3, stop_at: int = 100, platform: str = "cpu"
) -> tuple[TrainingReport, Silent]:
    progress = Silent()
    config = DemoConfig(steps=steps, batch=8, seq=4, platform=platform)
    trainers = [Scripted(values) for values in losses]
    report = train(config, trainers, windows(), progress, StopAt(progress, stop_at))
    return report, progress


def test_the_loop_counts_steps_tokens_and_drops() -> None:
    report, progress = run([3.0, 2.0, 1.0])
    assert (report.steps, report.tokens, report.dropped) == (3, 3 * 32, 6)
    np.testing.assert_array_equal(report.losses, np.float32([3, 2, 1]))
    assert progress.seen == [1, 2, 3]
    assert report.difference is None
    assert not report.stopped


def test_a_stop_request_ends_the_loop_between_steps() -> None:
    report, _ = run([3.0, 2.0, 1.0], stop_at=2)
    assert report.steps == 2
    assert report.stopped


def test_bit_equal_twins_have_no_difference_even_with_nan() -> None:
    report, _ = run([1.0, np.nan], [1.0, np.nan], steps=2)
    assert report.difference is None


def test_the_first_differing_step_ends_a_comparison() -> None:
    last_bit = float(np.nextafter(np.float32(2.0), np.float32(3.0)))
    report, _ = run([3.0, 2.0, 1.0], [3.0, last_bit, 1.0])
    assert report.difference is not None
    assert report.difference.step == 2
    assert report.difference.twin_loss == np.float32(last_bit)


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
    config = DemoConfig(steps=5, batch=2, seq=8, compare=True, platform=platform)
    model, twin = Scripted([2.0] * 5), Scripted([2.0] * 5)
    progress = Silent()
    train(config, [model, twin], windows(), progress, StopAt(progress, 5))
    assert twin.followed == [(step, model) for step in steps]
    assert not model.followed


def test_a_difference_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    from ep_runtime_client.demo import job
    from ep_runtime_client.demo.render import Reporter

    report, _ = run([3.0, 2.0], [3.0, 2.5], steps=2)
    config = DemoConfig(compare=True)
    stop = SimpleNamespace(requested=False)
    assert job.verdict(config, report, Reporter(config), stop) == job.DIFFERENT == 3
    assert "step 2 is the first whose loss differs: 2 (0x40000000)" in capsys.readouterr().out


def test_the_first_sigint_asks_and_the_second_interrupts() -> None:
    asked: list[bool] = []

    def twice() -> None:
        with StopRequest(lambda: asked.append(True)) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        twice()
    assert asked == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_sigint_amid_garbage_collection_is_not_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def interrupt(_phase: str, _info: Any) -> None:
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)

    def twice() -> None:
        with StopRequest(lambda: None):
            signal.raise_signal(signal.SIGINT)
            gc.callbacks.append(interrupt)
            gc.collect()
            threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert "Traceback" not in capfd.readouterr().err


class InterruptedDevice(io.RawIOBase):
    """A device during whose first write Ctrl-C is typed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written.append(bytes(data))
        if len(self.written) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return len(data)


def test_a_sigint_in_the_middle_of_a_write_is_reported_on_the_same_stream() -> None:
    device = InterruptedDevice()
    stream = io.BufferedWriter(device)

    def say(text: bytes) -> None:
        stream.write(text)
        stream.flush()

    with StopRequest(lambda: say(b"stopping")) as stop:
        say(b"step 1")
        assert stop.requested
    assert device.written == [b"step 1", b"stopping"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"devices": 6}, "--ep must be a divisor of devices=6, got 4"),
        ({"num_experts": 6}, "--experts must be a multiple of ep_size=4, got 6"),
        ({"batch": 12}, "--batch must be a multiple of devices=8, got 12"),
        ({"top_k": 9}, "--top-k must be 1 to num_experts=8, got 9"),
        ({"seq": 1}, "--seq must be 2 to 1024, got 1"),
        ({"compare": True, "transport": "xla"}, "--transport must be auto with --compare"),
        (
            {"transport": "nvlink"},
            "--transport must be one of ['auto', 'memfd', 'xla'] with --plat",
        ),
        (
            {"platform": "gpu", "transport": "memfd"},
            "--transport must be one of ['auto', 'nvlink',",
        ),
        ({"mesh": "dp=2,ep=2"}, "--mesh must be axes whose product is devices=8, got 'dp=2,ep=2'"),
        ({"mesh": "dp=4,fsdp=2"}, "--mesh must be axes with an ep among them, got"),
        ({"mesh": "dp=8,ep"}, "--mesh must be as dp=2,fsdp=2,ep=2 with axes of ('dp', 'fsdp',"),
        ({"mesh": "ep=2,ep=4"}, "--mesh must be as dp=2,fsdp=2,ep=2 with axes of"),
        ({"mesh": "pp=2,ep=4"}, "--mesh must be as dp=2,fsdp=2,ep=2 with axes of"),
        (
            {"mesh": "fsdp=2,ep=4", "rules": "shard-exp-on-fsdp", "num_experts": 12},
            "--experts must be a multiple of ep_size=4 x fsdp_size=2, got 12",
        ),
        ({"rules": "fsdp"}, "--rules must be one of ('fsdp+ep', 'shard-exp-on-fsdp'), got 'fsdp'"),
        ({"optimizer": "sgd"}, "--optimizer must be one of ('adamw', 'muon'), got 'sgd'"),
        (
            {"recipe": "bf16,fp4"},
            "--recipe must be of ('f32', 'bf16', 'fp8', 'fp8-block', 'mxfp8')",
        ),
        ({"recipe": "fp8,fp8"}, "--recipe must be different ones, got 'fp8,fp8'"),
        ({"recipe": "bf16,fp8", "compare": True}, "--recipe must be one with --compare"),
        ({"plot": "/nowhere/at/all.png"}, "--plot must be a file in a directory that exists, got"),
    ],
)
def test_options_that_do_not_fit_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        DemoConfig(**change).checked()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(("devices", "ep_size"), [(1, 1), (2, 2), (4, 2), (8, 4), (3, 3)])
def test_the_default_ep_size_divides_the_devices(devices: int, ep_size: int) -> None:
    assert default_ep_size(devices) == ep_size


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
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = make_config(parser.parse_args(options))
    assert (config.platform, config.devices) == (platform, devices)


def test_gpus_that_are_wanted_and_not_there_are_an_error_that_says_why(
    gpus_found: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = gpus.GpuFinding("WARN", "JAX has a plugin, this package has no CUDA", "build it")
    monkeypatch.setattr(gpus, "check", lambda: state)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(InvalidArgumentError, match=r"--platform gpu .*no CUDA \(build it\)"):
        make_config(parser.parse_args(["--platform", "gpu"]))


@pytest.mark.usefixtures("gpus_found")
def test_mesh_and_ep_exclude_each_other_and_mesh_says_how_many_devices() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = make_config(parser.parse_args(["--mesh", "fsdp=2,ep=2", "--batch", "4"]))
    assert (config.devices, config.axes) == (4, {"fsdp": 2, "ep": 2})
    assert make_config(parser.parse_args([])).axes == {"dp": 2, "ep": 4}
    with pytest.raises(InvalidArgumentError, match="--ep must be left out with --mesh, got 2 and"):
        make_config(parser.parse_args(["--mesh", "fsdp=2,ep=2", "--ep", "2"]))


def test_the_number_of_parameters_is_what_the_model_has() -> None:
    import jax

    from ep_runtime_client.demo import model

    config = DemoConfig(hidden_size=32, mlp_dim=24, num_layers=3, num_experts=8)
    sizes = model.ModelConfig(num_layers=3, hidden_size=32, mlp_dim=24, num_experts=8)
    specs = [LayerSpec(f"{i}", top_k=2, num_experts=8, hidden_size=32) for i in range(3)]
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), sizes, specs))
    assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.usefixtures("gpus_found")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--hidden", "30"], "--hidden must be a multiple of the 4 heads, got 30"),
        (["--mlp-dim", "0"], "--mlp-dim must be at least 1, got 0"),
        (["--learning-rate", "0"], r"--learning-rate must be more than 0, got 0\.0"),
    ],
)
def test_sizes_that_no_model_has_are_refused(options: list[str], text: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(InvalidArgumentError, match=text):
        make_config(parser.parse_args(options))


def test_muon_gets_every_matrix_and_nothing_else() -> None:
    import jax

    from ep_runtime_client.demo import model, optimizers

    sizes = model.ModelConfig(num_layers=1, hidden_size=16, mlp_dim=8, num_experts=4)
    spec = LayerSpec("moe", top_k=2, num_experts=4, hidden_size=16)
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), sizes, [spec]))
    found = optimizers.matrices(params)["blocks"][0]
    wi, wo = params["blocks"][0]["moe"].wi, params["blocks"][0]["moe"].wo
    for dims, array in ((found["moe"].wi, wi), (found["moe"].wo, wo)):
        shape = (array.shape[dims.reduction_axis[0]], array.shape[dims.output_axis[0]])
        assert shape in ((16, 8), (8, 16))
    assert found["moe"].router is None
    assert found["moe_norm"] is None
    optimizer = optimizers.make_optimizer(DemoConfig(optimizer="muon"))
    jax.eval_shape(optimizer.init, params)
