"""Compiles a fake libnccl and the NCCL part of the CUDA library, both for hosts without GPUs."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from child_programs import run_to_end

from ep_runtime import nccl

_ROOT = Path(__file__).parents[1]
_SOURCES = _ROOT / "csrc"
_OURS = _ROOT / "tests" / "csrc" / "nccl"
# JAX on GPUs also loads the real library into this process, and then its name is taken.
_SONAME = "libnccl_of_tests.so.2"
_NCCL = ("api.cc", "communicator.cc", "communicators.cc", "exchange.cc", "group.cc")


def _compile(name: str, sources: list[Path], *options: str) -> Path:
    """Builds a library from these sources once for all processes, and again if they change."""
    headers = (*_SOURCES.glob("core/*/*.h"), *_SOURCES.glob("ffi/nccl/nccl_table.h"))
    read = [*sources, *sorted(_SOURCES.glob("cuda/nccl/*")), *sorted(headers)]
    said = " ".join(options).encode()
    key = hashlib.sha256(said.join(path.read_bytes() for path in read)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ep-nccl-{os.geteuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.geteuid()
    made = folder / name
    if made.exists():
        return made
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    fresh = folder / f"{name}.{os.getpid()}"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-pthread", *options, "-o", str(fresh)]
    run_to_end(*command, *sources)
    fresh.replace(made)
    return made


@functools.cache
def fake_library() -> Path:
    """Builds libnccl.so.2 with communicators inside this process; `FakeNccl` sets what it does."""
    return _compile(nccl.LIBRARY, [_OURS / "fake_nccl.cc"], f"-Wl,-soname,{_SONAME}")


@functools.cache
def edge_library(soname: str = _SONAME) -> Path:
    """Builds the NCCL part of the CUDA library, for devices that always exist. It uses the libnccl
    that the process has loaded under that name.
    """
    sources = [
        *(_SOURCES / "cuda" / "nccl" / name for name in _NCCL),
        _SOURCES / "ffi" / "nccl" / "nccl_table.cc",
        _SOURCES / "core" / "base" / "status.cc",
        _OURS / "test_edge.cc",
    ]
    options = (f"-I{_SOURCES}", f'-DEP_RUNTIME_NCCL_SONAME="{soname}"', "-Wall", "-Wextra")
    return _compile("libnccl_edge.so", sources, *options)


class FakeNccl:
    """The switches and counts of the fake library."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(str(fake_library()))

    def set(self, name: str, value: int) -> None:
        self._library.FakeSet(name.encode(), value)

    def count(self, name: str) -> int:
        return int(self._library.FakeGet(name.encode()))

    def reset(self) -> None:
        for name in ("never_ready", "never_done", "never_final", "async_error", "id_result"):
            self.set(name, 0)
        self.set("version", 22809)
        self.set("init_result", 7)  # in progress, as NCCL answers
        self.set("wait_for_all_aborts", 0)
        self.set("counts", 0)
