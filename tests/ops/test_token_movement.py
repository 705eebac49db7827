"""dispatch and combine against the reference: values, plans and gradients."""

from __future__ import annotations

from typing import Any

import cases
import jax
import movement
import numpy as np
import pytest
from fakes import MakeGroup

import ep_runtime as ep

SHARED = ("dst_rank", "dst_row", "kept", "group_sizes", "num_recv")
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-2, "float16": 6e-3, "float64": 1e-12}


def check_case(make_group: MakeGroup, transport: str, case: cases.Case) -> dict[str, Any]:
    group = make_group(transport=transport, debug=True, **case.group_settings)
    layer = group.register_layer("moe", top_k=case.top_k)
    capacity = movement.capacity_of(case, layer)
    inputs = movement.inputs_of(case, group.spec, capacity)
    got = movement.run_ops(layer, case, movement.placed(inputs, case, group))
    want = movement.run_reference(case, group.spec, inputs, capacity)
    # Between nodes the receiver's side of a plan speaks of its node alone.
    names = SHARED if group.spec.node_size else tuple(want["plan"])
    for name in names:
        array = want["plan"][name]
        np.testing.assert_array_equal(got["plan"][name], array, err_msg=name)
    zone = want["in_zone"]
    np.testing.assert_array_equal(
        np.asarray(got["rows"])[zone], np.asarray(want["rows"])[zone], err_msg="rows"
    )
    np.testing.assert_array_equal(got["row_weights"], want["row_weights"], err_msg="row weights")
    tolerance = case.tolerance(TOLERANCE)
    for name in ("out", "d_tokens", "d_weights"):
        if want[name] is None:
            continue
        np.testing.assert_allclose(
            np.asarray(got[name], np.float64),
            np.asarray(want[name], np.float64),
            rtol=tolerance,
            atol=tolerance * case.hidden if name == "d_weights" else tolerance * case.top_k,
            err_msg=name,
        )
    return got


# Each value of each field once: the programs of xla take seconds to compile.
ON_XLA = {
    "top-8",
    "bfloat16 exact",
    "8-bit sums",
    "a rank receives nothing",
    "no tokens",
    "dp x ep",
    "3-D over both dims, crossed",
    "drops",
}
_RUNS = [
    *(
        pytest.param("xla", case, id=f"xla-{case.name}")
        for case in cases.CASES
        if case.name in ON_XLA
    ),
    *(pytest.param("memfd", case, id=f"memfd-{case.name}") for case in cases.CASES),
    *(
        pytest.param(f"memfd/{size}", case, id=f"memfd/{size}-{case.name}", marks=pytest.mark.slow)
        for size in (1, 2, 4)
        for case in cases.CASES
    ),
]


@pytest.mark.parametrize(("transport", "case"), _RUNS, indirect=["transport"])
def test_movement_equals_the_reference(
    make_group: MakeGroup, transport: str, case: cases.Case
) -> None:
    check_case(make_group, transport, case)


def test_float64_and_64_bit_indices_where_jax_has_them(
    make_group: MakeGroup, transport: str
) -> None:
    with jax.enable_x64(True):
        case = cases.Case("f64", dtype="float64", idx_dtype="int64", top_k=3, hidden=9)
        got = check_case(make_group, transport, case)
        assert got["out"].dtype == np.float64


def test_an_index_beyond_the_experts_is_an_unused_slot(
    make_group: MakeGroup, transport: str
) -> None:
    group = make_group(transport=transport, axes={"ep": 2}, num_experts=4, alignment=1)
    layer = group.register_layer("moe", top_k=2)
    beyond = np.int32([[0, 4], [3, 1], [5, 3], [2**31 - 1, 3]])
    prepare = jax.jit(lambda idx: ep.prepare(layer, idx).arrays)
    found, wanted = prepare(beyond), prepare(np.where(beyond < 4, beyond, -1))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
