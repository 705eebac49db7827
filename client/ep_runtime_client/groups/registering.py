"""Layers and stacks registered with the daemon, thousands in one call; without one, numbered."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ep_runtime import layer_specs, specs, wire
from ep_runtime.v1 import layer_service_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.groups.owner import GroupOwner


def register(
    session: GroupOwner,
    spec: specs.GroupSpec,
    generation: int,
    layers: Sequence[layer_specs.LayerSpec],
    stacks: Sequence[wire.LayerStackSpec],
    *,
    replace: bool = False,
) -> tuple[list[wire.RegisteredLayer], list[wire.RegisteredLayer]]:
    """Registers layers and stacks, thousands in one call, all of one call or none; without a
    daemon numbers them here.

    Raises:
        SpecMismatchError: a name is registered with other settings, and no `replace`.
        PoolExhaustedError: more handles than a board holds.
        StaleHandleError: the group is gone.
    """
    if not session.has_daemon:
        return (
            [
                wire.RegisteredLayer(s, 0, layer_specs.layer_id(spec.name, s.name), 0)
                for s in layers
            ],
            [
                wire.RegisteredLayer(
                    s.spec, s.num_layers, layer_specs.stack_base_id(spec.name, s.spec.name), 0
                )
                for s in stacks
            ],
        )
    found: tuple[list[wire.RegisteredLayer], list[wire.RegisteredLayer]] = ([], [])
    for first in range(0, len(layers) + len(stacks) or 1, wire.MAX_LAYERS_PER_CALL):
        last = first + wire.MAX_LAYERS_PER_CALL
        stacks_from = max(0, first - len(layers))
        answer = _register_some(
            session,
            layer_service_pb2.RegisterLayersRequest(
                op_id=uuid.uuid4().hex,
                group=spec.name,
                generation=generation,
                layers=[wire.layer_spec_to_proto(item) for item in layers[first:last]],
                stacks=[
                    wire.stack_spec_to_proto(item)
                    for item in stacks[stacks_from : max(0, last - len(layers))]
                ],
                replace=replace,
            ),
        )
        found[0].extend(wire.registered_from_proto(item) for item in answer.layers)
        found[1].extend(wire.registered_from_proto(item) for item in answer.stacks)
    return found


def _register_some(
    session: GroupOwner, request: layer_service_pb2.RegisterLayersRequest
) -> layer_service_pb2.RegisterLayersResponse:
    answer: layer_service_pb2.RegisterLayersResponse = session.run(
        lambda control: control.call(
            control.layers.RegisterLayers, request, timeout_s=transport.MUTATE_TIMEOUT_S
        )
    )
    return answer


def ask(session: GroupOwner, group: str, name: str) -> wire.RegisteredLayer:
    """A layer or a stack that the daemon knows by name.

    Raises:
        StaleHandleError: it knows none.
    """
    request = layer_service_pb2.GetLayerRequest(group=group, name=name)
    control = session.control
    answer = control.call(control.layers.GetLayer, request)
    return wire.registered_from_proto(answer.layer)
