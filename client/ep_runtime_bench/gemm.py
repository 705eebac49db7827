"""Times grouped GEMMs on one device, in comparison with a dense matmul of the same work,
`jax.lax.ragged_dot`, and, if installed, Tokamax's (https://github.com/openxla/tokamax), which needs
Python 3.12.

Recipes are measured on the same values, quantized before the measurement. So the figures cover
their matmuls, including copies of operands.

Each subject is a separate program that takes much longer than its launch. On a GPU the device's
clock is read between calls, in stream order: an interval is one call, one reading and the launches
of both, some microseconds more than the call. On CPU the host waits for each call. Subjects of a
case run one after the other, each after a warm-up. TFLOP/s count 2 * rows * K' * N' for the rows in
groups. The dense matmul has as many rows and one weight. Both layers of an expert are measured: K'
is H, then M.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_runtime_bench.base.device_bench import WARMUP, CallTimer, gpu_clock
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.timing import in_turn
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.ops.gemm import kernels_32
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits

ROWS = 32768  # unless tokens are given
INNER = 2048  # M of an expert: N' of the first layer is gate and up, 2 * M
GROUPS = (8, 32, 128)
# Small enough for a laptop.
CPU_HIDDEN, CPU_INNER, CPU_ROWS, CPU_REPEATS = 256, 128, 2048, 3
FEW_EXPERTS = 8
LOADS = ("uniform", "zipf", "half-empty")
ALIGNMENT = 128
# ragged_dot is many times slower, and its memory grows with the number of groups.
MAX_RAGGED_GROUPS = 32
RAGGED_CALLS = 2
PRODUCTS = ("forward", "data grad", "weight grad")
NARROW: dict[str, recipes.Recipe] = {
    "fp8": recipes.TensorScaling(),
    "fp8-block": recipes.BlockScaling(),
    "mxfp8": recipes.MXFP8(),
}
COLUMNS = (
    Column("product", "PRODUCT"),
    Column("recipe", "RECIPE"),
    Column("in_features", "K'", "count"),
    Column("out_features", "N'", "count"),
    Column("groups", "GROUPS", "count"),
    Column("load", "LOAD"),
    Column("rows", "ROWS", "count"),
    Column("ms", "MS", "count"),
    Column("tflops", "TFLOP/S", "count"),
    Column("dense_tflops", "DENSE", "count"),
    Column("ratio_to_dense", "X DENSE", "count"),
    Column("ratio_to_wide", "X UNQUANTIZED", "count"),
    Column("ragged_dot_tflops", "RAGGED_DOT", "count"),
    Column("tokamax_tflops", "TOKAMAX", "count"),
)

Program = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of operands that all matmuls of a case share.

    Attributes:
        rows: C, rows of the slab.
        in_features: K'.
        out_features: N'.
        groups: L.
    """

    rows: int
    in_features: int
    out_features: int
    groups: int


class HostTimer:
    """Times calls that the host waits for."""

    def call_us(
        self, program: Callable[..., Any], operands: tuple[Any, ...], repeats: int
    ) -> float:
        """Returns microseconds of one call, the median of `repeats`."""
        call = {"": lambda: jax.block_until_ready(program(*operands))}
        return 1e6 * median(in_turn(call, warmup=WARMUP, repeats=repeats)[""])


Timer = HostTimer | CallTimer


def run(options: BenchOptions) -> BenchReport:
    """Measures every matmul, load and number of groups on the first device."""
    sizes: dict[str, Any] = {}
    timer: Timer
    if options.on_gpus:
        device, timer = jax.devices("cuda")[0], CallTimer(gpu_clock)
    else:
        jax.config.update("jax_platforms", "cpu")
        device, timer = jax.devices("cpu")[0], HostTimer()
        experts = options.num_experts
        sizes = {"groups": (*sorted({min(FEW_EXPERTS, experts), experts}),), "inner": CPU_INNER}
        options = dataclasses.replace(
            options,
            hidden=CPU_HIDDEN,
            dtype="float32",
            tokens_per_rank=options.tokens_per_rank or CPU_ROWS // options.top_k,
            repeats=min(options.repeats, CPU_REPEATS),
        )
    with jax.default_device(device):
        rows = [*measure(options, timer, **sizes, narrow=_fitting(options))]
    title = (
        f"grouped GEMM on {device.device_kind}: {options.dtype}, medians of {options.repeats}; "
        "dense is one product of as many rows"
    )
    return BenchReport("gemm", title, COLUMNS, rows)


