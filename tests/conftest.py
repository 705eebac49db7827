"""Eight CPU devices for every test of this process, and nothing left behind by one test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# Before the CPU backend starts: jaxlib below 0.12 takes its thread pool's size from here.
os.environ.setdefault("PJRT_NPROC", "32")

import fakes
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def on_nodes(*sizes: int) -> list[Any]:
    """Transport memfd on nodes of so many ranks, as `make_group` takes it."""
    return [pytest.param(f"memfd/{size}", marks=pytest.mark.slow) for size in sizes]


@pytest.fixture
def unoptimized() -> Iterator[None]:
    """Programs compile with few of LLVM's optimizations, in half the time where they are long.

    For tests of what programs mean. Those of optimized ones' bits are in `test_transports_agree`.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(params=["xla", "memfd", *on_nodes(1, 2, 4)])
def transport(request: pytest.FixtureRequest) -> str:
    """All transports that run on CPU."""
    name: str = request.param
    if name.startswith("memfd"):
        fakes.require_native()
    if name != "memfd":
        request.getfixturevalue("unoptimized")
    return name


@pytest.fixture
def make_group() -> Iterator[Callable[..., fakes.LocalGroup]]:
    """`fakes.local_group` whose groups are closed after the test.

    transport="memfd/2" is "memfd" on nodes of 2 ranks, or of 1 where that does not divide.
    """
    groups: list[fakes.LocalGroup] = []

    def make(**settings: Any) -> fakes.LocalGroup:
        transport, _, size = settings.get("transport", "xla").partition("/")
        if size:
            settings |= {"transport": transport, "node_size": int(size)}
        groups.append(fakes.local_group(**settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
