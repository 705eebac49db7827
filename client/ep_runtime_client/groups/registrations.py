"""The layers of one group: looked up in this process, registered by the daemon.

This process finds layers by name, and the native library finds them by id. The daemon registers
thousands in one call; without a daemon they are numbered here.
"""

from __future__ import annotations

import functools
import operator
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ep_runtime import layer_specs, specs, wire
from ep_runtime.errors import SpecMismatchError, StaleHandleError
from ep_runtime.v1 import layer_service_pb2
from ep_runtime_client.base import jax_state
from ep_runtime_client.base.layers import EpLayer, LayerStack, layer_name
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.client import DaemonClient

AddNative = Callable[[Sequence[Any]], None]
# Fingerprint of replaced layers: no program has it, so every call of such a layer fails.
_NO_FINGERPRINT = 0
# Two registrations of one name are the same layer if these settings are equal.
_SETTINGS = operator.attrgetter("base_id", "spec.top_k", "spec.alignment", "spec.in_flight")


class Registrations:
    """Layers and stacks of a group. The group's lock guards it."""

    def __init__(self, group: specs.GroupSpec) -> None:
        self._group = group
        self._layers: dict[str, EpLayer | LayerStack] = {}
        self._items: dict[str, wire.RegisteredLayer] = {}
        self._gone: set[str] = set()  # layer names that a replacement removed

    @property
    def names(self) -> list[str]:
        return sorted(self._layers)

    def such(self, *names: str) -> str:
        """Describes layers that are missing here, for an error message."""
        return (
            f"such layer {', '.join(map(repr, names[:8]))} of group {self._group.name!r}, which "
            f"has {self.names},"
        )

    @property
    def items(self) -> list[wire.RegisteredLayer]:
        """Registered layers as the daemon sent them."""
        return list(self._items.values())

    def lookup(self, name: str) -> EpLayer | LayerStack | None:
        """Finds a layer, a stack, or with "stack[i]" one layer of it."""
        found = self._layers.get(name)
        if found is not None or not name.endswith("]"):
            return found
        stack_name, _, index = name[:-1].rpartition("[")
        stack = self._layers.get(stack_name)
        if isinstance(stack, LayerStack) and index.isdecimal() and int(index) < len(stack):
            layer = stack[int(index)]
            return layer if isinstance(layer, EpLayer) else None
        return None

    def known(
        self, wanted: layer_specs.LayerSpec, num_layers: int | None, *, replace: bool = False
    ) -> EpLayer | LayerStack | None:
        """Returns the registration of that name; None if there is none, or if it differs and
        `replace` is set.

        Raises:
            SpecMismatchError: the settings differ, and `replace` is not set.
        """
        found = self._layers.get(wanted.name)
        if found is None:
            return None
        theirs = found.num_layers if isinstance(found, LayerStack) else None
        if replace and (theirs != num_layers or found.spec != wanted):
            return None
        if theirs != num_layers:
            raise _mismatch(self._group.name, wanted.name, "num_layers", theirs, num_layers)
        self.check_same(wanted, found.spec)
        return found

    def missing(
        self, layers: Iterable[layer_specs.LayerSpec], *, replace: bool
    ) -> list[layer_specs.LayerSpec]:
        """Returns the layers that are not registered here yet, each once.

        Raises:
            SpecMismatchError: one has the name of another layer; names field and both values.
        """
        new: dict[str, layer_specs.LayerSpec] = {}
        for layer in layers:
            if self.known(layer, None, replace=replace) is None:
                self.check_members(layer.name, 0)
                self.check_same(layer, new.setdefault(layer.name, layer))
        return [*new.values()]

    def check_members(self, name: str, num_layers: int) -> None:
        """Raises InvalidArgumentError if two layers would have the same name."""

        def known(other: str) -> int | None:
            found = self._items.get(other)
            return None if found is None else found.num_layers

        layer_specs.check_stack_members(name, num_layers, known)

    def check_same(self, wanted: layer_specs.LayerSpec, found: layer_specs.LayerSpec) -> None:
        """Raises SpecMismatchError with the first field that differs."""
        for field, ours in vars(wanted).items():
            if vars(found)[field] != ours:
                raise _mismatch(self._group.name, wanted.name, field, vars(found)[field], ours)

    def replaces(self, items: Sequence[wire.RegisteredLayer]) -> bool:
        """Whether an item replaces another layer of its name."""
        return any(item.spec.name in self._items for item in self._new(items))

    def add(self, items: Sequence[wire.RegisteredLayer], add_native: AddNative | None) -> None:
        """Adds the daemon's registrations, here and in the native library."""
        new = self._new(items)
        made = [self._made(item) for item in new]
        before = [self._items[item.spec.name] for item in new if item.spec.name in self._items]
        here = {layer_id for item in new for layer_id, _ in _members(item)}
        gone = {i: name for item in before for i, name in _members(item) if i not in here}
        if add_native is not None and new:
            rows = [row for pair in zip(made, new, strict=True) for row in native_rows(*pair)]
            add_native([*_rows_of_gone(gone), *rows])
        self._gone.update(gone.values())
        for layer, item in zip(made, new, strict=True):
            self._gone.difference_update(name for _, name in _members(item))
            self._layers[layer.name] = layer
            self._items[layer.name] = item

    def _new(self, items: Sequence[wire.RegisteredLayer]) -> list[wire.RegisteredLayer]:
        """Returns the items that are new here, or that differ."""

        def here(item: wire.RegisteredLayer) -> tuple[Any, ...]:
            return (item.spec, item.num_layers, item.base_id, item.handle_base)

        known = {name: here(item) for name, item in self._items.items()}
        return [item for item in items if known.get(item.spec.name) != here(item)]

    def _made(self, item: wire.RegisteredLayer) -> EpLayer | LayerStack:
        if item.num_layers:
            return LayerStack(self._group, item.spec, item.num_layers, item.base_id)
        return EpLayer(self._group, item.spec, item.base_id)

    def require_current(self, layer: EpLayer) -> None:
        """Raises StaleHandleError if another layer has replaced this one."""
        current = self.lookup(layer.name)
        if current is None and layer.name not in self._gone:
            return  # unknown here: the call itself reports a missing layer
        if current is not None and _SETTINGS(current) == _SETTINGS(layer):
            return
        raise StaleHandleError(
            f"layer {layer.name!r} (top_k={layer.top_k}, alignment={layer.alignment}) was replaced "
            f"in group {self._group.name!r}; use the layer that the newer registration returned, "
            "or group.layer(name)",
            layer=layer.name,
            group=self._group.name,
        )

    def describe(self) -> list[dict[str, Any]]:
        """Returns the layers as plain values."""
        return [
            {
                "name": layer.name,
                "top_k": layer.spec.top_k,
                "alignment": layer.spec.alignment,
                "in_flight": layer.spec.in_flight,
                "num_layers": layer.num_layers if isinstance(layer, LayerStack) else 0,
            }
            for layer in self._layers.values()
        ]


