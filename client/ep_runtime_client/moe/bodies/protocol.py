"""Defines a body of `ep.moe`: one device's forward and backward, from tokens to their sums.

The op (`op.py`) places operands, gathers weights and sums over axes that split M; a body sees local
blocks without the slab dim. `composed.py` calls the separate ops and supports every call; `cuda.py`
and `cuda_nodes.py` make one custom call per direction. Results depend only on operands.

Letters: T, K, H, M, R as in `ops/__init__.py`; L experts of a rank, C capacity, N columns of the
first matmul's result (2M gated, else M).
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
    """Weights of the experts of one device, gathered over all axes except those that split M.

    With a recipe wi and wo are QuantizedTensors of these shapes, wi in one array.

    Attributes:
        wi: [L, H, 2, M], [L, H, 2M], a Pair of [L, H, M], or [L, H, M] if not gated.
        wo: [L, M, H].
        wi_bias: [L, *N'], or None.
        wo_bias: [L, H], or None.
        values: arrays that a learned activation reads.
    """

    wi: jax.Array | Pair | QuantizedTensor
    wo: jax.Array | QuantizedTensor
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None
    values: tuple[jax.Array, ...] = ()


class Given(NamedTuple):
    """Operands of a body on one device; forward and backward read the same ones.

    Attributes:
        rank: int32 [1].
        layer_index: int32 [1], of the layer in its stack.
        topk_idx: int32 [T, K].
        tokens: [T, H].
        weights: f32 [T, K].
        most: int32 [1], the most rows in the zones of any rank with windows mapped here.
        plan: from `prepare`; PlanArrays inside one node.
        scales: f32 [L] for each matmul with given scales of rows.
        copies: int32 [N, S], the expert of each slot of the ranks, -1 without one; None in calls
            without copies of experts.
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
    """Mesh axes that split the values of one scale.

    Attributes:
        rows: axes that split the rows of an expert.
        inner: axes that split M.
    """

    rows: Axes = ()
    inner: Axes = ()


class WeightGrads(NamedTuple):
    """How a body must make the gradients of wi and wo.

    Attributes:
        paired: whether gate and up of wi are two arrays.
        dtype: of both gradients; None is the dtype of rows.
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
        amax: f32 [L] for each matmul with given scales of rows.
        arrived: arrays that crossed between nodes meanwhile (`cuda.Crossing`).
    """

    y: jax.Array
    saved: tuple[jax.Array, ...] = ()
    amax: tuple[jax.Array, ...] = ()
    arrived: tuple[jax.Array, ...] = ()


class Gradients(NamedTuple):
    """Gradients on one device: of weights in the shapes of `Experts`, of biases in f32. None for
    integers among the values. `arrived`: as of `Forwarded`."""

    tokens: jax.Array
    weights: jax.Array
    wi: jax.Array | Pair | None
    wo: jax.Array | None
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None
    values: tuple[jax.Array | None, ...] = ()
    arrived: tuple[jax.Array, ...] = ()


class Body(Protocol):
    """The functions of a body's module."""

    def saved(self, call: ResolvedCall) -> tuple[Saved, ...]:
        """Lists the names of arrays that forward saves for backward, unless it saves nothing."""

    def multiple(self, call: ResolvedCall, *, paired: bool) -> int:
        """Returns the number that must divide a device's M; `paired`: gate and up are apart."""

    def forward(self, call: ResolvedCall, given: Given, experts: Experts, over: Over) -> Forwarded:
        """Sends tokens to their experts on all ranks, runs the experts, and returns the sums."""

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
        """Returns gradients of all operands of `forward`, from dy [T, H] and the `saved` arrays."""
