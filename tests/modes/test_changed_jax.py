"""Ops in a JAX whose private functions differ from those that the ops use."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from child_programs import run_python

HERE = Path(__file__).parent


@functools.cache
def run(fault: str) -> dict[str, Any]:
    done = run_python(Path(__file__).with_name("changed_jax_child.py"), fault)
    return json.loads(done.stdout.splitlines()[-1])


def test_this_jax_needs_no_fallback() -> None:
    found = run("none")
    assert found["warnings"] == []
    assert found["doctor"]["state"] == "OK"
    assert "shard_map" not in found["explained"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("name", "has no jax._src.custom_partitioning._custom_partitioning_partition: "),
        ("lowering", "does not keep a callback of custom_partitioning as it did: "),
    ],
)
def test_a_changed_jax_gives_the_same_bits_and_one_warning(fault: str, words: str) -> None:
    found, wanted = run(fault), run("none")
    assert {key: found[key] for key in ("auto", "rule")} == {
        key: wanted[key] for key in ("auto", "rule")
    }
    (warning,) = found["warnings"]
    assert words in warning
    assert found["explained"].endswith("\n  " + warning)
    assert found["doctor"]["state"] == "WARN"
    assert warning == f"{found['doctor']['found']}; {found['doctor']['advice']}"
