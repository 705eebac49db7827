"""Finds GPUs for the tests of this folder, or the reason to skip them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from block_ways import Ways
from gpu.block_programs import Blocks
from gpu.jobs import layouts
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime import native

_BUILT = native.library_path("cuda").exists()
if not layouts.TRIAL and not _BUILT:
    collect_ignore_glob = ["test_*.py"]  # a file on the command line is collected, and skipped


@functools.cache
def missing() -> str:
    """Returns why these tests cannot run here; "" if they can."""
    if not _BUILT:
        return "built without EP_RUNTIME_CUDA=ON"
    try:
        jax.devices("gpu")
    except RuntimeError:
        return "JAX sees no GPU"
    return ""


@pytest.fixture(scope="session")
def gpus() -> list[Any]:
    """One, two, four or eight GPUs, `layouts.COUNT` at most."""
    if not layouts.TRIAL and missing():
        pytest.skip(missing())
    found = jax.devices("cpu" if layouts.TRIAL else "gpu")
    there = min(len(found), layouts.COUNT)
    return found[: 1 << there.bit_length() - 1]


@pytest.fixture
def several_gpus(gpus: list[Any]) -> int:
    """Returns the number of GPUs: two, four or eight."""
    if len(gpus) < 2:
        pytest.skip(f"needs 2 GPUs or more, JAX sees {len(gpus)}")
    return len(gpus)


@pytest.fixture
def job_gpus(request: pytest.FixtureRequest, gpus: list[Any]) -> int:
    """Returns the ranks of a job: one per GPU, or several if processes share GPUs."""
    if layouts.RANKS:
        return layouts.RANKS
    return request.getfixturevalue("several_gpus")


@pytest.fixture
def session(gpus: list[Any]) -> Iterator[ep.Session]:
    """A session with its own daemon."""
    with ep.connect("embedded", timeout_s=60.0) as made:
        yield made


@pytest.fixture
def blocks(session: ep.Session, gpus: list[Any], ways: Ways) -> Blocks:
    """Layers and programs on a mesh of all GPUs, as one EP group."""
    return Blocks(session, Mesh(np.array(gpus), ("ep",)), ways)