def _fitting(options: BenchOptions) -> dict[str, recipes.Recipe]:
    """Returns NARROW if rows and features are multiples of all its recipes' tiles, else nothing."""
    sizes = (options.hidden, options.tokens_per_rank * options.top_k)
    return {} if any(size % recipes.MX_TILE for size in sizes) else NARROW


def measure(
    options: BenchOptions,
    timer: Timer,
    groups: tuple[int, ...] = GROUPS,
    inner: int = INNER,
    narrow: Mapping[str, recipes.Recipe] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Yields rows of the table; `narrow`: further recipes to measure."""
    capacity = options.tokens_per_rank * options.top_k or ROWS
    for k, n in ((options.hidden, 2 * inner), (inner, options.hidden)):
        dense = {count: _dense(options, timer, count, k, n) for count in (capacity, capacity // 2)}
        for count in groups:
            shape = Shape(capacity, k, n, count)
            yield from _case(options, timer, shape, dense, narrow)


def loads(name: str, groups: int, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns rows of each group, multiples of 128 if possible: in all `rows`, or half."""
    step = ALIGNMENT if rows >= groups * ALIGNMENT else 1
    sizes = np.full(groups, rows // groups, np.int32)
    if name == "half-empty":
        return sizes // 2
    if name == "zipf":
        share = 1 / np.arange(1, groups + 1)
        sizes = (rows / step * share / share.sum()).astype(np.int32) * step
        sizes[0] += rows - sizes.sum()
        np.random.default_rng(0).shuffle(sizes)
    return sizes


def _draw(seed: int, dtype: str, *shape: int) -> jax.Array:
    draw = jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype)))
    return draw()


def _dense(options: BenchOptions, timer: Timer, rows: int, k: int, n: int) -> dict[str, float]:
    """Returns microseconds of every matmul as one dense matmul."""
    x, grad, w = (_draw(0, options.dtype, *shape) for shape in ((rows, k), (rows, n), (k, n)))
    operands = {"forward": (x, w), "data grad": (grad, w), "weight grad": (x, grad)}
    contract = {"forward": (1, 0), "data grad": (1, 1), "weight grad": (0, 0)}
    found = {}
    for product, dims in contract.items():
        numbers = (((dims[0],), (dims[1],)), ((), ()))
        multiply = jax.jit(lambda a, b, numbers=numbers: lax.dot_general(a, b, numbers))
        found[product] = timer.call_us(multiply, operands[product], options.repeats)
    return found


def _ours(shape: Shape, dtype: str) -> dict[str, Program]:
    """Returns our matmuls as functions of (x, grad, w, sizes)."""
    gemm = gemm_plain.Gemm(jnp.dtype(dtype), ALIGNMENT, tf32=kernels_32.allowed())
    return {
        "forward": lambda x, grad, w, sizes: gemm_plain.forward(gemm, x, w, None, sizes),
        "data grad": lambda x, grad, w, sizes: gemm_plain.data_grad(gemm, grad, w, sizes),
        "weight grad": lambda x, grad, w, sizes: gemm_plain.weight_grad(
            gemm, x, grad, sizes, shape.groups, gemm.out_dtype
        ),
    }


def _tokamax() -> Callable[..., jax.Array] | None:
    """Returns Tokamax's ragged_dot, which has JAX's arguments; None if it is not installed."""
    if importlib.util.find_spec("tokamax") is None:
        return None
    return importlib.import_module("tokamax").ragged_dot


def _ragged(ragged_dot: Callable[..., jax.Array]) -> dict[str, Program]:
    def pullback(of: int) -> Program:
        def run(x: Any, grad: Any, w: Any, sizes: Any) -> jax.Array:
            _, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes), x, w)
            return pull(grad)[of]

        return run

    return {
        "forward": lambda x, grad, w, sizes: ragged_dot(x, w, sizes),
        "data grad": pullback(0),
        "weight grad": pullback(1),
    }


