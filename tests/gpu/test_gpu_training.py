"""Programs as users write them, through windows in GPU memory and XLA's collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.gpu_programs import EXPERTS, HIDDEN, PROGRAMS, TOKENS, TOP_K, Layers, layers_on
from gpu.jobs.layouts import TRANSPORT
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

_AGAIN = 20
_RECIPES = (ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8())
_SETTINGS: dict[str, Any] = {
    "num_experts": EXPERTS,
    "hidden_size": HIDDEN,
    "max_tokens_per_rank": TOKENS,
    "max_top_k": TOP_K,
    "max_token_dtype": "float32",
    "alignment": 8,
    "combine_precision": "exact",
    "op_timeout_s": 60.0,
}


def _layers(session: ep.Session, gpus: list[Any], transport: str) -> Layers:
    def group(name: str, mesh: Mesh, **more: Any) -> ep.Group:
        given = {"ep_axis": "ep", "transport": transport, **_SETTINGS, **more}
        return session.create_group(f"{name}-{transport}", mesh, **given)

    return layers_on(gpus, group)


@pytest.fixture(scope="module")
def both(gpus: list[Any]) -> Iterator[tuple[Layers, Layers]]:
    """The same layers on windows and on XLA's collectives."""
    with ep.connect("embedded", timeout_s=60.0) as session:
        yield _layers(session, gpus, TRANSPORT), _layers(session, gpus, "xla")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_give_what_they_give_over_collectives(
    both: tuple[Layers, Layers], program: Callable[[Layers], Any]
) -> None:
    mesh = both[0].mesh
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    rng = np.random.default_rng(0)
    count = TOKENS * mesh.size
    case = cases.Case("", tokens=count, num_experts=EXPERTS, top_k=TOP_K)
    operands = [
        jax.device_put(array, sharding)
        for array in (
            rng.standard_normal((count, HIDDEN)).astype(np.float32),
            cases.routing(case, 1)[0],
            rng.uniform(0.2, 1.0, (count, TOP_K)).astype(np.float32),
        )
    ]
    with jax.default_matmul_precision("highest"):
        run = program(both[0])
        got = jax.block_until_ready(run(*operands))
        want = program(both[1])(*operands)
        for _ in range(_AGAIN):  # replays the captured graph; the precision names the program
            again = run(*operands)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, jax.block_until_ready(again), got)


@pytest.mark.parametrize("recipe", [None, *_RECIPES], ids=lambda recipe: type(recipe).__name__)
def test_scanned_layers_give_what_layers_in_a_row_give(gpus: list[Any], recipe: Any) -> None:
    tokens, hidden, width, count = 128, 256, 128, 3
    with ep.connect("embedded", timeout_s=60.0) as session:
        group = session.create_group(
            "scanned",
            Mesh(np.array(gpus), ("ep",)),
            ep_axis="ep",
            transport=TRANSPORT,
            num_experts=EXPERTS,
            hidden_size=hidden,
            max_tokens_per_rank=tokens,
            max_top_k=TOP_K,
            op_timeout_s=60.0,
        )
        stack = group.register_layer_stack("moe", count, top_k=TOP_K)
        keys = jax.random.split(jax.random.key(2), count)
        params = [ep.init_moe_params(key, stack, width) for key in keys]
        x = jax.random.normal(jax.random.key(3), (tokens * len(gpus), hidden))

        def layer(index: Any, x: Any, own: Any) -> Any:
            # Routers read f32, so tokens whose experts nearly tie keep their experts.
            y, _ = ep.moe(stack[index], x, own, recipe=recipe, compute_dtype=jnp.bfloat16)
            return x + y

        def scanned(x: Any, params: Any) -> Any:
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *params)
            kept = jax.checkpoint(layer, policy=ep.remat_policy())
            given = (jnp.arange(count), stacked)
            x = lax.scan(lambda x, each: (kept(each[0], x, each[1]), None), x, given)[0]
            return jnp.square(x).sum()

        def in_a_row(x: Any, params: Any) -> Any:
            for index, own in enumerate(params):
                x = layer(index, x, own)
            return jnp.square(x).sum()

        got, want = (
            jax.block_until_ready(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, params))
            for loss in (scanned, in_a_row)
        )
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            mine, theirs = (np.asarray(each, np.float64) for each in (mine, theirs))
            scale = np.abs(theirs).max()
            np.testing.assert_allclose(mine / scale, theirs / scale, atol=0.02)
