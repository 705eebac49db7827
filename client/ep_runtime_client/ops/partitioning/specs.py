"""What PartitionSpecs say."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ep_runtime_client.ops.tracing.varying import Axes


def entry_axes(entry: Any) -> Axes:
    """The axis names of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def known_spec(array: Any) -> PartitionSpec | None:
    """The spec an array is known to have: its type's under Explicit axes, a concrete array's own.

    Returns:
        None for a tracer in Auto mode, a NumPy array, or an array on a single device.
    """
    if not isinstance(array, jax.core.Tracer):
        sharding = getattr(array, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else None
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None)
    return spec if spec is not None and any(entry_axes(entry) for entry in spec) else None
