"""`ep.sharding`: shards weights and batches by the logical names of their dims.

There are two layouts. "fsdp+ep" shards experts over ep and their H over fsdp. "shard-exp-on-fsdp"
shards experts over ep and fsdp together, ep major, and keeps each expert's matrices whole.
Optimizers of whole matrices (Muon) then need no collective. `grouped_gemm` gathers over fsdp only,
and its gradient is sharded over (ep, fsdp).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.moe.params import LOGICAL_AXES, MoEParams, logical_axes
from ep_runtime_client.ops.partitioning.roles import entry_axes, say_once
from ep_runtime_client.ops.quantize.ops import packing_of
from ep_runtime_client.ops.quantize.pair import is_pair
from ep_runtime_client.ops.quantize.quantized_tensor import FIELDS, QuantizedTensor

__all__ = ["GroupAxes", "Rules", "rules"]


def __dir__() -> list[str]:
    return __all__


KINDS = ("fsdp+ep", "shard-exp-on-fsdp")

Axes = str | Sequence[str] | None
Entry = str | tuple[str, ...] | None
Names = Sequence[str | None]

# Number of dims of parameters without a layer stack, if the same in every form.
_PLAIN_DIMS = {"wo": 3, "router": 2, "wo_bias": 2, "router_bias": 1}


class GroupAxes(TypedDict):
    """The mesh axes of a group, as keyword arguments of `create_group`."""

    ep_axis: tuple[str, ...]
    outer_axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules that map each logical name of a dim to mesh axes, as returned by `rules`.

    Hashable.

    Attributes:
        mesh_axes: the axes that the rules know, outermost first.
        logical: (name, axes) pairs for flax's `nnx.logical_axis_rules` and
            `linen.logical_axis_rules`.
        outer: further axes of the batch, outermost first.
        ep: axes of expert parallelism.
    """

    mesh_axes: tuple[str, ...]
    logical: tuple[tuple[str, Entry], ...]
    outer: tuple[str, ...]
    ep: tuple[str, ...]

    def on(self, mesh: Mesh | AbstractMesh) -> Rules:
        """Returns the rules without mesh axes that `mesh` lacks, and warns once if it lacks all.

        Args:
            mesh: any, concrete or abstract.

        Returns:
            The Rules for it.
        """
        if self.mesh_axes and mesh.axis_names and not {*self.mesh_axes} & {*mesh.axis_names}:
            axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            say_once(
                f"sharding rules know the mesh axes {', '.join(self.mesh_axes)} and the mesh has "
                f"{axes}, so that everything lies on every device: name its axes in "
                "ep.sharding.rules"
            )

        def left(axes: Sequence[str]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis in mesh.axis_names)

        logical = tuple((name, _entry(left(entry_axes(entry)))) for name, entry in self.logical)
        return Rules(left(self.mesh_axes), logical, left(self.outer), left(self.ep))

    def group_axes(self, mesh: Mesh | AbstractMesh) -> GroupAxes:
        """Returns the `ep_axis` and `outer_axes` that `create_group` needs on `mesh`.

        Args:
            mesh: any, concrete or abstract.

        Returns:
            Keyword arguments: `create_group(name, mesh, **rules.group_axes(mesh), ...)`.

        Raises:
            InvalidArgumentError: the mesh has none of the ep axes.
        """
        here = self.on(mesh)
        if not here.ep:
            raise InvalidArgumentError(
                f"mesh must have an axis of ep={self.ep}, got {mesh.axis_names}", argument="mesh"
            )
        return {"ep_axis": here.ep, "outer_axes": here.outer}

    def spec(self, names: Names) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dims have these logical names.

        None is the name of a dim that is not sharded. Each axis shards one dim only, the first that
        names it, as in flax.linen.

        Args:
            names: one per dim of the array.

        Returns:
            The spec, one entry per name.

        Raises:
            InvalidArgumentError: a name that the rules do not know.
        """
        known = dict(self.logical)
        used: set[str] = set()
        entries = []
        for name in names:
            if name is not None and name not in known:
                raise InvalidArgumentError(
                    f"names must be of {sorted(known)}, got {name!r}", argument="names"
                )
            axes = () if name is None else entry_axes(known[name])
            entries.append(_entry(tuple(axis for axis in axes if axis not in used)))
            used.update(axes)
        return PartitionSpec(*entries)

    def shardings(self, tree: Any, mesh: Mesh) -> Any:
        """Returns a NamedSharding for each array of a tree, for use in `jax.device_put` or orbax.

        Args:
            tree: arrays or ShapeDtypeStructs. The logical names come from MoEParams, anywhere in
                the tree (also in an optimizer's state), and from the metadata of flax's
                nnx.Variables and linen boxes. A tuple of names, or a PartitionSpec of names, stands
                for an array. Arrays without names are replicated. 8-bit weights of
                `quantize_params`, and their scales, are sharded as the weights.
            mesh: Auto or Explicit; axes that it lacks are left out.

        Returns:
            The tree with a sharding in place of each array (or of its linen box).

        Raises:
            InvalidArgumentError: the axes of a dim do not divide it.
        """
        here = self.on(mesh)

        def place(path: Any, leaf: Any) -> Any:
            where = jax.tree_util.keystr(path)
            if isinstance(leaf, MoEParams):
                return _of_params(here, leaf, mesh, where)
            if _is_variable(leaf):
                names = leaf.get_metadata().get("out_sharding")
                sharding = _placed(here, names, leaf.get_value(), mesh, where)
                return leaf.replace(sharding)
            if _is_names(leaf):
                return NamedSharding(mesh, here.spec(leaf))
            if _is_box(leaf):
                return _placed(here, leaf.names, leaf.value, mesh, where)
            return _placed(here, None, leaf, mesh, where)

        return jax.tree_util.tree_map_with_path(place, tree, is_leaf=_has_names)


def rules(
    kind: str,
    *,
    dp: Axes = "dp",
    fsdp: Axes = "fsdp",
    ep: Axes = "ep",
    tp: Axes = "tp",
    logical: Mapping[str, Axes] | None = None,
) -> Rules:
    """Returns the sharding rules of a layout for weights and batches.

    Args:
        kind: "fsdp+ep" or "shard-exp-on-fsdp".
        dp: mesh axes of plain data parallelism: a name, a tuple (major first) or None. Axes that a
            mesh lacks are left out. MaxText's is "data".
        fsdp: mesh axes of data parallelism that also shard weights.
        ep: mesh axes of the experts. MaxText's are "expert", or ("context", "expert").
        tp: mesh axes of tensor parallelism.
        logical: axes of further logical names, or other axes for these names.

    Returns:
        Rules for the parameters of `ep.moe` (exp, embed_moe, mlp_moe), for dense parameters (embed,
        mlp, vocab, heads, ...), and for activations (activation_batch and others).

    Raises:
        InvalidArgumentError: an unknown kind, or one axis in two roles.

    Source: logical names are flax's; "shard-exp-on-fsdp" is MaxText's layout of that name; Muon
    orthogonalizes whole matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Examples:
        >>> rules = ep.sharding.rules("fsdp+ep").on(mesh)
        >>> tuple(rules.spec(("exp", "embed_moe", None, "mlp_moe")))  # of wi
        ('ep', 'fsdp', None, None)
        >>> params = jax.device_put(params, rules.shardings(params, mesh))
    """
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind must be one of {KINDS}, got {kind!r}", argument="kind")
    roles = {
        "dp": entry_axes(dp),
        "fsdp": entry_axes(fsdp),
        "ep": entry_axes(ep),
        "tp": entry_axes(tp),
    }
    mesh_axes = tuple(axis for axes in roles.values() for axis in axes)
    for axis in mesh_axes:
        if mesh_axes.count(axis) > 1:
            at = [role for role, axes in roles.items() if axis in axes]
            raise InvalidArgumentError(
                f"axis {axis!r} must have one role, got it as {' and '.join(at)}", argument=at[-1]
            )
    outer = roles["dp"] + roles["fsdp"]
    on_fsdp = kind == "shard-exp-on-fsdp"
    table: dict[str, tuple[str, ...]] = {
        "exp": roles["ep"] + roles["fsdp"] if on_fsdp else roles["ep"],
        "embed_moe": () if on_fsdp else roles["fsdp"],
        "mlp_moe": roles["tp"],
        "embed": roles["fsdp"],
        **dict.fromkeys(("mlp", "vocab", "heads", "q_heads", "kv_heads"), roles["tp"]),
        **dict.fromkeys(("layers", "norm", "kv"), ()),
        "activation_batch": outer + roles["ep"],
        "activation_batch_moe": outer,
        "activation_exp": roles["ep"],
        **dict.fromkeys(("activation_length", "activation_embed"), ()),
        **dict.fromkeys(("activation_mlp", "activation_heads", "activation_vocab"), roles["tp"]),
        **{name: entry_axes(axes) for name, axes in (logical or {}).items()},
    }
    pairs = tuple((name, _entry(axes)) for name, axes in table.items())
    return Rules(mesh_axes, pairs, outer, roles["ep"])


def _entry(axes: tuple[str, ...]) -> Entry:
    """Converts axes to an entry of a PartitionSpec: None, a name, or a tuple."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def _is_variable(leaf: Any) -> bool:
    """Whether a leaf is a flax.nnx Variable, by its methods, because flax may not be installed."""
    return hasattr(leaf, "get_metadata") and hasattr(leaf, "get_value")


def _is_box(leaf: Any) -> bool:
    """Whether a leaf is a box of flax.linen, which holds a value and its axis names."""
    return hasattr(leaf, "unbox") and hasattr(leaf, "names")


def _is_names(leaf: Any) -> bool:
    if isinstance(leaf, PartitionSpec):
        return True
    plain = isinstance(leaf, tuple) and not hasattr(leaf, "_fields")
    return (
        plain
        and all(name is None or isinstance(name, str) for name in leaf)
        and any(name is not None for name in leaf)
    )


def _has_names(leaf: Any) -> bool:
    return isinstance(leaf, MoEParams) or _is_variable(leaf) or _is_box(leaf) or _is_names(leaf)


def _of_params(here: Rules, params: MoEParams, mesh: Mesh, where: str) -> MoEParams:
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    stacked = _stacked_dims(fields)

    def place(name: str, value: Any, at: str) -> Any:
        if is_pair(value):
            return tuple(place(name, each, f"{at}[{i}]") for i, each in enumerate(value))
        if isinstance(value, QuantizedTensor):
            return _of_quantized(place, here, name, value, stacked, mesh, at)
        if not hasattr(value, "shape"):  # None, or optax's stand-in for a masked array
            return value
        names = (None,) * stacked + logical_axes(name, len(value.shape) - stacked)
        return _placed(here, names, value, mesh, at)

    return MoEParams(**{name: place(name, x, f"{where}.{name}") for name, x in fields.items()})


def _of_quantized(
    place: Callable[..., Any],
    here: Rules,
    name: str,
    q: QuantizedTensor,
    stacked: int,
    mesh: Mesh,
    at: str,
) -> Any:
    """Shards 8-bit data like the weight, and scales along axes that divide them."""
    packing = packing_of(q.recipe, q.ndim - stacked, rows=False)
    names = logical_axes(name, packing.ndim)

    def one(field: str) -> NamedSharding | None:
        leaf = getattr(q, field)
        if leaf is None:
            return None
        laid = (None,) * stacked + tuple(names[dim] for dim in packing.dims[field])
        if "scale" not in field:
            return _placed(here, laid, leaf, mesh, f"{at}.{field}")
        spec = [*here.spec(laid)]
        sizes = [math.prod(mesh.shape[axis] for axis in entry_axes(entry)) for entry in spec]
        whole = (size % count for size, count in zip(leaf.shape, sizes, strict=False))
        kept = (None if rest else entry for rest, entry in zip(whole, spec, strict=False))
        return NamedSharding(mesh, PartitionSpec(*kept))

    origin = None if q.origin is None else place(name, q.origin, f"{at}.origin")
    found: Any = {field: one(field) for field in FIELDS}
    return dataclasses.replace(q, origin=origin, **found)


def _stacked_dims(fields: Mapping[str, Any]) -> int:
    """Returns the number of a layer stack's leading dims, the same for all parameters."""
    for name, dims in _PLAIN_DIMS.items():
        if hasattr(fields[name], "shape"):
            return len(fields[name].shape) - dims
    most = [
        len(value.shape) - len(LOGICAL_AXES[name]) + int(is_pair(fields[name]))
        for name in ("wi", "wi_bias")
        for value in (fields[name] if is_pair(fields[name]) else [fields[name]])
        if hasattr(value, "shape")
    ]
    return max(0, *most, 0)


def _placed(here: Rules, names: Names | None, value: Any, mesh: Mesh, where: str) -> NamedSharding:
    """Returns an array's sharding; raises InvalidArgumentError if axes do not divide a dim."""
    spec = here.spec(names or ())
    for dim, entry in enumerate(spec):
        axes = entry_axes(entry)
        size = math.prod(mesh.shape[axis] for axis in axes)
        if value.shape[dim] % size:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            assert names is not None  # a spec without names has no axes
            raise InvalidArgumentError(
                f"{where}: dim {dim} ({names[dim]}) of size {value.shape[dim]} must be a multiple "
                f"of {size}, the size of {sizes}; the array is {list(value.shape)}",
                argument="tree",
            )
    return NamedSharding(mesh, spec)
