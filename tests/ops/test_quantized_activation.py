"""Operands of the experts' matmuls, quantized in fewer passes: the same bits in every layout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe.api import MoEParams, init_moe_params, moe
from ep_runtime_client.ops.activation import quantized_kernels, quantized_plain
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.activation.quantized_plain import QuantizedActivation
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.quantize import kernels as quantize_kernels
from ep_runtime_client.ops.quantize.formats import recipes

Spec = PartitionSpec
BF16 = jnp.dtype(jnp.bfloat16)
SIZES = np.int32([[5, 0, 9], [1, 13, 2]])
TARGETS = (*quantized_kernels.TARGETS, *quantize_kernels.TARGETS)
RECIPES = {
    "tensor": (recipes.TensorScaling(), ["ep_activation_amax_v1", "ep_quantize_activation_v1"]),
    "block": (recipes.BlockScaling(), ["ep_quantize_activation_v1"]),
}


class Process:
    """Imitates a process whose GPUs have the kernels, or one without.

    CPU multiplies the copies with K' along memory then, where there are some.

    Attributes:
        transposed: of every product that was traced since, whether it was of such a copy.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.transposed: list[bool] = []
        self._patch, self._plain = patch, gemm_plain._forward
        patch.setattr(gemm_plain, "_forward", self._forward)

    def takes_kernels(self, wanted: bool) -> None:
        self.transposed.clear()
        self._patch.setattr(serve, "available", lambda: wanted)
        self._patch.setattr(serve, "multiplying_gpus", lambda: () if wanted else None)

    def _forward(self, gemm: Any, lhs: Any, rhs: Any, *rest: Any) -> Any:
        copy = getattr(rhs, "transposed", None)
        if copy is not None:
            rhs = dataclasses.replace(rhs, data=jnp.moveaxis(copy, -1, 1))
        self.transposed.append(copy is not None)
        return self._plain(gemm, lhs, rhs, *rest)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> Process:
    return Process(monkeypatch)


def drawn(*shape: int, dtype: Any = BF16) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def calls(function: Any, *operands: Any, platform: str = "cuda") -> list[str]:
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    return [name for name in sorted(TARGETS) for _ in range(text.count(f"@{name}("))]


def run(static: QuantizedActivation, hidden: Any, weights: Any, grad: Any = None) -> Any:
    if grad is None:
        return quantized_plain.forward(static, hidden, weights, SIZES)
    return quantized_plain.pullback(static, hidden, weights, SIZES, grad)


@pytest.mark.parametrize("weighted", [False, True], ids=["bare", "weighted"])
@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize(("recipe", "wanted"), RECIPES.values(), ids=RECIPES)
def test_one_call_makes_data_and_scales(
    process: Process, recipe: Any, wanted: list[str], gradient: bool, weighted: bool
) -> None:
    process.takes_kernels(True)
    static = QuantizedActivation(Activation("silu", True, BF16), recipe, 3)
    weights = drawn(2, 20, dtype=np.float32) if weighted else None
    operands = (drawn(2, 20, 2, 136), weights, drawn(2, 20, 136) if gradient else None)
    fused = functools.partial(run, static)
    assert calls(fused, *operands) == wanted
    assert calls(fused, *operands, platform="cpu") == []
    here = jax.jit(fused)(*operands)
    process.takes_kernels(False)
    alone = jax.jit(functools.partial(run, static))(*operands)
    assert jax.tree.structure(here) == jax.tree.structure(alone)
    there = np.arange(20) < SIZES.sum(1, keepdims=True)
    for left, right in zip(jax.tree.leaves(here), jax.tree.leaves(alone), strict=True):
        assert left.dtype == right.dtype
        left, right = np.asarray(left), np.asarray(right)
        # Gradients of rows past the last group are undefined.
        mine = there if left.shape[:2] == there.shape else np.ones(left.shape, bool)
        np.testing.assert_array_equal(left[mine], right[mine])


def test_gradients_of_halves_that_share_a_tile_take_two_passes(process: Process) -> None:
    process.takes_kernels(True)
    static = QuantizedActivation(Activation("silu", True, BF16), recipes.BlockScaling())
    for inner, wanted in ((136, "ep_quantize_tiles_v1"), (128, "ep_quantize_activation_v1")):
        operands = (drawn(2, 20, 2 * inner), None, drawn(2, 20, inner))
        assert calls(functools.partial(run, static), *operands) == [wanted]


@pytest.mark.parametrize(
    ("static", "recipe"),
    [
        (Activation("silu", True, jnp.dtype(jnp.float32)), recipes.BlockScaling()),
        (Activation(jax.nn.silu, True, BF16), recipes.BlockScaling()),
        (Activation("silu", True, BF16), recipes.MXFP8()),
    ],
    ids=["f32", "a function", "column-wise copies"],
)
def test_what_the_kernels_do_not_take_is_activated_and_then_quantized(
    process: Process, static: Activation, recipe: Any
) -> None:
    process.takes_kernels(True)
    hidden = drawn(2, 32, 2, 128, dtype=static.dtype)
    found = calls(functools.partial(run, QuantizedActivation(static, recipe)), hidden, None)
    assert not {*found} & {*quantized_kernels.TARGETS}


def test_exports_may_hold_every_call() -> None:
    named = {str(check) for check in ep.export_checks()}
    assert all(any(target in check for check in named) for target in quantized_kernels.TARGETS)


def test_the_block_gives_the_same_bits(make_group: Any, process: Process) -> None:
    group = make_group(
        mesh=fakes.mesh_of({"ep": 4, "tp": 2}),
        num_experts=8,
        max_top_k=2,
        transport="memfd",
        max_tokens_per_rank=32,
        hidden_size=32,
        partitioning="shard_map",
    )
    layer = group.register_layer("moe", top_k=2)
    specs = MoEParams(Spec(), Spec("ep", None, None, "tp"), Spec("ep", "tp"), None, None, None)
    params = init_moe_params(jax.random.key(0), layer, 512)
    placed = {
        name: jax.device_put(getattr(params, name), NamedSharding(group.mesh, getattr(specs, name)))
        for name in ("router", "wi", "wo")
    }
    params = dataclasses.replace(params, **placed)
    x = jax.random.normal(jax.random.key(7), (32, 32), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(group.mesh, Spec("ep")))

    def loss(x: Any, params: Any) -> Any:
        how = {"recipe": RECIPES["tensor"][0], "params_spec": specs, "capacity": 96}
        y, _ = moe(layer, x, params, weights_at="hidden", **how)
        return jnp.sin(y.astype(jnp.float32)).sum()

    found = []
    for wanted in (True, False):
        process.takes_kernels(wanted)
        found.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, params))
        assert {*process.transposed} == {wanted}
        jax.clear_caches()
    for left, right in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
