"""activation: what stands between the experts' two matmuls, over slabs of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.activation import plain
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.partitioning import regions, spread
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.resolved import Resolved, Sums
from ep_runtime_client.ops.partitioning.roles import Entries, Roles
from ep_runtime_client.ops.tracing import eager, first_order
from ep_runtime_client.ops.tracing.varying import Axes, spread_over


@dataclasses.dataclass(frozen=True)
class ActivationOp:
    """One pass, on (hidden, group_sizes, *grad, *row_weights). Hashable.

    Attributes:
        where: where it runs.
        activation: what is computed.
        ndim: of hidden.
        weighted: whether there are row_weights.
        backward: whether there is a grad [R, C, M], and results are the gradients of hidden and of
            row_weights instead of [R, C, M] and group_sizes.
        ordered: whether those group_sizes come after the rows (`plain.after`).
    """

    where: Where
    activation: Activation
    ndim: int
    weighted: bool
    backward: bool
    ordered: bool

    @property
    def name(self) -> str:
        return "activation"

    @property
    def _splits(self) -> bool:
        """Whether M is a dim of hidden, which axes may lie on."""
        return self.ndim == 4 or not self.activation.gated

    def roles(
        self, sizes: tuple[tuple[str, int], ...], arrived: Sequence[Entries], shapes: Any
    ) -> Roles:
        raise AssertionError("the roles of axes come with the layer")

    def entries(self, roles: Roles, inner: Axes) -> tuple[tuple[Entries, ...], tuple[Entries, ...]]:
        """How operands are taken and how results lie, with M over `inner`."""
        slab: Entries = (roles.slab, ())
        hidden: Entries = (*slab, *([()] * (self.ndim - 3)), inner)
        rows, weights = (*slab, inner), (slab,) if self.weighted else ()
        if self.backward:
            return (hidden, slab, rows, *weights), (hidden, *weights)
        return (hidden, slab, *weights), (rows, slab)

    def inner(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        unit: int = 1,
    ) -> Axes:
        """The axes that M stays on: they leave multiples of `unit` on every shard.

        Raises:
            InvalidArgumentError: axes lie on a dim of gate and up.
        """
        inner = tuple(axis for axis in roles.real(arrived[0][-1]) if axis not in roles.slab)
        if inner and not self._splits:
            raise InvalidArgumentError(
                f"hidden [R, C, 2M] must be whole on its last dim, got {roles.named(inner)}: no "
                "shard has both gate and up of a column. wi [E, H, 2, M] gives [R, C, 2, M]",
                argument="hidden",
            )
        return inner if shapes[0][-1] % (roles.size(inner) * unit) == 0 else ()

    def resolve(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[Entries] | None,
    ) -> Resolved:
        inner = self.inner(roles, arrived, shapes)
        operands, results = self.entries(roles, inner)
        sums = Sums(roles, self.where.manual)

        def local(hidden: jax.Array, sizes: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
            weights = rest[-1] if self.weighted else None
            if not self.backward:
                rows = plain.forward(self.activation, hidden, weights, sizes)
                return rows, plain.after(sizes, rows) if self.ordered else sizes
            d_hidden, d_weights = plain.pullback(self.activation, hidden, weights, sizes, rest[0])
            return (d_hidden,) if d_weights is None else (d_hidden, sums.total(d_weights, inner))

        return Resolved(operands, results, local)

    def factors(self) -> tuple[list[str], list[str]]:
        last = "m" if self._splits else "n"
        hidden = f"r c g {last}" if self.ndim == 4 else f"r c {last}"
        weights = ["r c"] if self.weighted else []
        if self.backward:
            return [hidden, "r l", "r c m", *weights], [hidden, *weights]
        return [hidden, "r l", *weights], ["r c m", "r l"]


def activate(
    layer: EpLayer | TracedLayer,
    activation: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    *,
    inner_axes: Axes | None = None,
    ordered: bool = True,
) -> jax.Array:
    """Activated rows [R, C, M] of the experts' first matmul, times their weights.

    Args:
        layer: whose slabs these are.
        activation: what is computed, and the result's dtype.
        hidden: [R, C, 2, M] (0 gate, 1 up), [R, C, 2M] (gate then up) or, not gated, [R, C, M].
        row_weights: [R, C] f32 or None.
        group_sizes: [R, L] int32, rows of each expert's zone.
        inner_axes: mesh axes that shard M where neither the partitioner nor a type knows it.
        ordered: False where group_sizes come after whatever else reads hidden.

    Returns:
        [R, C, M] in the activation's dtype, M sharded as hidden has it; rows past the last zone
        are undefined, and so are those of hidden, which are not read, and of the gradient of
        hidden. Differentiable in hidden and row_weights.

    Cost: one pass over the rows that are there; no collective but, for the gradient of row_weights,
    a sum of [R, C] f32 over the axes on M.
    """
    op, inner, operands = call_of(layer, activation, hidden, row_weights, group_sizes, inner_axes)
    op = dataclasses.replace(op, ordered=ordered)
    out: jax.Array = eager.run(_primal, (op, inner), *operands, traced=_activate)
    return out


def call_of(
    layer: EpLayer | TracedLayer,
    activation: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    inner_axes: Axes | None,
) -> tuple[ActivationOp, Axes, tuple[jax.Array, ...]]:
    """The op of `activate` with the same arguments, the axes on M, and its operands."""
    known = regions.known_entries(hidden, hidden.ndim)
    if known is not None:
        inner_axes = known[-1]  # a recipe's blocks may leave fewer axes than wi's spec has
    weights = () if row_weights is None else (row_weights,)
    operands: tuple[jax.Array, ...] = (hidden, group_sizes, *weights)
    where = regions.of_layer(layer, operands, known=inner_axes is not None, slabs=True)
    # Layers alike share what is traced: their names stay outside.
    where = dataclasses.replace(where, label="-")
    operands = tuple(spread_over(x, where.varying) for x in operands)
    weighted = row_weights is not None
    op = ActivationOp(where, activation, hidden.ndim, weighted, backward=False, ordered=True)
    return op, inner_axes or (), operands


def _run(op: ActivationOp, inner: Axes, *operands: jax.Array) -> tuple[jax.Array, ...]:
    roles = op.where.roles
    arrived = op.entries(roles, inner)[0] if roles is not None else ()
    return spread.run(op, arrived, *operands)


def _primal(static: tuple[ActivationOp, Axes], *operands: jax.Array) -> jax.Array:
    return _run(*static, *operands)[0]


def _pullback(static: tuple[ActivationOp, Axes], saved: Any, grad: jax.Array) -> Any:
    op, inner = static
    hidden, sizes, *weights = saved
    op = dataclasses.replace(op, backward=True)
    d_hidden, *d_weights = _run(op, inner, hidden, sizes, grad, *weights)
    return d_hidden, None, *d_weights


def _fwd(static: tuple[ActivationOp, Axes], *operands: Any) -> Any:
    hidden, _, *weights = operands
    out, sizes = eager.shared(_both, static, *operands)
    return out, (hidden, sizes, *weights)


def _both(static: tuple[ActivationOp, Axes], *operands: jax.Array) -> tuple[jax.Array, ...]:
    return _run(*static, *operands)


def _bwd(static: tuple[ActivationOp, Axes], saved: Any, grad: jax.Array) -> Any:
    return eager.shared(_pullback, static, saved, grad)


_activate = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("moe", _activate, _fwd, _bwd)
