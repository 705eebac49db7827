"""The bench of the MoE layer without a GPU: programs on CPU devices, tables from figures."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_programs import command, run_to_end
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_bench import cli
from ep_runtime_bench.base import clients
from ep_runtime_bench.base.device_bench import AXIS, ROWS
from ep_runtime_bench.base.moe_cases import (
    CASES,
    DEFAULT_CASES,
    DROPLESS,
    PADDED,
    REMAT,
    Case,
    KernelTime,
    LayerOrder,
    Measured,
    Profile,
    Step,
)
from ep_runtime_bench.base.options import BenchOptions
from ep_runtime_bench.moe import client, measuring, moe, stock_layer

RANKS = 2
CASE = Case(tokens=8, hidden=16, inner=8, num_experts=4, top_k=2)
ON_GPUS = BenchOptions(benches=("moe",), transports=("nvlink",), stock=True, devices=4)


def order_of(subject: str) -> LayerOrder:
    how: dict[str, Any] = {"devices": RANKS, "platform": "cpu", "dtype": "float32", "repeats": 3}
    return LayerOrder(subject=subject, name="tiny", case=CASE, address="embedded", **how)


def test_stock_is_the_layer_and_drops_only_past_its_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replaces ragged_all_to_all, which XLA on CPU lacks: gathers all that ranks send."""

    def ragged(x: Any, out: Any, *where: Any, axis_name: str) -> Any:
        arrays = [jax.lax.all_gather(a, axis_name) for a in (x, *where)]
        me, row = jax.lax.axis_index(axis_name), jnp.arange(x.shape[0])
        for source in range(RANKS):
            rows, starts, sizes, targets, _ = (a[source] for a in arrays)
            mine = (row >= starts[me]) & (row < starts[me] + sizes[me])
            to = jnp.where(mine, targets[me] + row - starts[me], out.shape[0])
            out = out.at[to].set(rows, mode="drop")
        return out

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), (AXIS,))
    stock = client.make_operands(order_of(DROPLESS), mesh)
    rows, whole = ROWS, jax.sharding.PartitionSpec()
    how: dict[str, Any] = {"in_specs": (rows, whole, rows, rows), "out_specs": rows}
    found = {}
    for name, factor in ((DROPLESS, 1.0), (PADDED, float(CASE.num_experts)), ("dropping", 0.01)):
        monkeypatch.setattr(stock_layer, "CAPACITY_FACTOR", factor)
        monkeypatch.setattr(stock_layer, "_ROW_TILE", 1)
        layer = stock_layer.make_layer(DROPLESS if name == DROPLESS else PADDED, CASE)
        mapped = jax.shard_map(layer, mesh=mesh, check_vma=False, **how)
        found[name] = np.asarray(jax.jit(mapped)(*stock))
    arrays = [np.asarray(array) for array in stock]
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(found[DROPLESS], by_hand(CASE.tokens, *arrays), **close)
    np.testing.assert_allclose(found[PADDED], found[DROPLESS], **close)
    np.testing.assert_allclose(found["dropping"], by_hand(1, *arrays), **close)


def by_hand(room: int, x: Any, router: Any, wi: Any, wo: Any) -> Any:
    """The layer in NumPy; an expert takes the first `room` slots of each rank's tokens."""
    y = np.zeros_like(x)
    for token, scores in enumerate(x @ router):
        if token % CASE.tokens == 0:
            taken = [0] * CASE.num_experts
        picked = np.argsort(-scores)[: CASE.top_k]
        share = np.exp(scores[picked] - scores.max())
        for expert, weight in zip(picked, share / share.sum(), strict=True):
            taken[expert] += 1
            if taken[expert] <= room:
                gate, up = np.split(x[token] @ wi[expert], 2)
                y[token] += weight * (gate / (1 + np.exp(-gate)) * up) @ wo[expert]
    return y


