"""Finds how the batch of an op without a layer is sharded, and runs a shard_map over the shards.

Without a group that names token axes, they are read off the operands, or given by a spec. The
number of shards is part of the results' shapes, so it must be known while tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning.roles import (
    as_auto,
    entries_of,
    explicit_axes,
    known_spec,
    typed,
)
from ep_runtime_client.ops.tracing.varying import Axes, spread_over, varied_axes

Spec = PartitionSpec | NamedSharding


@dataclasses.dataclass(frozen=True)
class BatchShards:
    """Mesh axes that shard a batch. Hashable: a static argument of custom_vjp.

    Attributes:
        axes: mesh axes on each leading dim, major first.
        feature: mesh axes on the last dim.
        mesh: the mesh with these axes, for calls without an ambient mesh; None without axes.
        varying: axes of an enclosing shard_map that the operands vary over.
    """

    axes: tuple[Axes, ...]
    feature: Axes = ()
    mesh: Mesh | AbstractMesh | None = None
    varying: Axes = ()

    @property
    def batch_axes(self) -> Axes:
        """All axes that shard the batch, in the order of the shards."""
        return tuple(axis for axes in self.axes for axis in axes)

    @property
    def num_shards(self) -> int:
        """n, the number of shards of the arrays at this point."""
        return prod(self._sizes(self.batch_axes))

    @property
    def per_dim(self) -> tuple[int, ...]:
        """Number of shards along each leading dim."""
        return tuple(prod(self._sizes(axes)) for axes in self.axes)

    def _sizes(self, axes: Axes) -> list[int]:
        mesh = _ambient() or self.mesh
        return [] if mesh is None else [mesh.shape[axis] for axis in axes]

    def token_spec(self, *, feature: bool = False) -> PartitionSpec:
        """Returns the spec of an array with the leading dims and one more."""
        return PartitionSpec(*(axes or None for axes in self.axes), self._last(feature))

    def row_spec(self, *, trailing: int = 1, feature: bool = False) -> PartitionSpec:
        """Returns the spec of [n * rows] with `trailing` more dims: all batch axes shard dim 0."""
        rest = (self._last(feature), *[None] * trailing)[:trailing]
        return PartitionSpec(self.batch_axes or None, *rest)

    def _last(self, feature: bool) -> Axes | None:
        return self.feature if feature and self.feature else None

    def here(self, *operands: Any) -> BatchShards:
        """Returns the shards at this point, without mesh axes that are already manual."""
        manual = jax.sharding.get_abstract_mesh().manual_axes

        def free(axes: Axes) -> Axes:
            return tuple(axis for axis in axes if axis not in manual)

        return BatchShards(
            tuple(free(axes) for axes in self.axes),
            free(self.feature),
            self.mesh,
            tuple(sorted(varied_axes(operands))),
        )


def find(spec: Spec | None, dims: int, operands: Sequence[Any]) -> BatchShards:
    """Finds the shards of a batch.

    Args:
        spec: sharding of the leading dims and the last one; None reads it off the operands.
        dims: number of leading dims, 1 or 2.
        operands: arrays with these leading dims and one more, the most trusted first; Nones are
            skipped.

    Returns:
        The axes that are not manual at this point; no axes if nothing is known.

    Raises:
        InvalidArgumentError: the spec names axes that the mesh lacks, or no mesh is set.
    """
    given = [x for x in operands if x is not None]
    mesh: Any = _ambient() or _mesh_of(spec) or next(filter(None, map(_mesh_of, given)), None)
    known = [entries for x in given if (entries := _known_entries(x, dims + 1)) is not None]
    if spec is None:
        entries = next((e for e in known if any(e[:dims])), ((),) * dims)
    else:
        entries = entries_of(spec.spec if isinstance(spec, NamedSharding) else spec, dims + 1)
    _check_axes([axis for axes in entries for axis in axes], mesh)
    found = BatchShards(entries[:dims], (), mesh)
    stated = spec is not None and any(entries[dims:])
    feature = entries[dims] if stated else last_axes(found, operands[0])
    return dataclasses.replace(found, feature=feature).here(*given)


def find_rows(spec: Spec | None, *operands: Any) -> BatchShards:
    """Like `find`, for arrays with equal sharding of dim 0; other dims stay as they are."""
    if spec is not None:
        entries = spec.spec if isinstance(spec, NamedSharding) else spec
        short = PartitionSpec(*entries[:1])
        spec = NamedSharding(spec.mesh, short) if isinstance(spec, NamedSharding) else short
    return dataclasses.replace(find(spec, 1, operands), feature=())


def last_axes(shards: BatchShards, array: Any) -> Axes:
    """Returns axes on the last dim of an array: known ones, else the shards' if they divide it."""
    known = _known_entries(array, jnp.ndim(array))
    size = jnp.shape(array)[-1]
    if known is not None:
        return tuple(axis for axis in known[-1] if axis not in shards.batch_axes)
    return shards.feature if size % prod(shards._sizes(shards.feature)) == 0 else ()


