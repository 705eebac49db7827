"""Weights quantized once: bits of `recipe=`, gradients to the f32 weights, no repeated work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import microbatches
import numpy as np
import pytest
from block_ways import Ways
from jax.extend import core

import ep_runtime as ep

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 64, 96, 24, 2  # neither is a multiple of a block of 128
TENSOR, BLOCK, MX = ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8()
_KEY = jax.eval_shape(jax.random.key, 0)
_WEIGHTS = {(HIDDEN, 2, INNER), (HIDDEN, INNER), (INNER, HIDDEN)}


group = fakes.module_group(
    {"ep": 2},
    num_experts=EXPERTS,
    hidden_size=HIDDEN,
    max_top_k=TOP_K,
    max_tokens_per_rank=4 * TOKENS,
    alignment=32,
)


@pytest.fixture(scope="module")
def layer(group: fakes.LocalGroup) -> Any:
    return group.register_layer("moe", top_k=TOP_K)


def drawn(layer: Any, dtype: Any = jnp.bfloat16, **options: Any) -> tuple[Any, Any]:
    """Draws tokens and parameters with biases in NumPy, because each draw of JAX is a program."""
    rng = np.random.default_rng(0)

    def filled(each: Any) -> jax.Array:
        return jnp.asarray((rng.standard_normal(each.shape) / 8).astype(each.dtype))

    made = jax.eval_shape(lambda key: ep.init_moe_params(key, layer, INNER, **options), _KEY)
    params = jax.tree.map(filled, made)
    return jnp.asarray(rng.standard_normal((2 * TOKENS, HIDDEN)).astype(dtype)), params


def graded(function: Callable[..., Any], params: Any, *others: Any) -> Any:
    """Returns a value and its gradients with respect to the first two operands."""

    def loss(params: Any, x: Any, *rest: Any) -> Any:
        y = function(params, x, *rest)
        return jnp.sin(y.astype(jnp.float32)).sum(), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, *others)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def weights_quantized(run: Callable[..., Any], *operands: Any) -> int:
    """Counts arrays like wi, gate, up or wo that a program rounds to 8 bits, per trip of scans."""
    return _rounded(jax.make_jaxpr(run)(*operands).jaxpr)


def _rounded(jaxpr: Any) -> int:
    found = 0
    for eqn in jaxpr.eqns:
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "convert_element_type":
            (made,) = eqn.outvars
            is_weight = len(made.aval.shape) > 2 and made.aval.shape[1:] in _WEIGHTS
            found += is_weight and "float8_e" in made.aval.dtype.name
        for inner in jax.tree.leaves(eqn.params, is_leaf=_is_program):
            if _is_program(inner):
                found += trips * _rounded(getattr(inner, "jaxpr", inner))
    return found


def _is_program(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


# Recipe, dtype of tokens, kind of parameters, and whether the block call runs.
CASES: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "tensor scales": (TENSOR, jnp.bfloat16, {"param_dtype": jnp.bfloat16}, False),
    "blocks": (BLOCK, jnp.bfloat16, {"use_bias": True}, True),
    "MX, not gated": (MX, jnp.bfloat16, {"gated": False}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_bits_of_the_recipe(layer: Any, ways: Ways, name: str) -> None:
    recipe, dtype, options, as_call = CASES[name]
    x, params = drawn(layer, dtype, **options)
    block = functools.partial(ep.moe, layer, gated=options.get("gated", True))

    def by_recipe(params: Any, x: Any) -> Any:
        return graded(lambda params, x: block(x, params, recipe=recipe)[0], params, x)

    def outside(params: Any, x: Any, params8: Any) -> Any:
        return graded(lambda p, x: block(x, ep.straight_through(p, params8))[0], params, x)

    params8 = ep.quantize_params(params, recipe, weights_only=True)
    ways.as_users() if as_call else ways.by_ops()
    same(jax.jit(outside)(params, x, params8), jax.jit(by_recipe)(params, x))
    assert weights_quantized(outside, params, x, params8) == 0
    assert weights_quantized(by_recipe, params, x) > 0


def test_quantized_in_the_loss_gradients_are_the_masters(layer: Any) -> None:
    x, params = drawn(layer, separate=True)

    def block(params: Any, x: Any) -> Any:
        return ep.moe(layer, x, ep.quantize_params(params, TENSOR), recipe=TENSOR)[0]

    got = jax.jit(lambda *operands: graded(block, *operands))(params, x)
    params8 = ep.quantize_params(params, TENSOR)  # takes gradients as an argument too
    (value, _), (of_leaves, d_x) = jax.jit(
        lambda *a: graded(lambda params, x: ep.moe(layer, x, params)[0], *a)
    )(params8, x)
    assert isinstance(got[1][0].wi, tuple)
    same((value, of_leaves.wi.origin, of_leaves.router, d_x), (got[0][0], *_parts(got)))


def _parts(got: Any) -> tuple[Any, ...]:
    params, d_x = got[1]
    return params.wi, params.router, d_x


@pytest.mark.parametrize(("recipe", "paired"), [(BLOCK, False), (MX, True)], ids=repr)
def test_grouped_gemm_takes_them_with_the_recipe(recipe: Any, paired: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((64, HIDDEN), (3, HIDDEN, 2, INNER))
    )
    wo, sizes = np.zeros((3, INNER, HIDDEN), np.float32), np.int32([32, 0, 32])
    wi: Any = (w[:, :, 0], w[:, :, 1]) if paired else w

    def product(wi: Any, x: Any, once: bool) -> Any:
        if once:
            wi = ep.quantize_params(ep.MoEParams(None, wi, wo), recipe).wi
        return ep.grouped_gemm(x, wi, sizes, recipe=recipe)

    run = jax.jit(lambda wi, x, once: graded(lambda *a: product(*a, once), wi, x), static_argnums=2)
    same(run(wi, x, True), run(wi, x, False))


@pytest.mark.parametrize(
    ("recipe", "separate", "policy", "as_call"),
    [(TENSOR, True, ("ep_plan",), True), (MX, False, None, False)],
    ids=repr,
)
def test_a_stack_is_quantized_at_once_and_scanned(
    group: fakes.LocalGroup, ways: Ways, recipe: Any, separate: bool, policy: Any, as_call: bool
) -> None:
    stack = group.register_layer_stack(f"stack {recipe}", 2, top_k=TOP_K)
    x, each = drawn(stack[0], separate=separate)
    params = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x]), each)
    ways.as_users() if as_call else ways.by_ops()

    def model(params: Any, x: Any, recipe: Any = None) -> Any:
        def step(x: Any, own: Any) -> Any:
            return x + ep.moe(stack[own[0]], x, own[1], recipe=recipe)[0], None

        body = step if policy is None else jax.checkpoint(step, policy=ep.remat_policy(policy))
        return jax.lax.scan(body, x, (jnp.arange(2), params))[0]

    def by_recipe(params: Any, x: Any) -> Any:
        return graded(lambda params, x: model(params, x, recipe), params, x)

    def once(params: Any, x: Any, params8: Any) -> Any:
        return graded(lambda p, x: model(ep.straight_through(p, params8), x), params, x)

    params8 = ep.quantize_params(params, recipe, weights_only=True)
    same(jax.jit(once)(params, x, params8), jax.jit(by_recipe)(params, x))
    assert weights_quantized(once, params, x, params8) == 0
    again = 1 if policy is None else 2
    rounded = {TENSOR: 3, MX: 4}[recipe]  # gate, up and wo; MX makes two copies of wi and wo
    assert weights_quantized(by_recipe, params, x) == 2 * again * rounded


@pytest.mark.parametrize("as_call", [False, True], ids=["slabs", "call"])
@pytest.mark.parametrize("once", [False, True], ids=["plain", "quantized"])
def test_a_scan_stacks_no_copy_of_weights_that_it_is_given(
    group: fakes.LocalGroup, ways: Ways, once: bool, as_call: bool
) -> None:
    stack = group.register_layer_stack(f"given {once} {as_call}", 2, top_k=TOP_K)
    x, each = drawn(stack[0], param_dtype=jnp.bfloat16)  # others are cast, and casts are saved
    params = jax.tree.map(lambda x: jnp.stack([x, x]), each)
    ways.as_users() if as_call else ways.by_ops()

    def loss(params: Any, x: Any) -> Any:
        params = ep.quantize_params(params, BLOCK, layer=stack[0]) if once else params

        def step(x: Any, own: Any) -> Any:
            return x + ep.moe(stack[own[0]], x, own[1])[0], None

        return jnp.sin(jax.lax.scan(step, x, (jnp.arange(2), params))[0]).sum()

    scans = list(_scans(jax.make_jaxpr(jax.grad(loss))(params, x).jaxpr))
    stacked = [made.aval for scan in scans for made in scan.outvars]
    weights = [x for x in stacked if x.shape in {params.wi.shape, params.wo.shape}]
    assert len(scans) == 2
    assert [x.dtype for x in weights] == [params.wi.dtype, params.wo.dtype]  # gradients


def _scans(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
            continue
        for inner in jax.tree.leaves(eqn.params, is_leaf=_is_program):
            if _is_program(inner):
                yield from _scans(getattr(inner, "jaxpr", inner))


def test_microbatches_share_one_quantization(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, params = drawn(layer, jnp.float32)
    batches = jnp.stack([x, 2 * x, -x])
    moe = ep.moe

    def by_recipe(params: Any, batches: Any) -> Any:
        return microbatches.accumulated_outside([layer], [params], batches)

    def once(params: Any, batches: Any) -> Any:
        params8 = ep.quantize_params(params, TENSOR, weights_only=True)

        def patched(layer: Any, x: Any, params: Any, *, recipe: Any, **options: Any) -> Any:
            return moe(layer, x, ep.straight_through(params, params8), **options)

        monkeypatch.setattr(ep, "moe", functools.partial(patched, recipe=None))
        return microbatches.accumulated_outside([layer], [params], batches)

    monkeypatch.setattr(ep, "moe", functools.partial(moe, recipe=TENSOR))
    want = jax.jit(by_recipe)(params, batches)
    again = weights_quantized(by_recipe, params, batches)
    same(jax.jit(once)(params, batches), want)
    assert weights_quantized(once, params, batches) == 2  # wi and wo
    assert again == 2 * len(batches)


def test_inside_a_checkpoint_the_tag_keeps_what_was_quantized(layer: Any) -> None:
    x, params = drawn(layer)

    def block(params: Any, x: Any) -> Any:
        return ep.moe(layer, x, ep.quantize_params(params, BLOCK))[0]

    def count(*tags: str) -> int:
        kept = jax.checkpoint(block, policy=ep.remat_policy(tags))
        closed = jax.jit(lambda *a: graded(kept, *a)[1]).trace(params, x).jaxpr
        return _rounded(closed.jaxpr)

    assert count("ep_plan") == 2 * count("ep_plan", "ep_q_w") == 4


def test_everything_else_of_a_tree_stays_as_it_is(layer: Any) -> None:
    x, params = drawn(layer)
    tree = {"first": {"moe": params, "norm": jnp.ones(3)}, "rest": [params, jnp.zeros(2)]}
    params8 = ep.quantize_params(tree, TENSOR)
    assert params8["first"]["norm"] is tree["first"]["norm"]
    assert params8["rest"][0].router is params.router
    only = ep.quantize_params(tree, TENSOR, weights_only=True)
    assert only["first"]["norm"] is None
    assert only["rest"][0].router is None
    leaves = jax.tree.leaves(only)
    assert sum(x.nbytes for x in leaves) < 0.3 * sum(x.nbytes for x in jax.tree.leaves(tree))
    back = ep.straight_through(tree, only)
    assert back["rest"][1] is tree["rest"][1]
    assert back["first"]["moe"].wi.origin is params.wi
    same(ep.moe(layer, x, back["rest"][0])[0], ep.moe(layer, x, params, recipe=TENSOR)[0])


def test_what_has_no_meaning_is_refused_with_names(layer: Any) -> None:
    x, params = drawn(layer)
    params8 = ep.quantize_params(params, TENSOR)
    delayed = ep.recipes.TensorScaling(delayed=True)
    small = jax.tree.map(lambda x: x[:2] if x.ndim > 2 else x, params)
    other = ep.quantize_params(params, TENSOR, weights_only=True)
    bare = ep.quantize_params(params, TENSOR)
    bare = ep.MoEParams(params.router, bare.wi.detached(), bare.wo.detached())
    stacked = ep.quantize_params(jax.tree.map(lambda x: x[None], params), TENSOR)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: ep.moe(layer, x, params8, recipe=BLOCK), "params.wi was quantized by Tensor"),
        (lambda: ep.moe(layer, x, params8, recipe=(None, MX)), "params.wo was quantized by Tensor"),
        (lambda: ep.quantize_params(params, delayed), "recipe must not be delayed"),
        (lambda: ep.quantize_params(params, (BLOCK, delayed)), "recipe must not be delayed"),
        (lambda: ep.quantize_params(params, None), "must quantize wi, wo or both"),
        (lambda: ep.quantize_params(params, ep.recipes.BF16()), "must quantize wi, wo or both"),
        (lambda: ep.quantize_params(params8, TENSOR), "wi that is quantized already"),
        (lambda: ep.quantize_params({"wi": params.wi}, TENSOR), "dict with none"),
        (lambda: ep.straight_through(params8, params8), "masters must be masters"),
        (lambda: ep.straight_through(params, {"a": params8}), "got dict"),
        (lambda: ep.straight_through(small, params8), "wi of masters is [2, 64, 2, 96]"),
        (lambda: ep.moe(layer, x, ep.quantize_params(small, TENSOR)), "4 experts"),
        (lambda: ep.moe(layer, x, other), "router"),
        (lambda: ep.moe(layer, x, stacked), "router must be [H, E]"),
        (lambda: params8.to_separate(), "wi is quantized"),
        (
            lambda: jax.grad(lambda p: ep.moe(layer, x, p)[0].astype("f4").sum())(bare),
            "ep.straight_through(masters, params8)",
        ),
    ]
    for call, words in refused:
        with pytest.raises(ep.InvalidArgumentError) as caught:
            call()
        assert words in str(caught.value)
