"""Compares token movement with the reference, in each of a job's processes or in only one.

No collective of XLA's: a process makes its own shards, and compares those that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cases
import jax
import movement
import numpy as np
from gpu.jobs.layouts import TRANSPORT
from gpu.test_gpu_movement import TOLERANCE, fitted
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

# In a group over nodes, the plan's other arrays describe how rows travel between nodes.
SHARED = ("dst_rank", "dst_row", "kept", "group_sizes", "num_recv")
_CASES = {case.name: case for case in cases.CASES}


def run_cases(names: list[str]) -> list[str]:
    """Runs the named cases, each in its own group; returns their names."""
    with ep.connect(timeout_s=60) as session:
        for name in names:
            run_case(session, fitted(_CASES[name], len(jax.devices())))
    return names


def run_case(session: ep.Session, case: cases.Case) -> None:
    """Runs one case, fitted to the number of devices, in its own group."""
    settings = dict(case.group_settings)
    axes = settings.pop("axes")
    used = np.array(jax.devices()[: math.prod(axes.values())]).reshape([*axes.values()])
    group = session.create_group(
        case.group_name, Mesh(used, [*axes]), transport=TRANSPORT, op_timeout_s=60, **settings
    )
    layer = group.register_layer("moe", top_k=case.top_k)
    capacity = movement.capacity_of(case, layer)
    inputs = movement.inputs_of(case, group.spec, capacity)
    got = movement.run_ops(layer, case, placed(inputs, case, group), summed=False)
    # The reference unrolls ranks and slots: with many, compiling takes longer than running.
    unrolled = jax.disable_jit(case.top_k > 8)
    with jax.default_device(jax.local_devices(backend="cpu")[0]), unrolled:
        want = movement.run_reference(case, group.spec, inputs, capacity)
    _check(case, group.spec.node_size, got, want)
    group.check()
    group.close()


def placed(inputs: movement.Inputs, case: cases.Case, group: ep.Group) -> movement.Inputs:
    """Like `movement.placed`, for several processes: each makes its own shards."""
    axes = movement.axes_of(case, group.spec)
    tokens = NamedSharding(group.mesh, PartitionSpec(*(names or None for names in axes)))
    slabs = NamedSharding(group.mesh, PartitionSpec(group.spec.token_axes))

    def put(array: Any, sharding: NamedSharding) -> Any:
        if array is None:
            return None
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    return movement.Inputs(
        tokens=put(inputs.tokens, tokens),
        topk_idx=put(inputs.topk_idx, tokens),
        weights=put(inputs.weights, tokens),
        cotangent=put(inputs.cotangent, tokens),
        factors=put(inputs.factors, slabs),
    )


def _local(got: jax.Array, want: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields this process's shards of an array: (index, values, wanted values)."""
    for shard in got.addressable_shards:
        yield shard.index, np.asarray(shard.data), np.asarray(want)[shard.index]


def _check(case: cases.Case, node_size: int, got: dict[str, Any], want: dict[str, Any]) -> None:
    """Compares integers and rows exactly, sums within the dtype's tolerance."""
    for name in SHARED if node_size else want["plan"]:
        array = want["plan"][name]
        for _, mine, wanted in _local(got["plan"][name], array):
            np.testing.assert_array_equal(mine, wanted, err_msg=f"{case.name}: {name}")
    for index, mine, wanted in _local(got["rows"], want["rows"]):
        zone = want["in_zone"][index[:2]]
        np.testing.assert_array_equal(mine[zone], wanted[zone], err_msg=f"{case.name}: rows")
    for _, mine, wanted in _local(got["row_weights"], want["row_weights"]):
        np.testing.assert_array_equal(mine, wanted, err_msg=f"{case.name}: row weights")
    tolerance = case.tolerance(TOLERANCE)
    for name in ("out", "d_tokens", "d_weights"):
        if want[name] is None:
            continue
        for _, mine, wanted in _local(got[name], want[name]):
            np.testing.assert_allclose(
                mine.astype(np.float64),
                wanted.astype(np.float64),
                rtol=tolerance,
                atol=tolerance * (case.hidden**0.5 if name == "d_weights" else case.top_k),
                err_msg=f"{case.name}: {name}",
            )
