"""`import ep_runtime`: light, lazy, and the same list in the stub."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from child_programs import run_python

import ep_runtime


def _stub_names() -> set[str]:
    tree = ast.parse((Path(ep_runtime.__file__).parent / "__init__.pyi").read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return imported | {"__version__"}


def test_the_stub_lists_the_public_names() -> None:
    # Flax and optax are optional extras, so `import *` leaves what needs them out.
    assert _stub_names() == {*ep_runtime.__all__, "linen", "nnx", "optax"}


def test_importing_loads_neither_jax_nor_native_nor_grpc() -> None:
    program = (
        "import ep_runtime, sys\n"
        "ep_runtime.recv_capacity, ep_runtime.LayerSpec, ep_runtime.SpecMismatchError\n"
        "found = {'jax', 'jaxlib', 'numpy', 'grpc', 'ep_runtime.native'} & set(sys.modules)\n"
        "sys.exit(f'loaded {found}' if found else 0)\n"
    )
    run_python("-c", program)


def test_connecting_without_a_daemon_loads_no_jax() -> None:
    program = (
        "import ep_runtime as ep, sys\n"
        "with ep.connect('none'):\n"
        "    sys.exit('loaded jax' if 'jax' in sys.modules else 0)\n"
    )
    run_python("-c", program)


def test_a_training_job_loads_no_bench() -> None:
    program = (
        "import ep_runtime as ep, sys\n"
        "for name in ep.__all__: getattr(ep, name)\n"
        "with ep.connect('none'):\n"
        "    found = [name for name in sys.modules if name.startswith('ep_runtime_bench')]\n"
        "    sys.exit(f'loaded {found}' if found else 0)\n"
    )
    run_python("-c", program)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'dispach'"):
        _ = ep_runtime.dispach  # type: ignore[attr-defined]


def test_submodules_show_their_public_names_alone() -> None:
    for name in (
        "convert",
        "distributed",
        "errors",
        "linen",
        "nnx",
        "optax",
        "recipes",
        "sharding",
    ):
        module = getattr(ep_runtime, name)
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, each) for each in module.__all__)
    named = {each for each in ep_runtime.__all__ if each.endswith("Error")}
    assert set(ep_runtime.errors.__all__) == named
