"""Each process of a movement test: runs cases through memfd, and compares with the reference."""

from __future__ import annotations

import hashlib
from typing import Any

import cases
import fakes
import jax
import movement
import numpy as np
from jax.experimental import multihost_utils

import ep_runtime as ep
from ep_runtime import layout
from ep_runtime_client.base import meshes


def run_case(session: Any, case: cases.Case, nodes: int) -> None:
    """Runs one case in its own group."""
    case = cases.fitted(case, len(jax.devices()))
    settings = case.group_settings
    mesh = fakes.mesh_of(settings.pop("axes"))
    group = session.create_group(case.group_name, mesh, **settings, op_timeout_s=60)
    assert (group.spec.transport, group.spec.node_size) == ("memfd", shares_of(group, nodes))
    movement.run_case(case, group)
    if case.name == "bfloat16 fast":
        check_quantized(case, group)
    group.close()


def check_quantized(case: cases.Case, group: ep.Group) -> None:
    """Rows quantized before they are sent have the bits of rows quantized on arrival."""
    recipe, layer = ep.recipes.BlockScaling(), group.layer("moe")
    capacity = movement.capacity_of(case, layer)
    inputs = movement.placed(movement.inputs_of(case, group.spec, capacity), case, group)

    @jax.jit
    def both(tokens: Any, topk_idx: Any) -> Any:
        behind = ep.dispatch(layer, tokens, topk_idx)
        q = ep.grouped_quantize(behind.tokens, behind.group_sizes, recipe, layer=layer)
        before = ep.dispatch(layer, tokens, None, plan=behind.plan, recipe=recipe).tokens
        found = [(jax.lax.bitcast_convert_type(x.data, np.uint8), x.scale) for x in (before, q)]
        return *found, behind.group_sizes

    made = both(inputs.tokens, inputs.topk_idx)
    before, behind, sizes = multihost_utils.process_allgather(made, tiled=True)
    for slab, used in enumerate(sizes.sum(1)):
        for got, want in zip(before, behind, strict=True):
            np.testing.assert_array_equal(got[slab, :used], want[slab, :used])


def shares_of(group: Any, nodes: int) -> int:
    """Returns how many ranks share windows, if processes are split evenly, in order, over nodes."""
    devices = meshes.rank_devices(group.mesh, group.spec)
    homes = [str(d.process_index * nodes // jax.process_count()) for d in devices]
    size = layout.node_size(homes, group.spec.ep_size)
    return 0 if size == group.spec.ep_size else size


def main(names: list[str], nodes: int = 1) -> list[str]:
    """Runs the named cases in a job on that many nodes; returns their names."""
    with ep.connect() as session:
        for case in cases.CASES:
            if case.name in names:
                run_case(session, case, nodes)
    return names


def digest(lowered: Any) -> str:
    """Names a program: equal in every process of a job."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()