# JAX's reader of profiles makes its types without modules; Python 3.12 warns, and it would abort.
@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
def test_a_process_measures_both_variants_and_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "start_jax", lambda *args: None)
    ticks = itertools.count()
    heard: list[str] = []
    measured = client.measure(order_of("memfd"), heard.append, lambda: float(next(ticks)))
    assert heard == [clients.READY, clients.COMPILED]
    assert [step.variant for step in measured.steps] == [REMAT, ""]
    for step in measured.steps:
        assert [*step.step_s] == [1.0]  # one step is enough, because the fake clock is fast
        assert step.enqueued_s == 1.0 / client.ENQUEUED
        assert step.planned_bytes > 0
    assert measured.window_bytes > 0
    arrays = (8 * 16, 16 * 4, 2 * 16 * 16, 2 * 8 * 16)  # x, router, wi and wo of a rank
    assert measured.given_bytes == 2 * 4 * sum(arrays)
    assert measured.estimated_bytes is not None
    assert measured.estimated_bytes > measured.window_bytes
    assert measured.dropped == 0
    parts = {each.part for each in measured.profile.kernels}
    assert "forward prepare" in parts
    assert any(part.startswith("backward experts") for part in parts)
    assert all(each.step_s >= 0 for each in measured.profile.kernels)
    assert 0 <= measured.profile.idle_s < measured.profile.step_s

    said = json.loads(json.dumps(dataclasses.asdict(measured)))
    assert Measured.from_dict(said) == measured


def test_both_matmuls_of_stock_and_ours_start_from_the_same_values() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), (AXIS,))
    stock, ours = (client.make_operands(order_of(name), mesh) for name in (PADDED, "memfd"))
    for theirs, mine in zip(stock, ours, strict=True):
        np.testing.assert_array_equal(np.asarray(theirs).ravel(), np.asarray(mine).ravel())
    x = np.asarray(stock[0])
    assert abs(x.mean()) < 0.2
    np.testing.assert_allclose(x.std(), 1.0, atol=0.15)


def test_ours_is_measured_before_what_it_is_compared_with() -> None:
    found = moe.orders(ON_GPUS, "address")
    assert [(each.subject, each.name) for each in found] == [
        (subject, name) for subject in ("nvlink", PADDED, DROPLESS) for name in DEFAULT_CASES
    ]
    assert LayerOrder.from_dict(dataclasses.asdict(found[0])) == found[0]


def test_each_capacity_is_a_subject_of_its_own() -> None:
    options = dataclasses.replace(ON_GPUS, capacity=(0.0, 1.25), cases=("mixtral-like",))
    found = moe.orders(options, "address")
    assert [each.label for each in found] == ["nvlink", "nvlink 1.25x", PADDED, DROPLESS]
    with pytest.raises(InvalidArgumentError, match=r"--capacity must be .* got \(-1\.0,\)"):
        dataclasses.replace(ON_GPUS, capacity=(-1.0,)).checked()


def test_each_setting_is_a_subject_of_its_own_and_stock_has_none() -> None:
    options = dataclasses.replace(
        ON_GPUS,
        recipes=("none", "fp8"),
        weights=("hidden", "output"),
        cases=("mixtral-like",),
        stock_layers=("stock-padded",),
    )
    found = moe.orders(options.checked(), "address")
    fp8 = ep.recipes.TensorScaling()
    assert [(each.label, client.recipe_of(each.recipe)) for each in found] == [
        ("nvlink", None),
        ("nvlink output", None),
        ("nvlink fp8", fp8),
        ("nvlink fp8 output", fp8),
        (PADDED, None),
    ]
    with pytest.raises(InvalidArgumentError, match=r"--recipe must be of .* got \('int8',\)"):
        dataclasses.replace(ON_GPUS, recipes=("int8",)).checked()
    with pytest.raises(
        InvalidArgumentError, match="stock-padded is for moe only, got it with gemm"
    ):
        dataclasses.replace(options, benches=("gemm",)).checked()


