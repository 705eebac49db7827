"""What `doctor` says of GPUs on machines that have them, or half of what they need."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ep_runtime import native
from ep_runtime.errors import EpRuntimeError
from ep_runtime_client.cli.machine import gpus


class Library:
    def __init__(self, found: list[str] | Exception) -> None:
        self._found = found

    def devices(self) -> list[str]:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """machine(modules, found): with these Python modules, and our library's GPUs or none of it."""

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def set_up(modules: set[str], found: list[str] | Exception | None) -> gpus.GpuFinding:
        path = tmp_path / "libep_runtime_cuda.so"
        if found is not None:
            path.touch()
            monkeypatch.setattr(native, "library", lambda platform: Library(found))
        monkeypatch.setattr(native, "library_path", lambda platform: path)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: object() if name in modules else None
        )
        return gpus.check()

    return set_up


def test_a_machine_without_gpus_is_fine(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_device_files", lambda: 0)
    assert machine(set(), None).state == "OK"


def test_gpus_that_nothing_here_was_installed_for_are_named(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_device_files", lambda: 4)
    said = machine(set(), None)
    assert (said.state, said.found[-22:]) == ("WARN", "and this machine has 4")
    assert "cuda13" in said.advice


def test_a_variable_that_keeps_jax_from_gpus_is_named(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    said = machine({"jax_cuda13_plugin", "cuda", "cuda.bindings"}, ["GPU-a"])
    assert (said.state, said.advice) == ("WARN", "JAX_PLATFORMS=cpu keeps JAX from them")


def test_jax_for_gpus_beside_a_build_without_cuda_says_how_to_build(machine: Any) -> None:
    said = machine({"jax_cuda13_plugin"}, None)
    assert said.state == "WARN"
    assert "JAX has jax_cuda13_plugin, this package was built without CUDA" in said.found
    assert said.advice.startswith("EP_RUNTIME_CUDA=ON pip install")


def test_a_build_with_cuda_beside_a_jax_without_names_the_extra(machine: Any) -> None:
    said = machine({"cuda", "cuda.bindings"}, ["GPU-a"])
    assert (said.state, said.found) == ("WARN", "1 GPUs: GPU-a; JAX sees none")
    assert "cuda13" in said.advice


def test_a_missing_driver_is_told_in_cudas_words(machine: Any) -> None:
    said = machine({"jax_cuda12_plugin"}, EpRuntimeError("CUDA: cudaGetDeviceCount: no driver"))
    assert (said.state, said.found) == ("WARN", "CUDA: cudaGetDeviceCount: no driver")


def test_a_daemon_without_cuda_bindings_is_warned_of(machine: Any) -> None:
    assert "cuda-bindings" in machine({"jax_cuda12_plugin"}, ["GPU-a"]).advice
    assert machine({"jax_cuda13_plugin", "cuda", "cuda.bindings"}, ["GPU-a", "GPU-b"]).state == "OK"


def test_cuda_12_is_said_to_be_untried(machine: Any) -> None:
    said = machine({"jax_cuda12_plugin", "cuda", "cuda.bindings"}, ["GPU-a"])
    assert (said.state, said.found) == ("WARN", "1 GPUs: GPU-a; jax_cuda12_plugin")
    assert "CUDA 12 was never tried on a GPU" in said.advice


@pytest.mark.parametrize(
    ("modules", "found", "platforms", "usable"),
    [
        ({"jax_cuda13_plugin"}, ["GPU-a", "GPU-b"], "", 2),
        ({"jax_cuda13_plugin"}, ["GPU-a"], "cuda,cpu", 1),
        ({"jax_cuda13_plugin"}, ["GPU-a"], "cpu", 0),
        ({"jax_cuda13_plugin"}, None, "", 0),
        (set(), ["GPU-a"], "", 0),
        ({"jax_cuda13_plugin"}, EpRuntimeError("CUDA: no driver"), "", 0),
    ],
)
def test_gpus_are_usable_where_both_sides_have_them(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    modules: set[str],
    found: list[str] | Exception | None,
    platforms: str,
    usable: int,
) -> None:
    machine(modules, found)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert gpus.usable() == usable
