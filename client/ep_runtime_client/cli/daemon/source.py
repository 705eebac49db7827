"""Where the commands get their rows: the daemon's admin service on admin.sock."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from ep_runtime import env, wire
from ep_runtime.errors import EpRuntimeError, PermissionDeniedError, RuntimeUnavailableError
from ep_runtime.units import iec
from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import message_values
from ep_runtime_client.daemons import addresses, children, transport
from ep_runtime_client.daemons.socket_directory import SocketDirectory

_PAGE_SIZE = 1000
# More than any daemon's list has: another node may answer anything, and without an end.
MAX_LIST_PAGES = 10_000
MAX_LIST_BYTES = 64 << 20
MAX_LIST_VALUES = 3_000_000  # some 250 MB
# The waits for a list's pages are at most so many times that for one answer.
LIST_WAITS = 2


_SERVICE = messages.DESCRIPTOR.services_by_name["AdminService"]
# What looking at values raises that are not as they must be.
_SENSELESS = (ArithmeticError, AttributeError, DecodeError, LookupError, TypeError, ValueError)

Flat = Callable[[dict[str, Any]], dict[str, Any]]


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

    def of_node(self, node: str) -> Source:
        """The same calls, for reading, answered by another node of the daemon's cluster."""
        return Source(self.directory, self._channel, self._timeout_s, node, self._metadata)

    def call(self, method: str, request: Any, flat: Flat = dict) -> dict[str, Any]:
        """One RPC's answer as plain values. Raises EpRuntimeError."""
        answer = self._send(method, request, self._timeout_s)
        with self._making_sense_of(method):
            return flat(message_values.plain(answer))

    def _send(self, method: str, request: Any, timeout_s: float) -> Any:
        if self._node:
            request.node = self._node
        call: Any = self._channel.unary_unary(f"/{_SERVICE.full_name}/{method}")
        data = request.SerializeToString()
        try:
            answer = call(data, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            ours = wire.error_from_rpc(error)
            ours.fields.setdefault("address", f"unix://{self.directory}")
            raise ours from None
        answer_type = _SERVICE.methods_by_name[method].output_type
        with self._making_sense_of(method):
            return message_factory.GetMessageClass(answer_type).FromString(answer)

    @contextlib.contextmanager
    def _making_sense_of(self, method: str) -> Iterator[None]:
        """Values of a node's answer may be any. Raises EpRuntimeError."""
        try:
            yield
        except _SENSELESS as error:
            raise self._odd(method, str(error) or type(error).__name__) from error

    def _odd(self, method: str, why: str) -> EpRuntimeError:
        who = f"node {self._node!r}" if self._node else f"the daemon at {self.directory}"
        return EpRuntimeError(f"the answer of {who} to {method} cannot be read: {why}")

    def pages(
        self,
        method: str,
        make_request: Callable[..., Any],
        field: str,
        *,
        flat: Flat = dict,
        **filters: Any,
    ) -> list[dict[str, Any]]:
        """Every row of a paged list, each as `flat` makes it.

        Raises:
            EpRuntimeError: of the call, or the list has no end, or what no daemon says.
        """
        rows: list[dict[str, Any]] = []
        token, seen = "", {""}
        left_bytes, budget = MAX_LIST_BYTES, message_values.ValueBudget(MAX_LIST_VALUES)
        left_s = list_s = LIST_WAITS * self._timeout_s
        while True:
            request = make_request(page_size=_PAGE_SIZE, page_token=token, **filters)
            began_s = time.monotonic()
            answer = self._send(method, request, min(self._timeout_s, left_s))
            left_s -= time.monotonic() - began_s
            with self._making_sense_of(method):
                rows += [
                    flat(message_values.plain(item, budget)) for item in getattr(answer, field)
                ]
            left_bytes -= answer.ByteSize()
            token = answer.next_page_token
            if not token:
                return rows
            if token in seen:
                raise self._odd(method, f"page {token[:40]!r} comes twice")
            seen.add(token)
            if left_bytes < 0 or len(seen) > MAX_LIST_PAGES:
                size = iec(MAX_LIST_BYTES - left_bytes)
                raise self._odd(method, f"{len(seen) - 1} pages with {size}, and no end")
            if left_s <= 0:
                raise self._odd(method, f"no end within {list_s:g} s")

    def status(self) -> dict[str, Any]:
        return self.call("GetStatus", messages.GetStatusRequest(), flat=_whole_status)

    def sessions(self) -> list[dict[str, Any]]:
        return self.pages("ListSessions", messages.ListSessionsRequest, "sessions")

    def groups(self) -> list[dict[str, Any]]:
        return self.pages("ListGroups", messages.ListGroupsRequest, "groups", flat=_flat_group)

    def layers(self) -> list[dict[str, Any]]:
        request = messages.AdminServiceListLayersRequest
        return self.pages("ListLayers", request, "layers", flat=_flat_layer)

    def handles(self, *, age_s: float | None = None) -> list[dict[str, Any]]:
        """`age_s`: as they were that long ago."""
        request = messages.ListHandlesRequest
        return self.pages("ListHandles", request, "handles", age=_age(age_s))

    def buffers(self) -> list[dict[str, Any]]:
        request = messages.ListBuffersRequest
        return self.pages("ListBuffers", request, "buffers", flat=_with_owner)

    def ranks(self) -> list[dict[str, Any]]:
        return self.pages("ListRanks", messages.ListRanksRequest, "ranks")

    def tallies(self, group: str = "", *, age_s: float | None = None) -> list[dict[str, Any]]:
        """`age_s`: as they were that long ago; `read_s` says when that was."""
        request, age = messages.ListTalliesRequest, _age(age_s)
        return self.pages(
            "ListTallies", request, "ranks", flat=_whole("now", "read_s"), group=group, age=age
        )

    def events(self, after: int) -> list[dict[str, Any]]:
        request = messages.ListEventsRequest
        return self.pages(
            "ListEvents", request, "events", flat=_whole("time"), after_sequence=after
        )

    def drain(self, deadline_s: float, *, shutdown: bool) -> dict[str, Any]:
        request = messages.DrainRequest(deadline=wire.duration(deadline_s), shutdown=shutdown)
        return self.call("Drain", request)

    def undrain(self) -> dict[str, Any]:
        return self.call("Undrain", messages.UndrainRequest())

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


def _with_owner(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "owner": f"{row['job']}/{row['group']}"}


def _whole(*keys: str) -> Flat:
    """Gives a row back that has what every daemon says; else raises ValueError."""

    def flat(row: dict[str, Any]) -> dict[str, Any]:
        missing = [key for key in keys if row[key] is None]
        if missing:
            raise ValueError(f"a row without {', '.join(missing)}")
        return row

    return flat


def _whole_status(row: dict[str, Any]) -> dict[str, Any]:
    if row["cluster"]:
        _whole("since_s")(row["cluster"])
    if row["recovery"] and row["recovery"]["under_way"]:  # else no time is left
        _whole("left_s")(row["recovery"])
    if row["drain"]:
        _whole("since_s")(row["drain"])
    return _whole("uptime_s")(row)


def default_place(timeout_s: float) -> SocketDirectory:
    """The daemon that reading commands ask without --address.

    $EP_RUNTIME_ADDRESS names it; else it is the node's daemon if that answers, else the only
    private daemon of this user.

    Raises:
        RuntimeUnavailableError: several private daemons answer, or none.
    """
    place = addresses.daemon_place(None)
    if env.address() is not None or children.answers(place, timeout_s):
        return place
    mine = [SocketDirectory(path, os.geteuid()) for path in env.private_directories()]
    private = [each for each in mine if children.answers(each, timeout_s)]
    if len(private) == 1:
        return private[0]
    if not private:
        raise place.unavailable("none runs there, and no private one of yours does")
    raise RuntimeUnavailableError(
        f"no daemon answers at {place.address}, but {len(private)} private ones of yours do; "
        "choose by --address " + " or ".join(shlex.quote(each.address) for each in private),
        address=place.address,
        answered=False,
    )


@contextlib.contextmanager
def open_source(address: str | None, *, timeout_s: float) -> Iterator[Source]:
    """The admin service at an address; over api.sock, with what is ours, where we may not order.

    Without an address it is that of `default_place`; a line on stderr names a private daemon.

    Raises:
        RuntimeUnavailableError: no daemon answers there.
        PermissionDeniedError: it is another user's.
    """
    try:
        place = addresses.daemon_place(address)
        rpc = transport.RpcChannel(place, wire.ADMIN_SOCKET, timeout_s)
    except PermissionDeniedError as error:
        if "directory" in error.fields:  # it is not to be trusted with anything
            raise
        with _as_session(place, timeout_s) as found:
            yield found
        return
    except RuntimeUnavailableError:
        if address is not None or env.address() is not None:
            raise
        place = default_place(timeout_s)
        rpc = transport.RpcChannel(place, wire.ADMIN_SOCKET, timeout_s)
        render.err(f"ep-runtime: asking your only private daemon, {place.address}")
    try:
        yield Source(place.directory, rpc.channel, timeout_s)
    finally:
        rpc.close()


def exact(address: str | None) -> str:
    """The address itself, or that of the default daemon: no private one stands in for it."""
    return addresses.daemon_place(address).address


@contextlib.contextmanager
def _as_session(place: SocketDirectory, timeout_s: float) -> Iterator[Source]:
    """What a user whom the daemon serves may read: a session that only asks."""
    token = transport.hello(place, timeout_s).session_token
    control = transport.ControlChannel(place, token)
    try:
        yield Source(place.directory, control.channel, timeout_s, metadata=control.metadata)
        control.call(control.sessions.CloseSession, session_service_pb2.CloseSessionRequest())
    finally:
        control.close()
