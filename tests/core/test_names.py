"""Names of the sources: one class per name, and no function that nobody calls."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("ep_runtime", "ep_runtime_server", "ep_runtime_client", "ep_runtime_bench")
# Flax has two frontends, and users know the block of either by this name.
TWICE = {"MoEBlock"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """File and tree of every module of ours but generated ones."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py*")):
                name = path.relative_to(Path(folder).parent)
                if path.suffix in (".py", ".pyi") and name.parts[:2] != ("ep_runtime", "v1"):
                    yield str(name), ast.parse(path.read_text())


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return dict(sources())


def test_no_two_classes_have_one_name(trees: dict[str, ast.Module]) -> None:
    places = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert len(places) > 100
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in TWICE} == {}
    assert set(twice) == TWICE
