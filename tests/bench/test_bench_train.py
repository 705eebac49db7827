"""Tests the bench of whole training steps without a GPU: models on CPU devices, and tables."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_bench import cli
from ep_runtime_bench.base.clients import COMPILED, READY
from ep_runtime_bench.base.moe_cases import CASES, CPU_CASES, PADDED, KernelTime, Profile
from ep_runtime_bench.base.options import BenchOptions
from ep_runtime_bench.base.train_cases import CPU_MODELS, MODELS, Committed, Trained, TrainOrder
from ep_runtime_bench.moe import stock_layer
from ep_runtime_bench.train import client, model, train

MODEL = dataclasses.replace(CPU_MODELS["8-layers"], num_experts=8, sequence=8, vocabulary=32)


def order_of(subject: str, **change: Any) -> TrainOrder:
    how: dict[str, Any] = {"devices": 4, "platform": "cpu", "dtype": "float32", "repeats": 1}
    how |= {"address": "embedded", "model": MODEL, **change}
    return TrainOrder(subject=subject, name="tiny", **how)


# JAX's reader of profiles makes its types without modules; Python 3.12 warns, and it would abort.
@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.parametrize("beside", ["fsdp", pytest.param("tp", marks=pytest.mark.slow)])
def test_both_train_the_same_model(
    monkeypatch: pytest.MonkeyPatch, address: str, beside: str
) -> None:
    """Our layer also runs with copies of its state, in turns with steps that make no copy."""
    monkeypatch.setattr(client, "start_jax", lambda *args: None)
    monkeypatch.setattr(model, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(stock_layer, "CAPACITY_FACTOR", float(MODEL.num_experts))  # no drops
    ticks = itertools.count()
    losses = {}
    how = {"model": dataclasses.replace(MODEL, beside=beside), "routing": "zipf"}
    how |= {"address": address, "commit_every": 2}
    for subject, remat in (("xla", "plan"), (PADDED, "default")):
        heard: list[str] = []
        order = order_of(subject, remat=remat, **how)
        found = client.measure(order, heard.append, lambda: float(next(ticks)))
        assert heard == [READY, COMPILED]
        assert [*found.step_s] == [1 / client.ROUND]
        assert found.planned_bytes > 0
        assert found.profile.kernels
        assert (found.committed is None) == (subject == PADDED)
        if seen := found.committed:
            assert (seen.without_s, seen.copy_s, seen.with_s) == ([1 / 2], [1.0], [2 / 2])
            experts = MODEL.layers * MODEL.num_experts * 3 * MODEL.hidden * MODEL.inner * 4
            assert seen.copied_bytes > 3 * experts  # with AdamW's moments
        assert Trained.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) == found
        losses[subject] = np.array(found.losses)
    assert losses[PADDED][-1] < losses[PADDED][0]
    np.testing.assert_allclose(losses["xla"], losses[PADDED], rtol=1e-4)


def test_a_skewed_rank_gets_about_twice_its_share() -> None:
    big = dataclasses.replace(MODEL, num_experts=32, top_k=2, sequence=512)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("ep",))
    place = model.Layout.of(mesh)
    order = order_of("memfd", model=big, routing="double")
    idx = np.asarray(model.experts_of(order, place))
    counts = np.bincount(idx.ravel() // 8, minlength=4)
    np.testing.assert_allclose(counts[0] / counts.sum(), 0.5, atol=0.05)
    assert model.experts_of(order_of("memfd"), place) is None


def test_ours_is_measured_before_stock_with_and_without_remat() -> None:
    options = BenchOptions(
        benches=("train",),
        transports=("nvlink",),
        stock=True,
        devices=4,
        recipes=("none", "fp8"),
        remat=("none", "plan"),
        routings=("router", "zipf"),
    )
    found = train.orders(options.checked(), "address")
    each = [
        "nvlink",
        "nvlink remat plan",
        "nvlink fp8",
        "nvlink fp8 remat plan",
        PADDED,
        f"{PADDED} remat default",
    ]
    assert [order.label for order in found] == each * 2
    assert {order.name for order in found} == {"8-layers", "8-layers zipf"}
    assert TrainOrder.from_dict(dataclasses.asdict(found[0])) == found[0]


@pytest.mark.parametrize(
    ("flag", "values", "second"),
    [("--overlap", "on,off", "overlap off"), ("--precision", "fast,fp8", "fp8 sums")],
)
def test_the_command_measures_each_that_is_asked_for(flag: str, values: str, second: str) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    said = parser.parse_args(["train", "--transports", "memfd", flag, values])
    found = train.orders(cli.make_options(said), "address")
    assert [order.label for order in found] == ["memfd", f"memfd {second}"]


@pytest.mark.parametrize(
    ("said", "of_fp8"),
    [("call,step", ["memfd fp8", "memfd fp8 weights once"]), ("step", ["memfd fp8 weights once"])],
)
def test_weights_are_quantized_once_a_step_with_8_bit_recipes_alone(
    said: str, of_fp8: list[str]
) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    line = ["train", "--transports", "memfd", "--recipe", "none,fp8", "--quantized", said]
    found = train.orders(cli.make_options(parser.parse_args(line)), "address")
    assert [order.label for order in found] == ["memfd", *of_fp8]


@pytest.mark.slow  # see tests/modules/test_quantized_once.py for the library
@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
def test_weights_that_are_quantized_once_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "start_jax", lambda *args: None)
    monkeypatch.setattr(model, "LEARNING_RATE", 1e-2)
    losses = []
    for quantized in ("call", "step"):
        order = order_of("xla", recipe="fp8", quantized=quantized, remat="plan")
        found = client.measure(order, lambda stage: None, itertools.count(1.0).__next__)
        losses.append(np.array(found.losses))
    assert losses[0][-1] < losses[0][0]
    assert losses[1][0] == losses[0][0]
    # XLA fuses code around the block differently, and 8 bits turn small changes into steps.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


def test_each_row_stands_beside_stock_with_remat_alike() -> None:
    kernels = [
        KernelTime("", "MemsetAsync", 1.0, 0.002),
        KernelTime("", "loop_broadcast_fusion", 1.0, 0.001),
        KernelTime("", "MemcpyD2D", 1.0, 0.004),
        KernelTime("forward experts", "GroupedGemmKernel", 1.0, 0.02),
    ]
    ours = Trained([0.05], [3.0, 2.0], 1000, 24, 5, Profile(kernels, 0.05, 0.003))
    found = {
        order_of("nvlink"): ours,
        order_of("nvlink", remat="plan"): ours,
        order_of(PADDED): Trained([0.1], [3.0, 2.0], 2048, 0, 5),
        order_of(PADDED, remat="default"): Trained([0.2], [3.0, 2.0], 512, 0, 5),
    }
    plain, again, *_ = train.make_rows(BenchOptions(), found)
    assert (plain["times_as_fast_as_stock"], plain["memory_to_stock"]) == (2.0, 0.5)
    assert (again["times_as_fast_as_stock"], again["memory_to_stock"]) == (4.0, 2.0)
    assert (plain["zeros_ms"], plain["copies_ms"], plain["idle_ms"]) == (3.0, 4.0, 3.0)
    assert plain["tokens_per_s"] == round(4 * MODEL.case.tokens / 0.05)


@pytest.mark.parametrize(
    ("models", "cases"), [(MODELS, CASES), (CPU_MODELS, CPU_CASES)], ids=["gpu", "cpu"]
)
def test_a_layer_of_the_model_is_a_case_of_its_name(models: Any, cases: Any) -> None:
    assert models["8-layers"].case == cases["8-layers"]


def test_copies_of_the_state_cost_what_steps_with_them_take_longer() -> None:
    order = order_of("nvlink", commit_every=50)
    seen = Committed([0.05, 0.07, 0.05], [0.06, 0.06, 0.09], [1.0, 3.0, 2.0], 10)
    found = {order: Trained([0.05], [3.0, 2.0], 1000, 24, 5, committed=seen)}
    (row,) = train._commit_rows(found)
    assert (row["without_ms"], row["with_ms"], row["exposed_ms"]) == (50.0, 60.0, 10.0)
    assert (row["commit_every"], row["copy_s"], row["copied_bytes"]) == (50, 2.0, 10)


def test_steps_to_the_next_copy_are_for_train_and_not_negative() -> None:
    for benches, steps in ((("moe",), 50), (("train",), -1)):
        with pytest.raises(InvalidArgumentError, match=f"got {steps} with {benches[0]}"):
            BenchOptions(benches=benches, commit_every=steps).checked()


def test_devices_that_no_mesh_of_the_model_has_are_refused() -> None:
    for name, devices in (("fsdp-ep", 3), ("8-layers", 3)):
        options = BenchOptions(benches=("train",), models=(name,), devices=devices)
        with pytest.raises(InvalidArgumentError, match=f"16 experts of {name}, got 3"):
            options.checked()
