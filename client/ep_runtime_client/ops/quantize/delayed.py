"""Delayed scaling: takes scales from the amax of earlier calls, and adds this call's amax.

Histories are per expert over all ranks, [history, E]. In a shard_map that is manual over ep axes,
every device has whole histories and reads its own experts' part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, flat, padded
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.rounding import scale_of
from ep_runtime_client.ops.tracing.varying import Axes, settled


def check_state(recipe: Recipe, state: Any, num_experts: int, name: str = "state") -> None:
    """Raises InvalidArgumentError unless `state` has the histories [history, E] f32 of `recipe`."""
    if not isinstance(state, DelayedState):
        raise InvalidArgumentError(
            f"{name} must be the DelayedState of {recipe}, from its init_state({num_experts}), got "
            f"{type(state).__name__}",
            argument="state",
        )
    wanted = jax.eval_shape(lambda: recipe.init_state(num_experts)).x
    for field, history in (("x", state.x), ("w", state.w)):
        shape, dtype = jnp.shape(history), jnp.result_type(history)
        if (shape, dtype) != (wanted.shape, wanted.dtype):
            raise InvalidArgumentError(
                f"{name}.{field} must be {wanted.dtype} [history, E] = {list(wanted.shape)}, got "
                f"{dtype} {list(shape)}; it is of one layer, and whole inside a shard_map too",
                argument="state",
            )


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Maps amax histories to the devices and groups of one call.

    Attributes:
        recipe: the recipe.
        num_experts: E, over all devices.
        groups: (R, L) of the call.
        ep: ep axes that are manual in an enclosing shard_map.
        experts: manual axes that split the kernels: ep axes, and others on the expert dim.
        alike: manual axes along which every device has the same histories.
        mesh: mesh on which the next histories must be replicated; None if types carry the sharding
            or no mesh is set.
    """

    recipe: Recipe
    num_experts: int
    groups: tuple[int, int]
    ep: Axes = ()
    experts: Axes = ()
    alike: Axes = ()
    mesh: Mesh | None = None

    def scales(self, state: DelayedState) -> tuple[jax.Array, jax.Array]:
        """Returns f32 scales of the rows [R, L] and of this device's kernels [E here]."""
        found = []
        for history, axes in ((state.x, self.ep), (state.w, self.experts)):
            amax = _typed_whole(lax.stop_gradient(history)).max(0)
            found.append(_mine(scale_of(amax, self.recipe.data_dtype()), axes))
        x, w = found
        numbers = jnp.arange(self.groups[0] * self.groups[1]) % x.shape[0]
        return jnp.take(x, numbers, axis=0).reshape(self.groups), w

    def next(self, state: DelayedState, x: jax.Array, w: jax.Array) -> DelayedState:
        """Returns `state` with this call's amax in front: of rows [R, L] and kernels [E here]."""
        here = self.num_experts // (lax.axis_size(self.ep) if self.ep else 1)
        rows = _typed_whole(x).reshape(-1, here).max(0)
        return DelayedState(
            self._pushed(state.x, rows, self.ep), self._pushed(state.w, w, self.experts)
        )

    def _pushed(self, history: jax.Array, amax: jax.Array, axes: Axes) -> jax.Array:
        history, amax = lax.stop_gradient(history), lax.stop_gradient(amax)
        if axes:
            amax = lax.all_gather(amax, axes, tiled=True)
        amax = settled(_typed_whole(amax), self.alike)
        pushed = jnp.concatenate([amax[None], _typed_whole(history)[:-1]])
        if regions.type_of(pushed) is None and self.mesh is not None:
            # XLA could choose another sharding than the input's, and the next step would recompile.
            whole = NamedSharding(self.mesh, PartitionSpec())
            pushed = lax.with_sharding_constraint(pushed, whole)
        return _typed(pushed, regions.type_of(history))


def begin(
    where: regions.Partitioning,
    recipe: Recipe,
    num_experts: int,
    groups: Sequence[int],
    lhs: Entries,
    rhs: Entries,
    state: DelayedState,
) -> tuple[tuple[jax.Array, jax.Array], Callable[[jax.Array, jax.Array], DelayedState]]:
    """Begins a call whose rows and kernels have these entries.

    Returns:
        The scales of `Delayed.scales`, and a function of this call's amax that returns the next
        state, as `Delayed.next` does.

    Raises:
        InvalidArgumentError: as `check_state`.
    """
    check_state(recipe, state, num_experts)
    roles = where.roles or Roles()

    def manual(axes: Collection[str]) -> Axes:
        return tuple(axis for axis in axes if axis in where.manual)

    over = {*roles.slab, *flat((*lhs[2:], *rhs))}  # ep axes, and all axes that split an amax
    delayed = Delayed(
        recipe,
        num_experts,
        (groups[0], groups[1]),
        manual(roles.real(roles.ep)),
        manual(roles.real(rhs[0])),
        tuple(axis for axis in where.manual if axis in over),
        where.mesh if isinstance(where.mesh, Mesh) and not where.manual else None,
    )
    state = state if where.manual else regions.settle(where, state, ())
    scales = regions.settle(where, delayed.scales(state), ())
    return scales, functools.partial(delayed.next, state)


def _mine(values: jax.Array, axes: Axes) -> jax.Array:
    """Returns this device's part of an [E] that manual `axes` split."""
    if not axes:
        return values
    here = values.shape[0] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(values, lax.axis_index(axes) * here, here)


def _typed_whole(x: jax.Array) -> jax.Array:
    """Gives `x` the type of an array that every device has, if types have shardings."""
    return _typed(x, None if regions.type_of(x) is None else padded((), x.ndim))


def _typed(x: jax.Array, entries: Entries | None) -> jax.Array:
    typed = regions.typed_as(x, entries)
    assert typed is not None
    return typed
