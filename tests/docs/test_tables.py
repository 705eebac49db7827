"""The tables of the docs are complete: commands, errors, environment variables."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import doc_pages
import pytest

from ep_runtime import env, errors
from ep_runtime_bench.base.moe_cases import CASES
from ep_runtime_bench.base.train_cases import MODELS, Model
from ep_runtime_client import cli
from ep_runtime_client.ops.block import takes
from ep_runtime_server.metrics.catalogue import METRICS

MAX_README_LINES = 120
COMMANDS = doc_pages.ROOT / "docs/commands.md"
ENVIRONMENT = doc_pages.ROOT / "docs/environment.md"
RESULTS = doc_pages.ROOT / "docs/results.md"
ERRORS = doc_pages.ROOT / "docs/reference/errors.md"


def first_names(page: Path, heading: str) -> list[str]:
    return [re.findall(r"`(\w+)`", row[0])[0] for row in doc_pages.table(page, heading)]


def test_the_readme_stays_short() -> None:
    assert len(doc_pages.README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def step_flops(model: Model) -> int:
    """Of one device: projections, causal attention, router and head, then the experts."""
    dense = 8 * model.hidden**2 + 2 * model.sequence * model.hidden
    dense += 2 * model.hidden * model.num_experts
    forward = model.layers * dense + 2 * model.hidden * model.vocabulary
    return 3 * model.case.tokens * forward + model.layers * model.case.flops


def test_speeds_follow_from_times_and_sizes() -> None:
    model, gpus, peak = MODELS["8-layers"], 2, 989e12
    flops = {name: case.flops for name, case in CASES.items()}
    flops |= {"8-layers, step": step_flops(model), "its layer": model.case.flops}
    ours = {}
    shown = doc_pages.table(RESULTS, "# Beside PyTorch and plain JAX")
    for what, by, ms, tokens, tflops, mfu, faster in shown:
        speed = flops[what] / float(ms) * 1e3
        ours[what] = ours.get(what, float(ms))  # the first row of each
        assert tflops == f"{speed / 1e12:.0f}", (what, by)
        assert mfu == f"{speed / peak:.0%}", (what, by)
        assert faster == ("" if by == "ep-runtime" else f"{float(ms) / ours[what]:.2f}")
        if tokens != "-":
            assert tokens == f"{round(gpus * model.case.tokens / float(ms) * 1e3, -2):,.0f}"
    readme = doc_pages.README.read_text(encoding="utf-8")
    told = set(re.findall(r"([\d.]+) ms", readme.partition("\n## ")[0]))
    assert {"90.9", "29.1"} <= told <= {row[2] for row in shown}


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
    # The daemon has one of its own, which never leaves its process.
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
    # Read when building, by CMake and not by Python.
    del shown["EP_RUNTIME_CUDA"]
    assert shown == documented


def test_every_reason_for_slabs_has_a_row() -> None:
    shown = doc_pages.table(doc_pages.ROOT / "docs/memory.md", "## What keeps a block to slabs")
    assert [row[0] for row in shown] == list(takes.REASONS.values())


def test_the_glossary_has_each_word_once() -> None:
    text = (doc_pages.ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+) \|", text, re.M)
    words = [each for word in words if word not in ("word", "---") for each in word.split(", ")]
    assert len(words) > 50
    assert sorted(set(words)) == sorted(words)


def test_the_table_of_metrics_is_the_catalogue() -> None:
    shown = doc_pages.table(doc_pages.ROOT / "docs/metrics.md", "## What there is")
    assert shown == [
        [f"`{metric.full_name}`", metric.kind, ", ".join(metric.labels), metric.help]
        for metric in METRICS.values()
    ]
