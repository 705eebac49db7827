"""Where the commands get their rows: the daemon's admin service on admin.sock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from ep_runtime import env, wire
from ep_runtime.errors import PermissionDeniedError, RuntimeUnavailableError
from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime.v1 import admin_service_pb2_grpc, session_service_pb2
from ep_runtime_client.cli.daemon.plain import plain
from ep_runtime_client.daemons import children, runtime, transport
from ep_runtime_client.daemons.place import Place

_PAGE_SIZE = 1000
_TALLIES_PAGE_SIZE = 16  # each has the rows of its experts, of every layer


class Source:
    """A connection to the admin service of one daemon."""

    def __init__(
        self,
        directory: Path,
        channel: grpc.Channel,
        timeout_s: float,
        node: str = "",
        metadata: transport.Metadata = (),
    ) -> None:
        """`node` of the daemon's cluster answers; "" is the daemon itself."""
        self.directory = directory
        self._channel = channel
        self._node = node
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)

    def of_node(self, node: str) -> Source:
        """The same calls, for reading, answered by another node of the daemon's cluster."""
        return Source(self.directory, self._channel, self._timeout_s, node, self._metadata)

    def call(self, method: str, request: Any) -> dict[str, Any]:
        """One RPC's answer as plain values. Raises EpRuntimeError."""
        return plain(self._send(method, request))

    def _send(self, method: str, request: Any) -> Any:
        if self._node:
            request.node = self._node
        try:
            return getattr(self._stub, method)(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            ours = wire.error_from_rpc(error)
            ours.fields.setdefault("address", f"unix://{self.directory}")
            raise ours from None

    def pages(
        self, method: str, make_request: Callable[..., Any], field: str, **filters: Any
    ) -> list[dict[str, Any]]:
        """Every row of a paged list."""
        rows: list[dict[str, Any]] = []
        token = ""
        filters.setdefault("page_size", _PAGE_SIZE)
        while True:
            request = make_request(page_token=token, **filters)
            answer = self._send(method, request)
            rows += [plain(item) for item in getattr(answer, field)]
            token = answer.next_page_token
            if not token:
                return rows

    def status(self) -> dict[str, Any]:
        return self.call("GetStatus", messages.GetStatusRequest())

    def sessions(self) -> list[dict[str, Any]]:
        return self.pages("ListSessions", messages.ListSessionsRequest, "sessions")

    def groups(self) -> list[dict[str, Any]]:
        return [_flat_group(row) for row in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.pages("ListGroups", messages.ListGroupsRequest, "groups")

    def layers(self) -> list[dict[str, Any]]:
        rows = self.pages("ListLayers", messages.AdminServiceListLayersRequest, "layers")
        return [_flat_layer(row) for row in rows]

    def handles(self, *, age_s: float | None = None) -> list[dict[str, Any]]:
        """`age_s`: as they were that long ago."""
        request = messages.ListHandlesRequest
        return self.pages("ListHandles", request, "handles", age=_age(age_s))

    def buffers(self) -> list[dict[str, Any]]:
        rows = self.pages("ListBuffers", messages.ListBuffersRequest, "buffers")
        return [dict(row, owner=f"{row['job']}/{row['group']}") for row in rows]

    def ranks(self) -> list[dict[str, Any]]:
        return self.pages("ListRanks", messages.ListRanksRequest, "ranks")

    def tallies(self, group: str = "", *, age_s: float | None = None) -> list[dict[str, Any]]:
        """`age_s`: as they were that long ago; `read_s` says when that was."""
        asked = {"page_size": _TALLIES_PAGE_SIZE, "group": group, "age": _age(age_s)}
        return self.pages("ListTallies", messages.ListTalliesRequest, "ranks", **asked)

    def events(self, after: int) -> list[dict[str, Any]]:
        return self.pages("ListEvents", messages.ListEventsRequest, "events", after_sequence=after)

    def drain(self, deadline_s: float, *, shutdown: bool) -> dict[str, Any]:
        request = messages.DrainRequest(deadline=wire.duration(deadline_s), shutdown=shutdown)
        return self.call("Drain", request)

    def fence(self, session_id: str, reason: str) -> dict[str, Any]:
        return self.call("Fence", messages.FenceRequest(session_id=session_id, reason=reason))

    def reclaim(
        self, name: str | None, *, job: str, uid: int | None, all_retained: bool
    ) -> dict[str, Any]:
        request = messages.ReclaimRequest(
            name=name or "", job=job, uid=uid, all_retained=all_retained
        )
        return self.call("Reclaim", request)


def _age(age_s: float | None) -> Any:
    return wire.duration(age_s) if age_s is not None else None


def _flat_group(row: dict[str, Any]) -> dict[str, Any]:
    """One level of keys, spec included; the members stay a list."""
    group = row["group"]
    spec = group["spec"]
    axes = {axis["name"]: axis["size"] for axis in spec["mesh_axes"]}
    world_size = len(group["members"])
    ep_size = 1
    for axis in spec["ep_axis"]:
        ep_size *= axes.get(axis, 1)
    pids = sorted({member["pid"] for member in group["members"] if member["pid"]})
    rest = {key: value for key, value in row.items() if key not in ("group", "age_s")}
    about = {key: value for key, value in group.items() if key not in ("spec", "members")}
    settings = {key: value for key, value in spec.items() if key not in ("name", "mesh_axes")}
    size = [value for value in (spec["workspace"] or {}).values() if value is not None]
    settings["workspace"] = size[0] if size else "auto"
    return {
        "name": spec["name"],
        **about,
        "age_s": row["age_s"],
        "world_size": world_size,
        "ep_size": ep_size,
        "mesh_axes": axes,
        "pids": pids,
        **rest,
        **settings,
        "members": group["members"],
    }


def _flat_layer(row: dict[str, Any]) -> dict[str, Any]:
    layer = row["layer"]
    about = {key: value for key, value in row.items() if key != "layer"}
    ids = {key: value for key, value in layer.items() if key not in ("spec", "already_registered")}
    return {"name": layer["spec"]["name"], **about, **layer["spec"], **ids}


def private_addresses(timeout_s: float) -> list[str]:
    """Addresses of the embedded daemons of this user that answer."""
    found = [
        path
        for path in env.private_directories()
        if children.answers(Place(path, os.geteuid()), timeout_s)
    ]
    return [f"unix://{path}" for path in found]


@contextlib.contextmanager
def open_source(address: str | None, *, timeout_s: float) -> Iterator[Source]:
    """The admin service at an address; over api.sock, with what is ours, where we may not order.

    Raises:
        RuntimeUnavailableError: no daemon answers there.
        PermissionDeniedError: it is another user's.
    """
    try:
        place = runtime.daemon_place(address)
        rpc = transport.RpcChannel(place, wire.ADMIN_SOCKET, timeout_s)
    except PermissionDeniedError as error:
        if "directory" in error.fields:  # it is not to be trusted with anything
            raise
        with _as_session(place, timeout_s) as found:
            yield found
        return
    except RuntimeUnavailableError as error:
        if address is None and (private := private_addresses(timeout_s)):
            raise RuntimeUnavailableError(
                f"{error}; processes of yours have private daemons: ask one with --address "
                + " or ".join(private),
                **error.fields,
            ) from error
        raise
    try:
        yield Source(place.directory, rpc.channel, timeout_s)
    finally:
        rpc.close()


@contextlib.contextmanager
def _as_session(place: Place, timeout_s: float) -> Iterator[Source]:
    """What a user whom the daemon serves may read: a session that only asks."""
    token = transport.hello(place, timeout_s).session_token
    control = transport.ControlChannel(place, token)
    try:
        yield Source(place.directory, control.channel, timeout_s, metadata=control.metadata)
        control.call(control.sessions.CloseSession, session_service_pb2.CloseSessionRequest())
    finally:
        control.close()
