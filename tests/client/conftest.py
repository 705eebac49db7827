"""Eight CPU devices."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from nccl_ranks import fake, ranks  # noqa: F401 - fixtures are found by name

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    found = jax.devices("cpu")
    assert len(found) >= 8
    return found[:8]


@pytest.fixture
def mesh(devices: list[Any]) -> Any:
    """dp 2 x ep 4."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(devices).reshape(2, 4), ("dp", "ep"))
