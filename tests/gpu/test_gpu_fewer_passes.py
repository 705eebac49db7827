"""Kernels that replace several passes over rows or weights give the bits of those passes, and
programs hold them instead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.layouts import TRANSPORT, TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe.api import init_moe_params, moe
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation import quantized_kernels, quantized_plain
from ep_runtime_client.ops.activation.function import ACTIVATIONS, Activation
from ep_runtime_client.ops.activation.quantized_plain import QuantizedActivation
from ep_runtime_client.ops.gemm import kernels_8
from ep_runtime_client.ops.quantize import kernels as quantize_kernels
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.quantize.formats.tiles import bits

_TARGETS = (
    *activation_kernels.TARGETS,
    *quantized_kernels.TARGETS,
    *quantize_kernels.TARGETS,
    *kernels_8.TARGETS,
)
_SIZES = np.int32([[16, 300, 0, 40], [8, 24, 1, 0]])
_ROWS = 384  # of a slab
_USED = np.arange(_ROWS) < _SIZES.sum(1, keepdims=True)
_RECIPES = {
    "tensor": recipes.TensorScaling(),
    "blocks": recipes.BlockScaling(),
    "blocks 2^n": recipes.BlockScaling(True),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


def _same_bits(got: Any, want: Any, note: str = "") -> None:
    got, want = (np.asarray(x) for x in (got, want))
    kind = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(kind), want.view(kind), err_msg=note)


def _drawn(seed: int, *shape: int, dtype: str = "bfloat16") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def _calls(run: Any, *operands: Any) -> set[str]:
    text = jax.jit(run).lower(*operands).compile().as_text() or ""
    return {name for name in _TARGETS if f'custom_call_target="{name}"' in text}


# Every function in one form, and one function in every form: gate and up as a pair, as halves,
# neither.
_ACTIVATIONS = [
    *[(Activation(name, True, jnp.dtype("bfloat16")), (2, 72)) for name in sorted(ACTIVATIONS)],
    *[
        (Activation("silu", gated, jnp.dtype(dtype)), shape)
        for dtype in ("bfloat16", "float16")
        for gated, shape in ((True, (2, 328)), (True, (400,)), (False, (136,)))
    ],
]


@pytest.mark.parametrize("recipe", _RECIPES.values(), ids=_RECIPES)
def test_activated_rows_are_quantized_as_by_two_passes(gpus: list[Any], recipe: Any) -> None:
    sizes = jnp.asarray(_SIZES)
    given = []
    for number, (static, shape) in enumerate(_ACTIVATIONS):
        hidden = _drawn(number, 2, _ROWS, *shape, dtype=static.dtype.name)
        hidden[~_USED] = np.nan
        width = np.prod(shape) // (2 if static.gated else 1)
        grad = _drawn(number, 2, _ROWS, width, dtype=static.dtype.name)
        weights = _drawn(9, 2, _ROWS, dtype="float32") if number % 2 else None
        given.append((hidden, weights, grad))

    def leaves(q: Any) -> Any:
        return bits(q.data), q.scale, q.amax

    def run(given: Any) -> Any:
        found = []
        for (static, _), (hidden, weights, grad) in zip(_ACTIVATIONS, given, strict=True):
            fused, operands = QuantizedActivation(static, recipe, 4), (hidden, weights, sizes)
            options: dict[str, Any] = {"num_experts": 4, "clear_slack": False}
            rows = activation_plain.forward(static, *operands)
            two = quantize_plain.quantize_rows(recipe, rows, sizes, **options)
            found.append((leaves(quantized_plain.forward(fused, *operands)), leaves(two)))
            back, back_weights = quantized_plain.pullback(fused, *operands, grad)
            rows, d_weights = activation_plain.pullback(static, *operands, grad)
            two = quantize_plain.quantize_rows(recipe, rows, sizes, gradient=True, **options)
            found.append(((leaves(back), back_weights), (leaves(two), d_weights)))
        return found

    found = jax.jit(run)(jax.device_put(given, gpus[0]))
    each = [case for case in _ACTIVATIONS for _ in ("values", "gradients")]
    for (static, shape), (one, two) in zip(each, found, strict=True):
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            left, right = np.asarray(left), np.asarray(right)
            mine = _USED if left.shape[:2] == _USED.shape else np.ones(left.shape, bool)
            _same_bits(left[mine], right[mine], f"{static} {shape}")


@pytest.mark.parametrize("recipe", _RECIPES.values(), ids=_RECIPES)
def test_weights_in_both_layouts_are_those_of_cpu(gpus: list[Any], recipe: Any) -> None:
    def run(kernels: Any) -> Any:
        made = [quantize_plain.quantize_kernel(recipe, w, transposed=True) for w in kernels]
        return [(bits(q.data), bits(q.transposed), q.scale, q.amax) for q in made]

    shapes, types = ((3, 96, 160), (2, 320, 2, 72)), ("bfloat16", "float16", "float32")
    drawn = [_drawn(4, *shape, dtype=dtype) for shape in shapes for dtype in types]
    compiled = jax.jit(run)
    got = compiled(jax.device_put(drawn, gpus[0]))
    want = compiled(jax.device_put(drawn, jax.devices("cpu")[0]))
    jax.tree.map(_same_bits, got, want)


@pytest.fixture(scope="module")
def session() -> Iterator[ep.Session]:
    with ep.connect("embedded", timeout_s=60.0) as made:
        yield made


@pytest.mark.parametrize("weights_at", ["hidden", "input"])
@pytest.mark.parametrize("name", ["tensor", "blocks"])
def test_the_moe_block_holds_them_and_gives_the_same_bits(
    gpus: list[Any],
    session: ep.Session,
    name: str,
    weights_at: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, tokens = Mesh(np.array(gpus), ("ep",)), 256
    group = session.create_group(
        f"fewer-passes-{name}-{weights_at}",
        mesh,
        ep_axis="ep",
        transport="xla",
        num_experts=8,
        hidden_size=256,
        max_tokens_per_rank=tokens,
        max_top_k=2,
        alignment=8,
    )
    layer = group.register_layer("moe", top_k=2)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    params = init_moe_params(jax.random.key(0), layer, 256)
    params = dataclasses.replace(params, wi=put(params.wi), wo=put(params.wo))
    x = put(_drawn(7, tokens * len(gpus), 256))

    def loss(x: Any, params: Any) -> Any:
        options = {"recipe": _RECIPES[name], "weights_at": weights_at}
        return jnp.sin(moe(layer, x, params, **options)[0].astype(jnp.float32)).sum()

    run = jax.value_and_grad(loss, argnums=(0, 1))
    found = jax.block_until_ready(jax.jit(run)(x, params))
    if not TRIAL:
        held = _calls(run, x, params)
        assert {"ep_quantize_activation_v1", "ep_quantize_weights_v1"} <= held
        assert not held & {"ep_activation_v1", "ep_transpose_weights_v1"}
    jax.clear_caches()
    monkeypatch.setattr(quantized_kernels, "supports", lambda *_, **__: False)
    monkeypatch.setattr(quantize_ops, "transposes", lambda *_: False)
    if not TRIAL:
        assert "ep_activation_v1" in _calls(run, x, params)
    jax.tree.map(_same_bits, found, jax.block_until_ready(jax.jit(run)(x, params)))


def test_weights_of_tokens_multiply_rows_once_they_are_dispatched(
    gpus: list[Any], session: ep.Session
) -> None:
    """With one expert per token, results equal those of tokens that are multiplied first."""
    mesh, tokens, hidden = Mesh(np.array(gpus), ("ep",)), 256, 256
    sizes = {"num_experts": 8, "hidden_size": hidden, "max_tokens_per_rank": tokens}
    group = session.create_group(
        "weighted-tokens", mesh, ep_axis="ep", transport=TRANSPORT, **sizes
    )
    layer = group.register_layer("moe", top_k=1)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("ep")))
    made = init_moe_params(jax.random.key(0), layer, 256, use_router=False)
    params = jax.tree.map(put, made)
    rows = tokens * len(gpus)
    x, weights = put(_drawn(7, rows, hidden)), put(_drawn(8, rows, 1, dtype="float32"))
    idx = put(np.random.default_rng(3).integers(-1, 8, (rows, 1), np.int32))

    def inside(x: Any, weights: Any, params: Any) -> Any:
        routing = ep.Routing(idx, weights)
        return moe(layer, x, params, routing=routing, weights_at="input")[0]

    def before(x: Any, weights: Any, params: Any) -> Any:
        x = (x.astype(jnp.float32) * weights).astype(x.dtype)
        return moe(layer, x, params, routing=ep.Routing(idx, jnp.ones_like(weights)))[0]

    def graded(run: Any) -> Any:
        def loss(*operands: Any) -> Any:
            y = run(*operands)
            return jnp.sin(y.astype(jnp.float32)).sum(), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(x, weights, params)

    got, want = (jax.device_get(graded(run)) for run in (inside, before))
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        left, right = (np.asarray(each, np.float32) for each in (left, right))
        np.testing.assert_allclose(left, right, rtol=2e-2, atol=2e-2 * np.abs(right).max())
    _same_bits(got[1], want[1], "y")
