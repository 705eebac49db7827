"""`fit_mesh()`: the largest mesh of live devices that a model's sizes divide by."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ep_runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class FittedMesh:
    """A mesh and the devices left out of it, as returned by `fit_mesh`.

    Attributes:
        mesh: the devices that train.
        idle: the others, in the order they were given.
    """

    mesh: Mesh
    idle: tuple[Any, ...]


def fit_mesh(
    devices: Sequence[Any],
    axes: Mapping[str, int | None],
    *,
    num_experts: int,
    batch: int,
    ep_axis: str | Sequence[str] = "ep",
    batch_axes: Sequence[str] | None = None,
) -> FittedMesh:
    """Makes the largest mesh of `devices` whose axes divide the experts and the batch.

    Call it at the start of every generation. Every process gets the same mesh. Idle devices are
    spread over the processes, so that a process has none in the mesh only if the mesh has fewer
    devices than there are processes. Devices that were idle before a loss are used after it.

    Args:
        devices: of all processes, for example `generation.devices`.
        axes: size of each mesh axis, outermost first; None for an axis that takes what is left.
        num_experts: must be a multiple of the size of the ep axes.
        batch: rows of the global batch; must be a multiple of the size of the batch axes.
        ep_axis: the axis, or axes, that shard the experts.
        batch_axes: axes that shard the batch. None: all axes of the mesh.

    Returns:
        The mesh and the idle devices. Of several meshes of that size, the one with the largest ep
        axes.

    Raises:
        InvalidArgumentError: an axis is unknown or has a wrong size, or no mesh of these axes fits.

    Examples:
        >>> import jax
        >>> seven = jax.devices()[:7]
        >>> fitted = ep.distributed.fit_mesh(seven, {"ep": None}, num_experts=64, batch=32)
        >>> dict(fitted.mesh.shape), len(fitted.idle)
        ({'ep': 4}, 3)
    """
    ep_axes = (ep_axis,) if isinstance(ep_axis, str) else tuple(ep_axis)
    split = tuple(axes) if batch_axes is None else tuple(batch_axes)
    for name in (*ep_axes, *split):
        if name not in axes:
            raise InvalidArgumentError(
                f"axes must have every ep and batch axis, got {list(axes)} without {name!r}",
                argument="axes",
            )
    for name, size in axes.items():
        if size is not None and size < 1:
            raise InvalidArgumentError(
                f"the size of axis {name!r} must be at least 1 or None, got {size}", argument="axes"
            )

    def size_of(names: Sequence[str], sizes: Mapping[str, int]) -> int:
        return math.prod(sizes[name] for name in names)

    for count in range(len(devices), 0, -1):
        fitting = [
            sizes
            for sizes in _sizes(axes, count)
            if num_experts % size_of(ep_axes, sizes) == 0 and batch % size_of(split, sizes) == 0
        ]
        if fitting:
            best = max(fitting, key=lambda sizes: size_of(ep_axes, sizes))
            used, idle = _spread(devices, count)
            shape = [best[name] for name in axes]
            return FittedMesh(Mesh(np.array(used).reshape(shape), tuple(axes)), tuple(idle))
    raise InvalidArgumentError(
        f"no mesh of axes {dict(axes)} on {len(devices)} devices divides num_experts="
        f"{num_experts} and batch={batch}; give an axis None for its size",
        argument="axes",
        devices=len(devices),
    )


def _sizes(axes: Mapping[str, int | None], count: int) -> Iterator[dict[str, int]]:
    """All sizes of the axes whose product is `count`."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    choices = [divisors if size is None else [size] for size in axes.values()]
    for sizes in itertools.product(*choices):
        if math.prod(sizes) == count:
            yield dict(zip(axes, sizes, strict=True))


def _spread(devices: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Chooses `count` devices, a first one of each process before a second one of any."""
    before: collections.Counter[int] = collections.Counter()
    turns = []
    for place, device in enumerate(devices):
        turns.append((before[device.process_index], place))
        before[device.process_index] += 1
    chosen = {place for _, place in sorted(turns)[:count]}
    used = [device for place, device in enumerate(devices) if place in chosen]
    return used, [device for place, device in enumerate(devices) if place not in chosen]