def _mismatch(group: str, layer: str, field: str, theirs: Any, ours: Any) -> SpecMismatchError:
    return SpecMismatchError(
        f"layer {layer!r} of group {group!r} is registered with {field}={theirs}, "
        f"this call has {field}={ours}; make them equal, or pass replace=True{jax_state.outside()}",
        object=layer,
        field=field,
        theirs=theirs,
        ours=ours,
    )


def _members(item: wire.RegisteredLayer) -> list[tuple[int, str]]:
    """Returns (id, name) of the layer, or of each layer of the stack."""
    if not item.num_layers:
        return [(item.base_id, item.spec.name)]
    return [(item.base_id + i, layer_name(item.spec.name, i)) for i in range(item.num_layers)]


def native_rows(layer: EpLayer | LayerStack, item: wire.RegisteredLayer) -> list[Any]:
    """Makes one entry of the native library per layer, and per layer of a stack."""
    from ep_runtime.native_abi import LayerStruct

    first = layer if isinstance(layer, EpLayer) else layer[0]
    assert isinstance(first, EpLayer)  # a Python index of a stack gives an EpLayer
    return [
        LayerStruct(
            id=layer_id,
            name=name.encode(),
            fingerprint=first.fingerprint,
            top_k=first.top_k,
            alignment=first.alignment,
            in_flight=first.in_flight,
            handle_base=item.handle_base + index * first.in_flight,
        )
        for index, (layer_id, name) in enumerate(_members(item))
    ]


