"""vmap over a mesh axis outside the group, as programs write the stages of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import collectives
import dense_moe
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep

P = PartitionSpec

STAGES, TOKENS, HIDDEN, WIDTH = 2, 32, 32, 32
MESHES: dict[str, dict[str, int]] = {
    "ep 4": {"stage": STAGES, "ep": 4},
    "fsdp 2 x ep 2": {"stage": STAGES, "fsdp": 2, "ep": 2},
}
over_stages = functools.partial(jax.vmap, spmd_axis_name="stage")


def group_of(make_group: MakeGroup, axes: dict[str, int], **settings: Any) -> fakes.LocalGroup:
    outer = tuple(axis for axis in axes if axis in ("dp", "fsdp"))
    defaults: dict[str, Any] = {"transport": "memfd", "num_experts": 8, "max_top_k": 2}
    defaults |= {"hidden_size": HIDDEN, "alignment": 32}
    return make_group(mesh=fakes.mesh_of(axes), outer_axes=outer, **defaults | settings)


def draw(group: fakes.LocalGroup, layer: Any, *, on_experts: bool = True) -> tuple[Any, Any]:
    """Draws tokens [STAGES, T, H] and every stage's parameters, each on the stage's devices."""
    keys = jax.random.split(jax.random.key(0), STAGES)
    each = [ep.init_moe_params(key, layer, WIDTH) for key in keys]
    tokens = jax.random.normal(jax.random.key(1), (STAGES, TOKENS, HIDDEN))
    axes = group.spec.token_axes

    def placed(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(group.mesh, P("stage", *spec)))

    def spread(path: Any, *leaves: jax.Array) -> jax.Array:
        expert = path[-1].name in ("wi", "wo")
        fsdp = "fsdp" if "fsdp" in axes and on_experts else None
        return placed(jnp.stack(leaves), *(("ep", fsdp) if expert else ()))

    return placed(tokens, axes), jax.tree_util.tree_map_with_path(spread, *each)


def stage_loss(layer: Any, x: Any, params: Any, **options: Any) -> Any:
    y, aux, stats = ep.moe(layer, x, params, aux_loss_coeff=0.1, return_stats=True, **options)
    return jnp.sin(y).sum() + aux, (y, stats)


def graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Values and gradients of the sum of all stages' losses, compiled."""

    def total(*operands: Any) -> Any:
        losses, rest = function(*operands)
        return losses.sum(), rest

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def one_by_one(graded_stage: Callable[..., Any], *operands: Any) -> Any:
    """Computes the results of `graded(over_stages(...))` by a program of one stage."""
    results = [
        graded_stage(*jax.tree.map(lambda leaf, i=i: leaf[i], operands)) for i in range(STAGES)
    ]
    (values, rest), grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
    return (values.sum(), rest), grads


def assert_close(got: Any, want: Any, tolerance: float = 1e-6) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


CASES = [
    ("ep 4", "auto", None),
    ("ep 4", "shard_map", ep.recipes.BlockScaling()),
    ("fsdp 2 x ep 2", "auto", ep.recipes.MXFP8()),
]


@pytest.mark.parametrize(("mesh", "partitioning", "recipe"), CASES, ids=str)
def test_the_block_of_all_stages_is_that_of_each(
    make_group: MakeGroup, mesh: str, partitioning: str, recipe: Any
) -> None:
    group = group_of(make_group, MESHES[mesh], partitioning=partitioning)
    layer = group.register_layer("moe", top_k=2)
    operands = draw(group, layer)
    one = functools.partial(stage_loss, layer, recipe=recipe)
    if "fsdp" in mesh and recipe is not None:
        experts = P("ep", "fsdp")
        one = functools.partial(one, params_spec=ep.MoEParams(P(), experts, experts))
    compiled = graded(over_stages(one)).lower(*operands).compile()
    want = one_by_one(graded(one), *operands)
    assert_close(compiled(*operands), want, 1e-6 if recipe is None else 1e-5)
    assert "collective-permute" not in compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["xla", "memfd/2"])
