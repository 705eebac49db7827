"""Movement by custom_partitioning and by shard_map, and the block's weights under plain jit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cases
import collectives
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_client.ops.partitioning import on_mesh
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.programs.explain import explain_text

AXES = {"dp": 2, "ep": 4}


def draw(lead: tuple[int, ...] = (64,)) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    idx = cases.routing(cases.Case("", tokens=64, num_experts=8), 1)[0].reshape(*lead, -1)
    x = rng.standard_normal((*lead, 16)).astype(np.float32)
    return x, rng.uniform(0.2, 1, (*lead, 2)).astype(np.float32), idx


def block(layer: Any, x: Any, weights: Any, idx: Any) -> Any:
    sent = ep.dispatch(layer, x, idx, weights)
    out = ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)
    return out, sent.group_sizes


def program(layer: Any, *, remat: bool = False) -> Any:
    def loss(*args: Any) -> Any:
        out, sizes = block(layer, *args)
        return jnp.sin(out).sum(), (out, sizes)

    run = jax.checkpoint(loss) if remat else loss
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("transport", "lead"),
    [
        ("memfd", (64,)),
        ("memfd", (8, 8)),
        pytest.param("xla", (64,), marks=pytest.mark.slow),
        pytest.param("memfd/2", (64,), marks=pytest.mark.slow),
    ],
)
def test_rule_and_shard_map_give_the_same_bits(
    make_group: fakes.MakeGroup, transport: str, lead: tuple[int, ...]
) -> None:
    results, counts = [], []
    for partitioning in ("rule", "shard_map"):
        group = make_group(
            axes=AXES,
            outer_axes="dp",
            transport=transport,
            num_experts=8,
            partitioning=partitioning,
        )
        layer = group.register_layer("moe", top_k=2)
        spec = PartitionSpec(("dp", "ep")) if len(lead) == 1 else PartitionSpec("dp", "ep")
        placed = [jax.device_put(a, NamedSharding(group.mesh, spec)) for a in draw(lead)]
        run = program(layer)
        # 3-D tracers do not show their sharding, so the first sharding that divides is taken.
        compiled = run.lower(*(placed if len(lead) == 1 else draw(lead))).compile()
        custom = on_mesh.TARGET in run.lower(*draw(lead)).as_text()
        assert custom == (partitioning == "rule")
        counts.append(collectives.count(compiled))
        results.append(jax.tree.leaves(run(*placed)))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
    assert counts[0] == counts[1]
    if transport == "memfd":
        assert counts[0] == Counter({("all-reduce", "f32"): 1})  # the loss


def test_other_sources_give_a_program_another_key(
    make_group: fakes.MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule runs after JAX asks its cache, so a program's text must follow from the rule."""
    group = make_group(
        axes=AXES, outer_axes="dp", transport="memfd", num_experts=8, partitioning="rule"
    )
    layer = group.register_layer("moe", top_k=2)
    texts = []
    for digest in "ab":
        monkeypatch.setattr(on_mesh, "_sources", lambda digest=digest: digest)
        jax.clear_caches()  # ops are traced once
        texts.append(program(layer).lower(*draw()).as_text())
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_the_rule_works_under_remat_scan_and_in_explain(make_group: fakes.MakeGroup) -> None:
    group = make_group(
        axes=AXES, outer_axes="dp", transport="xla", num_experts=8, partitioning="rule"
    )
    layer = group.register_layer("moe", top_k=2)
    sharding = NamedSharding(group.mesh, PartitionSpec(("dp", "ep")))
    placed = [jax.device_put(a, sharding) for a in draw()]

    def looped(x: Any, weights: Any, idx: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return block(layer, x, weights, idx)[0], None

        return jnp.sin(jax.lax.scan(jax.checkpoint(step), x, length=2)[0]).sum()

    def unrolled(x: Any, weights: Any, idx: Any) -> Any:
        for _ in range(2):
            x = jnp.tanh(x) * weights.sum(-1, keepdims=True)
        return jnp.sin(x).sum()

    run = jax.jit(jax.value_and_grad(looped, argnums=(0, 1)))
    value, grads = run(*placed)
    wanted, others = jax.value_and_grad(unrolled, argnums=(0, 1))(*draw())
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    for got, want in zip(grads, others, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    found = explain_text(run.lower(*placed).compile().as_text()).collectives
    assert {each.op for each in found} >= {"prepare", "dispatch", "combine"}
    assert {each.layer for each in found} == {"moe"}


def test_a_region_that_is_manual_over_dp_takes_the_shard_map(make_group: fakes.MakeGroup) -> None:
    group = make_group(
        axes=AXES, outer_axes="dp", transport="xla", num_experts=8, partitioning="rule"
    )
    layer = group.register_layer("moe", top_k=2)
    outer = PartitionSpec("dp")
    run = jax.shard_map(
        lambda *args: block(layer, *args)[0],
        mesh=group.mesh,
        axis_names={"dp"},
        in_specs=outer,
        out_specs=outer,
        check_vma=False,
    )
    x, weights, idx = draw()
    wanted = np.tanh(x) * weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.jit(run)(x, weights, idx), wanted, rtol=1e-5, atol=1e-6)


EXPERTS, HIDDEN, MLP, TOKENS = 4, 256, 256, 16
MESHES: dict[str, Any] = {
    "fsdp": ({"dp": 2, "fsdp": 2, "ep": 2}, ("dp", "fsdp")),
    "tp": ({"fsdp": 2, "ep": 2, "tp": 2}, ("fsdp",)),
}
WI = {"fsdp": P("ep", "fsdp"), "tp": P("ep", "fsdp", None, "tp")}
WO = {"fsdp": P("ep", None, "fsdp"), "tp": P("ep", "tp", "fsdp")}
RECIPES: dict[str, Any] = {
    "bf16": None,
    "TensorScaling": recipes.TensorScaling(),
    "BlockScaling": recipes.BlockScaling(),
    "MXFP8": recipes.MXFP8(),
}
FAST = {("fsdp", "bf16"), ("tp", "TensorScaling")}


def run_moe(layer: Any, recipe: Any) -> Callable[..., Any]:
    return lambda params, x: ep.moe(layer, x, params, recipe=recipe)[0]


def run_nnx(layer: Any, recipe: Any) -> Callable[..., Any]:
    from flax import nnx

    made = nnx.eval_shape(lambda: ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), recipe=recipe))
    graph, state = nnx.split(made)
    tree = jax.tree.structure(state)

    def run(params: Any, x: Any) -> Any:
        state = jax.tree.unflatten(tree, [params.router, params.wi, params.wo])
        return nnx.merge(graph, state)(x)[0]

    return run


