"""Weights whose shards hold no whole blocks of a recipe: gathered before, in every mode alike."""

from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime import errors
from ep_runtime_client.moe.params import MoEParams, init_moe_params

EXPERTS, TOKENS, TOP_K = 4, 32, 2
BLOCKS = ep.recipes.BlockScaling()
SPLIT = {"fsdp": 2, "ep": 2, "tp": 2}  # 96 of 192 on a shard
SPLIT_SPECS = MoEParams(P(), P("ep", "fsdp", None, "tp"), P("ep", "tp", "fsdp"), None, None, None)
DEEP = {"fsdp": 4, "ep": 2}  # 64 of 256 on a shard, and 256 would leave whole blocks of 1,024
DEEP_SPECS = MoEParams(P(), P("ep", "fsdp"), P("ep", None, "fsdp"), None, None, None)
TOKENS_SPEC = P(("fsdp", "ep"))


def trained(
    make_group: MakeGroup,
    axes: dict[str, int],
    specs: MoEParams,
    size: int,
    *,
    explicit: bool = False,
    manual: bool = False,
) -> Any:
    """Loss and gradients of a block whose rows and experts are `size` wide."""
    mesh = fakes.mesh_of(axes, explicit=explicit)
    shards = axes["fsdp"] * axes["ep"]
    settings = {
        "hidden_size": size,
        "num_experts": EXPERTS,
        "max_tokens_per_rank": TOKENS // shards,
    }
    group = make_group(
        transport="memfd", mesh=mesh, outer_axes=("fsdp",), max_top_k=TOP_K, **settings
    )
    layer = group.register_layer("moe", top_k=TOP_K)
    fresh = init_moe_params(jax.random.key(0), layer, size)
    params = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), fresh, specs)
    x = jax.random.normal(jax.random.key(1), (TOKENS, size), jnp.float32)
    x = jax.device_put(x, NamedSharding(mesh, TOKENS_SPEC))

    def block(params: Any, x: jax.Array) -> jax.Array:
        given = {"params_spec": specs} if manual else {}
        return ep.moe(layer, x, params, recipe=BLOCKS, **given)[0]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        run: Any = block
        if manual:
            where = {"mesh": mesh, "in_specs": (specs, TOKENS_SPEC), "out_specs": TOKENS_SPEC}
            run = jax.shard_map(block, check_vma=False, **where)
        return jnp.sin(run(params, x)).sum()

    return jax.jit(jax.value_and_grad(loss))(params, x)


def check_same(found: Any, wanted: Any) -> None:
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    for name in ("wi", "wo"):
        np.testing.assert_array_equal(getattr(grads, name), getattr(wanted_grads, name))
    # Summed over all tokens, by each mode in an order of its own.
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(grads.router, wanted_grads.router, rtol=1e-4, atol=1e-4)


def test_explicit_axes_have_the_gradients_of_the_rule(make_group: MakeGroup) -> None:
    wanted = trained(make_group, SPLIT, SPLIT_SPECS, 192)
    found = trained(make_group, SPLIT, SPLIT_SPECS, 192, explicit=True)
    check_same(found, wanted)
    assert jax.typeof(found[1].wi).sharding.spec == SPLIT_SPECS.wi


def test_a_manual_region_gathers_a_weight_once(make_group: MakeGroup) -> None:
    wanted = trained(make_group, DEEP, DEEP_SPECS, 256)
    check_same(trained(make_group, DEEP, DEEP_SPECS, 256, manual=True), wanted)


def test_a_manual_axis_that_cuts_blocks_and_rows_is_refused(make_group: MakeGroup) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"dim 3 .* of 128.* tp=2, got size 192"):
        trained(make_group, SPLIT, SPLIT_SPECS, 192, manual=True)