def test_other_transports(make_group: MakeGroup, transport: str) -> None:
    group = group_of(make_group, MESHES["ep 4"], transport=transport)
    layer = group.register_layer("moe", top_k=2)
    operands = draw(group, layer)
    one = functools.partial(stage_loss, layer)
    assert_close(graded(over_stages(one))(*operands), one_by_one(graded(one), *operands))


def test_each_stage_has_layers_of_its_own_in_a_scan_with_remat(make_group: MakeGroup) -> None:
    """The layer's index is batched: stage s runs layers 2 s and 2 s + 1."""
    group = group_of(make_group, MESHES["ep 4"])
    stack = group.register_layer_stack("moe", 2 * STAGES, top_k=2)
    first = jnp.arange(STAGES, dtype=jnp.int32) * 2

    def stage(x: Any, params: Any, first: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            return x + ep.moe(stack[i], x, params)[0], None

        body = jax.checkpoint(body, policy=ep.remat_policy())
        x, _ = lax.scan(body, x, first + jnp.arange(2, dtype=jnp.int32))
        return jnp.sin(x).sum(), x

    operands = (*draw(group, stack[0]), first)
    assert_close(graded(over_stages(stage))(*operands), one_by_one(graded(stage), *operands), 1e-5)


def test_the_ops_one_by_one(make_group: MakeGroup) -> None:
    group = group_of(make_group, MESHES["ep 4"])
    layer = group.register_layer("moe", top_k=2)
    x, params = draw(group, layer)
    idx = jax.random.randint(jax.random.key(2), (STAGES, TOKENS, 2), 0, 8, jnp.int32)

    def stage(x: Any, wi: Any, idx: Any) -> Any:
        sent = ep.dispatch(layer, x, None, plan=ep.prepare(layer, idx))
        sizes, scaling = sent.group_sizes, ep.recipes.TensorScaling()
        rows = ep.grouped_gemm(sent.tokens, wi, sizes, layer=layer)
        narrow = ep.grouped_quantize(sent.tokens, sizes, scaling, layer=layer)
        wide = ep.grouped_gemm(
            narrow, ep.grouped_quantize(wi, None, scaling, layer=layer), sizes, layer=layer
        )
        moved = ep.permute(x, idx, num_experts=8)
        back = x + ep.unpermute(moved.tokens, moved)
        y = ep.combine(layer, sent, rows + wide.astype(x.dtype))
        y = y + ep.dense(back, wi[0], layer=layer)
        return jnp.sin(y).sum(), (y, sent.num_recv)

    operands = (x, params.wi[:, :, :, 0], idx)
    assert_close(graded(over_stages(stage))(*operands), one_by_one(graded(stage), *operands), 1e-5)


def test_what_all_stages_share_is_not_batched(make_group: MakeGroup) -> None:
    group = group_of(make_group, MESHES["ep 4"])
    layer = group.register_layer("moe", top_k=2)
    x, params = draw(group, layer)
    shared = jax.tree.map(lambda leaf: leaf[0], params)
    one = functools.partial(stage_loss, layer)
    (value, _), (d_x, d_params) = graded(over_stages(one, in_axes=(0, None)))(x, shared)
    repeated = jax.tree.map(lambda leaf: jnp.stack([leaf] * STAGES), shared)
    (want, _), (want_x, want_each) = one_by_one(graded(one), x, repeated)
    summed = jax.tree.map(lambda leaf: leaf.sum(0), want_each)
    assert_close((value, d_x, d_params), (want, want_x, summed), 1e-5)


def test_a_pipeline_trains_as_without_one(make_group: MakeGroup) -> None:
    """Microbatches shift from stage to stage; the reference is dense, in f64, without stages."""
    group = group_of(make_group, MESHES["ep 4"])
    layer = group.register_layer("moe", top_k=2)
    _, params = draw(group, layer)
    batches = jax.random.normal(jax.random.key(3), (3, TOKENS, HIDDEN))
    on_stages = NamedSharding(group.mesh, P("stage", "ep"))

    def pipeline(params: Any, batches: Any) -> Any:
        stages = over_stages(lambda x, p: x + ep.moe(layer, x, p)[0])

        def tick(state: Any, fed: Any) -> Any:
            state = jnp.roll(state, 1, 0).at[0].set(fed)
            state = stages(lax.with_sharding_constraint(state, on_stages), params)
            return state, state[-1]

        drained = jnp.concatenate([batches, batches[: STAGES - 1]])
        _, outs = lax.scan(tick, jnp.zeros((STAGES, TOKENS, HIDDEN)), drained)
        return outs[STAGES - 1 :]

    def dense(params: Any, batches: Any) -> Any:
        x = batches
        for i in range(STAGES):
            mine = jax.tree.map(lambda leaf, i=i: leaf[i], params)
            x = x + dense_moe.Dense(2)(x, mine)[0]
        return x

    def trained(outputs: Callable[..., Any], params: Any, batches: Any) -> Any:
        loss = jax.jit(jax.value_and_grad(lambda p, x: ((outputs(p, x) - jnp.cos(x)) ** 2).mean()))
        losses = []
        for _ in range(5):
            value, grads = loss(params, batches)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            losses.append(float(value))
        return losses, jax.device_get(params)

    losses, got = trained(pipeline, params, batches)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (params, batches))
        want_losses, want = trained(dense, *wide)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_close(got, want)


