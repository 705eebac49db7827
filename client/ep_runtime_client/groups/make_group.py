"""Makes a group from a caller's spec and mesh, or from the spec that the daemon stores."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime import device_layout, specs, wire
from ep_runtime.errors import (
    EpRuntimeError,
    GroupNotReadyError,
    InvalidArgumentError,
    SpecMismatchError,
    StaleHandleError,
)
from ep_runtime.v1 import group_service_pb2, layer_service_pb2, session_service_pb2
from ep_runtime_client.base import jax_state, meshes
from ep_runtime_client.base.dtypes import dtype_name
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.daemons.client import DaemonClient
from ep_runtime_client.groups import estimate, forming
from ep_runtime_client.groups.group import Group
from ep_runtime_client.groups.held_group import HeldGroup

if TYPE_CHECKING:
    from jax.sharding import Mesh


def resolve(client: DaemonClient, mesh: Any, settings: specs.GroupSettings) -> specs.GroupSpec:
    """Returns the spec of a group with these settings on a concrete mesh.

    Raises:
        InvalidArgumentError: names the argument, and the wanted and the given value.
        NotImplementedError: the transport is not part of this version.
    """
    mesh_axes = meshes.axes_of(mesh)
    meshes.devices_of(mesh)
    spec = dataclasses.replace(
        settings,
        max_token_dtype=dtype_name(settings.max_token_dtype, "max_token_dtype"),
        transport=meshes.resolve_transport(
            settings.transport,
            mesh,
            has_daemon=client.has_daemon,
            in_cluster=lambda: _in_cluster(client),
        ),
    ).on(mesh_axes)
    device_layout.check_limits(spec)
    return dataclasses.replace(spec, retain_s=0.0) if client.is_private else spec


def _in_cluster(client: DaemonClient) -> bool:
    control = client.control
    request = session_service_pb2.GetServerInfoRequest()
    return wire.CLUSTER in control.call(control.sessions.GetServerInfo, request).features


def asked(spec: specs.GroupSpec) -> specs.GroupSpec:
    """Returns the spec without node_size, which daemons fill in."""
    return dataclasses.replace(spec, node_size=0)


def is_same(found: HeldGroup, spec: specs.GroupSpec, mesh: Mesh, *, replace: bool) -> bool:
    """Whether create_group may return `found`; False if it must make a new group.

    Raises:
        SpecMismatchError: the settings differ, and `replace` is False.
    """
    if found.is_gone:
        return False
    difference = spec.difference(asked(found.spec))
    if difference is None:
        theirs, ours = ([d.id for d in meshes.rank_devices(m, spec)] for m in (found.mesh, mesh))
        if theirs == ours:
            return True
        difference = ("mesh.devices", ours, theirs)
    if replace:
        return False
    field, ours, theirs = difference
    raise SpecMismatchError(
        f"group {spec.name!r} exists with {field}={theirs}, this call has {field}={ours}; make "
        f"them equal, or pass replace=True{jax_state.outside()}",
        object=spec.name,
        field=field,
        theirs=theirs,
        ours=ours,
    )


def make_group(
    client: DaemonClient, spec: specs.GroupSpec, mesh: Mesh, *, replace: bool
) -> HeldGroup:
    """Forms the group and makes it this process's live group of that name."""
    _check_free(client, spec.name)
    owners = [int(device.process_index) for device in meshes.rank_devices(mesh, spec)]
    check_shared(client, spec.name, owners)
    claim = _claim(spec, mesh)
    group = HeldGroup(client, mesh, forming.form(client, spec, claim, replace=replace))
    group.group = Group(group)
    try:
        live_groups.add(group)
    except BaseException:
        with contextlib.suppress(EpRuntimeError):  # errors of closing must not hide the first one
            group.close()
        raise
    # XLA reports memory of its own process only.
    ours = meshes.rank_devices(mesh, spec)[claim.ranks[0]]
    estimate.report(group.spec, ours, len(claim.ranks))
    return group


def _check_free(client: DaemonClient, name: str) -> None:
    """Raises if the name is open here, because layers find their group by name."""
    other = live_groups.get(name)
    if other is not None and other.client is not client:
        raise InvalidArgumentError(
            f"group {name!r} is open in this process's session with {other.client.address}; "
            "close it there first, or choose another name",
            argument="name",
        )


def check_shared(client: DaemonClient, name: str, owners: Sequence[int]) -> None:
    """Raises InvalidArgumentError if the other processes of the ranks' `owners` cannot join the
    group."""
    processes = sorted(set(owners))
    if len(processes) > 1 and client.alone:
        raise InvalidArgumentError(
            f"group {name!r} spans the processes {processes}, but ep.connect() came before "
            f"jax.distributed.initialize: each process has {client.alone}, and none can reach "
            "the others. Call jax.distributed.initialize first, then ep.connect(), in every "
            "process",
            argument="mesh",
            processes=processes,
        )
    if len(processes) > 1 and client.has_daemon:
        _check_hosts(client, name, owners)


