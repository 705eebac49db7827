"""Layers in a training program: frozen names that resolve to a live group.

`EpLayer` and `LayerStack` are static data: hashable, picklable, never pytree leaves. They hold
specs; mesh, windows and generation are looked up in this process's table of live groups when an op
is traced, so a layer that was pickled, or found by name, works like the original.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from typing import TYPE_CHECKING, Any, Protocol

from ep_runtime import layer_specs, specs
from ep_runtime.errors import InvalidArgumentError, StaleHandleError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh


class LayerGroup(Protocol):
    """The part of the users' `Group` that layers and ops need."""

    name: str
    spec: specs.GroupSpec
    mesh: Mesh
    session: Any

    def check(self, arrays: Any = None) -> Any: ...


class LiveGroup(Protocol):
    """The part of a group in this process that layers, ops and programs need."""

    name: str
    spec: specs.GroupSpec
    group: LayerGroup
    client: Any

    @property
    def is_gone(self) -> bool: ...

    @property
    def layer_names(self) -> list[str]: ...

    def registered(self, name: str) -> EpLayer | LayerStack | None: ...

    def require_layer(self, layer: EpLayer) -> None: ...

    def require_open(self, layer: str | None = None) -> None: ...

    def require_whole(self, layer: str | None = None) -> None: ...

    def settle(self) -> None: ...


class LiveGroups:
    """The groups of this process by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, LiveGroup] = {}
        self._reports: dict[str, str] = {}

    def add(self, group: LiveGroup) -> None:
        """Adds a group; raises InvalidArgumentError if another live group here has the name."""
        with self._lock:
            other = self._groups.get(group.name)
            if other is not None and other is not group:
                raise InvalidArgumentError(
                    f"group {group.name!r} is already open in this process; close it first, "
                    "or pass replace=True to create_group",
                    argument="name",
                )
            self._groups[group.name] = group
            self._reports.pop(group.name, None)

    def remove(self, group: LiveGroup) -> None:
        with self._lock:
            if self._groups.get(group.name) is group:
                del self._groups[group.name]

    def get(self, name: str) -> LiveGroup | None:
        with self._lock:
            return self._groups.get(name)

    def of(self, layer: EpLayer) -> LiveGroup:
        """Returns the open group of a layer.

        Raises:
            StaleHandleError: the group is closed, gone or has other settings, or the layer was
                replaced.
        """
        with self._lock:
            group = self._groups.get(layer.group_spec.name)
        if group is None:
            raise StaleHandleError(
                f"layer {layer.name!r}: group {layer.group_spec.name!r} is not open in this "
                "process; connect and create the group, or attach to it with session.group(name)",
                layer=layer.name,
                group=layer.group_spec.name,
            )
        group.require_layer(layer)
        if group.spec.fingerprint != layer.group_spec.fingerprint:
            raise StaleHandleError(
                f"layer {layer.name!r} is of an older group {group.name!r} with other settings; "
                "register it again in the new one",
                layer=layer.name,
                group=group.name,
            )
        return group

    def report(self, name: str, text: str) -> None:
        """Saves an error of a group's call that the native library did not see.

        The text has the library's form. A saved error stays until it is taken.
        """
        with self._lock:
            self._reports.setdefault(name, text)

    def take_report(self, name: str) -> str | None:
        """Returns and forgets the error that `report` saved."""
        with self._lock:
            return self._reports.pop(name, None)

    def all(self) -> list[LiveGroup]:
        with self._lock:
            return list(self._groups.values())

    def clear(self) -> None:
        """Forgets everything; a forked child calls it."""
        self._lock = threading.Lock()
        self._groups, self._reports = {}, {}


live_groups = LiveGroups()


def layer(name: str) -> EpLayer | LayerStack:
    """Returns a layer of this process by the name "group/layer", also under tracing.

    Args:
        name: the group's name, "/", and the name of a layer, a stack, or "stack[i]" in it.

    Returns:
        The EpLayer or LayerStack.

    Raises:
        StaleHandleError: this process has no layer of that name, or the layer's group is gone.
        InvalidArgumentError: the name is not text, no group is open in this process, or the name
            is ambiguous because group names contain "/".

    Cost: no RPC.

    Examples:
        >>> ep.layer("moe/block0/moe") == layer
        True
    """
    if not isinstance(name, str):
        raise InvalidArgumentError(f"name must be text, got {name!r}", argument="name")
    inside = [group for group in live_groups.all() if name.startswith(f"{group.name}/")]
    asked = [(group, group.registered(name[len(group.name) + 1 :])) for group in inside]
    found = [(group, known) for group, known in asked if known is not None]
    if len(found) > 1:
        raise InvalidArgumentError(
            f"{name!r} is a layer of each of the groups {sorted(group.name for group, _ in found)}"
            "; choose one by group.layer(name)",
            argument="name",
        )
    if not live_groups.all():
        raise InvalidArgumentError(
            f"layer {name!r} needs an open group in this process, and there is none; call "
            "ep.connect(), session.create_group(...) and group.register_layer(...) first",
            argument="name",
        )
    if not found:
        there = [f"{group.name}/{one}" for group in live_groups.all() for one in group.layer_names]
        raise StaleHandleError(
            f'this process has no layer {name!r} ("group/layer"), it has {sorted(there)}',
            layer=name,
        )
    group, known = found[0]
    group.require_open(known.name)
    return known


@dataclasses.dataclass(frozen=True, repr=False)
class EpLayer:
    """A registered layer: the first argument of `moe`, `dispatch` and the other calls.

    Get it from `Group.register_layer`, from a stack, or from `Group.layer(name)`.

    Attributes:
        group_spec: the group's spec.
        spec: the layer's spec, defaults filled in.
        base_id: id of the layer in compiled programs; for a layer of a stack, of its layer 0.
        index: position in its stack; 0 for a plain layer.
    """

    group_spec: specs.GroupSpec
    spec: layer_specs.LayerSpec
    base_id: int
    index: int = 0

    def __repr__(self) -> str:
        return f"EpLayer({_described(self.group_spec, self.spec)})"

    @functools.cached_property
    def name(self) -> str:
        """Name of the layer, unique in its group; "stack[i]" for a layer of a stack."""
        return self.spec.name

    @functools.cached_property
    def top_k(self) -> int:
        """K, the number of experts per token."""
        return self.spec.top_k

    @functools.cached_property
    def alignment(self) -> int:
        """The rows of each expert are padded to a multiple of this number."""
        assert self.spec.alignment is not None  # filled at registration
        return self.spec.alignment

    @functools.cached_property
    def in_flight(self) -> int:
        """Number of dispatches that may be open at once; handles are 0 to in_flight - 1."""
        return self.spec.in_flight

    @property
    def id(self) -> int:
        """The layer's number at the daemon, the same in every process."""
        return self.base_id + self.index

    @functools.cached_property
    def fingerprint(self) -> int:
        """A 63-bit id of the group's and layer's settings that change a compiled program."""
        return specs.stable_id(
            "program", str(self.group_spec.fingerprint), f"{self.top_k}/{self.alignment}"
        )

    @property
    def group(self) -> LayerGroup:
        """The open group of this layer.

        Raises StaleHandleError if this process has no open group of that name.
        """
        return live_groups.of(self).group

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layer's group."""
        return self.group.mesh


