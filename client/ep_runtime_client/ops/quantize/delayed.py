"""Delayed scaling: scales from the amax of earlier calls, and histories with this call's in front.

Histories are per expert over all ranks, [history, E]. Inside a shard_map that is manual over ep
axes every device has whole histories and takes its experts' part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.rounding import scale_of
from ep_runtime_client.ops.tracing.varying import Axes


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Whose histories are used where.

    Attributes:
        recipe: the recipe.
        num_experts: E, over all devices.
        groups: (R, L) of the call.
        ep: ep axes that are manual around the call.
    """

    recipe: Recipe
    num_experts: int
    groups: tuple[int, int]
    ep: Axes

    @classmethod
    def of(cls, where: Where, recipe: Recipe, num_experts: int, groups: Sequence[int]) -> Delayed:
        ep = () if where.roles is None else where.roles.real(where.roles.ep)
        manual = tuple(axis for axis in ep if axis in where.manual)
        return cls(recipe, num_experts, (groups[0], groups[1]), manual)

    def check(self, state: DelayedState) -> None:
        """Raises InvalidArgumentError unless the histories are [history, E] f32."""
        wanted = jax.eval_shape(lambda: self.recipe.init_state(self.num_experts)).x.shape
        for name, history in (("x", state.x), ("w", state.w)):
            if jnp.shape(history) != wanted:
                raise InvalidArgumentError(
                    f"state.{name} must be [history, E] = {list(wanted)}, got "
                    f"{list(jnp.shape(history))}",
                    argument="state",
                )

    def scales(self, state: DelayedState) -> tuple[jax.Array, jax.Array]:
        """f32 scales of the rows [R, L] and of the kernels [E here]."""
        found = []
        for history in (state.x, state.w):
            amax = lax.stop_gradient(history).max(0)
            found.append(self._mine(scale_of(amax, self.recipe.data_dtype())))
        x, w = found
        numbers = jnp.arange(self.groups[0] * self.groups[1]) % x.shape[0]
        return jnp.take(x, numbers, axis=0).reshape(self.groups), w

    def next(self, state: DelayedState, x: jax.Array, w: jax.Array) -> DelayedState:
        """`state` with this call's amax in front: of the rows [R, L], of the kernels [E here]."""
        here = w.shape[0]
        rows = x.reshape(-1, here).max(0)
        return DelayedState(self._pushed(state.x, rows), self._pushed(state.w, w))

    def _pushed(self, history: jax.Array, amax: jax.Array) -> jax.Array:
        if self.ep:
            amax = lax.all_gather(amax, self.ep, tiled=True)
        pushed = jnp.concatenate([amax[None], history[:-1]])
        return lax.stop_gradient(pushed)

    def _mine(self, values: jax.Array) -> jax.Array:
        """The part of [E] that this device's experts have."""
        if not self.ep:
            return values
        here = values.shape[0] // lax.axis_size(self.ep)
        start = lax.axis_index(self.ep) * here
        part: jax.Array = lax.dynamic_slice_in_dim(values, start, here)
        return part
