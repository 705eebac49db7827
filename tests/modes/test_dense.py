"""dense: values, gradients, and the collectives of its layouts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import collectives
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_client.ops.quantize.formats import recipes

GATHER, SUM, SCATTER = "all-gather", "all-reduce", "reduce-scatter"
FSDP_EP = {"dp": 2, "fsdp": 2, "ep": 2}
FSDP_TP = {"dp": 2, "fsdp": 2, "tp": 2}

# axes, specs of x, kernel and output gradient, collectives, recipe, K', N'
CASES: dict[str, Any] = {
    "a tuple on N'": (
        FSDP_EP,
        (P(("fsdp", "ep")), P(None, ("fsdp", "ep")), P(("fsdp", "ep"))),
        {(GATHER, "f32"): 2, (SCATTER, "f32"): 1},
        None,
    ),
    "fsdp on K' and tp on N', one scale each": (
        FSDP_TP,
        (P(("dp", "fsdp")), P("fsdp", "tp"), P(("dp", "fsdp"), None, "tp")),
        # amax of the kernel, x and the gradient; d_x over tp; d_kernel over dp.
        {(GATHER, "u8"): 2, (SUM, "f32"): 5, (SCATTER, "f32"): 1},
        recipes.TensorScaling(),
    ),
    "tp on both sides of K'": (
        FSDP_TP,
        (P("dp", None, "tp"), P("tp"), P("dp")),
        {(SUM, "f32"): 2},
        None,
    ),
}


def draw(k: int, n: int) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = [(8, 32, k), (k, n), (8, 32, n)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def step(x: Any, kernel: Any, grad: Any, **options: Any) -> Any:
    y, pull = jax.vjp(lambda x, kernel: ep.dense(x, kernel, **options), x, kernel)
    return y, *pull(grad)


@pytest.mark.parametrize(
    ("axes", "specs", "moved", "recipe"),
    [pytest.param(*case, id=name) for name, case in CASES.items()],
)
def test_a_kernel_is_gathered_and_activations_never_are(
    axes: Any, specs: Any, moved: Any, recipe: Any
) -> None:
    size = (256, 256) if isinstance(recipe, recipes.BlockScaling) else (64, 64)
    arrays = draw(*size)
    mesh = fakes.mesh_of(axes)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    compiled = jax.jit(lambda *args: step(*args, recipe=recipe)).lower(*placed).compile()
    assert collectives.count(compiled) == Counter(moved)
    found = compiled(*placed)
    for got, like in zip(found[1:], placed, strict=False):
        assert got.sharding.is_equivalent_to(like.sharding, got.ndim)
    wanted = jax.jit(lambda *args: step(*args, recipe=recipe))(*arrays)
    twin = [ep.dense(*placed[:2], recipe=recipe)]
    for got, want in zip((*found, *twin), (*wanted, found[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_a_sum_is_scattered_where_the_result_lies_over_its_axes() -> None:
    mesh = fakes.mesh_of(FSDP_TP)
    x, kernel, _ = draw(64, 16)
    x = jax.device_put(x, NamedSharding(mesh, P("dp", None, "tp")))
    kernel = jax.device_put(kernel, NamedSharding(mesh, P("tp")))
    out = NamedSharding(mesh, P("dp", "tp"))
    compiled = jax.jit(ep.dense, out_shardings=out).lower(x, kernel).compile()
    assert collectives.count(compiled) == Counter({(SCATTER, "f32"): 1})
    np.testing.assert_allclose(compiled(x, kernel), x @ kernel, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", [None, recipes.TensorScaling(), recipes.MXFP8()])
def test_one_device_multiplies_adds_the_bias_once_and_differentiates(recipe: Any) -> None:
    x, kernel, grad = draw(64, 32)
    bias = np.arange(32, dtype=np.float32)

    def loss(f: Any, *args: Any) -> Any:
        return (f(*args) * grad).sum()

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    value, found = run(lambda x, k, b: ep.dense(x, k, bias=b, recipe=recipe), x, kernel, bias)
    if recipe is None:
        np.testing.assert_allclose(ep.dense(x[0], kernel), x[0] @ kernel, rtol=1e-5, atol=1e-5)
    wanted_value, wanted = run(lambda x, k, b: x @ k + b, x, kernel, bias)
    tolerance = 1e-5 if recipe is None else 0.09
    np.testing.assert_allclose(value, wanted_value, rtol=max(tolerance, 1e-4))
    for got, want in zip(found, wanted, strict=True):
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def test_explicit_axes_keep_the_types_of_what_they_are_gradients_of() -> None:
    mesh = fakes.mesh_of(FSDP_EP, explicit=True)
    specs = (P(("dp", "fsdp")), P("fsdp"), P(("dp", "fsdp")))
    placed = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(draw(16, 8), specs, strict=True)
    ]
    y, d_x, d_kernel = jax.jit(step)(*placed)
    assert jax.typeof(d_kernel).sharding.spec[0] == "fsdp"
    np.testing.assert_allclose(y, np.array(placed[0]) @ np.array(placed[1]), 1e-4, 1e-4)
    np.testing.assert_allclose(d_x, np.array(placed[2]) @ np.array(placed[1]).T, 1e-4, 1e-4)


@pytest.mark.parametrize("manual", [("dp", "fsdp", "ep"), ("dp",)], ids=["all", "dp"])
def test_inside_a_manual_region_local_rows_meet_the_whole_kernel(manual: Any) -> None:
    mesh = fakes.mesh_of(FSDP_EP)
    x, kernel, _ = draw(16, 8)
    rows = P(tuple(axis for axis in ("dp", "fsdp") if axis in manual))
    run = jax.shard_map(
        lambda x, kernel: ep.dense(x, kernel, recipe=recipes.TensorScaling()),
        mesh=mesh,
        axis_names=set(manual),
        in_specs=(rows, P()),
        out_specs=rows,
    )
    wanted = jax.jit(lambda *args: ep.dense(*args, recipe=recipes.TensorScaling()))(x, kernel)
    np.testing.assert_allclose(jax.jit(run)(x, kernel), wanted, rtol=1e-4, atol=1e-4)
    loss = jax.jit(jax.grad(lambda *args: (run(*args) ** 2).sum(), argnums=1))
    local = jax.jit(jax.grad(lambda x, k: (ep.dense(x, k) ** 2).sum(), argnums=1))(x, kernel)
    assert np.linalg.norm(loss(x, kernel) - local) <= 0.1 * np.linalg.norm(local)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": np.zeros((63, 8), np.float32)}, ["kernel", "[63, 8]"]),
        ({"bias": np.zeros(9, np.float32)}, ["bias", "[8]", "[9]"]),
        ({"recipe": recipes.TensorScaling(delayed=True)}, ["recipe", "delayed"]),
        ({"x": np.zeros((4, 64), np.int32)}, ["x", "int32"]),
    ],
)
def test_operands_that_do_not_fit_are_named(change: Any, words: list[str]) -> None:
    given = {"x": jnp.zeros((4, 64)), "kernel": jnp.zeros((64, 8)), "bias": None, "recipe": None}
    given |= change
    with pytest.raises(ValueError, match="must be") as caught:
        ep.dense(given["x"], given["kernel"], bias=given["bias"], recipe=given["recipe"])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("recipe", [None, recipes.TensorScaling(), recipes.MXFP8()])
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_rows_have_a_result_and_gradients_without_any(
    lead: tuple[int, ...], recipe: Any
) -> None:
    x, kernel, bias = jnp.zeros((*lead, 64)), jnp.ones((64, 32)), jnp.ones(32)
    y = ep.dense(x, kernel, bias=bias, recipe=recipe)
    assert y.shape == (*lead, 32)
    grads = jax.jit(jax.grad(lambda *args: ep.dense(*args, recipe=recipe).sum(), argnums=(0, 1)))
    d_x, d_kernel = grads(x, kernel)
    assert d_x.shape == x.shape
    np.testing.assert_array_equal(d_kernel, np.zeros((64, 32)))


def test_nothing_to_contract_is_zeros() -> None:
    np.testing.assert_array_equal(ep.dense(jnp.zeros((3, 0)), jnp.ones((0, 4))), np.zeros((3, 4)))