@dataclasses.dataclass(frozen=True, repr=False)
class LayerStack:
    """Several layers with the same settings, for a `lax.scan` over layers.

    `stack[i]` is layer i, with i a Python or a traced int.

    Attributes:
        group_spec: the group's spec.
        spec: the spec of each layer; its name is the stack's.
        num_layers: how many.
        base_id: id of layer 0; layer i has base_id + i.
    """

    group_spec: specs.GroupSpec
    spec: layer_specs.LayerSpec
    num_layers: int
    base_id: int

    def __repr__(self) -> str:
        return f"LayerStack({_described(self.group_spec, self.spec)}, num_layers={self.num_layers})"

    @property
    def name(self) -> str:
        """Name of the stack, unique in its group."""
        return self.spec.name

    @property
    def group(self) -> LayerGroup:
        """The open group of this stack.

        Raises StaleHandleError if this process has no open group of that name.
        """
        return self._layer(0).group

    def __len__(self) -> int:
        return self.num_layers

    def _layer(self, index: int) -> EpLayer:
        named = dataclasses.replace(self.spec, name=layer_name(self.name, index))
        return EpLayer(self.group_spec, named, self.base_id, index)

    def __getitem__(self, index: int | jax.Array) -> EpLayer | TracedLayer:
        """Returns layer `index` of the stack, which calls accept like any other layer.

        Args:
            index: a Python int, counted from the end if negative, or a traced int32 [].

        Returns:
            An EpLayer for a Python int; a TracedLayer, valid in this trace only, for a traced int.

        Raises:
            IndexError: the stack has fewer layers.
            InvalidArgumentError: neither an integer nor a traced integer.

        Cost: no RPC. A scan over the stack compiles its body once.
        """
        try:
            position = operator.index(index)
        except TypeError:
            if getattr(getattr(index, "dtype", None), "kind", "") not in ("i", "u"):
                raise InvalidArgumentError(
                    f"stack {self.name!r} takes an integer or a traced int32 scalar, got {index!r}",
                    argument="index",
                ) from None
            return self._traced(index)
        except Exception as error:  # noqa: BLE001 - a tracer refuses with a JAX error of its own
            if "racer" not in type(error).__name__:
                raise
            return self._traced(index)
        if not -self.num_layers <= position < self.num_layers:
            raise IndexError(f"layer {position} of stack {self.name!r} of {self.num_layers} layers")
        return self._layer(position % self.num_layers)

    def _traced(self, index: Any) -> TracedLayer:
        if index.shape:
            raise InvalidArgumentError(
                f"index of stack {self.name!r} must be a scalar, got {list(index.shape)}",
                argument="index",
            )
        return TracedLayer(self, index)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer of a stack with a traced int32 scalar as index; valid inside one trace."""

    stack: LayerStack
    index: Any

    @property
    def static(self) -> EpLayer:
        """Layer 0 of the stack, whose settings, name and base id the program uses."""
        return self.stack._layer(0)


def _described(group: specs.GroupSpec, layer: layer_specs.LayerSpec) -> str:
    return (
        f"{group.name + '/' + layer.name!r}, top_k={layer.top_k}, num_experts={group.num_experts}, "
        f"hidden_size={group.hidden_size}, ep_size={group.ep_size}, transport={group.transport!r}"
    )


def layer_name(stack_name: str, index: int) -> str:
    """Returns the name under which layer `index` of a stack is registered and listed."""
    return f"{stack_name}[{index}]"


def resolve(layer: EpLayer | TracedLayer) -> tuple[EpLayer, Any]:
    """Returns (static layer, index) for an op; the index is a Python int or a traced scalar."""
    if isinstance(layer, TracedLayer):
        return layer.static, layer.index
    if isinstance(layer, EpLayer):
        return (dataclasses.replace(layer, index=0) if layer.index else layer), layer.index
    got = type(layer).__name__
    if isinstance(layer, layer_specs.LayerSpec):
        got = (
            f"LayerSpec {layer.name!r}, which names no group, to trace and to export as well: "
            'register it, where no daemon is in a group of ep.connect("none")'
        )
    raise InvalidArgumentError(f"layer must be an EpLayer or stack[i], got {got}", argument="layer")