def _check_hosts(client: DaemonClient, name: str, owners: Sequence[int]) -> None:
    """Raises if the processes, in rank order, are on several hosts without a cluster.

    Raises:
        InvalidArgumentError: they are on several hosts.
        GroupNotReadyError: one of them has not connected in time.
    """
    jax_state.tell_host()  # needed if ep.connect() came before jax.distributed
    if _in_cluster(client):
        return
    hosts = jax_state.hosts_of(dict.fromkeys(owners), client.timeout_s)
    by_host: dict[str, list[int]] = {}
    for process, host in sorted(hosts.items()):
        by_host.setdefault(host, []).append(process)
    if absent := by_host.pop("", []):
        raise GroupNotReadyError(
            f"group {name!r}: the processes {absent} did not call ep.connect() within "
            f"{client.timeout_s:g} s",
            group=name,
            missing_ranks=[rank for rank, owner in enumerate(owners) if owner in absent],
        )
    if len(by_host) > 1:
        parts = " and ".join(map(str, by_host.values()))
        raise InvalidArgumentError(
            f"group {name!r} spans {len(by_host)} hosts, with the processes {parts}, and the "
            f"daemon at {client.address} is not joined to those of other hosts. Run `ep-runtime "
            "serve --coordinator ADDRESS` on one host and `ep-runtime serve --join ADDRESS` on "
            'each other one (docs/nodes.md), or take ep.connect("none"), which needs no daemon',
            argument="mesh",
            processes=sorted(hosts),
        )


def _claim(spec: specs.GroupSpec, mesh: Mesh) -> forming.Claim:
    """Returns the claim on world ranks whose devices this process drives.

    Raises:
        InvalidArgumentError: it drives none of them.
    """
    import jax

    here = jax.process_index()
    ours = {
        rank: device
        for rank, device in enumerate(meshes.rank_devices(mesh, spec))
        if device.process_index == here
    }
    if not ours:
        raise InvalidArgumentError(
            f"mesh has no device of this process ({here}); it spans processes "
            f"{meshes.processes_of(mesh)}",
            argument="mesh",
        )
    ordinals = [device.local_hardware_id for device in ours.values()]
    return forming.Claim(tuple(ours), tuple(ordinals) if device_layout.on_device(spec) else ())


def is_state(name: str) -> InvalidArgumentError:
    """Makes the error for the name of a job's state copy, which is not a group of tokens."""
    return InvalidArgumentError(
        f"group {name!r} is a copy of the job's state; `State.restore` reads it", argument="name"
    )


def stored_spec(client: DaemonClient, name: str) -> specs.GroupSpec:
    """Returns the spec that the daemon keeps for a group of the session's job.

    Raises:
        StaleHandleError: the daemon knows no group of that name.
    """
    if not client.has_daemon:
        raise StaleHandleError(
            f'group {name!r} is not open in this process, and address="none" has no daemon to ask',
            group=name,
        )
    control = client.control
    answer = control.call(control.groups.GetGroup, group_service_pb2.GetGroupRequest(name=name))
    spec = asked(wire.group_spec_from_proto(answer.group.spec))
    if spec.transport == specs.STATE:
        raise is_state(name)
    return spec


def default_mesh(spec: specs.GroupSpec) -> Mesh:
    """Makes the spec's mesh over this job's devices, in the order of `jax.make_mesh` on CPU.

    Raises:
        InvalidArgumentError: the job has fewer devices than the group.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    devices = jax.devices("cpu") if spec.transport == "memfd" else jax.devices()
    if len(devices) < spec.world_size:
        raise InvalidArgumentError(
            f"group {spec.name!r} needs {spec.world_size} devices {dict(spec.mesh_axes)}, "
            f"got {len(devices)} in this job; pass mesh=",
            argument="mesh",
        )
    shape = [size for _, size in spec.mesh_axes]
    names = [name for name, _ in spec.mesh_axes]
    return Mesh(np.array(devices[: spec.world_size]).reshape(shape), names)


def adopt_layers(group: HeldGroup) -> None:
    """Makes every layer that the daemon keeps for the group usable here."""
    control = group.client.control
    token = ""
    while True:
        request = layer_service_pb2.ListLayersRequest(
            group=group.name, page_size=10_000, page_token=token
        )
        answer = control.call(control.layers.ListLayers, request)
        group.adopt([wire.registered_from_proto(item) for item in answer.layers])
        token = answer.next_page_token
        if not token:
            return
