"""What `doctor` says of NCCL where the package can use it, and where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_runtime import native, nccl
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client.cli.commands import doctor


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
