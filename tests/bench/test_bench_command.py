"""`ep-runtime bench`: small runs of every bench, with plausible figures and exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from child_programs import command, run_to_end

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_bench.base import timing
from ep_runtime_bench.base.options import BenchOptions, Sample
from ep_runtime_bench.movement import cpu_movement
from ep_runtime_bench.movement.memcpy import Memcpy


def figures(*options: str) -> dict[str, Any]:
    done = run_to_end(*command("bench", *options, "-o", "json"))
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema_version"] == 1
    return document


def test_movement_compares_transports_and_memcpy_in_one_run() -> None:
    sizes = ["--devices", "2", "--experts", "4", "--top-k", "2", "--tokens", "8"]
    found = figures("dispatch", "combine", *sizes, "--row-bytes", "64,128", "--repeats", "2")
    rows = found["movement"]
    subjects = [(row["op"], row["row_bytes"], row["transport"]) for row in rows]
    assert subjects == [
        (op, size, transport)
        for op in ("dispatch", "combine")
        for size in (64, 128)
        for transport in ("memfd", "xla", "memcpy")
    ]
    assert all(row["bytes"] == 2 * 8 * 2 * row["row_bytes"] for row in rows)
    assert all(row["median_ms"] >= 0 and row["tokens_per_s"] > 0 for row in rows)


def test_several_processes_compare_transports_and_memcpy() -> None:
    sizes = ["--processes", "3", "--devices", "3", "--experts", "12"]
    more = ["--top-k", "2", "--tokens", "8", "--row-bytes", "64", "--repeats", "2"]
    rows = figures("dispatch", "combine", *sizes, *more)["movement"]
    subjects = [(row["op"], row["transport"]) for row in rows]
    assert subjects == [
        (op, transport)
        for op in ("dispatch", "combine")
        for transport in ("memfd", "xla", "memcpy")
    ]
    assert all(row["bytes"] == 3 * 8 * 2 * 64 for row in rows)
    assert all(row["ratio_to_xla"] > 0 and row["ratio_to_memcpy"] > 0 for row in rows)


def test_a_call_of_several_processes_took_as_long_as_the_slowest() -> None:
    one = [Sample("dispatch", "memfd", 64, [1.0, 5.0]), Sample("dispatch", "xla", 64, [2.0, 2.0])]
    two = [Sample("dispatch", "memfd", 64, [3.0, 4.0]), Sample("dispatch", "xla", 64, [1.0, 6.0])]
    assert [sample.seconds for sample in cpu_movement.slowest([one, two])] == [
        [3.0, 5.0],
        [2.0, 6.0],
    ]


def test_one_transport_alone_has_no_ratio_to_xla() -> None:
    sizes = ["--devices", "2", "--experts", "2", "--top-k", "1", "--tokens", "4"]
    words = ["--transports", "memfd", *sizes, "--row-bytes", "64", "--repeats", "1"]
    done = run_to_end(*command("bench", "dispatch", *words))
    assert "X MEMCPY" in done.stdout


def test_connect_shows_every_stage_and_their_sum() -> None:
    found = figures("connect", "--devices", "2")
    stages = [row["stage"] for row in found["connect"]]
    assert stages[1:8] == [
        "connect",
        "jax_backend",
        "create_group",
        "register_layer",
        "trace",
        "compile",
        "first_call",
    ]
    assert stages[-1] == "connect to end of first handler"


def test_wrong_names_are_exit_code_1() -> None:
    assert "BENCH must be of" in run_to_end(*command("bench", "dispatsch"), code=1).stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": 3}, "--processes must divide --devices=8, got 3"),
        ({"processes": 2, "benches": ("dispatch", "gemm")}, "got it with gemm"),
        ({"row_bytes": (3,)}, "multiples of 2"),
        ({"spare_experts": ("auto", "-1")}, "--spare-experts must be auto or .*, got auto,-1"),
    ],
)
def test_processes_and_rows_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        BenchOptions(**options).checked()


def test_subjects_take_turns_after_their_warm_up() -> None:
    calls: list[str] = []
    subjects = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = timing.in_turn(subjects, warmup=1, repeats=2)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert [len(samples) for samples in seconds.values()] == [2, 2]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.0, 1.0)])
def test_a_quantile_is_a_sample(share: float, expected: float) -> None:
    assert timing.quantile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_memcpy_copies_a_size_that_no_thread_count_divides() -> None:
    memcpy = Memcpy(1_000_003)
    memcpy()
    memcpy.close()


@pytest.mark.slow
def test_gemm_measures_every_recipe_on_cpu() -> None:
    sizes = ["--experts", "12", "--tokens", "64", "--top-k", "2", "--repeats", "1"]
    found = figures("gemm", "--transports", "memfd", *sizes)["gemm"]
    assert {row["groups"] for row in found} == {8, 12}
    assert {row["recipe"] for row in found} == {None, "fp8", "fp8-block", "mxfp8"}
    assert {(row["in_features"], row["out_features"]) for row in found} == {(256, 256), (128, 256)}
    assert all(row["ms"] > 0 for row in found)
