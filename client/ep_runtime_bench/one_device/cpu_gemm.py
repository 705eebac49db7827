"""Grouped GEMM of one CPU device: every recipe, as full as the slab is, beside all experts dense.

"dense" multiplies every row by every expert and keeps what belongs together: what one writes
without ragged ops. Recipes include their quantization: rows and kernels in forward, the gradient
in backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.timing import in_turn
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes

WIDTH = 256  # K' and N'
CAPACITY = 2048  # rows of the slab, unless tokens say otherwise
FILLED = (0.125, 0.5, 1.0)  # of the slab
FEW_EXPERTS = 8
# A dense call takes seconds, so more samples are not worth the time.
MAX_REPEATS = 3
DENSE = "dense"
RECIPES: dict[str, recipes.Recipe | None] = {
    "f32": None,
    "bf16": recipes.BF16(),
    "fp8": recipes.TensorScaling(),
    "fp8-block": recipes.BlockScaling(),
    "mxfp8": recipes.MXFP8(),
}
COLUMNS = (
    Column("subject", "SUBJECT"),
    Column("experts", "EXPERTS", "count"),
    Column("filled", "FILLED", "count"),
    Column("forward_ms", "FORWARD MS", "count"),
    Column("backward_ms", "BACKWARD MS", "count"),
    Column("ratio_to_dense", "X DENSE", "count"),
    Column("hlo_ops", "HLO OPS", "count", wide=True),
)

Run = Callable[..., Any]


class _Subject(NamedTuple):
    forward: Run  # (lhs, rhs, group_sizes) -> what backward needs
    backward: Run  # (what forward gave, grad, group_sizes) -> d_lhs, d_rhs


def run(options: BenchOptions) -> BenchReport:
    """Times forward and backward of every recipe at 8 and at options.num_experts experts."""
    jax.config.update("jax_platforms", "cpu")
    capacity = options.tokens_per_rank * options.top_k or CAPACITY
    repeats = min(options.repeats, MAX_REPEATS)
    rows = [
        row
        for experts in sorted({min(FEW_EXPERTS, options.num_experts), options.num_experts})
        for filled in FILLED
        for row in _rows(experts, capacity, filled, repeats)
    ]
    title = (
        f"grouped GEMM on CPU: {capacity} rows of {WIDTH}, kernels {WIDTH} x {WIDTH} in f32, "
        f"medians of {repeats}"
    )
    return BenchReport("gemm", title, COLUMNS, rows)


def _rows(experts: int, capacity: int, filled: float, repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(int(filled * capacity), [1 / experts] * experts)
    sizes = jnp.asarray(drawn, jnp.int32)
    lhs, grad = (rng.standard_normal((capacity, WIDTH)).astype(np.float32) for _ in range(2))
    rhs = rng.standard_normal((experts, WIDTH, WIDTH)).astype(np.float32)
    subjects = {DENSE: _dense()} | {name: _grouped(recipe) for name, recipe in RECIPES.items()}
    calls: dict[str, Callable[[], object]] = {}
    for name, subject in subjects.items():
        forward, backward = jax.jit(subject.forward), jax.jit(subject.backward)
        saved = forward(lhs, rhs, sizes)
        calls[f"{name} forward"] = _call(forward, lhs, rhs, sizes)
        calls[f"{name} backward"] = _call(backward, saved, grad, sizes)
    taken = in_turn(calls, warmup=1, repeats=repeats)
    times = {name: 1e3 * median(seconds) for name, seconds in taken.items()}
    dense = times[f"{DENSE} forward"] + times[f"{DENSE} backward"]
    rows = []
    for name, subject in subjects.items():
        forward_ms, backward_ms = (times[f"{name} {way}"] for way in ("forward", "backward"))
        rows.append(
            {
                "subject": name,
                "experts": experts,
                "filled": filled,
                "forward_ms": round(forward_ms, 2),
                "backward_ms": round(backward_ms, 2),
                "ratio_to_dense": round((forward_ms + backward_ms) / dense, 4),
                "hlo_ops": _operations(subject, lhs, rhs, grad, sizes),
            }
        )
    return rows


def _call(compiled: Run, *args: Any) -> Callable[[], object]:
    return lambda: jax.block_until_ready(compiled(*args))


def _operations(subject: _Subject, lhs: Any, rhs: Any, grad: Any, sizes: Any) -> int:
    """Operations of forward and backward together, as they are handed to XLA."""

    def both(lhs: Any, rhs: Any, grad: Any, sizes: Any) -> Any:
        return subject.backward(subject.forward(lhs, rhs, sizes), grad, sizes)

    return len(re.findall(r" = ", jax.jit(both).lower(lhs, rhs, grad, sizes).as_text()))


def _grouped(recipe: recipes.Recipe | None) -> _Subject:
    gemm = gemm_plain.Gemm(jnp.float32)

    def forward(lhs: Any, rhs: Any, sizes: Any) -> Any:
        rows, kernel = lhs, rhs
        if recipe is not None:
            rows = quantize_plain.quantize_rows(recipe, lhs, sizes)
            kernel = quantize_plain.quantize_kernel(recipe, rhs)
        return gemm_plain.forward(gemm, rows, kernel, None, sizes), rows, kernel

    def backward(saved: Any, grad: Any, sizes: Any) -> Any:
        _, rows, kernel = saved
        if recipe is not None:
            grad = quantize_plain.quantize_rows(recipe, grad, sizes, gradient=True)
        return gemm_plain.pullback(gemm, rows, kernel, grad, sizes)

    return _Subject(forward, backward)


def _dense() -> _Subject:
    def product(lhs: Any, rhs: Any, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes)
        place = jnp.arange(lhs.shape[0])[:, None]
        mine = ((place < ends) & (place >= ends - sizes)).astype(lhs.dtype)
        every = jnp.einsum("ck,ekn->cen", lhs, rhs)
        return jnp.einsum("cen,ce->cn", every, mine)

    def forward(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return product(lhs, rhs, sizes), lhs, rhs

    def backward(saved: Any, grad: Any, sizes: Any) -> Any:
        _, lhs, rhs = saved
        return jax.vjp(lambda x, w: product(x, w, sizes), lhs, rhs)[1](grad)

    return _Subject(forward, backward)
