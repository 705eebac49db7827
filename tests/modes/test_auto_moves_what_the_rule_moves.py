"""The MoE block under plain jit: weights of unknown layout move as by the rule, in every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import collectives
import fakes
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_client.ops.partitioning import on_mesh
from ep_runtime_client.ops.quantize.formats import recipes

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
    """One step of gradient descent on weights whose layout no argument of ours says."""
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
    # Both kernels' gradients are left where the kernels lie, and summed in f32.
    assert kinds["reduce-scatter", "f32"] == 2


@pytest.mark.parametrize(("form", "recipe"), [("nnx", "bf16"), ("linen", "TensorScaling")])
def test_the_modules_are_the_same_program(form: str, recipe: str) -> None:
    programs = [lowered(each, "tp", recipe, "auto").as_text() for each in (form, "moe")]
    assert on_mesh.TARGET in programs[0]
    assert len({collectives.unnamed(text) for text in programs}) == 1
