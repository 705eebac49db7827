"""Explicit axes, ambient meshes, and what of a call gets into the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.block.moe import init_moe_params, moe

MakeGroup = Callable[..., fakes.LocalGroup]

AXES = {"dp": 2, "ep": 4}
SPEC = PartitionSpec(("dp", "ep"))


def draw(tokens: int = 64) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    idx = cases.routing(cases.Case("", tokens=tokens, num_experts=8), 1)[0]
    weights = rng.uniform(0.2, 1, (tokens, 2)).astype(np.float32)
    return rng.standard_normal((tokens, 16)).astype(np.float32), idx, weights


def block(layer: Any, x: Any, idx: Any, weights: Any) -> Any:
    sent = ep.dispatch(layer, x, idx, weights)
    return ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)


def meant(x: Any, weights: Any) -> Any:
    return jnp.tanh(x) * weights.sum(-1, keepdims=True)


@pytest.fixture
def explicit_group(make_group: MakeGroup) -> fakes.LocalGroup:
    fakes.require_native()
    mesh = fakes.mesh_of(AXES, explicit=True)
    return make_group(mesh=mesh, outer_axes="dp", transport="memfd", num_experts=8)


@pytest.mark.parametrize("ambient", [True, False], ids=["set_mesh", "no set_mesh"])
def test_explicit_axes(explicit_group: fakes.LocalGroup, ambient: bool) -> None:
    group = explicit_group
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    spread = [jax.device_put(a, NamedSharding(group.mesh, SPEC)) for a in (x, idx, weights)]
    scope: AbstractContextManager[Any] = jax.set_mesh(group.mesh) if ambient else nullcontext()

    def loss(x: Any, idx: Any, weights: Any) -> Any:
        out = block(layer, x, idx, weights)
        return jnp.sin(out).sum(), out

    wanted = jax.grad(lambda x, w: jnp.sin(meant(x, w)).sum(), argnums=(0, 1))(x, weights)
    with scope:
        grads, out = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))(*spread)
        np.testing.assert_allclose(out, meant(x, weights), rtol=1e-5, atol=1e-6)
        for got, want in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert jax.typeof(out).sharding.spec == PartitionSpec(("dp", "ep"), None)
        np.testing.assert_allclose(jax.jit(block, static_argnums=0)(layer, x, idx, weights), out)
        params = init_moe_params(jax.random.key(0), layer, 8)
        y, _ = jax.jit(lambda x, p: moe(layer, x, p))(spread[0], params)
    assert y.shape == x.shape


def test_three_dims_keep_the_layout_that_their_type_says(
    explicit_group: fakes.LocalGroup,
) -> None:
    layer = explicit_group.register_layer("moe", top_k=2)
    sharding = NamedSharding(explicit_group.mesh, PartitionSpec("ep", "dp"))
    x, idx, weights = (jax.device_put(a.reshape(8, 8, -1), sharding) for a in draw())
    compiled = jax.jit(lambda *args: block(layer, *args)).lower(x, idx, weights).compile()
    assert " all-" not in compiled.as_text()
    assert compiled.output_shardings.is_equivalent_to(sharding, 3)


def test_programs_hold_names_and_sizes_only(make_group: MakeGroup) -> None:
    """A restarted job, with another generation, traces the same text; another spec another one."""
    fakes.require_native()
    x, idx, weights = draw()
    texts = []
    for alignment in (8, 8, 16):
        group = make_group(
            name="restarted", transport="memfd", axes=AXES, outer_axes="dp", alignment=alignment
        )
        layer = group.register_layer("moe", top_k=2)
        run = jax.jit(lambda x, w, layer=layer: block(layer, x, idx, w))
        texts.append(run.lower(x, weights).as_text())
        group.close()
    assert texts[0] == texts[1]
    assert "ep_prepare_v1" in texts[0]
    assert texts[0] != texts[2]