def run_linen(layer: Any, recipe: Any) -> Callable[..., Any]:
    block = ep.linen.MoEBlock(layer, MLP, recipe=recipe)

    def run(params: Any, x: Any) -> Any:
        named = {name: getattr(params, name) for name in ("router", "wi", "wo")}
        return block.apply({"params": named}, x)[0]

    return run


FORMS = {"moe": run_moe, "nnx": run_nnx, "linen": run_linen}


def lowered(form: str, mesh: str, recipe: str, partitioning: str) -> Any:
    """Takes one step of gradient descent on weights whose layout is not an argument."""
    axes, outer = MESHES[mesh]
    group = fakes.local_group(
        axes,
        outer_axes=outer,
        transport="memfd",
        partitioning=partitioning,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        alignment=32,
        max_tokens_per_rank=2 * TOKENS,
        name="group",
    )
    layer = group.register_layer("moe", top_k=2)
    run = FORMS[form](layer, RECIPES[recipe])

    def step(params: Any, x: Any) -> Any:
        y, pull = jax.vjp(run, params, x)
        grads, d_x = pull(y)
        return jax.tree.map(jnp.subtract, params, grads), d_x

    def shape(dims: tuple[int, ...], spec: P, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(group.mesh, spec))

    params = ep.MoEParams(
        shape((HIDDEN, EXPERTS), P(), jnp.float32),
        shape((EXPERTS, HIDDEN, 2, MLP), WI[mesh], jnp.float32),
        shape((EXPERTS, MLP, HIDDEN), WO[mesh], jnp.float32),
    )
    x = shape((8 * TOKENS, HIDDEN), P(group.spec.token_axes), jnp.bfloat16)
    try:
        return jax.jit(step, donate_argnums=0).lower(params, x)
    finally:
        group.close()


def moved(*program: str) -> tuple[Counter[tuple[str, str]], dict[str, int]]:
    """Collectives by kind and dtype, and their bytes by kind."""
    compiled = lowered(*program).compile()
    kinds = collectives.count(compiled)
    return kinds, {kind: collectives.moved_bytes(compiled, kind) for kind, _ in kinds}


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        pytest.param(mesh, recipe, marks=[] if (mesh, recipe) in FAST else pytest.mark.slow)
        for mesh in MESHES
        for recipe in RECIPES
    ],
)
def test_a_step_of_the_block_moves_the_same_kinds_and_bytes(mesh: str, recipe: str) -> None:
    kinds, sizes = moved("moe", mesh, recipe, "auto")
    assert (kinds, sizes) == moved("moe", mesh, recipe, "rule")
    # Both kernels' gradients are sharded like the kernels, and summed in f32.
    assert kinds["reduce-scatter", "f32"] == 2


@pytest.mark.parametrize(("form", "recipe"), [("nnx", "bf16"), ("linen", "TensorScaling")])
def test_the_modules_are_the_same_program(form: str, recipe: str) -> None:
    programs = [lowered(each, "tp", recipe, "auto").as_text() for each in (form, "moe")]
    assert on_mesh.TARGET in programs[0]
    assert len({collectives.unnamed(text) for text in programs}) == 1