def _case(
    options: BenchOptions,
    timer: Timer,
    shape: Shape,
    dense: dict[int, dict[str, float]],
    narrow: Mapping[str, recipes.Recipe],
) -> Iterator[dict[str, Any]]:
    k, n = shape.in_features, shape.out_features
    shapes = ((shape.rows, k), (shape.rows, n), (shape.groups, k, n))
    arrays = [_draw(seed, options.dtype, *each) for seed, each in enumerate(shapes)]
    ours = {name: jax.jit(program) for name, program in _ours(shape, options.dtype).items()}
    ragged = {name: jax.jit(program) for name, program in _ragged(lax.ragged_dot).items()}
    peer = _tokamax()
    tokamax = {} if peer is None else {name: jax.jit(p) for name, p in _ragged(peer).items()}
    for load in LOADS:
        sizes = loads(load, shape.groups, shape.rows)
        operands = (*arrays, jnp.asarray(sizes))
        rows = int(sizes.sum())
        full = dense[shape.rows if rows > shape.rows // 2 else shape.rows // 2]
        wide = {}
        for product in PRODUCTS:
            us = wide[product] = timer.call_us(ours[product], operands, options.repeats)
            other = None
            if shape.groups <= MAX_RAGGED_GROUPS:
                other = _us_if_it_runs("ragged_dot", timer, ragged[product], operands, RAGGED_CALLS)
            peers = {"ragged_dot_tflops": _tflops(rows, k, n, other)}
            if tokamax:
                other = _us_if_it_runs(
                    "Tokamax", timer, tokamax[product], operands, options.repeats
                )
                peers["tokamax_tflops"] = _tflops(rows, k, n, other)
            yield _row(product, shape, load, rows, us, full[product]) | peers
        for name, recipe in narrow.items():
            made, dtypes = _quantized(recipe, *operands)
            for product in PRODUCTS:
                program = _of_raw(ours[product], dtypes)
                us = timer.call_us(program, (made, operands[-1]), options.repeats)
                row = _row(product, shape, load, rows, us, full[product])
                yield row | {"recipe": name, "ratio_to_wide": round(wide[product] / us, 3)}


def _row(
    product: str, shape: Shape, load: str, rows: int, us: float, dense_us: float
) -> dict[str, Any]:
    k, n = shape.in_features, shape.out_features
    speed = _tflops(rows, k, n, us)
    render.err(f"{product} {k} x {n}, {shape.groups} groups, {load}: {speed} TFLOP/s")
    return {
        "product": product,
        "recipe": None,
        "in_features": k,
        "out_features": n,
        "groups": shape.groups,
        "load": load,
        "rows": rows,
        "ms": round(us / 1e3, 4),
        "tflops": speed,
        "dense_tflops": _tflops(rows, k, n, dense_us),
        "ratio_to_dense": round(dense_us / us, 3),
        "ratio_to_wide": None,
        "ragged_dot_tflops": None,
        "tokamax_tflops": None,
    }


def _quantized(recipe: recipes.Recipe, *operands: Any) -> tuple[Any, Any]:
    """Quantizes x, grad and w by the recipe, 8-bit floats as uint8; also returns their dtypes."""

    def run(x: Any, grad: Any, w: Any, sizes: Any) -> Any:
        return (
            quantize_plain.quantize_rows(recipe, x, sizes),
            quantize_plain.quantize_rows(recipe, grad, sizes, gradient=True),
            quantize_plain.quantize_kernel(recipe, w),
        )

    dtypes = jax.tree.map(lambda leaf: leaf.dtype, jax.eval_shape(run, *operands))
    return jax.jit(lambda *given: jax.tree.map(bits, run(*given)))(*operands), dtypes


def _of_raw(program: Program, dtypes: Any) -> Program:
    """Makes a function of (result of `_quantized`, sizes), which casts from uint8 first."""

    def run(made: Any, sizes: Any) -> jax.Array:
        return program(*jax.tree.map(from_bits, made, dtypes), sizes)

    return jax.jit(run)


def _us_if_it_runs(
    name: str, timer: Timer, program: Program, operands: tuple[Any, ...], repeats: int
) -> float | None:
    """Returns microseconds of one call of a peer; None if it rejects operands or lacks memory."""
    try:
        return timer.call_us(program, operands, repeats)
    except (NotImplementedError, ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        render.err(f"{name}: {type(error).__name__}: {error}")
        return None


def _tflops(rows: int, k: int, n: int, us: float | None) -> float | None:
    return None if us is None else float(f"{2 * rows * k * n / us / 1e6:.4g}")
