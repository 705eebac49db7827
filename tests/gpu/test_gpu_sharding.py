"""Weights over fsdp, ep and tp on two or four GPUs: collectives of gradients, and values.

Rows of the table of sharding rules on both meshes, under plain jit: nothing but the arrays says
how weights lie. Collectives are counted in the compiled program, values compared with one GPU.
On two GPUs the ep axis has one rank.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.layouts import TRANSPORT
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

sys.path.append(str(Path(__file__).parents[1] / "modes"))

import collectives

FSDP_EP, EP_TP = ("fsdp", "ep"), ("ep", "tp")
EXPERTS, ROWS, K, N, TOP_K, TOKENS = 8, 512, 256, 512, 2, 128
GATHER, SUM, SCATTER = "all-gather", "all-reduce", "reduce-scatter"
RECIPES: dict[str, Any] = {
    "bf16": None,
    "TensorScaling": ep.recipes.TensorScaling(),
    "BlockScaling": ep.recipes.BlockScaling(),
    "MXFP8": ep.recipes.MXFP8(),
}
# Axes of the mesh, weight, and collectives allowed in forward and backward without a recipe. A
# recipe with one scale per group adds the reduction of amax.
LAYOUTS: dict[str, tuple[tuple[str, str], tuple[Any, ...], set[str]]] = {
    "fsdp on K'": (FSDP_EP, ("ep", "fsdp"), {GATHER, SCATTER}),
    "fsdp on N'": (FSDP_EP, ("ep", None, "fsdp"), {GATHER, SCATTER}),
    "experts over ep and fsdp": (FSDP_EP, (("ep", "fsdp"),), {GATHER, SCATTER}),
    "nothing but ep": (FSDP_EP, ("ep",), {SUM}),
    "tp on N'": (EP_TP, ("ep", None, "tp"), {SUM}),
    "tp on K'": (EP_TP, ("ep", "tp"), {SUM}),
}
# Relative to the larger of both: sums are in f32, of products of bf16 or 8-bit values.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Place:
    """A group on one of the meshes and its layer."""

    group: ep.Group
    layer: ep.EpLayer

    @property
    def slab(self) -> PartitionSpec:
        return PartitionSpec(self.group.spec.token_axes)

    def put(self, array: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.group.mesh, spec))


@pytest.fixture(scope="module")
def places(gpus: list[Any]) -> Iterator[dict[str, Place]]:
    if len(gpus) < 2:
        pytest.skip(f"needs 2 or 4 GPUs, JAX sees {len(gpus)}")
    ranks = 2 if len(gpus) >= 4 else 1
    with ep.connect("embedded", timeout_s=60.0) as session:
        made = {}
        for axes, sizes in ((FSDP_EP, (2, ranks)), (EP_TP, (ranks, 2))):
            group = session.create_group(
                "-".join(axes),
                Mesh(np.array(gpus[: 2 * ranks]).reshape(sizes), axes),
                ep_axis="ep",
                outer_axes=tuple(axis for axis in axes if axis == "fsdp"),
                transport=TRANSPORT,
                num_experts=EXPERTS,
                hidden_size=K,
                max_tokens_per_rank=TOKENS,
                max_top_k=TOP_K,
                alignment=128,
                op_timeout_s=60.0,
            )
            made[" ".join(axes)] = Place(group, group.register_layer("moe", top_k=TOP_K))
        yield made


def close(got: Any, want: Any, name: str) -> None:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    scale = np.abs(want).max()
    np.testing.assert_allclose(got / scale, want / scale, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matmul_moves_its_weight_and_nothing_else(
    places: dict[str, Place], gpus: list[Any], layout: str, recipe: str
) -> None:
    axes, weight, kinds = LAYOUTS[layout]
    place, spec = places[" ".join(axes)], PartitionSpec(*weight)
    rng = np.random.default_rng(0)
    slabs, groups = place.group.spec.num_slabs, place.group.spec.experts_per_rank
    shapes = ((slabs, ROWS, K), (EXPERTS, K, N), (slabs, ROWS, N))
    lhs, rhs, grad = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    sizes = 128 * rng.integers(0, 2, (slabs, groups)).astype(np.int32)

    def step(layer: Any, lhs: Any, rhs: Any, sizes: Any, grad: Any) -> Any:
        def forward(lhs: Any, rhs: Any) -> Any:
            return ep.grouped_gemm(lhs, rhs, sizes, layer=layer, recipe=RECIPES[recipe])

        out, pull = jax.vjp(forward, lhs, rhs)
        return out, *pull(grad)

    given = ((lhs, place.slab), (rhs, spec), (sizes, place.slab), (grad, place.slab))
    operands = [place.put(*each) for each in given]
    compiled = jax.jit(lambda *args: step(place.layer, *args)).lower(*operands).compile()
    moved = {kind for kind, _ in collectives.count(compiled)}
    assert kinds <= moved <= kinds | ({SUM} if recipe == "TensorScaling" else set())
    # No row moves: all gathers together move the weight's shards twice, in the recipe's bytes.
    if GATHER in kinds:
        whole = groups * K * N
        most = 2 * whole * (2 if recipe == "bf16" else 1.05)
        assert collectives.moved_bytes(compiled, GATHER) <= most
        assert collectives.moved_bytes(compiled, SCATTER) == whole // 2 * 4
    alone = [jax.device_put(x, gpus[0]) for x in (lhs, rhs, sizes, grad)]
    want = jax.jit(lambda *args: step(None, *args))(*alone)
    got, again = compiled(*operands), compiled(*operands)
    assert got[2].sharding.is_equivalent_to(NamedSharding(place.group.mesh, spec), 3)
    used = np.arange(ROWS) < sizes.sum(-1)[:, None]
    for name, *arrays in zip(("out", "d_lhs", "d_rhs"), got, again, want, strict=True):
        rows = used if name != "d_rhs" else ...  # rows past the last group are undefined
        mine, repeated, theirs = (np.asarray(array, np.float32)[rows] for array in arrays)
        np.testing.assert_array_equal(repeated, mine, err_msg=name)
        close(mine, theirs, name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("axes", [FSDP_EP, EP_TP], ids=" ".join)
def test_the_block_leaves_gradients_where_weights_lie(
    places: dict[str, Place], axes: tuple[str, str], recipe: str
) -> None:
    place, P = places[" ".join(axes)], PartitionSpec
    params = ep.init_moe_params(jax.random.key(0), place.layer, N)
    specs = ep.MoEParams(P(), P("ep", "fsdp"), P("ep", None, "fsdp"))
    if axes is EP_TP:
        specs = ep.MoEParams(P(), P("ep", None, None, "tp"), P("ep", "tp"))
    params = jax.tree.map(place.put, params, specs)
    shards = place.group.spec.num_slabs
    x = jax.random.normal(jax.random.key(1), (TOKENS * shards, K), jnp.float32)
    x = place.put(x, place.slab)

    def grads(told: Any, params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, _ = ep.moe(
                place.layer,
                x,
                params,
                recipe=RECIPES[recipe],
                compute_dtype=jnp.bfloat16,
                params_spec=told,
            )
            return jnp.square(y).sum()

        return jax.grad(loss, argnums=(0, 1))(params, x)

    compiled = jax.jit(lambda *args: grads(None, *args)).lower(params, x).compile()
    counted: Counter[str] = Counter()
    for (kind, _), count in collectives.count(compiled).items():
        counted[kind] += count
    assert counted[SCATTER] == (2 if axes is FSDP_EP else 0)
    assert {*counted} <= {GATHER, SUM, SCATTER}
    assert bool(counted[GATHER]) == (axes is FSDP_EP)
    got = compiled(params, x)
    jax.tree.map(np.testing.assert_array_equal, compiled(params, x), got)
    want = jax.jit(lambda *args: grads(specs, *args))(params, x)  # by the shard_map
    for mine, theirs, given in zip(*map(jax.tree.leaves, (got, want, (params, x))), strict=True):
        assert mine.sharding.is_equivalent_to(given.sharding, mine.ndim)
        close(mine, theirs, "gradient")
