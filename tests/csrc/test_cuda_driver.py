"""A driver older than the CUDA that the library was built with: the error names both versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from child_programs import run_to_end
from host_programs import CSRC, HERE

# As much of libcuda.so.1 as the CUDA runtime asks for before it refuses an old driver.
_OLD_DRIVER = 'extern "C" int cuDriverGetVersion(int* version) { *version = 11080; return 0; }\n'


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc's headers and runtime")
def test_an_old_driver_is_named_with_the_version_it_must_support(tmp_path: Path) -> None:
    def run(*command: object, **environment: str) -> str:
        return run_to_end(*command, cwd=tmp_path, **environment).stdout

    (tmp_path / "driver.cc").write_text(_OLD_DRIVER)
    run("nvcc", "-shared", "-Xcompiler=-fPIC", "-cudart=none", "-o=libcuda.so.1", "driver.cc")
    sources = (
        HERE / "cuda_driver.cc",
        CSRC / "cuda/device/driver.cc",
        CSRC / "core/base/status.cc",
    )
    run("nvcc", "-std=c++17", f"-I{CSRC}", *sources, "-o=program")
    said = run("./program", LD_LIBRARY_PATH=str(tmp_path))
    assert "EP_RUNTIME/RuntimeUnavailableError: the NVIDIA driver must support CUDA 1" in said
    assert ", got a driver for CUDA 11.8; install " in said