def _rows_of_gone(gone: dict[int, str]) -> list[Any]:
    from ep_runtime.native_abi import LayerStruct

    rest = (_NO_FINGERPRINT, 1, 1, 1, 0)
    return [LayerStruct(layer_id, name.encode(), *rest) for layer_id, name in gone.items()]


def register(
    client: DaemonClient,
    spec: specs.GroupSpec,
    generation: int,
    layers: Sequence[layer_specs.LayerSpec],
    stacks: Sequence[wire.LayerStackSpec],
    *,
    replace: bool = False,
) -> tuple[list[wire.RegisteredLayer], list[wire.RegisteredLayer]]:
    """Registers layers and stacks, thousands in one call, and either all of a call or none; without
    a daemon it numbers them here.

    Raises:
        SpecMismatchError: a name is registered with other settings, and `replace` is not set.
        PoolExhaustedError: more handles than a board holds.
        StaleHandleError: the group is gone.
    """
    if not client.has_daemon:
        ids = [layer_specs.layer_id(spec.name, one.name) for one in layers]
        bases = [layer_specs.stack_base_id(spec.name, one.spec.name) for one in stacks]
        numbered = zip(layers, ids, strict=True), zip(stacks, bases, strict=True)
        return (
            [wire.RegisteredLayer(one, 0, number, 0) for one, number in numbered[0]],
            [wire.RegisteredLayer(one.spec, one.num_layers, base, 0) for one, base in numbered[1]],
        )
    found: tuple[list[wire.RegisteredLayer], list[wire.RegisteredLayer]] = ([], [])
    for first in range(0, len(layers) + len(stacks) or 1, wire.MAX_LAYERS_PER_CALL):
        last = first + wire.MAX_LAYERS_PER_CALL
        stacks_from = max(0, first - len(layers))
        some_stacks = stacks[stacks_from : max(0, last - len(layers))]
        request = layer_service_pb2.RegisterLayersRequest(
            op_id=uuid.uuid4().hex,
            group=spec.name,
            generation=generation,
            layers=[wire.layer_spec_to_proto(item) for item in layers[first:last]],
            stacks=[wire.stack_spec_to_proto(item) for item in some_stacks],
            replace=replace,
        )
        answer = client.run(functools.partial(_ask_to_register, request))
        found[0].extend(wire.registered_from_proto(item) for item in answer.layers)
        found[1].extend(wire.registered_from_proto(item) for item in answer.stacks)
    return found


def _ask_to_register(
    request: layer_service_pb2.RegisterLayersRequest, control: transport.ControlChannel
) -> layer_service_pb2.RegisterLayersResponse:
    method: Callable[..., layer_service_pb2.RegisterLayersResponse] = control.layers.RegisterLayers
    return control.call(method, request, timeout_s=transport.MUTATE_TIMEOUT_S)


def ask(client: DaemonClient, group: str, name: str) -> wire.RegisteredLayer:
    """Asks the daemon for a layer or a stack by name.

    Raises:
        StaleHandleError: the daemon knows no such layer.
    """
    request = layer_service_pb2.GetLayerRequest(group=group, name=name)
    control = client.control
    answer = control.call(control.layers.GetLayer, request)
    return wire.registered_from_proto(answer.layer)
