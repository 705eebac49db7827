"""Quantization of rows and weights by every recipe, and the activation, as share of a copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.one_device import rows
from ep_runtime_bench.one_device.gpu_gemm import LOADS, loads
from ep_runtime_bench.one_device.rows import RowSizes, Subject
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.quantize.formats.tiles import bits

GROUPS = 32
# Recipe, and bytes of one value of a row: how often 2 bytes are read, what is written with scales.
RECIPES: dict[str, tuple[recipes.Recipe, int, float]] = {
    "tensor scales": (recipes.TensorScaling(), 2, 1.0),
    "1 x 128 blocks": (recipes.BlockScaling(), 1, 1 + 4 / 128),
    "MXFP8, both ways": (recipes.MXFP8(), 1, 2 + 2 / 32),
}


def run(options: BenchOptions) -> BenchReport:
    """Measures every recipe and load."""
    subjects = functools.partial(make_subjects, options)
    return rows.run("quantize", "quantization and SwiGLU", options, subjects)


def make_subjects(options: BenchOptions, sizes: RowSizes) -> Iterator[Subject]:
    """What is measured, one after the other: arrays of one are gone when the next is made."""
    item = jnp.dtype(options.dtype).itemsize
    for load in LOADS:
        groups = jnp.asarray(loads(load, GROUPS, sizes.rows))
        used = int(groups.sum())
        yield from _recipes(options, sizes, load, groups, used * sizes.hidden, item)
        yield from _activation(options, sizes, load, groups, used, item)
    shape = (GROUPS, sizes.hidden, sizes.hidden // 2)
    w = rows.draw(3, options.dtype, *shape)
    for name, (recipe, reads, written) in RECIPES.items():
        title = "weights, 128 x 128 blocks" if "128" in name else f"weights, {name}"
        moved = int(w.size * (reads * item + (1.0 if "128" in name else written)))
        program = functools.partial(_kernel, recipe)
        yield Subject(title, "", shape[0] * shape[1], moved, program, (w,))


def _kernel(recipe: recipes.Recipe, w: jax.Array) -> Any:
    return jax.tree.map(bits, quantize_plain.quantize_kernel(recipe, w))


def _recipes(
    options: BenchOptions, sizes: RowSizes, load: str, groups: jax.Array, values: int, item: int
) -> Iterator[Subject]:
    x = rows.draw(1, options.dtype, sizes.rows, sizes.hidden)
    for name, (recipe, reads, written) in RECIPES.items():

        def program(x: Any, groups: Any, recipe: recipes.Recipe = recipe) -> Any:
            q = quantize_plain.quantize_rows(recipe, x, groups, clear_slack=False)
            return jax.tree.map(bits, q.detached())

        moved = int(values * (reads * item + written))
        yield Subject(f"rows, {name}", load, values // sizes.hidden, moved, program, (x, groups))


def _activation(
    options: BenchOptions, sizes: RowSizes, load: str, groups: jax.Array, used: int, item: int
) -> Iterator[Subject]:
    static = Activation("silu", True, jnp.dtype(options.dtype))
    inner = sizes.hidden // 4
    hidden = rows.draw(4, options.dtype, 1, sizes.rows, 2, inner)
    grad = rows.draw(5, options.dtype, 1, sizes.rows, inner)
    row = inner * item * used

    def forward(hidden: Any, groups: Any) -> Any:
        return activation_plain.forward(static, hidden, None, groups)

    def backward(hidden: Any, groups: Any, grad: Any) -> Any:
        # The product takes the place of a copy: the kernel writes where it reads.
        return activation_plain.pullback(static, -hidden, None, groups, grad)[0]

    slabs = groups[None]
    yield Subject("SwiGLU forward", load, used, 3 * row, forward, (hidden, slabs))
    moved = 5 * row + 2 * hidden.nbytes
    name = "SwiGLU backward, after a pass over hidden"
    yield Subject(name, load, used, moved, backward, (hidden, slabs, grad))
