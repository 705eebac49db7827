"""What `doctor` says of NCCL where the package can use it, and where it cannot."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from ep_runtime import native, nccl
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client.cli.commands import doctor
from ep_runtime_client.cli.machine import gpus


class Library:
    def __init__(self, found: int | Exception) -> None:
        self._found = found

    def version(self) -> int:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


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


def test_the_version_and_where_it_is_from_are_named(
    built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "library", lambda: Library(22809))
    assert doctor._nccl() == ("nccl", "OK", "NCCL 2.28.9 of /opt/libnccl.so.2", "")


def test_a_machine_without_libnccl_learns_what_to_install(
    built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
