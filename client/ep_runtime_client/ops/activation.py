"""activation: what stands between the experts' two matmuls, over slabs of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ep_runtime_client.ops import local_activation, twin
from ep_runtime_client.ops.calls import Call
from ep_runtime_client.ops.local_activation import Activation
from ep_runtime_client.ops.token_layout import Axes, entry_axes, known_spec


@dataclasses.dataclass(frozen=True)
class _Static:
    """One activation call. Hashable: a static argument.

    Attributes:
        call: the dispatch whose slabs it works on.
        activation: what is computed.
        inner: mesh axes on the last dim (M); rows are whole along every other axis but the slabs'.
        open: mesh axes that are left to the partitioner, where nobody knows whether M lies on them.
    """

    call: Call
    activation: Activation
    inner: Axes
    open: Axes

    def spec(self, ndim: int) -> PartitionSpec:
        """Of an array [R, C, ..., M]."""
        return PartitionSpec(self.call.slab_axes, *([None] * (ndim - 2)), self.inner or None)


def activate(
    call: Call,
    activation: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    *,
    inner_axes: Axes | None = None,
) -> jax.Array:
    """Activated rows [R, C, M] of the experts' first matmul, times their weights.

    Args:
        call: the dispatch whose slabs these are.
        activation: what is computed, and the result's dtype.
        hidden: [R, C, 2, M] (0 gate, 1 up), [R, C, 2M] (gate then up) or, not gated, [R, C, M].
        row_weights: [R, C] f32 or None.
        group_sizes: [R, L] int32, rows of each expert's zone.
        inner_axes: mesh axes that shard M, where a traced array's type does not tell.

    Returns:
        [R, C, M] in the activation's dtype, M sharded as hidden has it; rows past the last zone
        are undefined (zero on CPU), and so are those of hidden, which are not read. Differentiable
        in hidden and row_weights; gradients are zero past the last zone.

    Cost: one pass over the rows that are there; no collective but, for the gradient of row_weights,
    a sum of [R, C] f32 over the axes on M.
    """
    call = twin.varied(call, hidden, row_weights, group_sizes)
    hidden = twin.vary(call, hidden)
    row_weights = None if row_weights is None else twin.vary(call, row_weights)
    inner, open_axes = _inner(call, hidden, inner_axes)
    static = _Static(call.anonymous(), activation, inner, open_axes)
    out: jax.Array = twin.run(_primal, static, hidden, row_weights, group_sizes, traced=_activate)
    return out


def _inner(call: Call, hidden: jax.Array, given: Axes | None) -> tuple[Axes, Axes]:
    """(axes that shard M, axes that might)."""
    sizes = call.group.axis_sizes
    others = tuple(a for a in call.free_axes if a not in call.slab_axes and sizes[a] > 1)
    known = known_spec(hidden)
    if given is None and known is not None:
        given = entry_axes(known[hidden.ndim - 1]) if len(known) == hidden.ndim else ()
    if given is None:
        return (), others
    return tuple(a for a in given if a in others), ()


def _primal(
    static: _Static, hidden: jax.Array, row_weights: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    given = (hidden, group_sizes) if row_weights is None else (hidden, group_sizes, row_weights)

    def body(hidden: jax.Array, sizes: jax.Array, *weights: jax.Array) -> jax.Array:
        part = weights[0] if weights else None
        return local_activation.forward(static.activation, hidden, part, sizes)

    slab = twin.slab_spec(static.call)
    specs = (static.spec(hidden.ndim), slab, slab)[: len(given)]
    out: jax.Array = twin.per_device(
        static.call, body, given, specs, static.spec(3), leave=static.open
    )
    return out


def _pullback(static: _Static, saved: Any, grad: jax.Array) -> Any:
    hidden, row_weights, group_sizes = saved
    given = (hidden, grad, group_sizes) + (() if row_weights is None else (row_weights,))

    def body(hidden: jax.Array, grad: jax.Array, sizes: jax.Array, *weights: jax.Array) -> Any:
        part = weights[0] if weights else None
        d_hidden, d_part = local_activation.pullback(static.activation, hidden, part, sizes, grad)
        if d_part is None:
            return (d_hidden,)
        if static.inner:
            d_part = lax.psum(d_part, static.inner)
        return d_hidden, d_part

    slab, rows = twin.slab_spec(static.call), static.spec(hidden.ndim)
    specs = (rows, static.spec(3), slab, slab)[: len(given)]
    outs = (rows,) if row_weights is None else (rows, slab)
    grads = twin.per_device(static.call, body, given, specs, outs, leave=static.open)
    return grads if row_weights is not None else (grads[0], None)


def _fwd(static: _Static, *operands: Any) -> Any:
    return twin.shared(_primal, static, *operands), operands


def _bwd(static: _Static, saved: Any, grad: jax.Array) -> Any:
    return (*twin.shared(_pullback, static, saved, grad), None)


_activate = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_activate.defvjp(_fwd, _bwd)
