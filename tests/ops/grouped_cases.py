"""Group sizes and operands for tests of grouped GEMM and quantization."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ep_runtime_client.ops.quantize.formats import recipes

ROWS, GROUPS = 192, 4

SIZES = {
    "uneven, one empty": (3, 0, 120, 5),
    "one has everything": (0, 192, 0, 0),
    "nothing": (0, 0, 0, 0),
    "all rows": (64, 65, 63, 0),
    "aligned": (64, 0, 32, 96),
    "slack": (1, 70, 1, 0),
}

RECIPES = (
    recipes.BF16(),
    recipes.TensorScaling(),
    recipes.BlockScaling(),
    recipes.BlockScaling(power_of_two_scales=True, gradient_dtype="float8_e5m2"),
    recipes.MXFP8(),
)


class Operands(NamedTuple):
    """f32 arrays; rows past the last group are NaN."""

    lhs: Any  # [C, K']
    rhs: Any  # [G, K', *N']
    bias: Any  # [G, *N']
    grad: Any  # [C, *N']


@functools.cache
def drawn(inner: int, trailing: tuple[int, ...], rows: int = ROWS) -> Operands:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        # Rows and columns of very different sizes, which one scale does not fit.
        spread = np.exp(rng.uniform(-3, 3, (*shape[:-1], 1)))
        return (rng.standard_normal(shape) * spread).astype(np.float32)

    return Operands(
        draw(rows, inner),
        draw(GROUPS, inner, *trailing),
        draw(GROUPS, *trailing),
        draw(rows, *trailing),
    )


def operands(sizes: Any, inner: int, trailing: tuple[int, ...]) -> Operands:
    found = drawn(inner, trailing)
    lhs, grad = found.lhs.copy(), found.grad.copy()
    lhs[sum(sizes) :] = grad[sum(sizes) :] = np.nan
    return found._replace(lhs=lhs, grad=grad)
