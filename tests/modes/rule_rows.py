"""The table of the sharding rules as data: how weights are sharded, and which arrays move."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.quantize.formats import recipes

GATHER, SUM, SCATTER = "all-gather", "all-reduce", "reduce-scatter"
DP_FSDP_EP = {"dp": 2, "fsdp": 2, "ep": 2}
FSDP_EP = {"fsdp": 4, "ep": 2}
EP_TP = {"ep": 4, "tp": 2}
WIDE_EP = {"fsdp": 2, "ep": 4}
NO_EP = {"dp": 2, "fsdp": 2, "tp": 2, "ep": 1}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        axes: the mesh.
        weight: PartitionSpec entries of rhs; of a pair those of each.
        moved: collectives of forward and backward, by kind and dtype.
        recipe: how operands are quantized.
        k, n: K' and N'.
        bias: whether there is one.
        pair: whether rhs is gate and up of [E, K', M]; n is then (2, M).
    """

    axes: dict[str, int]
    weight: tuple[Any, ...]
    moved: dict[tuple[str, str], int]
    recipe: Any = None
    k: int = 16
    n: tuple[int, ...] = (8,)
    bias: bool = False
    pair: bool = False

    def step(self, layer: Any, *operands: Any, rhs_spec: Any = None) -> Any:
        """Forward and backward of operands (lhs, rhs, bias or None, sizes, gradient)."""
        lhs, rhs, bias, sizes, grad = operands

        def forward(lhs: Any, rhs: Any, bias: Any) -> Any:
            return ep.grouped_gemm(
                lhs, rhs, sizes, layer=layer, bias=bias, recipe=self.recipe, rhs_spec=rhs_spec
            )

        out, pull = jax.vjp(forward, lhs, rhs, bias)
        return out, *pull(grad)

    def specs(self, slab: PartitionSpec) -> list[PartitionSpec]:
        """Returns specs of those operands, given the spec of rows, `slab`."""
        between = (None,) if self.pair else ()
        bias = PartitionSpec(self.weight[0], *between, *self.weight[2:])
        return [slab, PartitionSpec(*self.weight), bias, slab, slab]


PLAIN = {(GATHER, "f32"): 2, (SCATTER, "f32"): 1}
ROWS = {
    "fsdp on K'": Row(DP_FSDP_EP, ("ep", "fsdp"), PLAIN | {(SUM, "f32"): 1}),
    "experts over ep and fsdp, one scale each": Row(
        DP_FSDP_EP,
        (("ep", "fsdp"),),
        # Scales are gathered too; amax of rows and of their gradient; the sum of d_w over dp.
        {(GATHER, "u8"): 2, (GATHER, "f32"): 2, (SUM, "f32"): 3, (SCATTER, "f32"): 1},
        recipes.TensorScaling(),
    ),
    "fsdp on N', two copies": Row(
        FSDP_EP,
        ("ep", None, "fsdp"),
        {(GATHER, "u8"): 4, (SCATTER, "f32"): 1},
        recipes.MXFP8(),
        k=32,
        n=(128,),
    ),
    "fsdp on K', blocks": Row(
        WIDE_EP,
        ("ep", "fsdp"),
        {(GATHER, "u8"): 2, (GATHER, "f32"): 2, (SCATTER, "f32"): 1},
        recipes.BlockScaling(),
        k=256,
        n=(32,),
    ),
    "tp on N'": Row(EP_TP, ("ep", None, "tp"), {(SUM, "f32"): 1}),
    "tp on K'": Row(EP_TP, ("ep", "tp"), {(SUM, "f32"): 1}, bias=True),
    "tp on M of gate and up": Row(EP_TP, ("ep", None, None, "tp"), {(SUM, "f32"): 1}, n=(2, 8)),
    "a pair, fsdp on K' and tp on M": Row(
        NO_EP,
        (None, "fsdp", "tp"),
        # The collectives of one array, as halves; d_x over tp; d_bias and both of d_w over dp.
        {(GATHER, "f32"): 4, (SUM, "f32"): 4, (SCATTER, "f32"): 2},
        n=(2, 8),
        bias=True,
        pair=True,
    ),
    "a pair, one scale each": Row(
        NO_EP,
        (None, "fsdp", "tp"),
        # Gathered as one array, because it is quantized as one.
        {(GATHER, "u8"): 2, (SUM, "f32"): 6, (SCATTER, "f32"): 2},
        recipes.TensorScaling(),
        n=(2, 8),
        pair=True,
    ),
    "fsdp and tp, one scale each": Row(
        NO_EP,
        (None, "fsdp", "tp"),
        # amax of the weight, the rows and their gradient; d_x over tp; d_w over dp.
        {(GATHER, "u8"): 2, (SUM, "f32"): 5, (SCATTER, "f32"): 1},
        recipes.TensorScaling(),
    ),
}
SLOW_ROWS = {
    "fsdp on N'": Row(DP_FSDP_EP, ("ep", None, "fsdp"), PLAIN | {(SUM, "f32"): 1}),
    "a pair, experts over ep and fsdp": Row(
        FSDP_EP,
        (("ep", "fsdp"),),
        {(GATHER, "f32"): 4, (SCATTER, "f32"): 2},
        n=(2, 8),
        pair=True,
    ),
    "a pair, two copies": Row(
        FSDP_EP,
        ("ep", None, "fsdp"),
        {(GATHER, "u8"): 4, (SCATTER, "f32"): 2},
        recipes.MXFP8(),
        k=32,
        n=(2, 128),
        pair=True,
    ),
    "a tuple on K'": Row(DP_FSDP_EP, ("ep", ("fsdp", "dp")), PLAIN),
    "both outer axes": Row(
        DP_FSDP_EP, ("ep", "dp", "fsdp"), {(GATHER, "f32"): 4, (SCATTER, "f32"): 2}
    ),
    "experts over ep and fsdp": Row(FSDP_EP, (("ep", "fsdp"),), PLAIN),
    "bias over fsdp": Row(
        FSDP_EP, ("ep", None, "fsdp"), {(GATHER, "f32"): 3, (SCATTER, "f32"): 2}, bias=True
    ),
    "ep is injected": Row(FSDP_EP, (None, "fsdp"), PLAIN | {(GATHER, "f32"): 3}),
    "nothing but ep": Row(DP_FSDP_EP, ("ep",), {(SUM, "f32"): 1}),
    "tp and fsdp in a tuple": Row(NO_EP, (None, None, ("tp", "fsdp")), PLAIN | {(SUM, "f32"): 2}),
    "tp on K', one scale each": Row(
        EP_TP, ("ep", "tp"), {(SUM, "f32"): 3}, recipes.TensorScaling()
    ),
    "tp on N', two copies": Row(
        EP_TP, ("ep", None, "tp"), {(SUM, "f32"): 1}, recipes.MXFP8(), k=32, n=(64,)
    ),
    "fsdp on K', one scale each": Row(
        WIDE_EP,
        ("ep", "fsdp"),
        {(GATHER, "u8"): 2, (SUM, "f32"): 3, (SCATTER, "f32"): 1},
        recipes.TensorScaling(),
    ),
    "experts over ep and fsdp, two copies": Row(
        DP_FSDP_EP,
        (("ep", "fsdp"),),
        {(GATHER, "u8"): 4, (SUM, "f32"): 1, (SCATTER, "f32"): 1},
        recipes.MXFP8(),
        k=32,
        n=(32,),
    ),
}
