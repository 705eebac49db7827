"""Describes a matmul to GPU kernels (`Product`), and the kernels to their callers
(`GemmKernels`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ep_runtime_client.ops.quantize.pair import Pair


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A matmul, or the sum over rows that is a bias's gradient.

    Attributes:
        left: the operand that has rows, an array or a QuantizedTensor.
        right: the other operand; None if rows are summed.
        groups: shape of group_sizes, [L] or [S, L].
        experts: G.
        features: K' and the trailing dims N'; N' alone if rows are summed.
        cast: dtype to which arrays are cast first, or None.
        tf32: f32 operands may be rounded to tf32.
    """

    left: Any
    right: Any
    groups: tuple[int, ...]
    experts: int
    features: Sequence[int]
    cast: Any = None
    tf32: bool = False

    @property
    def rows(self) -> int:
        """S * C, the rows of all slabs."""
        return math.prod(self.left.shape[: len(self.groups)])

    @property
    def widths(self) -> tuple[int, int]:
        """K', and N' as one dim."""
        return self.features[0], math.prod(self.features[1:])


@dataclasses.dataclass(frozen=True)
class GemmKernels:
    """Kernels of the CUDA library for one kind of operands.

    Attributes:
        supports: whether they support a matmul, if its program is lowered for a GPU.
        forward: (out_dtype, cast, lhs, rhs, bias, group_sizes) -> as `plain.forward`, but rows
            past the last group are undefined.
        data_grad: (out_dtype, cast, clear_slack, grad, rhs, group_sizes) -> as `plain.data_grad`;
            rows past the last group are undefined unless cleared.
        weight_grad: (out_dtype, cast, experts, paired, lhs, grad, group_sizes) -> as
            `plain.weight_grad`; sums are f32 and rounded once.
        cast: dtype to which they always cast; None uses the call's.
    """

    supports: Callable[[Product], bool]
    forward: Callable[..., jax.Array]
    data_grad: Callable[..., jax.Array]
    weight_grad: Callable[..., jax.Array | Pair]
    cast: Any = None