def test_a_stage_has_the_collectives_that_it_has_alone(make_group: MakeGroup) -> None:
    group = group_of(make_group, MESHES["ep 4"])
    layer = group.register_layer("moe", top_k=2)
    spec = ep.MoEParams(P(), P("ep"), P("ep"))
    operands = draw(group, layer)

    def pulled(x: Any, params: Any) -> Any:
        y, pull = jax.vjp(lambda x, p: ep.moe(layer, x, p, params_spec=spec)[0], x, params)
        return pull(y)

    both = jax.jit(over_stages(pulled)).lower(*operands).compile()
    alone = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf[0], NamedSharding(group.mesh, spec)),
        operands,
        (P("ep"), spec),
    )
    single = jax.jit(pulled).lower(*alone).compile()
    assert collectives.count(both) == collectives.count(single)
    assert both.as_text().count(" while(") == single.as_text().count(" while(")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no axis": ({}, "ep ops cannot run under vmap"),
    "an axis of the group": ({"spmd_axis_name": "ep"}, "got ep"),
    "two indices for each place": ({"spmd_axis_name": "stage"}, "got 4"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_every_other_vmap_is_refused(
    make_group: MakeGroup, options: dict[str, Any], words: str
) -> None:
    group = group_of(make_group, MESHES["ep 4"])
    layer = group.register_layer("moe", top_k=2)
    shapes = jax.eval_shape(lambda: ep.init_moe_params(jax.random.key(0), layer, WIDTH))
    params = jax.tree.map(lambda each: np.ones(each.shape, each.dtype), shapes)
    x = np.ones((4, TOKENS, HIDDEN), np.float32)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(jax.vmap(lambda x: ep.moe(layer, x, params)[0], **options), x)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(jax.vmap(lambda x: ep.dense(x, params.router, layer=layer), **options), x)


def test_what_cannot_be_batched_over_stages_says_so(make_group: MakeGroup) -> None:
    group = group_of(make_group, MESHES["ep 4"], partitioning="rule")
    layer = group.register_layer("moe", top_k=2)
    x, params = draw(group, layer)
    with pytest.raises(NotImplementedError, match='partitioning="rule"'):
        jax.jit(over_stages(lambda x, params: ep.moe(layer, x, params)[0]))(x, params)
    with pytest.raises(NotImplementedError, match="pass layer="):
        jax.jit(over_stages(lambda x, kernel: ep.dense(x, kernel)))(x, params.router)
