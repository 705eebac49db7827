"""Calls a daemon's admin service and returns answers as plain values for JSON and tables.

Rows have every field, with its name in the proto. Durations become `<name>_s` in seconds,
timestamps ISO 8601 in UTC, enums their name without the prefix that the proto repeats, absent
messages None.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError, Message

from ep_runtime import wire
from ep_runtime.errors import EpRuntimeError
from ep_runtime.text import iec
from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime_client.daemons import transport

_PAGE_SIZE = 1000
# More pages than any list needs: a limit, because another node may send pages without end.
MAX_LIST_PAGES = 10_000
MAX_LIST_BYTES = 64 << 20
MAX_LIST_VALUES = 3_000_000  # some 250 MB
# Time limit for all pages of a list, as a multiple of one answer's timeout.
LIST_WAITS = 2


_SERVICE = messages.DESCRIPTOR.services_by_name["AdminService"]
# Errors while reading values that do not follow the proto.
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
        """`node`: the node of the daemon's cluster that answers; "" is the daemon itself."""
        self.directory = directory
        self._channel = channel
        self._node = node
        self._timeout_s = timeout_s
        self._metadata = metadata

    def of_node(self, node: str) -> Source:
        """Returns a source in which another node of the cluster answers reading calls."""
        return Source(self.directory, self._channel, self._timeout_s, node, self._metadata)

    def call(self, method: str, request: Any, flat: Flat = dict) -> dict[str, Any]:
        """Makes one RPC and returns its answer as plain values. Raises EpRuntimeError."""
        answer = self._send(method, request, self._timeout_s)
        with self._making_sense_of(method):
            return flat(plain(answer))

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
        """Converts errors in reading a node's answer to EpRuntimeError."""
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
        """Reads all pages of a list and returns its rows, each converted by `flat`.

        Raises:
            EpRuntimeError: the call failed, or the list has no end or values that no daemon sends.
        """
        rows: list[dict[str, Any]] = []
        token, seen = "", {""}
        left_bytes, budget = MAX_LIST_BYTES, ValueBudget(MAX_LIST_VALUES)
        left_s = list_s = LIST_WAITS * self._timeout_s
        while True:
            request = make_request(page_size=_PAGE_SIZE, page_token=token, **filters)
            began_s = time.monotonic()
            answer = self._send(method, request, min(self._timeout_s, left_s))
            left_s -= time.monotonic() - began_s
            with self._making_sense_of(method):
                rows += [flat(plain(item, budget)) for item in getattr(answer, field)]
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
        """Lists handles; with `age_s`, their state that long ago."""
        request = messages.ListHandlesRequest
        return self.pages("ListHandles", request, "handles", age=_age(age_s))

    def buffers(self) -> list[dict[str, Any]]:
        def with_owner(row: dict[str, Any]) -> dict[str, Any]:
            return {**row, "owner": f"{row['job']}/{row['group']}"}

        return self.pages("ListBuffers", messages.ListBuffersRequest, "buffers", flat=with_owner)

    def ranks(self) -> list[dict[str, Any]]:
        return self.pages("ListRanks", messages.ListRanksRequest, "ranks")

    def tallies(self, group: str = "", *, age_s: float | None = None) -> list[dict[str, Any]]:
        """Lists tallies; with `age_s`, their state that long ago, whose exact time is `read_s`."""
        request, age = messages.ListTalliesRequest, _age(age_s)
        return self.pages(
            "ListTallies", request, "ranks", flat=_whole("now", "read_s"), group=group, age=age
        )

    def events(self, after: int = 0) -> list[dict[str, Any]]:
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
    """Flattens a group and its spec to one level of keys; members stay a list."""
    group = row["group"]
    spec = group["spec"]
    axes = {axis["name"]: axis["size"] for axis in spec["mesh_axes"]}
    pids = sorted({member["pid"] for member in group["members"] if member["pid"]})
    gpus = {gpu.pop("world_rank"): gpu for gpu in row["gpus"]}
    devices = dict.fromkeys(_gpu(**gpu) for gpu in gpus.values())
    rest = {key: value for key, value in row.items() if key not in ("group", "age_s", "gpus")}
    about = {key: value for key, value in group.items() if key not in ("spec", "members")}
    settings = {key: value for key, value in spec.items() if key not in ("name", "mesh_axes")}
    size = [value for value in (spec["workspace"] or {}).values() if value is not None]
    settings["workspace"] = size[0] if size else "auto"
    return {
        "name": spec["name"],
        **about,
        "age_s": row["age_s"],
        "world_size": len(group["members"]),
        "ep_size": math.prod(axes.get(axis, 1) for axis in spec["ep_axis"]),
        "mesh_axes": axes,
        "pids": pids,
        "devices": [*devices],
        **rest,
        **settings,
        "members": [{**each, **gpus.get(each["world_rank"], {})} for each in group["members"]],
    }


