"""jax_debug_nans on GPUs, where kernels do not write rows that nobody reads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.gpu_programs import EXPERTS, TOP_K
from gpu.jobs.layouts import TRANSPORT
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, WIDTH = 128, 256, 128
RECIPES = (None, ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_step_op_by_op_raises_for_nothing(
    session: ep.Session, gpus: list[Any], recipe: Any
) -> None:
    mesh = Mesh(np.array(gpus), ("ep",))
    group = session.create_group(
        "nans",
        mesh,
        ep_axis="ep",
        transport=TRANSPORT,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=TOP_K,
        op_timeout_s=60.0,
        replace=True,
    )
    layer = group.register_layer("moe", top_k=TOP_K)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("ep",)))
    x = jax.random.normal(jax.random.key(0), (TOKENS * mesh.size, HIDDEN), jnp.bfloat16)
    params = ep.init_moe_params(jax.random.key(1), layer, WIDTH, param_dtype=jnp.bfloat16)
    x, params = jax.device_put((x, params), (split, ep.MoEParams(whole, split, split)))

    def loss(x: Any, params: Any) -> Any:
        y, _ = ep.moe(layer, x, params, recipe=recipe, weights_at=None)
        return y.astype(jnp.float32).sum()

    with jax.debug_nans(True):
        grads = jax.block_until_ready(jax.grad(loss, argnums=(0, 1))(x, params))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(grads))
    group.close()
