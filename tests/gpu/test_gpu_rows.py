"""Activation, quantization and moves of rows by the GPU kernels equal CPU's, in any program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.layouts import TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation import quantized_plain
from ep_runtime_client.ops.activation.function import ACTIVATIONS, Activation
from ep_runtime_client.ops.activation.quantized_plain import QuantizedActivation
from ep_runtime_client.ops.gemm import kernels_bias
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.kernels import move_rows
from ep_runtime_client.ops.quantize import kernels as quantize_kernels
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.quantize.formats.tiles import bits
from ep_runtime_client.ops.transports import fp8_sums, nodes

_AGAIN = 10
# Relative to the operands: the result's rounding, and f32 arithmetic.
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
_F32 = 1e-5
_TARGETS = (
    *activation_kernels.TARGETS,
    *quantize_kernels.TARGETS,
    *move_rows.TARGETS,
    *kernels_bias.TARGETS,
)
_SIZES = np.int32([[16, 300, 0, 40], [8, 24, 1, 0]])
_ROWS = 384  # of a slab
_USED = np.arange(_ROWS) < _SIZES.sum(1, keepdims=True)


def _both(gpus: list[Any], run: Any, *operands: Any) -> tuple[Any, Any]:
    """Returns the results of `run` on a GPU, the same every time, and on CPU."""
    cpu = jax.devices("cpu")[0]
    compiled = jax.jit(run)
    given = jax.device_put(operands, gpus[0])
    got = jax.block_until_ready(compiled(*given))
    for _ in range(_AGAIN):  # replays the captured graph
        again = compiled(*given)
    jax.tree.map(_same_bits, jax.block_until_ready(again), got)
    return got, compiled(*jax.device_put(operands, cpu))


def _raw(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(np.dtype(f"u{x.dtype.itemsize}")) if x.dtype != bool else x


def _same_bits(got: Any, want: Any, note: str = "") -> None:
    np.testing.assert_array_equal(_raw(got), _raw(want), err_msg=note)


def _near(got: Any, want: Any, size: float, note: str = "") -> None:
    tolerance = (_ROUNDING[np.asarray(got).dtype.name] + _F32) * size
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=note)


def _calls(run: Any, *operands: Any) -> set[str]:
    text = jax.jit(run).lower(*operands).compile().as_text()
    return {name for name in _TARGETS if f'custom_call_target="{name}"' in text}


def _drawn(seed: int, *shape: int, dtype: str = "bfloat16") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def _with_slack(x: Any) -> Any:
    x[~_USED] = np.nan
    return x


# Every function in one type, and one function in every type and form.
_ACTIVATIONS = [
    *[(Activation(name, True, jnp.dtype("bfloat16")), True) for name in sorted(ACTIVATIONS)],
    *[
        (Activation("gelu", gated, jnp.dtype(dtype)), weighted)
        for dtype in ("float16", "float32")
        for gated, weighted in ((True, False), (False, True))
    ],
]


@pytest.mark.parametrize(("static", "weighted"), _ACTIVATIONS)
def test_activations_are_those_of_cpu(gpus: list[Any], static: Activation, weighted: bool) -> None:
    dtype, sizes, mine = str(static.dtype), jnp.asarray(_SIZES), jnp.asarray(_USED)
    hidden = _with_slack(_drawn(0, 2, _ROWS, *([2, 40] if static.gated else [40]), dtype=dtype))
    grad = _with_slack(_drawn(1, 2, _ROWS, 40, dtype=dtype))
    weights = _with_slack(_drawn(2, 2, _ROWS, dtype="float32")) if weighted else None

    def run(hidden: Any, weights: Any, grad: Any) -> Any:
        out = activation_plain.forward(static, hidden, weights, sizes)
        back = activation_plain.pullback(static, hidden, weights, sizes, grad)
        d_hidden = jnp.where(mine.reshape(*mine.shape, *[1] * (hidden.ndim - 2)), back[0], 0)
        return jnp.where(mine[..., None], out, 0), d_hidden, back[1]

    got, want = _both(gpus, run, hidden, weights, grad)
    for name, found, meant in zip(("out", "hidden", "weights"), got, want, strict=True):
        if meant is not None:
            largest = float(np.abs(np.asarray(meant, np.float64)).max())
            _near(found, meant, max(largest, 1.0), name)
    if weighted:
        np.testing.assert_array_equal(np.asarray(got[2])[~_USED], 0)


_RECIPES = {
    "tensor": recipes.TensorScaling(),
    "tensor e4m3": recipes.TensorScaling(gradient_dtype="float8_e4m3fn"),
    "blocks": recipes.BlockScaling(),
    "blocks 2^n e5m2": recipes.BlockScaling(True, gradient_dtype="float8_e5m2"),
    "mx": recipes.MXFP8(),
    "mx e5m2": recipes.MXFP8(gradient_dtype="float8_e5m2"),
}


def _odd_values(seed: int, *shape: int, dtype: str) -> Any:
    """Draws values of very different sizes, some zero, tiny, infinite or NaN."""
    rng = np.random.default_rng(seed)
    most = 8 if dtype == "float16" else 100
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-most, most, (*shape[:-1], 1))
    kinds = rng.integers(0, 500, shape)
    for kind, value in enumerate((np.inf, -np.inf, np.nan, 0.0, -0.0, 2.0**-128, -(2.0**-127))):
        x = np.where(kinds == kind, value, x)
    with np.errstate(over="ignore"):
        return x.astype(jnp.dtype(dtype))


_TYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("recipe", _RECIPES.values(), ids=_RECIPES)
def test_quantized_rows_are_those_of_cpu_bit_by_bit(gpus: list[Any], recipe: Any) -> None:
    shapes = [(96,), (2, 160), (1312,), (200,)]
    if isinstance(recipe, recipes.MXFP8):
        shapes.pop()
    drawn = [
        _with_slack(_odd_values(number, 2, _ROWS, *shape, dtype=dtype))
        for number, shape in enumerate(shapes)
        for dtype in _TYPES
    ]

    def run(arrays: Any, sizes: Any) -> Any:
        made = [
            quantize_plain.quantize_rows(recipe, x, sizes, gradient=True, num_experts=experts)
            for x in arrays
            for experts in ([4, None] if x.ndim == 4 else [8])
        ]
        return jax.tree.map(bits, made)

    jax.tree.map(_same_bits, *_both(gpus, run, drawn, _SIZES))


def _drawn_layout(seed: int) -> tuple[Any, int, int]:
    """Draws sizes [3, S, L] of three calls, rows of a slab and a width."""
    rng = np.random.default_rng(seed)
    alignment = 1 << rng.integers(6)
    slabs, groups = (1, 200) if seed == 4 else (rng.choice([1, 2, 3]), rng.integers(1, 13))
    sizes = rng.integers(0, 40, (3, slabs, groups)) // alignment * alignment
    sizes[rng.random(sizes.shape) < 1 / 3] = 0
    # In half of the cases the last groups have more rows than fit.
    rows = max(1, sizes.sum(-1).max() + rng.integers(60) - (10 if seed % 2 else 0))
    rows = -(-rows // 32) * 32 if seed % 3 == 0 else rows  # as MXFP8 needs
    return sizes.astype(np.int32), int(rows), int(32 * rng.integers(1, 13) + 8 * (seed % 3))


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_of_rows_is_that_of_cpu(gpus: list[Any], seed: int) -> None:
    sizes, rows, width = _drawn_layout(seed)
    dtype, name = _TYPES[seed // 3], sorted(ACTIVATIONS)[seed % len(ACTIVATIONS)]
    gated, of_groups = seed % 5 > 0, sizes.shape[2] if seed % 2 else None
    static = Activation(name, gated, jnp.dtype(dtype))
    kinds = [recipes.TensorScaling(), recipes.BlockScaling(seed % 4 > 1)]
    kinds += [recipes.MXFP8()] * (rows % 32 == 0 and width % 32 == 0)
    gemm = gemm_plain.Gemm(jnp.dtype(dtype))

    def run(hidden: Any, weights: Any, grad: Any, odd: Any, sizes: Any) -> Any:
        used = jnp.arange(rows) < sizes.sum(-1, keepdims=True)
        operands = (hidden, weights, sizes)
        out = activation_plain.forward(static, *operands)
        back, d_weights = activation_plain.pullback(static, *operands, grad)
        found = [jnp.where(used[..., None], x.reshape(*used.shape, -1), 0) for x in (out, back)]
        near = [*found, d_weights, gemm_plain.bias_grad(gemm, grad, sizes)]
        exact, pairs, options = [], [], {"num_experts": of_groups}
        for recipe in kinds:
            exact.append(quantize_plain.quantize_rows(recipe, odd, sizes, **options))
            if recipe in kinds[:2] and dtype != "float32":
                fused = QuantizedActivation(static, recipe, of_groups)
                one = quantized_plain.forward(fused, *operands)
                pairs.append((one, quantize_plain.quantize_rows(recipe, out, sizes, **options)))

        def in_zones(x: Any) -> Any:  # the other rows of `one` are undefined
            return jnp.where(used[..., None], x, 0) if x.shape[:2] == used.shape else x

        exact, pairs = jax.tree.map(bits, (exact, pairs))
        return near, exact, jax.tree.map(in_zones, pairs)

    for call, each in enumerate(sizes):
        slack = np.arange(rows) >= each.sum(-1, keepdims=True)
        shape = (*slack.shape, *([2, width] if gated else [width]))
        drawn = [_drawn(seed + call, *of, dtype=dtype) for of in (shape, (*slack.shape, width))]
        odd = _odd_values(seed + call, *slack.shape, width, dtype=dtype)
        weights = _drawn(seed + call, *slack.shape, dtype="float32")
        for x in (*drawn, odd, weights):
            x[slack] = np.nan
        (near, exact, pairs), want = _both(gpus, run, drawn[0], weights, drawn[1], odd, each)
        for got, meant in zip(near, want[0], strict=True):
            _near(got, meant, max(1.0, float(np.abs(np.asarray(meant, np.float64)).max(initial=0))))
        jax.tree.map(_same_bits, exact, want[1])
        for pair in pairs:
            jax.tree.map(_same_bits, *pair)


@pytest.mark.parametrize("hidden", [1312, 8])
@pytest.mark.parametrize("dtype", _TYPES)
def test_sums_of_8_bits_are_those_of_cpu_bit_by_bit(
    gpus: list[Any], dtype: str, hidden: int
) -> None:
    sums = _odd_values(7, 300, hidden, dtype=dtype)
    slot_row = np.random.default_rng(7).integers(-1, 300, (90, 5), dtype=np.int32)

    def run(sums: Any, slot_row: Any) -> Any:
        scaled = fp8_sums.scaled(sums)
        return scaled, nodes.sum_scaled(scaled, slot_row, jnp.dtype(dtype))

    wanted = {"ep_quantize_tiles_v1", "ep_sum_scaled_rows_v1"}
    assert TRIAL or _calls(run, sums, slot_row) == wanted
    (scaled, got), (scaled_on_cpu, want) = _both(gpus, run, sums, slot_row)
    jax.tree.map(_same_bits, scaled, scaled_on_cpu)
    # The sign of a NaN differs between CPU and GPU.
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, want)))


@pytest.mark.parametrize("recipe", _RECIPES.values(), ids=_RECIPES)
def test_quantized_kernels_are_those_of_cpu_bit_by_bit(gpus: list[Any], recipe: Any) -> None:
    shapes = ((3, 96, 160), (2, 320, 2, 64))
    drawn = [_odd_values(4, *shape, dtype=dtype) for shape in shapes for dtype in _TYPES]

    def run(kernels: Any) -> Any:
        return jax.tree.map(bits, [quantize_plain.quantize_kernel(recipe, w) for w in kernels])

    jax.tree.map(_same_bits, *_both(gpus, run, drawn))


def test_given_scales_saturate_as_on_cpu(gpus: list[Any]) -> None:
    recipe = recipes.TensorScaling(delayed=True)
    x = _with_slack(_odd_values(5, 2, _ROWS, 64, dtype="bfloat16"))
    w = _odd_values(6, 4, 64, 32, dtype="float32")
    scale = np.float32([[1, 0.25, 3, 100], [1e-9, 7, 2, 1]])

    def run(x: Any, w: Any, scale: Any) -> Any:
        rows = quantize_plain.scale_rows(recipe, x, jnp.asarray(_SIZES), scale)
        kernel = quantize_plain.quantize_kernel(recipe, w, scale=scale[0])
        return bits(rows.data), bits(kernel.data)

    jax.tree.map(_same_bits, *_both(gpus, run, x, w, scale))


def _routed(seed: int, tokens: int, slots: int, experts: int) -> Any:
    return np.random.default_rng(seed).integers(-1, experts, (tokens, slots)).astype(np.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
@pytest.mark.parametrize(("tokens", "hidden"), [(200, 48), (37, 1000)])
def test_permutations_and_their_gradients_are_those_of_cpu(
    gpus: list[Any], tokens: int, hidden: int, from_map: bool, dtype: str
) -> None:
    experts = 40
    choice = _routed(1, tokens, 3, experts)
    slots = 3
    if from_map:
        choice = np.random.default_rng(2).random((tokens, experts)) < 0.1
        slots = experts
    weights = _drawn(3, tokens, slots, dtype="float32")

    def run(tokens: Any, weights: Any, factors: Any) -> Any:
        routed = {"routing_map": choice} if from_map else {"topk_idx": choice}

        def sorted_and_back(tokens: Any, weights: Any) -> Any:
            options = {"num_experts": experts, "align_size": 8, "num_out_tokens": 500}
            p = ep.permute(tokens, **routed, **options)
            other = p.tokens * -0.5  # exact in every type
            return ep.unpermute(other, p, merging_probs=weights), p.tokens

        (out, moved), pull = jax.vjp(sorted_and_back, tokens, weights)
        return out, moved, pull((factors, jnp.zeros_like(moved)))

    rows = (_drawn(seed, tokens, hidden, dtype=dtype) for seed in (4, 5))
    operands = (next(rows), weights, next(rows))
    got, want = _both(gpus, run, *operands)
    _same_bits(got[1], want[1], "rows")
    _near(got[0], want[0], 8, "tokens")
    _near(got[2][0], want[2][0], 8, "gradient of tokens")
    _near(got[2][1], want[2][1], 64, "gradient of weights")


def test_rows_of_any_type_move_as_they_are(gpus: list[Any]) -> None:
    choice = _routed(6, 64, 2, 8)
    rng = np.random.default_rng(7)
    for kind in ("int8", "uint16", "int32", "bool", "float8_e4m3fn"):
        values = rng.integers(0, 2, (64, 32)).astype(jnp.dtype(kind))

        def run(values: Any) -> Any:
            return ep.permute(values, choice, num_experts=8).tokens

        got, want = _both(gpus, run, values)
        _same_bits(got, want, kind)


def test_chunks_in_another_order_and_back(gpus: list[Any]) -> None:
    sizes, order = np.int32([5, 0, 30, 9]), np.int32([2, 3, 0, 1])

    def run(x: Any, factors: Any) -> Any:
        out, pull = jax.vjp(lambda x: ep.sort_chunks(x, sizes, order), x)
        return out, pull(factors)

    jax.tree.map(_same_bits, *_both(gpus, run, _drawn(8, 50, 24), _drawn(9, 50, 24)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_a_bias_are_those_of_cpu(gpus: list[Any], dtype: str) -> None:
    gemm = gemm_plain.Gemm(jnp.dtype(dtype))

    def run(grad: Any, sizes: Any) -> Any:
        return gemm_plain.bias_grad(gemm, grad, sizes, 4), gemm_plain.bias_grad(gemm, grad, sizes)

    grad = _with_slack(_drawn(13, 2, _ROWS, 2, 40, dtype=dtype))
    for found, meant in zip(*_both(gpus, run, grad, _SIZES), strict=True):
        _near(found, meant, 30)


# The tests below run programs around the kernels: rows [R, C, H], two experts per slab.
_RANKS = 4
_GROUPS = np.int32([[5, 80], [0, 33], [96, 0], [0, 0]])


def _layer(x: Any, wi: Any, wo: Any, sizes: Any) -> Any:
    """Both matmuls of the experts in FP8, and the activation between them."""
    recipe = recipes.BlockScaling()
    hidden = ep.grouped_gemm(x, wi, sizes, recipe=recipe)
    static = Activation("silu", True, jnp.dtype(jnp.bfloat16))
    inner = _activated(static, hidden, sizes)
    out = ep.grouped_gemm(inner, wo, sizes, recipe=recipe)
    mine = jnp.arange(x.shape[1]) < sizes.sum(-1)[:, None]
    return jnp.where(mine[..., None], out, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated(static: Activation, hidden: Any, sizes: Any) -> Any:
    return activation_plain.forward(static, hidden, None, sizes)


def _activated_bwd(static: Activation, kept: Any, grad: Any) -> Any:
    hidden, sizes = kept
    return activation_plain.pullback(static, hidden, None, sizes, grad)[0], None


_activated.defvjp(
    lambda static, hidden, sizes: (_activated(static, hidden, sizes), (hidden, sizes)),
    _activated_bwd,
)


def _scanned(x: Any, wi: Any, wo: Any, sizes: Any) -> Any:
    """Three calls in a row, with remat."""

    def step(x: Any, scale: Any) -> Any:
        return jnp.tanh(x + _layer(x, wi * scale, wo, sizes)), None

    scales = jnp.asarray([1, 0.5, 2], jnp.bfloat16)
    return jax.lax.scan(jax.checkpoint(step), x, scales)[0]


def _loss(layer: Any, *operands: Any) -> Any:
    return jnp.sin(layer(*operands).astype(jnp.float32)).sum()


def _operands() -> tuple[Any, ...]:
    x = _drawn(10, _RANKS, 96, 64)
    for slab, used in enumerate(_GROUPS.sum(-1)):
        x[slab, used:] = 0
    wi, wo = _drawn(11, 2 * _RANKS, 64, 2, 32), _drawn(12, 2 * _RANKS, 32, 64)
    return x, wi / 8, wo / 6, _GROUPS


def _compare(got: Any, want: Any) -> None:
    # Values near a rounding border may round to either side, which FP8 puts far apart.
    np.testing.assert_allclose(got[0], want[0], rtol=2e-2, atol=2.0)
    for name, mine, theirs in zip(("x", "wi", "wo"), got[1], want[1], strict=True):
        mine, theirs = (np.asarray(x).astype(np.float64) for x in (mine, theirs))
        off = np.abs(mine - theirs)
        largest = np.abs(theirs).max()
        assert off.max() <= 0.2 * largest, name
        assert off.mean() <= 0.01 * largest, name


@pytest.mark.parametrize(
    "layer", [_layer, jax.checkpoint(_layer), _scanned], ids=["plain", "remat", "scan with remat"]
)
def test_programs_give_what_they_give_on_cpu(gpus: list[Any], layer: Any) -> None:
    run = jax.value_and_grad(functools.partial(_loss, layer), argnums=(0, 1, 2))
    _compare(*_both(gpus, run, *_operands()))


def test_programs_hold_the_calls(gpus: list[Any]) -> None:
    if TRIAL:
        pytest.skip("the calls are those of GPUs")
    run = jax.grad(functools.partial(_loss, _layer), argnums=(0, 1, 2))
    wanted = {*activation_kernels.TARGETS, "ep_quantize_tiles_v1", "ep_quantize_weights_v1"}
    assert _calls(run, *jax.device_put(_operands(), gpus[0])) == wanted


@pytest.mark.parametrize("mode", ["shard_map", "rule"])
def test_spread_over_gpus(gpus: list[Any], mode: str) -> None:
    mesh, spec = Mesh(np.array(gpus), ("ep",)), PartitionSpec("ep")
    put = [jax.device_put(x, NamedSharding(mesh, spec)) for x in _operands()]

    def part(*blocks: Any) -> Any:
        return jax.lax.psum(_loss(_layer, *blocks), "ep")

    loss: Any = functools.partial(_loss, _layer)
    if mode == "shard_map":
        loss = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    run = jax.value_and_grad(loss, argnums=(0, 1, 2))
    plain = jax.value_and_grad(functools.partial(_loss, _layer), argnums=(0, 1, 2))
    want = jax.jit(plain)(*jax.device_put(_operands(), jax.devices("cpu")[0]))
    got = jax.block_until_ready(jax.jit(run)(*put))
    _compare(got, want)
    jax.tree.map(_same_bits, jax.jit(run)(*put), got)


def test_other_buffers_than_those_that_were_captured(gpus: list[Any]) -> None:
    """A command buffer records addresses: new addresses must reach the kernels."""
    recipe = recipes.MXFP8()

    @jax.jit
    def run(x: Any, sizes: Any) -> Any:
        return jax.tree.map(bits, quantize_plain.quantize_rows(recipe, x, sizes))

    kept = []
    for turn in range(8):
        everything = (_drawn(20 + turn, 2, _ROWS, 64), np.roll(_SIZES, turn, 1))
        kept.append(jax.device_put(everything, gpus[0]))
        want = run(*jax.device_put(everything, jax.devices("cpu")[0]))
        jax.tree.map(_same_bits, run(*kept[-1]), want)
