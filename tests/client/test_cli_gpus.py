"""`doctor` reports GPUs and NCCL on machines that have all, half or none of them."""

from __future__ import annotations

import importlib.util
import os
import types
from pathlib import Path
from typing import Any

import pytest

from ep_runtime import native, nccl
from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError
from ep_runtime_client.cli.commands import doctor
from ep_runtime_client.cli.machine import gpus


class Library:
    """A fake of our CUDA library or of NCCL's, with its findings or its error."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def devices(self) -> Any:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    version = devices


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """machine(modules, found): has these Python modules, and the GPUs our library
    finds, or none.
    """

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


NO_DRIVER = "CUDA: cudaGetDeviceCount: no driver"
WITHOUT = "JAX has jax_cuda13_plugin, this package was built without CUDA"


@pytest.mark.parametrize(
    ("modules", "found", "state", "told", "advice"),
    [
        ("jax_cuda13_plugin", None, "WARN", WITHOUT, "EP_RUNTIME_CUDA=ON pip install"),
        ("cuda cuda.bindings", ["GPU-a"], "WARN", "1 GPUs: GPU-a; JAX sees none", "cuda13"),
        ("jax_cuda12_plugin", EpRuntimeError(NO_DRIVER), "WARN", NO_DRIVER, ""),
        ("jax_cuda12_plugin", ["GPU-a"], "WARN", "", "cuda-bindings"),
        ("jax_cuda13_plugin cuda cuda.bindings", ["GPU-a", "GPU-b"], "OK", "", ""),
        (
            *("jax_cuda12_plugin cuda cuda.bindings", ["GPU-a"], "WARN"),
            *("1 GPUs: GPU-a; jax_cuda12_plugin", "CUDA 12 was never tried on a GPU"),
        ),
    ],
)
def test_what_gpus_lack_here_is_named_with_its_remedy(
    machine: Any, modules: str, found: Any, state: str, told: str, advice: str
) -> None:
    said = machine({*modules.split()}, found)
    assert said.state == state
    assert told in said.found
    assert advice in said.advice


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


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "library_path", lambda platform: tmp_path)
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", "/opt/libnccl.so.2")


def test_a_package_without_cuda_needs_no_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "library_path", lambda platform: tmp_path / "none.so")
    assert doctor._nccl().state == "OK"
    assert "without CUDA" in doctor._nccl().found


def test_the_version_of_libnccl_is_named_or_what_to_install(
    built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "library", lambda: Library(22809))
    assert doctor._nccl() == ("nccl", "OK", "NCCL 2.28.9 of /opt/libnccl.so.2", "")
    missing = RuntimeUnavailableError("this process has no libnccl.so.2")
    monkeypatch.setattr(nccl, "library", lambda: Library(missing))
    said = doctor._nccl()
    assert (said.state, said.found) == ("WARN", "this process has no libnccl.so.2")
    assert "cuda13" in said.advice


def test_a_header_of_another_version_is_named(
    built: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nccl, "library", lambda: Library(22809))
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(tmp_path / "lib" / "libnccl.so.2"))
    header = tmp_path / "include" / "nccl.h"
    header.parent.mkdir()
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE 22809\n")
    assert doctor._nccl().state == "OK"
    header.write_text("#define NCCL_VERSION_CODE   22703 // 2.27\n")
    said = doctor._nccl()
    assert said.state == "WARN"
    assert f"NCCL 2.28.9 of {tmp_path}/lib/libnccl.so.2; {header} is of 2.27.3" in said.found
    assert "nccl.h of NCCL 2.28.9" in said.advice


def test_several_gpus_want_launches_in_order_and_room_for_buffers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "usable", lambda: 2)
    for value, state in (("0", "WARN"), ("1", "OK")):
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", value)
        ordered, shared = doctor._several_gpus()
        assert (ordered.state, shared.check) == (state, "shared memory")
    monkeypatch.setattr(gpus, "usable", lambda: 1)
    assert doctor._several_gpus() == []


@pytest.mark.parametrize(("free_bytes", "state"), [((1 << 30) - 4096, "WARN"), (1 << 30, "OK")])
def test_a_small_dev_shm_is_named(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, state: str
) -> None:
    found = types.SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: found)
    said = doctor._shared_memory()
    assert (said.state, "--shm-size=1g" in said.advice) == (state, state == "WARN")
    monkeypatch.undo()
    assert "for NCCL" in doctor._shared_memory("/nowhere").advice
