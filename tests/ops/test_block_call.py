"""Compares block calls with slabs: values, gradients, and the arrays a program saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_ways import Ways, assert_close

import ep_runtime as ep
from ep_runtime import errors, workspace
from ep_runtime_client.moe import bodies
from ep_runtime_client.ops.kernels import row_blocks

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 8, 3


group = fakes.module_group(
    {"dp": 2, "ep": 4},
    debug=True,
    outer_axes="dp",
    num_experts=EXPERTS,
    hidden_size=HIDDEN,
    max_top_k=TOP_K,
    max_tokens_per_rank=64,
)


@pytest.fixture(scope="module")
def layer(group: fakes.LocalGroup) -> Any:
    return group.register_layer("moe", top_k=TOP_K, in_flight=2)


def make_params(layer: Any, **options: Any) -> ep.MoEParams:
    params = ep.init_moe_params(jax.random.key(0), layer, INNER, **options)
    if not options.get("use_bias"):
        return params
    biases = (params.wi_bias, params.wo_bias)
    leaves, tree = jax.tree.flatten(biases)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(*each) for each in zip(keys, map(jnp.shape, leaves), strict=True)]
    wi_bias, wo_bias = jax.tree.unflatten(tree, drawn)
    return dataclasses.replace(params, wi_bias=wi_bias, wo_bias=wo_bias)


def draw(*lead: int) -> Any:
    return jax.random.normal(jax.random.key(7), (*lead, HIDDEN))


def graded(layer: Any, **options: Any) -> Callable[..., Any]:
    """Returns ((y, aux, stats), gradients of x and params) of a block."""

    def run(x: Any, params: Any) -> Any:
        def block(x: Any, params: Any) -> Any:
            y, aux, stats = ep.moe(layer, x, params, return_stats=True, **options)
            return (y, aux), dataclasses.replace(stats, routing=None)

        (y, aux), pull, stats = jax.vjp(block, x, params, has_aux=True)
        return (y, aux, stats), pull((jnp.cos(y.astype(jnp.float32)).astype(y.dtype), aux + 1))

    return run


# A call of moe: options of the parameters, options of the call, and the leading dims of x.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "weights in combine": ({}, {"aux_loss_coeff": 0.1}, (64,)),
    "weights before wo": ({}, {"weights_at": "hidden", "keep_factor": 0.25}, (64,)),
    "keeps nothing": ({"gated": False}, {"keep": "nothing", "activation": "gelu"}, (64,)),
    "biases": ({"use_bias": True}, {"weights_at": None}, (64,)),
    "a pair with biases": ({"use_bias": True, "separate": True}, {}, (16, 4)),
    "drops": ({"gated": False}, {"capacity": 24, "weights_at": None}, (64,)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_ops(layer: Any, ways: Ways, name: str) -> None:
    of_params, options, lead = CASES[name]
    options = {"gated": of_params.get("gated", True), **options}
    want, got = ways.both(graded(layer, **options), draw(*lead), make_params(layer, **of_params))
    assert_close(got, want)
    assert (name == "drops") == (int(want[0][2].dropped) > 0)


@pytest.mark.parametrize("name", ["weights before wo", "a pair with biases", "drops"])
def test_how_close_rows_lie_changes_no_bit(
    group: fakes.LocalGroup, ways: Ways, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Covers y, gradients, drops and num_recv; drops and num_recv follow the layer's alignment."""
    monkeypatch.setattr(row_blocks, "MIN_BLOCK_ROWS", 128)  # sums of equally many rows
    of_params, options, lead = CASES[name]
    options = {"gated": of_params.get("gated", True), **options}
    if name == "drops":
        options["capacity"] = 128  # one zone
    layer = group.register_layer(f"128 {name}", top_k=TOP_K, alignment=128)
    params, found = make_params(layer, **of_params), []
    ways.emulated()
    for rows in (128, 8, 1):
        monkeypatch.setattr(workspace, "ROW_ALIGNMENT", rows)
        run = graded(layer, **options)
        found.append(jax.device_get(jax.jit(lambda *x, run=run: run(*x))(draw(*lead), params)))
    assert (name == "drops") == (int(found[0][0][2].dropped) > 0)
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


def test_only_rows_that_nobody_sees_lie_closer(layer: Any, ways: Ways) -> None:
    def text() -> str:
        run = jax.jit(lambda x, params: ep.moe(layer, x, params)[0])
        return run.lower(draw(64), make_params(layer)).as_text()

    ways.emulated()
    assert "row_alignment = 1 :" in text()
    ways.as_users()
    assert "row_alignment" not in text()


