"""Block calls with recipes give the bits of slabs; on CPU the call is composed of public ops."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_ways import Ways, assert_close

import ep_runtime as ep
from ep_runtime import native
from ep_runtime_client.moe import bodies
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.gemm import kernels_16
from ep_runtime_client.ops.kernels import serve

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 48, 32, 4, 2, 24
TENSOR, BLOCK = ep.recipes.TensorScaling(), ep.recipes.BlockScaling()


group = fakes.module_group(
    {"ep": 2},
    debug=True,
    num_experts=EXPERTS,
    hidden_size=HIDDEN,
    max_top_k=TOP_K,
    max_tokens_per_rank=TOKENS,
)


@pytest.fixture(scope="module")
def layer(group: fakes.LocalGroup) -> Any:
    return group.register_layer("moe", top_k=TOP_K)


def graded(layer: Any, x: Any, params: Any, **options: Any) -> Any:
    def block(x: Any, params: Any) -> Any:
        return ep.moe(layer, x, params, weights_at="hidden", **options)[0]

    y, pull = jax.vjp(block, x, params)
    return y, pull(jnp.cos(y.astype(jnp.float32)).astype(y.dtype))


def drawn(layer: Any, of_rows: Any = jnp.float32, **options: Any) -> tuple[Any, Any]:
    params = ep.init_moe_params(jax.random.key(0), layer, INNER, **options)
    x = jax.random.normal(jax.random.key(7), (2 * TOKENS, HIDDEN), of_rows)
    return x, params


CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "tensor scales": (TENSOR, jnp.bfloat16, {}, {}),
    "16-bit parameters": (
        TENSOR,
        jnp.bfloat16,
        {"param_dtype": jnp.bfloat16},
        {"keep_factor": 0.25},
    ),
    "scales of blocks": (BLOCK, jnp.bfloat16, {}, {}),
    "wide gradients": (
        ep.recipes.BlockScaling(power_of_two_scales=True, gradient_dtype="float8_e5m2"),
        jnp.bfloat16,
        {"separate": True},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_ops(layer: Any, ways: Ways, name: str) -> None:
    recipe, dtype, of_params, options = CASES[name]
    x, params = drawn(layer, dtype, **of_params)
    options = {"recipe": recipe, **options}
    want, got = ways.both(lambda x, params: graded(layer, x, params, **options), x, params)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    exact = jax.jit(lambda x, params: graded(layer, x, params)[0])
    assert not np.array_equal(got[0], exact(x, params))  # some values were rounded


@pytest.mark.parametrize(
    "policy",
    [None, ("ep_plan", "ep_q_w")],
    ids=str,
)
def test_scans_and_checkpoints_quantize_weights_as_often_as_the_ops(
    group: fakes.LocalGroup, ways: Ways, policy: tuple[str, ...] | None
) -> None:
    stack = group.register_layer_stack(f"stack{policy}", 2, top_k=TOP_K)
    x, each = drawn(stack[0])
    params = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x]), each)

    def run(x: Any, params: Any) -> Any:
        def step(x: Any, own: Any) -> Any:
            number, params = own
            y = ep.moe(stack[number], x, params, recipe=TENSOR, weights_at="hidden")[0]
            return x + y, None

        body = step if policy is None else jax.checkpoint(step, policy=ep.remat_policy(policy))

        def loss(x: Any, params: Any) -> Any:
            return jnp.sin(jax.lax.scan(body, x, (jnp.arange(2), params))[0]).sum()

        return jax.grad(loss, argnums=(0, 1))(x, params)

    want, got = ways.both(run, x, params)
    assert_close(got, want)


def test_explain_says_which_recipes_the_call_takes(layer: Any, ways: Ways) -> None:
    ways.emulated()
    x, params = drawn(layer)

    def told(recipe: Any) -> str:
        run = jax.jit(lambda x, p: ep.moe(layer, x, p, recipe=recipe)[0])
        (path,) = ep.explain(run, x, params).paths
        return path.why or path.path

    for taken in (TENSOR, BLOCK, (TENSOR, TENSOR), ep.recipes.BF16()):
        assert told(taken) == "cuda"
    for refused in ((TENSOR, BLOCK), (TENSOR, None)):
        assert told(refused) == bodies.REASONS["recipe"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, ""),
        ({"recipe": BLOCK}, ""),
        ({"recipe": ep.recipes.MXFP8()}, "mxfp8"),
        ({"gpus": ("10.0",)}, "gpu"),
        ({"recipe": ep.recipes.MXFP8(), "gpus": ("10.0", "10.0")}, "gpu"),
        ({"hidden": 260}, "sizes"),
        ({"precision": "highest"}, ""),
        ({"dtype": "float32"}, ""),
        ({"dtype": "float32", "precision": "tensorfloat32"}, ""),
        ({"dtype": "float32", "precision": "high"}, "precision"),
        ({"dtype": "float32", "precision": "highest"}, "precision"),
        ({"dtype": "float32", "recipe": BLOCK}, "quantized"),
        ({"dtype": "float32", "recipe": BLOCK, "precision": "highest"}, "quantized"),
        ({"dtype": "float32", "hidden": 260}, ""),
        ({"dtype": "float32", "hidden": 258}, "sizes"),
        ({"dtype": "float64"}, "dtype"),
        ({"experts": kernels_16.MAX_EXPERTS}, ""),
        ({"experts": kernels_16.MAX_EXPERTS + 1}, "sizes"),
    ],
    ids=str,
)
def test_what_the_tensor_cores_do_not_know_runs_composed(
    group: Any, said: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = said.get("recipe")
    monkeypatch.setattr(serve, "installed", lambda: True)
    monkeypatch.setattr(serve, "register_for_gpus", lambda: said.get("gpus", ("9.0",)))
    monkeypatch.setattr(native, "library", lambda _: SimpleNamespace(has_kernels_for=lambda _: 1))
    asked = bodies.Asked(
        group=dataclasses.replace(group.spec, transport="nvlink"),
        tokens=TOKENS,
        hidden=said.get("hidden", 256),
        inner=256,
        experts=said.get("experts", 2),
        activation=Activation("silu", True, jnp.dtype(said.get("dtype", "bfloat16"))),
        recipes=(recipe, recipe),
        paired=False,
        to_input=False,
    )
    with jax.default_matmul_precision(said.get("precision", "default")):
        assert bodies.unsupported(asked) == why