def _gpu(device: str, gpu_index: int | None) -> str:
    return f"{'?' if gpu_index is None else gpu_index}:{device}"


def _flat_layer(row: dict[str, Any]) -> dict[str, Any]:
    layer = row["layer"]
    about = {key: value for key, value in row.items() if key != "layer"}
    ids = {key: value for key, value in layer.items() if key not in ("spec", "already_registered")}
    return {"name": layer["spec"]["name"], **about, **layer["spec"], **ids}


def _whole(*keys: str) -> Flat:
    """Returns a check that returns a row if it has these keys, and else raises ValueError."""

    def flat(row: dict[str, Any]) -> dict[str, Any]:
        missing = [key for key in keys if row[key] is None]
        if missing:
            raise ValueError(f"a row without {', '.join(missing)}")
        return row

    return flat


def _whole_status(row: dict[str, Any]) -> dict[str, Any]:
    if row["cluster"]:
        _whole("since_s")(row["cluster"])
    if row["recovery"] and row["recovery"]["under_way"]:  # otherwise left_s is absent
        _whole("left_s")(row["recovery"])
    if row["drain"]:
        _whole("since_s")(row["drain"])
    return _whole("uptime_s")(row)


class ValueBudget:
    """Limits the number of values in the messages of one list."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        """Takes `count` values; raises ValueError if the limit is exceeded."""
        self._left -= count
        if self._left < 0:
            raise ValueError(f"it has more than {self._most} values")


def plain(message: Message, budget: ValueBudget | None = None) -> dict[str, Any]:
    """Converts a message to a dict. Raises ValueError or OverflowError for impossible values."""
    fields = message.DESCRIPTOR.fields
    if budget is not None:
        budget.take(len(fields))
    row: dict[str, Any] = {}
    for field in fields:
        value = getattr(message, field.name)
        key = field.name
        if _is_duration(field):
            key += "_s"
        if field.is_repeated:
            row[key] = _repeated(field, value, budget)
        elif field.has_presence and not message.HasField(field.name):
            row[key] = None
        else:
            row[key] = _single(field, value, budget)
    return row


def _is_duration(field: Any) -> bool:
    return field.message_type is not None and field.message_type.name == "Duration"


def _repeated(field: Any, value: Any, budget: ValueBudget | None) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    return [_single(field, item, budget) for item in value]


def _single(field: Any, value: Any, budget: ValueBudget | None) -> Any:
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if isinstance(value, duration_pb2.Duration):
        return round(wire.seconds(value), 6)
    if isinstance(value, timestamp_pb2.Timestamp):
        return value.ToDatetime(tzinfo=datetime.UTC).isoformat(timespec="milliseconds")
    if isinstance(value, Message):
        return plain(value, budget)
    return value


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """Returns READY for GROUP_STATE_READY of GroupState, and an unknown number as text."""
    found = enum.values_by_number.get(number)
    if found is None:
        return str(number)
    zero = enum.values_by_number[0].name  # ends in _UNSPECIFIED, buf's rule
    return str(found.name).removeprefix(zero.removesuffix("UNSPECIFIED"))
