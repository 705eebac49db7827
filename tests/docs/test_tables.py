"""The tables and dashboards of the docs are complete, and match names in the code."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_pages
import numpy as np
import pytest
from grafana_files import DASHBOARD, PANELS, RULES, VARIABLES, expressions
from named_tests import names_in
from prometheus_client import ProcessCollector

from ep_runtime import board, env, errors, specs
from ep_runtime_bench.base.moe_cases import CASES, Case
from ep_runtime_bench.base.train_cases import MODELS
from ep_runtime_client import cli
from ep_runtime_client.moe import bodies
from ep_runtime_server.metrics.catalogue import (
    COUNTER,
    GAUGE,
    GROUP,
    HISTOGRAM,
    LAYER,
    METRICS,
    NODE,
    RANK,
    Metric,
)

TEST = re.compile(r"`([^\s`]+\.py)::([^\s`]+)`")
COMMANDS = doc_pages.ROOT / "docs/commands.md"
ENVIRONMENT = doc_pages.ROOT / "docs/environment.md"
ERRORS = doc_pages.ROOT / "docs/reference/errors.md"


def first_names(page: Path, heading: str) -> list[str]:
    return [re.findall(r"`(\w+)`", row[0])[0] for row in doc_pages.table(page, heading)]


@pytest.mark.parametrize(("page", "most"), [("README.md", 120), ("docs/results.md", 200)])
def test_the_page_stays_short(page: str, most: int) -> None:
    assert len((doc_pages.ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def rows_of(bench: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Devices, and a row of docs/results whose speeds are given."""
    for path in sorted((doc_pages.ROOT / "docs/results").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["bench"] == bench:
            yield from ((run["devices"], row) for row in run["rows"] if row.get("tflops"))


def test_speeds_follow_from_times_and_sizes() -> None:
    layers = {**CASES, "Qwen3-235B-A22B": Case(8192, 4096, 1536, 128, 8)}
    sizes: dict[str, dict[str, tuple[str, int, int, int]]] = {
        "train": {
            name: ("step_ms", m.case.tokens, m.flops, 1 + (m.beside == "tp"))
            for name, m in MODELS.items()
        },
        "moe": {name: ("enqueued_ms", c.tokens, c.flops, 1) for name, c in layers.items()},
    }
    told = set()
    for bench, known in sizes.items():
        for devices, row in rows_of(bench):
            key, tokens, flops, shared = known[(row.get("model") or row["case"]).split()[0]]
            ms = row[key] * shared  # devices along tp share tokens
            np.testing.assert_allclose(row["tflops"], flops / ms / 1e9, rtol=0.01, atol=0.06)
            np.testing.assert_allclose(row["mfu"], row["tflops"] / 989, atol=0.001)
            np.testing.assert_allclose(row["tokens_per_s"], devices * tokens / ms * 1e3, rtol=0.01)
            told.add(f"{row[key]:.1f}")
    readme = doc_pages.README.read_text(encoding="utf-8")
    shown = set(re.findall(r"([\d.]+) ms", readme.partition("\n## ")[0]))
    assert {"93.2", "30.4"} <= shown <= told


@pytest.mark.parametrize(
    ("page", "marker", "variables"),
    [
        (doc_pages.README, "demo", ""),
        (doc_pages.README, "tests", ""),
        (doc_pages.ROOT / "docs/gpus.md", "gpu demo", "EP_RUNTIME_CUDA=ON "),
    ],
)
def test_each_command_is_one_line_from_nothing(page: Path, marker: str, variables: str) -> None:
    lines = doc_pages.named(page, marker).code.strip().splitlines()
    assert len(lines) == 1
    start = f"python3 -m venv .venv && {variables}.venv/bin/pip install "
    assert lines[0].startswith(start)
    extras = re.findall(r"\[([\w,]+)\]", lines[0])[0].split(",")
    project = tomllib.loads((doc_pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_the_command_table_lists_every_command() -> None:
    assert first_names(COMMANDS, "# Command line") == list(cli.COMMANDS)


def test_the_error_table_lists_every_error() -> None:
    # The daemon has its own id, which never leaves its process.
    tree = errors.EpRuntimeError.__subclasses__()
    classes = {child.__name__ for child in tree if child.__module__ == errors.__name__}
    assert set(first_names(ERRORS, "# Errors")) == classes


def test_the_environment_table_is_the_one_of_the_code() -> None:
    assert env.__doc__ is not None
    documented = dict(re.findall(r"^\| (\w+) \| (.*) \|$", env.__doc__, re.MULTILINE))
    documented.pop("variable")
    shown = {
        re.findall(r"`(\w+)`", row[0])[0]: " | ".join(row[1:])
        for row in doc_pages.table(ENVIRONMENT, "# Environment variables")
    }
    # CMake reads these when building, not Python.
    del shown["EP_RUNTIME_CUDA"]
    assert shown == documented


def test_boards_have_the_sizes_of_the_capacity_page() -> None:
    def size(gpus: int, ep_size: int, num_experts: int) -> str:
        settings = specs.GroupSettings(
            name="g",
            ep_axis="ep",
            num_experts=num_experts,
            hidden_size=7168,
            max_tokens_per_rank=4096,
        )
        spec = settings.on((("dp", gpus // ep_size), ("ep", ep_size)))
        spec = dataclasses.replace(spec, transport="nccl", node_size=8)
        return f"{board.board_bytes(spec, range(8)) / 2**20:.1f} MiB"

    page = (doc_pages.ROOT / "docs/capacity.md").read_text(encoding="utf-8")
    for gpus in (8, 576, 4096):
        assert f"takes {size(gpus, gpus, gpus)} if all GPUs are one EP group" in page
        assert f"takes {size(gpus, 8, 256)} for EP\ngroups of 8 with 256 experts" in page


def test_every_reason_for_the_composed_body_has_a_row() -> None:
    shown = doc_pages.table(doc_pages.ROOT / "docs/memory.md", "## When the composed body runs")
    assert [row[0] for row in shown] == list(bodies.REASONS.values())


def test_the_tables_of_metrics_are_the_catalogue() -> None:
    tables = {"### A daemon": NODE, "### A group": GROUP, "### A layer": LAYER, "### A rank": RANK}

    def heading_of(metric: Metric) -> str:
        fit = [name for name, labels in tables.items() if metric.labels[: len(labels)] == labels]
        return max(fit, key=lambda name: len(tables[name]))

    for heading, labels in tables.items():
        assert doc_pages.table(doc_pages.ROOT / "docs/metrics.md", heading) == [
            [f"`{metric.full_name}`", ", ".join(metric.labels[len(labels) :]), metric.help]
            for metric in METRICS.values()
            if heading_of(metric) == heading
        ]
    # The page gives types by these rules.
    histograms = {"op_seconds", "op_wait_seconds"}
    for metric in METRICS.values():
        counts = COUNTER if metric.name.endswith("_total") else GAUGE
        assert metric.kind == (HISTOGRAM if metric.name in histograms else counts)


@pytest.mark.parametrize("name", ["threat-model", "guarantees", "faults"])
def test_every_promise_of_a_table_names_tests_that_are_there(name: str) -> None:
    text = (doc_pages.ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    tables = [part for part in text.split("\n\n") if "| held by |" in part]
    rows = [row for table in tables for row in table.splitlines()[2:] if row.startswith("|")]
    assert len(rows) >= 20
    for row in rows:
        assert TEST.search(row.rpartition(" | ")[2]), row
    assert [
        f"{file}::{test}" for file, test in TEST.findall(text) if test not in names_in(file)
    ] == []
    if name == "guarantees":
        sections = text.split("\n## ")[1:]
        assert [x.splitlines()[0] for x in sections if "| held by |" not in x] == ["Not guaranteed"]


def test_the_policy_has_the_versions_that_pip_takes() -> None:
    page = doc_pages.ROOT / "docs/support.md"
    project = tomllib.loads((doc_pages.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (jax,) = (each for each in project["dependencies"] if each.startswith("jax>"))
    assert f"`{jax}`" in page.read_text(encoding="utf-8")
    rows = doc_pages.table(page, "## Support policy")
    refused = [row[0] for row in rows if row[3].endswith("pip refuses to install")]
    assert project["requires-python"] == f">={rows[0][0]},<{refused[0]}"
    said = {part.rsplit(" ", 1)[1] for part in project["classifiers"] if " :: 3." in part}
    assert said == {row[0] for row in rows if row[0] not in refused}


# Prometheus adds the scraped target. `job` is our label with honor_labels, otherwise Prometheus's.
SCRAPED = {"instance", "job"}
KNOWN = {"up": SCRAPED}
KNOWN |= {family.name: SCRAPED for family in ProcessCollector(registry=None).collect()}
for metric in METRICS.values():
    parts = ("_sum", "_count", "_bucket") if metric.kind == HISTOGRAM else ("",)
    for part in parts:
        more = {"le"} if part == "_bucket" else set()
        KNOWN[metric.full_name + part] = {*metric.labels, *SCRAPED, *more}
SELECTED = re.compile(r"\b((?:ep_runtime|process)_\w+|up)\b(?:{([^}]*)})?")


def labels_of(text: str) -> set[str]:
    """Labels of all metrics that an expression selects."""
    return set().union(*(KNOWN[metric] for metric, _ in SELECTED.findall(text)))


@pytest.mark.parametrize(("title", "text"), expressions())
def test_an_expression_asks_for_what_is_exported(title: str, text: str) -> None:
    found = SELECTED.findall(text)
    assert found
    for metric, selector in found:
        assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector)) <= KNOWN[metric]
    for names in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", text):
        assert set(re.findall(r"\w+", names)) <= labels_of(text)


def test_metrics_that_nothing_shows_are_few() -> None:
    shown = {metric for _, text in expressions() for metric, _ in SELECTED.findall(text)}
    parts = ("", "_sum", "_count", "_bucket")
    missing = [
        m.name for m in METRICS.values() if shown.isdisjoint(m.full_name + part for part in parts)
    ]
    # Metrics of sizes, and metrics that repeat another metric's value.
    assert len(missing) <= len(METRICS) // 2, missing


def test_legends_messages_and_variables_name_labels_that_are_there() -> None:
    for rule in RULES:
        said = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= labels_of(rule["expr"]), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    for target in [target for panel in PANELS for target in panel["targets"]]:
        legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert set(legend) <= labels_of(target["expr"]), target["expr"]
    for variable in VARIABLES[1:]:
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert query is not None
        assert query[2] in labels_of(query[1])


def test_names_are_given_once() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 15
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
