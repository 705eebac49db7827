"""Tests which libnccl and which of our libraries a process may load."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess

import pytest
from child_programs import run_python
from nccl_builds import edge_library, fake_library

from ep_runtime import nccl
from ep_runtime.errors import VersionSkewError


@pytest.mark.parametrize(
    ("version", "path", "error", "parts"),
    [
        (21707, "/nowhere", "VersionSkewError", ["2.18.1 or newer", "2.17.7"]),
        (None, "/nowhere/libnccl.so.2", "RuntimeUnavailableError", ["libnccl.so.2", "/nowhere"]),
    ],
)
def test_a_process_whose_nccl_is_old_or_missing_says_so(version, path, error, parts):
    code = f"""
import ctypes, pathlib
from ep_runtime import errors, nccl
if {version}:
    ctypes.CDLL({str(fake_library())!r}).FakeSet(b"version", {version})
try:
    nccl.NcclLibrary(pathlib.Path({str(edge_library())!r})).version()
except errors.{error} as error:
    print(error)
"""
    said = run_python("-c", code, EP_RUNTIME_NCCL_LIBRARY=path).stdout
    assert all(part in said for part in parts), said


def test_a_library_of_another_abi_is_refused(tmp_path):
    empty = tmp_path / "empty.cc"
    empty.write_text("")
    made = tmp_path / "libempty.so"
    subprocess.run(["c++", "-shared", "-o", str(made), str(empty)], check=True, timeout=60)
    with pytest.raises(VersionSkewError, match="build it again"):
        nccl.NcclLibrary(made)


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_library_of_each_extra_is_loaded_and_gives_ids(extra):
    """Tests NCCL's own wheel without a GPU. Install the other CUDA version's by `pip install
    --target FOLDER nvidia-nccl-cu12`, and set PYTHONPATH=FOLDER.
    """
    wheel = "nvidia-nccl-cu" + extra.removeprefix("cuda")
    try:
        installed = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{wheel} is not installed")
    code = f"""
import ctypes, json, os, pathlib
from ep_runtime import nccl
from ep_runtime_server.nccl import unique_id_child
made = unique_id_child.make(2)
loaded = nccl.NcclLibrary(pathlib.Path({str(edge_library(nccl.LIBRARY))!r}))
print(json.dumps(made | {{"read": loaded.version(), "maps": open("/proc/self/maps").read()}}))
os.sys.stdout.flush()
os._exit(0)  # NCCL's threads would keep a clean exit
"""
    path = str(installed.locate_file(f"nvidia/nccl/lib/{nccl.LIBRARY}"))
    chosen = {"EP_RUNTIME_NCCL_LIBRARY": path, "NCCL_SOCKET_IFNAME": "lo"}
    said = json.loads(run_python("-c", code, **chosen).stdout.splitlines()[-1])
    assert "error" not in said, said
    # The version is read only after every symbol that we call was found.
    assert nccl.version_text(said["read"]) == installed.version
    assert said["read"] == said["version"]
    assert len({*said["ids"]}) == 2
    assert {len(each) for each in said["ids"]} == {2 * nccl.UNIQUE_ID_BYTES}
    assert os.path.realpath(path) in said["maps"]