def _known_entries(array: Any, dims: int) -> tuple[Axes, ...] | None:
    spec = known_spec(array)
    return None if spec is None else entries_of(spec, dims)


def _check_axes(axes: Sequence[str], mesh: Mesh | AbstractMesh | None) -> None:
    if not axes:
        return
    if mesh is None:
        raise InvalidArgumentError(
            f"tokens_spec needs a mesh with the axes {tuple(axes)}; call under "
            "jax.set_mesh(mesh), or give NamedSharding(mesh, spec)",
            argument="tokens_spec",
        )
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        raise InvalidArgumentError(
            f"tokens_spec must name axes of the mesh {dict(mesh.shape)}, got {tuple(unknown)}",
            argument="tokens_spec",
        )


def _ambient() -> AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _mesh_of(x: Any) -> Any:
    """Returns the mesh that a NamedSharding, a concrete array, or an Explicit type names."""
    if isinstance(x, NamedSharding):
        return x.mesh
    if isinstance(x, jax.core.Tracer):
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        return None if mesh is None or mesh.empty else mesh
    sharding = getattr(x, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def check_divides(shards: BatchShards, lead: Sequence[int]) -> None:
    """Raises InvalidArgumentError unless the shards divide the leading dims."""
    for dim, (size, parts) in enumerate(zip(lead, shards.per_dim, strict=True)):
        if size % parts:
            raise InvalidArgumentError(
                f"dim {dim} of the tokens must be a multiple of {parts}, its shards over "
                f"{shards.axes[dim]}, got {size}; ep.pad_tokens pads with unused slots",
                argument="tokens",
                tokens=size,
                shards=parts,
            )


def settled(
    shards: BatchShards, operands: Sequence[jax.Array | None], specs: Sequence[PartitionSpec]
) -> list[Any]:
    """Casts operands to the types that the op gives their gradients; a None stays None.

    Call it before a custom_vjp: the transposes of these casts move gradients to the layout of their
    operand, and sum the gradient of an operand that was replicated.
    """
    given = [x if x is None else spread_over(jnp.asarray(x), shards.varying) for x in operands]
    present = [x for x in given if x is not None]
    traced = any(isinstance(x, jax.core.Tracer) for x in present)
    if not traced or not (shards.batch_axes or shards.feature):
        return given
    mesh = _shard_map_mesh(shards, present)
    if not _stated(mesh):
        return given
    pairs = zip(given, specs, strict=True)
    return [x if x is None else typed(mesh, x, spec) for x, spec in pairs]


def _stated(mesh: Any) -> frozenset[str]:
    """Returns the Explicit axes that are not manual yet."""
    return explicit_axes(mesh) - {*jax.sharding.get_abstract_mesh().manual_axes}


def per_shard(
    shards: BatchShards,
    body: Callable[..., Any],
    operands: Sequence[jax.Array],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
) -> Any:
    """Runs `body` once per shard on the local blocks of `operands`.

    Args:
        shards: the shards as seen from this point.
        body: takes as many arrays as there are operands, and runs no collective.
        operands: arrays that are global except along manual axes.
        in_specs: one per operand.
        out_specs: a prefix of what `body` returns.

    Returns:
        The results of `body`, sharded as `out_specs` says.
    """

    def cast(x: jax.Array) -> jax.Array:
        return spread_over(x, shards.varying)

    ambient = jax.sharding.get_abstract_mesh()
    if not shards.batch_axes and not shards.feature:
        return jax.tree.map(cast, body(*map(cast, operands)))
    mesh: Any = _shard_map_mesh(shards, operands)
    stated = _stated(mesh)
    if stated:
        operands = [typed(mesh, *each) for each in zip(operands, in_specs, strict=True)]
    mapped = jax.shard_map(
        body,
        mesh=mesh if ambient.empty else None,
        # The types of arrays say that the other Explicit axes shard nothing. Make those axes manual
        # too, or every gather inside the body would have to repeat it.
        axis_names={*shards.batch_axes, *shards.feature} | stated,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.tree.map(cast, mapped(*operands))


def _shard_map_mesh(shards: BatchShards, operands: Sequence[jax.Array]) -> Any:
    """Returns the ambient mesh, the operands' explicit one, or the mesh of `shards`."""
    ambient = _ambient()
    if ambient is not None:
        return ambient
    for x in operands:
        mesh = _mesh_of(x)
        if mesh is not None and explicit_axes(mesh):
            return mesh
    return as_auto(shards.mesh) if isinstance(shards.mesh, Mesh) else shards.mesh
