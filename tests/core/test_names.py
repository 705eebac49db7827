"""Every function in the sources has a caller."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("ep_runtime", "ep_runtime_server", "ep_runtime_client", "ep_runtime_bench")
# Functions that Flax, gRPC, JAX and `logging` call.
OF_FRAMEWORKS = {"_same_tangent", "emit", "intercept_service", "set_view", "setup"}
# Methods of public classes.
OF_USERS = {"from_separate"}
# References of tests, and functions that show tests whether an op reads stale memory.
OF_TESTS = {"await_ready", "poison_staging"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yields file and tree of each of our modules, except generated ones."""
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


def words(tree: ast.Module) -> Iterator[str]:
    """Yields every name that a module uses, also in tables of names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def functions(tree: ast.Module) -> Iterator[str]:
    """Yields functions and methods of a module, except RPCs."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    rpcs = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Servicer")
        for each in node.body
        if isinstance(each, kinds) and each.name[0].isupper()
    }
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node not in rpcs:
            yield node.name


def test_every_function_is_called(trees: dict[str, ast.Module]) -> None:
    used = {word for tree in trees.values() for word in words(tree)}
    found = {
        each: name
        for name, tree in trees.items()
        for each in functions(tree)
        if each not in used and not each.startswith("__")
    }
    assert set(found) == OF_FRAMEWORKS | OF_USERS | OF_TESTS, found


def replaced() -> Iterator[tuple[str, str, str]]:
    """Yields file, module and name of every `setattr(module, "name", ...)` on our modules."""
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules = {
            name.asname or name.name: f"{node.module}.{name.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ep_runtime")
            for name in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
                owner, name = node.args[:2]
                known = isinstance(owner, ast.Name) and owner.id in modules
                if known and isinstance(name, ast.Constant):
                    yield path.name, modules[ast.unparse(owner)], str(name.value)


def test_what_tests_replace_is_there() -> None:
    """Also covers tests on GPUs, which run only on machines with GPUs."""
    names = list(replaced())
    assert len(names) > 50
    for file, owner, name in names:
        assert hasattr(pkgutil.resolve_name(owner), name), f"{file}: {owner} has no {name}"