@pytest.mark.parametrize(
    ("words", "stock", "layers"),
    [
        ("nvlink,stock-padded", True, ("stock-padded",)),
        ("nvlink,stock-dropless,stock-padded", True, ("stock-padded", "stock-dropless")),
        ("nvlink,stock", True, ("stock-padded", "stock-dropless")),
        ("nvlink", False, ("stock-padded", "stock-dropless")),
    ],
)
def test_stock_layers_are_chosen_by_name(words: str, stock: bool, layers: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    options = cli.make_options(parser.parse_args(["moe", "--devices", "4", "--transports", words]))
    assert (options.transports, options.stock, options.stock_layers) == (("nvlink",), stock, layers)


def test_what_is_known_so_far_is_saved_when_a_process_of_ours_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = [KernelTime("forward experts", "GroupedGemmKernel", 1.0, 0.5)]
    first = Measured([Step("", [1.0], 1.0, None, 0)], 0, Profile(kernels, 1.0, 0.5))

    def measured(wanted: Any, *_: Any) -> Iterator[Any]:
        yield next(one for one in wanted if one.name == "small-experts"), dataclasses.asdict(first)
        raise RuntimeError("the second failed")

    monkeypatch.setattr(clients, "measured", measured)
    monkeypatch.setattr(moe.clients, "warm_daemon", lambda: contextlib.nullcontext("address"))
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    saved = tmp_path / "new" / "folder"
    words = ["moe", "--devices", "2", "--transports", "memfd", "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["cli", "bench", "--save", "x", "moe"])
    with pytest.raises(RuntimeError, match="the second failed"):
        cli.run(parser.parse_args(words))
    (path,) = saved.iterdir()
    assert path.name.endswith("-moe-small-experts-memfd.json")
    known = json.loads(path.read_text())
    assert (known["kind"], known["bench"]) == ("bench_rows", "moe")
    assert [row["enqueued_ms"] for row in known["rows"]] == [1000]
    assert {"jax", "jaxlib", "ep-runtime"} <= {*known["versions"]}
    assert "torch" not in known["versions"]
    assert {"host", "gpus", "driver", "cpus"} == {*known["machine"]}
    assert known["command"] == "ep-runtime bench moe"
    written = capsys.readouterr().err
    assert "small-experts: memfd:   500.000 ms  50.0%" in written
    assert "forward experts  GroupedGemmKernel" in written


def test_what_finds_no_row_is_counted() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), (AXIS,))
    case = dataclasses.replace(CASE, tokens=256)
    order = dataclasses.replace(order_of("xla"), case=case, capacity_factor=1.0)
    with ep.connect("none") as session:
        group = measuring.create_group(order, order.case, mesh, session)
        layer = group.register_layer("layer", top_k=CASE.top_k)
        _, router, wi, wo = client.make_operands(order, mesh)
        x = jnp.ones((RANKS * case.tokens, case.hidden))
        to_one_rank = jnp.zeros_like(router).at[:, :2].set([2.0, 1.0])
        dropped = client._run(order, layer, x, to_one_rank, wi, wo)[2].dropped
    # A rank has room for its even share only.
    assert group.capacity_per_rank == case.tokens * case.top_k
    assert dropped == (RANKS - 1) * case.tokens * case.top_k


def test_rows_compare_with_stock_in_time_and_memory() -> None:
    found = {
        ("mixtral-like", "nvlink"): Measured(
            [Step(REMAT, [3.0], 2.0, 50, 40), Step("", [2.0, 4.0], 1.0, 70, 60)],
            30,
            Profile([KernelTime("forward experts", "GroupedGemmKernel", 1.0, 0.5)], 1.0, 0.5),
            given_bytes=20,
            estimated_bytes=25,
        ),
        ("mixtral-like", PADDED): Measured([Step("", [2.0], 2.0, 200, 90)]),
        ("mixtral-like", DROPLESS): Measured([Step("", [9.0], 8.0, 400, 90)]),
    }
    ours, again, padded, dropless = moe.make_rows(ON_GPUS, found)
    assert (ours["layer_bytes"], ours["estimated_bytes"]) == (70 + 30 - 20, 25)
    assert [row["subject"] for row in (ours, again)] == ["nvlink", "nvlink remat"]
    assert (ours["step_p50_ms"], ours["step_p99_ms"], ours["enqueued_ms"]) == (3000, 4000, 1000)
    assert (ours["times_as_fast_as_padded"], ours["times_as_fast_as_dropless"]) == (2, 8)
    assert (ours["memory_bytes"], ours["memory_to_padded"]) == (100, 0.5)
    assert again["memory_to_padded"] == 0.4
    assert (padded["times_as_fast_as_padded"], dropless["times_as_fast_as_padded"]) == (1, 0.25)
    assert ours["tflops"] == round(CASES["mixtral-like"].flops / 1e12, 1)


