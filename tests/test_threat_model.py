"""The threat model names tests for its claims, and they are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "threat-model.md"
NAME = re.compile(r"`(\S+\.py)::(\S+)`")


@functools.cache
def names_in(file: str) -> set[str]:
    """TEST and CLASS::TEST of a file, as pytest names them."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for outer in tree.body:
        if isinstance(outer, ast.ClassDef) and outer.name.startswith("Test"):
            found |= {f"{outer.name}::{n.name}" for n in outer.body if hasattr(n, "name")}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_test_that_the_page_names_is_there(text: str) -> None:
    named = NAME.findall(text)
    assert len(named) > 50
    form = len(re.findall("`FILE::TEST`", text))
    assert len(named) + form == len(re.findall(r"`[^`\n]*::[^`\n]*`", text))
    assert not [f"{file}::{test}" for file, test in named if test not in names_in(file)]


def test_every_claim_of_a_table_has_a_test(text: str) -> None:
    tables = [part for part in text.split("\n\n") if "| held by |" in part]
    rows = [row for table in tables for row in table.splitlines() if row.startswith("|")]
    claims = [row for row in rows if "held by" not in row and not row.startswith("|---")]
    assert claims
    assert not [row for row in claims if not NAME.search(row.rpartition(" | ")[2])]
