"""Masked tokens change neither the block nor its losses, whether they are NaN or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_moe import Dense, in_f64, worst_error
from fakes import MakeGroup
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 8, 3, 64
ROWS = P(("dp", "ep"))


@pytest.fixture(params=["memfd", "xla", "memfd explicit"])
def layer(request: pytest.FixtureRequest, make_group: MakeGroup) -> Any:
    transport, _, explicit = request.param.partition(" ")
    group = make_group(
        transport=transport,
        mesh=fakes.mesh_of({"dp": 2, "ep": 4}, explicit=bool(explicit)),
        outer_axes="dp",
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
    )
    return group.register_layer("moe", top_k=TOP_K)


def draw(*lead: int) -> tuple[Any, Any]:
    """Draws tokens and a mask; masked tokens are NaN."""
    keys = jax.random.split(jax.random.key(3))
    mask = np.array(jax.random.bernoulli(keys[0], 0.6, lead))
    mask.reshape(-1)[:9] = False  # all tokens of a rank
    x = jax.random.normal(keys[1], (*lead, HIDDEN))
    return jnp.where(mask[..., None], x, jnp.nan), mask


def graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """((y, aux), gradients of x and params) of the sum of both results."""

    def loss(x: Any, params: Any) -> Any:
        y, aux = function(x, params)[:2]
        return jnp.sin(y).sum() + aux, (y, aux)

    def run(x: Any, params: Any) -> Any:
        grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, params)
        return results, grads

    return run


@pytest.mark.parametrize("lead", [(TOKENS,), (16, 4)])
def test_the_block_is_that_of_the_other_tokens(layer: Any, lead: tuple[int, ...]) -> None:
    (x, mask), params = draw(*lead), ep.init_moe_params(jax.random.key(0), layer, 24)
    with jax.set_mesh(layer.mesh):
        x, params = jax.device_put(x, NamedSharding(layer.mesh, ROWS)), jax.device_put(params, P())
        block = graded(lambda x, p: ep.moe(layer, x, p, token_mask=mask, aux_loss_coeff=0.1))
        (y, aux), (dx, dparams) = jax.device_get(jax.jit(block)(x, params))
    for each in (y, dx):
        np.testing.assert_array_equal(each[~mask], 0)
    want = in_f64(graded(Dense(TOP_K)), np.asarray(x)[mask], params)
    assert worst_error(((y[mask], aux), (dx[mask], dparams)), want) < 1e-5


def test_an_own_routing_loses_masked_tokens(layer: Any) -> None:
    (x, mask), params = draw(TOKENS), ep.init_moe_params(jax.random.key(0), layer, 24)
    own = ep.route(jnp.nan_to_num(x) @ params.router, TOP_K)
    nan = jnp.where(mask[:, None], own.topk_weights, jnp.nan)
    params = dataclasses.replace(params, router=None)

    def block(x: Any, weights: Any) -> Any:
        routing = own._replace(topk_weights=weights)
        y, aux, stats = ep.moe(
            *(layer, x, params),
            routing=routing,
            token_mask=mask,
            aux_loss_coeff=0.1,
            return_stats=True,
        )
        return (y, aux), stats

    def want(x: Any, weights: Any) -> Any:
        kept = own._replace(topk_idx=own.topk_idx[mask], probs=own.probs[mask])
        y = Dense(TOP_K).experts(x, params, kept.topk_idx, weights)
        return y, ep.aux_loss(kept, coeff=0.1)

    put = NamedSharding(layer.mesh, ROWS)
    with jax.set_mesh(layer.mesh):
        run = jax.jit(lambda x, w: (block(x, w)[1], graded(lambda *a: block(*a)[0])(x, w)))
        stats, got = jax.device_get(run(jax.device_put(x, put), jax.device_put(nan, put)))
    (y, aux), (dx, dweights) = got
    np.testing.assert_array_equal(dweights[~mask], 0)
    wanted = in_f64(graded(want), np.asarray(x)[mask], np.asarray(nan)[mask])
    assert worst_error(((y[mask], aux), (dx[mask], dweights[mask])), wanted) < 1e-5
    counts = np.bincount(np.asarray(own.topk_idx)[mask].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    assert stats.dropped == 0


def test_masks_and_coefficients_may_be_traced_and_take_no_capacity(layer: Any) -> None:
    """Also inside a shard_map, where the mask is local; drops are those of the other tokens."""
    (x, mask), params = draw(TOKENS), ep.init_moe_params(jax.random.key(0), layer, 24)
    options: dict[str, Any] = {"capacity": 16, "return_stats": True}

    def local(x: Any, params: Any, mask: Any, coeff: Any) -> Any:
        return ep.moe(layer, x, params, token_mask=mask, aux_loss_coeff=coeff, **options)

    mapped = jax.shard_map(
        local,
        mesh=layer.mesh,
        in_specs=(ROWS, ep.MoEParams(P(), P("ep"), P("ep")), ROWS, P()),
        out_specs=(ROWS, P(), ep.MoEStats(P(), P(), ROWS, ROWS)),
    )
    put = NamedSharding(layer.mesh, ROWS)
    with jax.set_mesh(layer.mesh):
        operands = (jax.device_put(x, put), params, jax.device_put(mask, put), jnp.float32(0.1))
        y, aux, stats = jax.device_get(jax.jit(local)(*operands))
        if jax.sharding.AxisType.Explicit not in layer.mesh.axis_types:
            got = jax.device_get(jax.jit(mapped)(*operands))
            jax.tree.map(np.testing.assert_allclose, got, (y, aux, stats))
    own = ep.route(jnp.nan_to_num(x) @ params.router, TOP_K)
    unused = own._replace(topk_idx=jnp.where(mask[:, None], own.topk_idx, -1))
    rest = dataclasses.replace(params, router=None)
    want = jax.jit(lambda x: ep.moe(layer, x, rest, routing=unused, **options))(jnp.nan_to_num(x))
    np.testing.assert_array_equal(stats.num_recv, want[2].num_recv)
    np.testing.assert_array_equal(stats.dropped, want[2].dropped)
    assert stats.dropped > 0
    np.testing.assert_allclose(y, want[0], rtol=1e-6)
    np.testing.assert_allclose(aux, ep.aux_loss(stats.routing, coeff=0.1), rtol=1e-6)


def test_what_does_not_fit_is_said() -> None:
    spec = ep.LayerSpec("moe", top_k=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN)
    (x, mask), params = draw(TOKENS), ep.init_moe_params(jax.random.key(0), spec, 24)
    for wrong, text in ((mask[:3], r"bool \[64\].*got bool\[3\]"), (mask * 1, r"got int32\[64\]")):
        with pytest.raises(ValueError, match=f"token_mask must be .*{text}"):
            jax.eval_shape(lambda x, wrong=wrong: ep.moe(spec, x, params, token_mask=wrong), x)
        with pytest.raises(ValueError, match="token_mask must be bool"):
            ep.route(x @ params.router, TOP_K, token_mask=wrong)
    with pytest.raises(ValueError, match=r"coeff must be a scalar, got \[2\]"):
        ep.z_loss(ep.route(x @ params.router, TOP_K), coeff=jnp.ones(2))


def test_modules_take_a_mask_and_name_what_replaced_their_options(make_group: MakeGroup) -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra flax")
    group = make_group(axes={"ep": 2}, num_experts=EXPERTS, max_top_k=TOP_K)
    layer = group.register_layer("moe", top_k=TOP_K)
    (x, mask), router = draw(16), ep.Router("sigmoid")
    of_nnx = ep.nnx.MoEBlock(layer, 24, rngs=nnx.Rngs(0), router=router)
    want, _ = ep.moe(layer, x, of_nnx.params, router=router, token_mask=mask)
    np.testing.assert_array_equal(of_nnx(x, token_mask=mask)[0], want)
    of_linen = ep.linen.MoEBlock(layer, 24, router=router)
    params = {name: getattr(of_nnx.params, name) for name in ("router", "wi", "wo")}
    np.testing.assert_array_equal(of_linen.apply({"params": params}, x, token_mask=mask)[0], want)
    with pytest.raises(ep.InvalidArgumentError, match=r"write router=ep.Router\(num_groups=...\)"):
        ep.nnx.MoEBlock(layer, 24, rngs=nnx.Rngs(0), num_groups=2)
    with pytest.raises(ep.InvalidArgumentError, match='write weights_at="hidden"'):
        ep.linen.MoEBlock(layer, 24, apply_topk_weights_early=True)
