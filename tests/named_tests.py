"""Finds tests by the names that pages use: FILE::TEST, with FILE relative to `tests/`."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

TESTS = Path(__file__).resolve().parent


@functools.cache
def names_in(file: str) -> set[str]:
    """Returns TEST and CLASS::TEST of a file, in pytest's spelling."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in tree.body if isinstance(node, kinds)}
    for outer in tree.body:
        if isinstance(outer, ast.ClassDef) and outer.name.startswith("Test"):
            found |= {f"{outer.name}::{n.name}" for n in outer.body if hasattr(n, "name")}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}
