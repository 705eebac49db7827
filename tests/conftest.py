"""Eight CPU devices for every test of this process, and nothing left behind by one test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before the CPU backend starts: jaxlib below 0.12 takes its thread pool's size from here.
os.environ.setdefault("PJRT_NPROC", "32")

import fakes
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(params=["xla", "memfd"])
def transport(request: pytest.FixtureRequest) -> str:
    """Both transports that run on CPU."""
    name: str = request.param
    if name == "memfd":
        fakes.require_native()
    return name


@pytest.fixture
def make_group() -> Iterator[Callable[..., fakes.LocalGroup]]:
    """`fakes.local_group` whose groups are closed after the test."""
    groups: list[fakes.LocalGroup] = []

    def make(**settings: object) -> fakes.LocalGroup:
        groups.append(fakes.local_group(**settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
