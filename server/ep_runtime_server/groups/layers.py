"""Registered layers of a group: their names, ids in programs, and handles on the board."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from ep_runtime import board_abi, layer_specs, specs
from ep_runtime.allowed_names import check_new_name
from ep_runtime.errors import (
    InvalidArgumentError,
    PoolExhaustedError,
    SpecMismatchError,
    StaleHandleError,
)
from ep_runtime.layer_specs import STACK_MEMBER, LayerSpec, check_stack_members
from ep_runtime.wire import LayerStackSpec, RegisteredLayer
from ep_runtime_server.base.clock import paced

MAX_REPLACED = 1024


@dataclasses.dataclass(frozen=True)
class Handle:
    """One handle of a layer; each call in flight uses its own handle."""

    layer: str
    handle: int
    index: int


@dataclasses.dataclass
class _Addition:
    """The registrations of one call, before they are checked and added together."""

    next_handle: int
    layers: dict[str, RegisteredLayer] = dataclasses.field(default_factory=dict)
    ids: dict[int, str] = dataclasses.field(default_factory=dict)
    replace: bool = False


class LayerTable:
    """Layers and stacks of a group. Handle indices are dense; no other layer reuses an index."""

    def __init__(self, group: specs.GroupSpec) -> None:
        self._group = group
        self._layers: dict[str, RegisteredLayer] = {}
        self._ids: dict[int, str] = {}
        self._next_handle = 0
        self._history: list[RegisteredLayer] = []
        self.history_version = 0
        self._changing = asyncio.Lock()  # because checks of a long list await in between

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def num_layers(self) -> int:
        """Returns the number of layers, counting each layer of a stack."""
        return sum(max(layer.num_layers, 1) for layer in self._layers.values())

    @property
    def num_handles(self) -> int:
        return self._next_handle

    @property
    def history(self) -> Sequence[RegisteredLayer]:
        """Returns registrations in order; a later one replaces earlier ones of the same name.

        Registrations are appended until most entries are replaced ones. Then the list is rebuilt
        without those, under a new `history_version`.
        """
        return self._history

    def _trim_history(self) -> None:
        if len(self._history) <= 2 * len(self._layers) + MAX_REPLACED:
            return
        # Keep the layer with the last handles, so that a restarted daemon does not reuse them.
        end = self._next_handle
        last = next(x for x in self._history if x.handle_base + x.num_handles == end)
        self._history = [last, *self._layers.values()]
        self.history_version += 1

    def all(self) -> list[RegisteredLayer]:
        """Returns the registered layers in order."""
        return list(self._layers.values())

    async def register(
        self,
        layers: Sequence[LayerSpec],
        stacks: Sequence[LayerStackSpec],
        admit: Callable[[int], None] = lambda count: None,
        *,
        replace: bool = False,
    ) -> tuple[list[RegisteredLayer], list[RegisteredLayer]]:
        """Registers all layers and stacks, or none; known equal ones keep their ids and handles.

        Args:
            admit: called with the number of new registrations; raises to refuse them.

        Raises:
            InvalidArgumentError: a layer or stack does not fit the group.
            SpecMismatchError: a name is registered with other settings, and `replace` is False.
            PoolExhaustedError: the board does not have enough handles left.
        """
        async with self._changing:
            added = _Addition(self._next_handle, replace=replace)
            answer = [self._plan(spec, 0, added) async for spec in paced(layers)]
            stack_answer = [
                self._plan(stack.spec, stack.num_layers, added) async for stack in paced(stacks)
            ]
            admit(sum(name not in self._layers for name in added.layers))
            for layer in added.layers.values():
                self._put(layer)
        return answer, stack_answer

    def restore(self, layers: Iterable[RegisteredLayer]) -> None:
        """Restores layers of the journal, in the order of their registration."""
        for layer in layers:
            self._put(layer)

    def _put(self, layer: RegisteredLayer) -> None:
        """Adds a layer, or replaces one of the same name, whose other handles stay unused."""
        before = self._layers.pop(layer.spec.name, None)
        if before is not None:
            del self._ids[before.base_id]
        self._layers[layer.spec.name] = layer
        self._ids[layer.base_id] = layer.spec.name
        self._next_handle = max(self._next_handle, layer.handle_base + layer.num_handles)
        self._history.append(layer)
        self._trim_history()

    async def rejoin(self, layers: Sequence[RegisteredLayer], *, takes_word: bool) -> None:
        """Compares layers of a process with the group's layers; `takes_word` adds unknown ones.

        Raises:
            SpecMismatchError: the group has a layer with other settings, ids or handles.
            StaleHandleError: the group lacks a layer, and `takes_word` is False.
            InvalidArgumentError: a layer's values are impossible.
        """
        async with self._changing:
            new = await self._compared(layers)
            if new and not takes_word:
                raise StaleHandleError(
                    f"layer {new[0].spec.name!r} is not registered in group {self._group.name!r}",
                    layer=new[0].spec.name,
                    group=self._group.name,
                )
            await self._check_word(new)
            self.restore(new)

    async def _compared(self, layers: Sequence[RegisteredLayer]) -> list[RegisteredLayer]:
        """Compares layers with the group's layers, and returns the unknown ones."""
        new = []
        async for layer in paced(layers):
            known = self._layers.get(layer.spec.name)
            if known is None:
                new.append(layer)
                continue
            self._compare(known, layer.spec, layer.num_layers)
            if (known.base_id, known.handle_base) != (layer.base_id, layer.handle_base):
                raise SpecMismatchError(
                    f"layer {layer.spec.name!r} has id {known.base_id} and handles from "
                    f"{known.handle_base}, this call says {layer.base_id} and {layer.handle_base}",
                    object=layer.spec.name,
                    field="handle_base",
                    theirs=known.handle_base,
                    ours=layer.handle_base,
                )
        return new

    async def _check_word(self, new: Sequence[RegisteredLayer]) -> None:
        taken = sorted(
            (layer.handle_base, layer.num_handles) for layer in (*self._layers.values(), *new)
        )
        ends = [base + count for base, count in taken]
        overlap = any(base < end for (base, _), end in zip(taken[1:], ends, strict=False))
        outside = bool(taken) and (taken[0][0] < 0 or ends[-1] > board_abi.MAX_HANDLES)
        async for layer in paced(new):
            check_new_name("layer", layer.spec.name)
            filled = layer_specs.check_layer(self._group, layer.spec)
            make_id = layer_specs.stack_base_id if layer.num_layers else layer_specs.layer_id
            right_id = layer.base_id == make_id(self._group.name, layer.spec.name)
            if filled != layer.spec or not right_id or overlap or outside or layer.num_layers < 0:
                raise InvalidArgumentError(
                    f"layer {layer.spec.name!r} cannot have been registered with id "
                    f"{layer.base_id} and handles from {layer.handle_base}",
                    argument="layers",
                )

    def _plan(self, spec: LayerSpec, num_layers: int, added: _Addition) -> RegisteredLayer:
        filled = layer_specs.check_layer(self._group, spec)
        known = added.layers.get(spec.name) or self._layers.get(spec.name)
        if known is not None and not self._gives_way(known, filled, num_layers, added):
            self._compare(known, filled, num_layers)
            return dataclasses.replace(known, already_registered=True)
        if known is None:
            check_new_name("layer", spec.name)
        self._check_names(spec.name, num_layers, added)
        make_id = layer_specs.stack_base_id if num_layers else layer_specs.layer_id
        base_id = make_id(self._group.name, spec.name)
        taken = self._ids.get(base_id) or added.ids.get(base_id)
        if taken not in (None, spec.name):
            raise InvalidArgumentError(
                f"layer {spec.name!r} has the same id as {taken!r}; rename one", argument="name"
            )
        layer = RegisteredLayer(filled, num_layers, base_id, added.next_handle)
        if known is not None and layer.num_handles <= known.num_handles:
            layer = dataclasses.replace(layer, handle_base=known.handle_base)
        else:
            self._check_handles(layer)
            added.next_handle += layer.num_handles
        added.layers[spec.name] = layer
        added.ids[base_id] = spec.name
        return layer

    def _gives_way(
        self, known: RegisteredLayer, spec: LayerSpec, num_layers: int, added: _Addition
    ) -> bool:
        """Returns whether the call replaces a known layer, which it may do once per layer."""
        same = (known.spec, known.num_layers) == (spec, num_layers)
        return added.replace and not same and spec.name not in added.layers

    def _check_handles(self, layer: RegisteredLayer) -> None:
        """Raises PoolExhaustedError if the layer's handles do not fit on the board."""
        free = board_abi.MAX_HANDLES - layer.handle_base
        if layer.num_handles > free:
            raise PoolExhaustedError(
                f"layer {layer.spec.name!r} asks for {layer.num_handles} handles, group "
                f"{self._group.name!r} has {free} of {board_abi.MAX_HANDLES} left",
                asked=layer.num_handles,
                free=free,
                limit=board_abi.MAX_HANDLES,
            )

    def _compare(self, known: RegisteredLayer, spec: LayerSpec, num_layers: int) -> None:
        if known.spec == spec and known.num_layers == num_layers:
            return
        theirs, ours = dataclasses.asdict(known.spec), dataclasses.asdict(spec)
        theirs["num_layers"], ours["num_layers"] = known.num_layers, num_layers
        for field, value in theirs.items():
            if ours[field] != value:
                raise SpecMismatchError(
                    f"layer {spec.name!r} of group {self._group.name!r} is registered with "
                    f"{field}={value}, this call says {ours[field]}; make them equal, or pass "
                    "replace=True",
                    object=spec.name,
                    field=field,
                    theirs=value,
                    ours=ours[field],
                )

    def _check_names(self, name: str, num_layers: int, added: _Addition) -> None:
        """Refuses a layer "s[3]" next to a stack "s", whose layer 3 has the same name."""

        def known(other: str) -> int | None:
            found = self._layers.get(other) or added.layers.get(other)
            return None if found is None else found.num_layers

        # Check at most MAX_HANDLES members: a larger stack is refused anyway, and checking all of
        # its names would block the event loop.
        check_stack_members(name, min(num_layers, board_abi.MAX_HANDLES), known)

    def get(self, name: str) -> RegisteredLayer:
        """Finds a layer or stack by name; "s[3]" finds stack "s".

        Raises:
            StaleHandleError: the name is not registered.
        """
        found = self._layers.get(name)
        if found is None:
            member = STACK_MEMBER.fullmatch(name)
            stack = self._layers.get(member["stack"]) if member else None
            if member and stack is not None and int(member["index"]) < stack.num_layers:
                found = stack
        if found is None:
            raise StaleHandleError(
                f"layer {name!r} is not registered in group {self._group.name!r}",
                layer=name,
                group=self._group.name,
            )
        return found

    def name_of_id(self, layer_id: int) -> str:
        """Returns the name of the layer with an id from a board record; empty if unknown."""
        name = self._ids.get(layer_id)
        if name is not None and not self._layers[name].num_layers:
            return name
        index = layer_id & (specs.MAX_STACK_LAYERS - 1)
        stack = self._ids.get(layer_id - index)
        if stack is None or index >= self._layers[stack].num_layers:
            return name or ""
        return f"{stack}[{index}]"

    def handles(self) -> Iterator[Handle]:
        """Yields each layer's handles, in order of registration."""
        for layer in self.all():
            for position in range(max(layer.num_layers, 1)):
                name = f"{layer.spec.name}[{position}]" if layer.num_layers else layer.spec.name
                base = layer.handle_base + position * layer.spec.in_flight
                for handle in range(layer.spec.in_flight):
                    yield Handle(name, handle, base + handle)
