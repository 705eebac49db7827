"""Rows of a block call are packed densely, whatever the alignment of the group's slabs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_programs import (
    HIDDEN,
    SENT,
    TENSOR,
    TILES,
    TOKENS,
    TOP_K,
    Blocks,
    compare,
    graded,
    ran,
)
from gpu.jobs.layouts import TRANSPORT

import ep_runtime as ep

pytestmark = pytest.mark.skipif(TRANSPORT == "xla", reason="has no block calls")
ALIGNMENTS = (1, 8, 128)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bfloat16", {}),
    "bf16, made again": ("bfloat16", {"keep": "nothing"}),
    "f16, weights in combine": ("float16", {"weights_at": "output"}),
    "f32": ("float32", {}),
    "fp8": ("bfloat16", {"recipe": TENSOR}),
    "fp8 by blocks": ("bfloat16", {"recipe": TILES}),
    "fp8 by blocks sent": ("bfloat16", {"recipe": TILES}),
}


def layer_of(blocks: Blocks, alignment: int, **settings: Any) -> Any:
    return blocks.layer(f"aligned-{alignment}", alignment=alignment, **settings)


def uneven(idx: Any, experts: int) -> Any:
    """Gives experts uneven counts of rows; one expert has none."""
    return np.where(idx == 1, -1, np.where(idx % 3 == 0, 0, idx))


@pytest.mark.parametrize("workspace", ["auto", 0.6], ids=["one pass", "parts"])
@pytest.mark.parametrize("name", CASES)
def test_the_groups_alignment_changes_no_bit(blocks: Blocks, name: str, workspace: Any) -> None:
    dtype, options = CASES[name]
    hidden = SENT if "sent" in name else HIDDEN
    given, found = blocks.drawn(uneven, hidden), []
    for alignment in ALIGNMENTS:
        layer = layer_of(blocks, alignment, hidden=hidden, workspace=workspace)
        params = blocks.params(layer)
        if alignment == ALIGNMENTS[-1]:
            found.append(compare(blocks, layer, params, given, dtype, **options))
        else:
            blocks.call()
            run = functools.partial(graded, layer, jnp.dtype(dtype), **options)
            found.append(ran(run, *given, params))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_drops_are_those_of_the_layers_alignment(blocks: Blocks, alignment: int) -> None:
    layer = layer_of(blocks, alignment)
    params = blocks.params(layer)
    x, weights, idx = blocks.drawn(uneven)
    capacity = max(TOKENS * TOP_K * 2 // 3 // alignment, 1) * alignment

    def counts(idx: Any) -> Any:
        routing = ep.Routing(idx, weights, None)
        options = {"routing": routing, "capacity": capacity, "return_stats": True}
        stats = ep.moe(layer, x, params, **options)[2]
        return stats.dropped, stats.num_recv

    blocks.ways.body("composed")
    want = jax.device_get(jax.jit(counts)(idx))
    compare(blocks, layer, params, (x, weights, idx), "bfloat16", capacity=capacity)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(jax.jit(lambda i: counts(i))(idx)), want
    )
    assert want[0] > 0
    dispatched = jax.jit(lambda x, idx: ep.dispatch(layer, x, idx).group_sizes)(x, idx)
    assert not (np.asarray(dispatched) % alignment).any()
