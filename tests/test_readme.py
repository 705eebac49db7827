"""The README is true: its example runs, its tables are complete, its commands are there."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime import env, errors
from ep_runtime_client import cli
from ep_runtime_client.demo.cli import add_arguments, make_config

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLE_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


def block(text: str, marker: str) -> str:
    """The code block after `<!-- marker -->`."""
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"no block after the marker {marker!r}"
    return found[1]


def table(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its two header lines."""
    after = text.split(f"\n{heading}\n", 1)[1]
    lines = after[after.index("\n|") + 1 :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def first_names(text: str, heading: str) -> list[str]:
    return [re.findall(r"`(\w+)`", row[0])[0] for row in table(text, heading)]


@pytest.mark.parametrize(
    ("marker", "variables"), [("demo", ""), ("gpu demo", "EP_RUNTIME_CUDA=ON "), ("tests", "")]
)
def test_each_command_is_one_line_from_nothing(text: str, marker: str, variables: str) -> None:
    lines = block(text, marker).strip().splitlines()
    assert len(lines) == 1
    start = f"python3 -m venv .venv && {variables}.venv/bin/pip install "
    assert lines[0].startswith(start)
    extras = re.findall(r"\[([\w,]+)\]", lines[0])[0].split(",")
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_the_example_runs_as_it_stands(text: str, tmp_path: Path) -> None:
    code = block(text, "example")
    assert len(code.splitlines()) <= 30
    script = tmp_path / "example.py"
    script.write_text(code + '\nassert np.isfinite(float(value))\nprint("trained")\n')
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("trained")


def test_the_training_job_shown_is_the_one_that_is_tested(text: str) -> None:
    script = (README.parent / "tests/training/train.py").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- training -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 3
    for code in shown:
        assert code in script or textwrap.indent(code, "    ") in script


def test_the_matmuls_shown_run_and_have_gradients(text: str) -> None:
    code = compile(block(text, "recipes"), str(README), "exec")

    def shown(x: Any, w: Any) -> Any:
        names = {"ep": ep, "x": x, "w": w, "group_sizes": jnp.int32([[20, 12]])}
        exec(code, names)  # the README's own text
        return jnp.abs(names["y"]).sum()

    grads = jax.jit(jax.grad(shown, argnums=(0, 1)))(jnp.ones((1, 32, 32)), jnp.ones((2, 32, 32)))
    assert all(np.isfinite(grad).all() and np.any(grad) for grad in grads)


def test_the_demo_lines_are_options_that_fit(text: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    lines = block(text, "demo options").strip().splitlines()
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["ep-runtime", "demo"]
        make_config(parser.parse_args(words[2:]))


def test_the_command_table_lists_every_command(text: str) -> None:
    assert first_names(text, "## Command line") == list(cli.COMMANDS)


def test_the_error_table_lists_every_error(text: str) -> None:
    # The daemon has one of its own, which never leaves its process.
    tree = errors.EpRuntimeError.__subclasses__()
    classes = {child.__name__ for child in tree if child.__module__ == errors.__name__}
    assert set(first_names(text, "## Errors")) == classes


def test_the_environment_table_is_the_one_of_the_code(text: str) -> None:
    assert env.__doc__ is not None
    documented = dict(re.findall(r"^\| (\w+) \| (.*) \|$", env.__doc__, re.MULTILINE))
    documented.pop("variable")
    shown = {
        re.findall(r"`(\w+)`", row[0])[0]: " | ".join(row[1:])
        for row in table(text, "## Environment variables")
    }
    # Read when building, by CMake and not by Python.
    del shown["EP_RUNTIME_CUDA"]
    assert shown == documented