def test_columns_of_gate_and_up_in_one_dim(layer: Any, ways: Ways) -> None:
    params, x = make_params(layer), draw(64)
    ways.as_users()

    def flat(x: Any, params: Any) -> Any:
        wi = params.wi.reshape(*params.wi.shape[:2], -1)
        return graded(layer)(x, dataclasses.replace(params, wi=wi))

    want, got = (jax.jit(run)(x, params) for run in (graded(layer), flat))
    d_wi = got[1][1].wi.reshape(params.wi.shape)
    got = (got[0], (got[1][0], dataclasses.replace(got[1][1], wi=d_wi)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


ROUTINGS: dict[str, Callable[[Any], Any]] = {
    "drawn": lambda idx: idx,
    "unused slots": lambda idx: np.where(idx % 3 == 0, -1, idx),
    "nothing but unused slots": lambda idx: np.full_like(idx, -1),
    "all to one expert": lambda idx: np.where(np.arange(TOP_K) == 0, 5, -1) + 0 * idx,
    "all to one rank": lambda idx: (
        np.where(np.arange(TOP_K) < 2, 2 + np.arange(TOP_K), -1) + 0 * idx
    ),
    "nothing to the last rank": lambda idx: np.where(idx >= EXPERTS - 2, idx - 4, idx),
}


def routed(layer: Any) -> Callable[..., Any]:
    """Returns (y, gradients of x, params and weights) of a block with indices from the caller."""

    def run(x: Any, params: Any, weights: Any, idx: Any) -> Any:
        def block(x: Any, params: Any, weights: Any) -> Any:
            return ep.moe(layer, x, params, routing=ep.Routing(idx, weights, None))[0]

        y, pull = jax.vjp(block, x, params, weights)
        return y, pull(jnp.cos(y))

    return run


def check_routings(layer: Any, ways: Ways) -> None:
    """Compares values and gradients of every routing with those of the ops, twice."""
    params = dataclasses.replace(make_params(layer), router=None)
    keys = jax.random.split(jax.random.key(3))
    drawn = np.asarray(jax.random.randint(keys[0], (64, TOP_K), 0, EXPERTS))
    weights, x = jax.random.normal(keys[1], drawn.shape), draw(64)

    run = routed(layer)
    operands = (x, params, weights)
    ways.by_ops()
    by_slabs = jax.jit(run)
    want = {name: by_slabs(*operands, change(drawn)) for name, change in ROUTINGS.items()}
    ways.taken()
    by_call = jax.jit(lambda *given: run(*given))
    for name, change in ROUTINGS.items():
        got = by_call(*operands, change(drawn))
        assert_close(got, want[name])
        jax.tree.map(np.testing.assert_array_equal, by_call(*operands, change(drawn)), got)
        unused = np.asarray(change(drawn)) < 0
        assert not np.asarray(got[1][2])[unused].any(), name


def test_any_routing(layer: Any, ways: Ways) -> None:
    check_routings(layer, ways)


def test_arrays_that_are_there_run_as_in_a_program(layer: Any, ways: Ways) -> None:
    params, x = make_params(layer), draw(64)
    want, _ = ways.both(lambda x, params: ep.moe(layer, x, params)[0], x, params)
    assert_close(ep.moe(layer, x, params)[0], want)


def test_keep_is_checked(layer: Any) -> None:
    params, x = make_params(layer), draw(64)
    wrong: Any = ({"keep": "second"}, {"keep_factor": 0.0}, {"keep_factor": float("nan")})
    for options in wrong:
        with pytest.raises(errors.InvalidArgumentError, match=next(iter(options))):
            ep.moe(layer, x, params, **options)


def test_second_derivatives_are_refused(layer: Any, ways: Ways) -> None:
    ways.as_users()
    params, x = make_params(layer), draw(64)
    first = jax.grad(lambda x: ep.moe(layer, x, params)[0].sum())
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        jax.eval_shape(jax.grad(lambda x: first(x).sum()), x)


def test_explain_names_the_body_and_why_it_is_not_the_fast_one(layer: Any, ways: Ways) -> None:
    params, x = make_params(layer), draw(64)

    def told(**options: Any) -> list[str]:
        run = jax.jit(lambda x, p: ep.moe(layer, x, p, **options)[0])
        return [str(path) for path in ep.explain(run, x, params).paths]

    assert told() == [f"ep.moe of 'moe': composed: {bodies.REASONS['transport']}"]
    ways.emulated()
    assert told(keep="nothing") == ["ep.moe of 'moe': cuda"]
    recipe = (ep.recipes.TensorScaling(), None)
    assert told(recipe=recipe) == [f"ep.moe of 'moe': composed: {bodies.REASONS['recipe']}"]
