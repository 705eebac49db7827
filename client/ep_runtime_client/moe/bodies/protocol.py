"""Defines a body of `ep.moe`: one device's forward and backward, from tokens to their sums.

The op around it (`op.py`) places operands, gathers weights and adds up what axes split; a body sees
local blocks without the slab dim. `composed.py` is made of the ops one by one and takes everything;
`cuda.py` and `cuda_nodes.py` are one custom call per direction. All are functions of their operands
alone.

Letters: T, K, H, M, R as in `ops/__init__.py`; L experts of a rank, C capacity, N columns of the
first product (2M gated, else M).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from ep_runtime_client.moe.resolved import ResolvedCall, Saved
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing.varying import Axes


class Experts(NamedTuple):
    """Weights of the experts of one device, whole but for axes that split M.

    With a recipe wi and wo are QuantizedTensors of these shapes, wi in one array.

    Attributes:
        wi: [L, H, 2, M], [L, H, 2M], a Pair of [L, H, M], or [L, H, M] where it is not gated.
        wo: [L, M, H].
        wi_bias: [L, *N'], or None.
        wo_bias: [L, H], or None.
        values: that a learned activation reads.
    """

    wi: jax.Array | Pair | QuantizedTensor
    wo: jax.Array | QuantizedTensor
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None
    values: tuple[jax.Array, ...] = ()


class Given(NamedTuple):
    """Operands of one device, in both directions.

    Attributes:
        rank: int32 [1].
        layer_index: int32 [1], of the layer in its stack.
        topk_idx: int32 [T, K].
        tokens: [T, H].
        weights: f32 [T, K].
        most: int32 [1], the most rows that the zones of any rank have whose windows this one maps.
        plan: of `prepare`; of PlanArrays where it is between ranks that map each other's windows.
        scales: f32 [L] for each product whose scales of rows are given.
        copies: int32 [N, S], the expert of each slot of the ranks, -1 without one; None in calls
            whose experts have no copies.
    """

    rank: jax.Array
    layer_index: jax.Array
    topk_idx: jax.Array
    tokens: jax.Array
    weights: jax.Array
    most: jax.Array
    plan: AnyArrays
    scales: tuple[jax.Array, ...] = ()
    copies: jax.Array | None = None


class Over(NamedTuple):
    """Mesh axes that split what one scale is for.

    Attributes:
        rows: those that split the rows of an expert.
        inner: those that split M.
    """

    rows: Axes = ()
    inner: Axes = ()


class WeightGrads(NamedTuple):
    """Tells a body how to make the gradients of wi and wo.

    Attributes:
        paired: gate and up of wi apart.
        dtype: theirs; None is that of rows.
        wanted: False if the program does not use them, so that the body makes none. Bodies
            without a workspace always get True.
    """

    paired: bool
    dtype: Any = None
    wanted: bool = True


class Forwarded(NamedTuple):
    """Results of forward on one device.

    Attributes:
        y: [T, H].
        saved: arrays for backward, as `Body.saved` lists them.
        amax: f32 [L] for each product whose scales of rows are given.
    """

    y: jax.Array
    saved: tuple[jax.Array, ...] = ()
    amax: tuple[jax.Array, ...] = ()


class Gradients(NamedTuple):
    """Gradients on one device: of weights as `Experts` has them, of biases in f32. Integers among
    the values have none."""

    tokens: jax.Array
    weights: jax.Array
    wi: jax.Array | Pair | None
    wo: jax.Array | None
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None
    values: tuple[jax.Array | None, ...] = ()


class Body(Protocol):
    """The functions of a body's module."""

    def saved(self, call: ResolvedCall) -> tuple[Saved, ...]:
        """Names, in order, what forward saves for backward if it is not told to save nothing."""

    def multiple(self, call: ResolvedCall, *, paired: bool) -> int:
        """Returns the divisor that a device's M needs; `paired` if gate and up come apart."""

    def forward(self, call: ResolvedCall, given: Given, experts: Experts, over: Over) -> Forwarded:
        """Tokens to their experts on all ranks and back, summed."""

    def backward(
        self,
        call: ResolvedCall,
        given: Given,
        experts: Experts,
        saved: tuple[jax.Array, ...],
        dy: jax.Array,
        grads: WeightGrads,
        over: Over,
    ) -> Gradients:
        """Gradients of what `forward` was given, from dy [T, H]; `saved` as it returned it."""
