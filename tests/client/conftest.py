"""Fixtures of the client's tests: devices, a real daemon in a short directory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from ep_runtime_client import children

jax.config.update("jax_num_cpu_devices", 8)

READY_TIMEOUT_S = 60.0


def package_path() -> str:
    """A PYTHONPATH under which a child imports the packages that this process imports."""
    found = []
    for name in ("ep_runtime", "ep_runtime_server", "ep_runtime_client"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found.append(str(Path(spec.origin).parent.parent))
    return os.pathsep.join(dict.fromkeys(found))


@pytest.fixture(autouse=True)
def _children_import_what_we_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", package_path())
    for name in ("EP_RUNTIME_ADDRESS", "EP_RUNTIME_JOB", "EP_RUNTIME_DEBUG", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A socket directory: pytest's own are too long for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="ept-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(directory: Path) -> Iterator[children.Child]:
    """A running daemon; it must still end well after the test."""
    child = children.Child.start(directory, ["--max-host-bytes", "1G"], pass_fds=[])
    child.wait_ready(READY_TIMEOUT_S)
    yield child
    code = child.stop()
    assert code == 0, child.log_tail(50)


@pytest.fixture
def address(daemon: children.Child) -> str:
    return f"unix://{daemon.directory}"


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    """Eight CPU devices."""
    found = jax.devices("cpu")
    assert len(found) >= 8
    return found[:8]


@pytest.fixture
def mesh(devices: list[Any]) -> Any:
    """dp 2 x ep 4."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(devices).reshape(2, 4), ("dp", "ep"))