def test_recipes_compare_with_the_layer_without_one() -> None:
    options = dataclasses.replace(ON_GPUS, recipes=("none", "fp8"), cases=("mixtral-like",))
    found = {
        ("mixtral-like", label): Measured(
            [Step(REMAT, [3.0], again, 0, 0), Step("", [2.0], s, 0, 0)]
        )
        for label, s, again in (("nvlink", 2.0, 4.0), ("nvlink fp8", 1.0, 3.0))
    }
    rows = moe.make_rows(options, found)
    assert [row["time_to_plain"] for row in rows] == [None, None, 0.5, 0.75]


def test_weights_quantized_before_the_step_give_the_step_that_quantizes_them() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), (AXIS,))
    order = dataclasses.replace(order_of("xla"), recipe="fp8")
    with ep.connect("none") as session:
        group = measuring.create_group(order, order.case, mesh, session)
        layer = group.register_layer("layer", top_k=CASE.top_k)
        operands = client.make_operands(order, mesh)
        once = dataclasses.replace(order, quantized="step")
        given = (*operands, client._quantized(once, layer, operands))
        steps = [
            client._compiled(client._losses(each, mesh, layer)[""], arrays)(*arrays)
            for each, arrays in ((order, operands), (once, given))
        ]
    assert jax.tree.structure(steps[0]) == jax.tree.structure(steps[1])
    for mine, theirs in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_only_recipes_of_8_bits_are_measured_with_weights_quantized_once() -> None:
    options = dataclasses.replace(
        ON_GPUS, recipes=("none", "fp8"), cases=("mixtral-like",), quantized=("call", "step")
    )
    labels = [order.label for order in moe.orders(options, "")]
    assert labels == ["nvlink", "nvlink fp8", "nvlink fp8 weights once", PADDED, DROPLESS]
    found = {
        ("mixtral-like", label): Measured([Step("", [1.0], s, 0, 0)])
        for label, s in zip(labels[:3], (2.0, 1.0, 0.5), strict=True)
    }
    ratios = [row["time_to_plain"] for row in moe.make_rows(options, found)]
    assert ratios == [None, 0.5, 0.25]


def test_kernels_below_one_percent_are_summed_and_the_rest_is_no_kernel() -> None:
    kernels = [
        KernelTime("forward experts", "GroupedGemmKernel", 2.0, 0.5),
        KernelTime("forward router", "fusion", 1.0, 0.009),
        KernelTime("backward router", "fusion", 3.0, 0.002),
    ]
    found = {
        ("a", "nvlink"): Measured([Step("", [1.0], 1.0, None, 0)], 0, Profile(kernels, 1.0, 0.489)),
        ("a", PADDED): Measured([Step("", [1.0], 1.0, None, 0)]),
    }
    rows = [*moe.kernel_rows(found)]
    assert [(row["part"], row["calls"], row["percent"]) for row in rows] == [
        ("forward experts", 2, 50.0),
        ("others", 4, 1.1),
        ("no kernel", 0, 48.9),
    ]


