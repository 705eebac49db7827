"""Each process of a movement test: runs cases through memfd, and compares with the reference."""

from __future__ import annotations

import hashlib
from typing import Any

import cases
import jax
import movement
import numpy as np
from jax.experimental import multihost_utils

import ep_runtime as ep
from ep_runtime import layout
from ep_runtime_client.base import meshes

# The other arrays of a plan over nodes describe ranks of one node only.
SAME_OVER_NODES = ("dst_rank", "dst_row", "kept", "group_sizes", "num_recv")
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-2, "float16": 6e-3}


def run_case(session: Any, case: cases.Case, nodes: int) -> None:
    """Runs one case in its own group; every process sees every value."""
    case = cases.fitted(case, len(jax.devices()))
    settings = dict(case.group_settings)
    axes = settings.pop("axes")
    count = int(np.prod([*axes.values()]))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape([*axes.values()]), [*axes])
    group = session.create_group(case.group_name, mesh, **settings, op_timeout_s=60)
    assert (group.spec.transport, group.spec.node_size) == ("memfd", shares_of(group, nodes))
    layer = group.register_layer("moe", top_k=case.top_k)
    capacity = movement.capacity_of(case, layer)
    inputs = movement.inputs_of(case, group.spec, capacity)
    got = movement.run_ops(layer, case, movement.placed(inputs, case, group))
    got.pop("sent")
    got = multihost_utils.process_allgather(got, tiled=True)
    check(case, group.spec, inputs, capacity, got)
    if case.name == "bfloat16 fast":
        check_quantized(layer, movement.placed(inputs, case, group))
    group.close()


def check_quantized(layer: Any, inputs: Any) -> None:
    """Rows quantized before they are sent have the bits of rows quantized on arrival."""
    recipe = ep.recipes.BlockScaling()

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


def check(case: cases.Case, spec: Any, inputs: Any, capacity: int, got: dict[str, Any]) -> None:
    """Compares integers and rows exactly, sums within the dtype's tolerance."""
    want = movement.run_reference(case, spec, inputs, capacity)
    for name in SAME_OVER_NODES if spec.node_size else want["plan"]:
        array = want["plan"][name]
        np.testing.assert_array_equal(got["plan"][name], array, err_msg=name)
    zone = want["in_zone"]
    np.testing.assert_array_equal(got["rows"][zone], np.asarray(want["rows"])[zone])
    np.testing.assert_array_equal(got["row_weights"], want["row_weights"])
    tolerance = case.tolerance(TOLERANCE)
    for name in ("out", "d_tokens", "d_weights"):
        if want[name] is not None:
            np.testing.assert_allclose(
                np.asarray(got[name], np.float64),
                np.asarray(want[name], np.float64),
                rtol=tolerance,
                atol=tolerance * (case.hidden if name == "d_weights" else case.top_k),
                err_msg=name,
            )


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
