"""Quantization of a whole stack of layers' kernels, in one op."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax

from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.resolved import Arrived, Resolved, Shapes, Sizes, Wanted
from ep_runtime_client.ops.partitioning.roles import Roles, flat
from ep_runtime_client.ops.quantize.ops import QuantizeKernel
from ep_runtime_client.ops.quantize.packing import Packing


@dataclasses.dataclass(frozen=True)
class QuantizeStack:
    """w [*stack, E, K', *N'], or gate and up, -> leaves with the stack's dims in front of each.

    Attributes:
        kernel: of one layer.
        dims: how many dims the stack has.
    """

    kernel: QuantizeKernel
    dims: int

    name: ClassVar[str] = "grouped_quantize"

    @property
    def where(self) -> Partitioning:
        return self.kernel.where

    @property
    def packing(self) -> Packing:
        """Packing of one layer's leaves."""
        return self.kernel.packing

    def roles(self, sizes: Sizes, arrived: Arrived, shapes: Shapes) -> Roles:
        return Roles(sizes, (), arrived[0][self.dims])

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        dims = self.dims
        each = self.kernel.resolve(
            roles, [x[dims:] for x in arrived], [x[dims:] for x in shapes], None
        )
        taken = {*flat(each.operands[0])}
        lead = tuple(
            axes if not {*axes} & taken and size % roles.size(axes) == 0 else ()
            for axes, size in zip(map(roles.real, arrived[0][:dims]), shapes[0], strict=False)
        )

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            layers = blocks[0].shape[:dims]
            experts = blocks[0].shape[dims]
            count = math.prod(layers) * experts
            made = each.local(*(x.reshape(count, *x.shape[dims + 1 :]) for x in blocks))
            return tuple(x.reshape(*layers, experts, *x.shape[1:]) for x in made)

        operands = tuple((*lead, *x) for x in each.operands)
        return Resolved(operands, tuple((*lead, *x) for x in each.results), local)

    def factors(self) -> tuple[list[str], list[str]]:
        lead = " ".join(f"s{i}" for i in range(self.dims))
        given, made = self.kernel.factors()
        return [f"{lead} {x}" for x in given], [f"{lead} {x}" for x in made]