RELEASED = Path(__file__).parent.parent / "families/released.json"
LAYERS = {  # H, M, E and K of released models
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Qwen1.5-MoE": (2048, 1408, 60, 4),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "OLMoE-1B-7B": (2048, 1024, 64, 8),
    "dbrx": (6144, 10752, 16, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "DeepSeek-V2": (5120, 1536, 160, 6),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Kimi-K2": (7168, 2048, 384, 8),
    "GLM-4.5": (5120, 1536, 160, 8),
    "MiniMax-M2": (3072, 1536, 256, 8),
    "Ernie-4.5": (2560, 1536, 64, 6),
    "Llama-4-Scout": (5120, 8192, 16, 1),
    "granite-3.1-3b-a800m": (1536, 512, 40, 8),
}


def with_config(path: Path, config: Any) -> BenchOptions:
    path.write_text(json.dumps(config), encoding="utf-8")
    return dataclasses.replace(ON_GPUS, config=str(path)).checked()


def test_a_config_file_gives_the_layer_of_its_model(tmp_path: Path) -> None:
    found = {}
    for name, config in json.loads(RELEASED.read_text(encoding="utf-8")).items():
        order, *_ = moe.orders(with_config(tmp_path / "config.json", config), "address")
        assert order.name == config["model_type"]
        assert order.config is not None
        assert ep.Router.from_hf(order.config) == ep.Router.from_hf(config)
        found[name] = dataclasses.astuple(order.case)[1:]
    assert found == LAYERS


GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 16, "intermediate_size": 8}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mixtrol"}, "model type 'mixtrol'; did you mean 'mixtral'"),
        ({"hidden_size": None}, "must have one of hidden_size, d_model, got none"),
        ({"intermediate_size": [8, 16]}, r"one whole number as intermediate_size, got \[8, 16\]"),
        ({"hidden_act": "xielu"}, "an activation of silu, .*, got 'xielu'"),
        ({"num_local_experts": 6}, "--devices must divide .* 6 of gpt_oss"),
    ],
)
def test_what_a_config_file_lacks_is_named(change: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        with_config(tmp_path / "config.json", {**GPT_OSS, **change})
    with pytest.raises(InvalidArgumentError, match=r"--config must be a readable config\.json"):
        dataclasses.replace(ON_GPUS, config=str(tmp_path / "nothing")).checked()
    with pytest.raises(InvalidArgumentError, match="takes the place of --cases"):
        dataclasses.replace(ON_GPUS, config="config.json", cases=("8-layers",)).checked()


def test_the_layer_of_a_config_has_its_router_and_activation() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), (AXIS,))
    config = {**GPT_OSS, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    config["swiglu_limit"] = 0.1  # clamps most of these gates and ups
    order = dataclasses.replace(order_of("xla"), config=config)
    with ep.connect("none") as session:
        group = measuring.create_group(order, order.case, mesh, session)
        layer = group.register_layer("layer", top_k=CASE.top_k)
        x, router, wi, wo = client.make_operands(order, mesh)
        got = client._run(order, layer, x, router, wi, 10 * wo)[0]
        logits = np.asarray(x @ router, np.float64)
    scores = 1 / (1 + np.exp(-logits))
    picked = np.argsort(-logits)[:, : CASE.top_k]
    shares = np.take_along_axis(scores, picked, -1)
    shares *= 2.5 / shares.sum(-1, keepdims=True)
    wi, wo = np.asarray(wi, np.float64)[picked], 10 * np.asarray(wo, np.float64)[picked]
    gate, up = np.moveaxis(np.einsum("th,tkhgm->tkgm", x, wi), 2, 0)
    gate, up = np.minimum(gate, 0.1), np.clip(up, -0.1, 0.1)
    wanted = np.einsum("tk,tkm,tkmh->th", shares, gate / (1 + np.exp(-gate)) * up, wo)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [{"cases": ("gpt",)}, {"cases": ()}, {"devices": 3}],
    ids=["unknown case", "no case", "experts that do not divide"],
)
def test_wrong_options_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="--cases|--devices"):
        dataclasses.replace(ON_GPUS, **change).checked()


def test_a_process_that_fails_is_fatal_only_where_it_is_ours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    monkeypatch.setattr(clients, "python_command", lambda *args: command)

    def measured(*subjects: str) -> list[Any]:
        return [*clients.measured([*map(order_of, subjects)], 60.0)]

    assert measured(PADDED, DROPLESS) == []
    assert f"{PADDED}: no figures, it ended with exit code 7" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="memfd failed"):
        measured("memfd", PADDED)


@pytest.mark.slow
def test_the_command_writes_all_tables() -> None:
    words = ["--devices", "2", "--repeats", "2", "--cases", "small-experts", "-o", "json"]
    done = run_to_end(*command("bench", "moe", *words, "--transports", "memfd,stock"))
    found = json.loads(done.stdout)
    subjects = [row["subject"] for row in found["moe"]]
    assert subjects == ["memfd", "memfd remat", PADDED]
    assert found["moe_kernels"][-1]["part"] == "no kernel"
