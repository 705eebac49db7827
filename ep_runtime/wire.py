"""Converts specs to protobuf messages and errors to gRPC statuses, and back.

Conversions from protobuf validate all fields, because a peer may send anything. The functions do
not use sockets. The module needs grpcio and protobuf, but not JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import code_pb2, error_details_pb2, status_pb2

import ep_runtime
from ep_runtime import errors, layer_specs, specs, workspace
from ep_runtime.v1 import types_pb2

API_VERSION = "v1"
CLUSTER = "cluster"  # feature of a daemon that belongs to a cluster
API_SOCKET = "api.sock"
FD_SOCKET = "fd.sock"
ADMIN_SOCKET = "admin.sock"

TOKEN_KEY = "ep-session-token"
PID_KEY = "ep-session-pid"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "ep-runtime"

# Limit of layers and stacks in one call; callers with more make several calls.
MAX_LAYERS_PER_CALL = 4096
# Longest request that a daemon reads; MAX_LAYERS_PER_CALL layers with the longest names use two
# thirds of this size.
MAX_REQUEST_BYTES = 1 << 20
# Longest answer, for all layers that a group can have.
MAX_MESSAGE_BYTES = 16 << 20
MAX_PACKET_BYTES = 64 << 10
MAX_FDS_PER_PACKET = 64  # the kernel allows 253

# Limits of lists and texts in an error, because gRPC refuses trailers over 8 KiB.
_MAX_ERROR_LIST = 64
_MAX_ERROR_TEXT = 1500


def work_together(one: str, other: str) -> bool:
    """Returns whether daemons and clients of two package versions work together.

    The major versions must be equal, and the minor versions at most one apart.
    """
    ours, theirs = (re.match(r"(\d+)\.(\d+)", version) for version in (one, other))
    if ours is None or theirs is None:
        return one == other
    return ours[1] == theirs[1] and abs(int(ours[2]) - int(theirs[2])) <= 1


@dataclasses.dataclass(frozen=True)
class LayerStackSpec:
    """A stack of `num_layers` equal layers; the spec's name is the stack's name."""

    spec: layer_specs.LayerSpec
    num_layers: int


@dataclasses.dataclass(frozen=True)
class RegisteredLayer:
    """A registered layer (with num_layers 0) or stack.

    Handle h of layer i has the index handle_base + i * spec.in_flight + h on the group's board.
    """

    spec: layer_specs.LayerSpec
    num_layers: int
    base_id: int
    handle_base: int
    already_registered: bool = False

    @property
    def num_handles(self) -> int:
        return max(self.num_layers, 1) * self.spec.in_flight


MessageT = TypeVar("MessageT", bound=Message)


def filled(kind: type[MessageT], source: Any, /, **others: Any) -> MessageT:
    """Makes a message from attributes of `source` named like its fields, and from `others`."""
    classes: Any = kind, type(source)
    names = (name for name in _shared(*classes) if name not in others)
    return kind(**{name: getattr(source, name) for name in names}, **others)


@functools.cache
def _shared(kind: Any, of: Any) -> tuple[str, ...]:
    """Returns the message's field names that a dataclass or NamedTuple has as attributes."""
    declared = getattr(of, "_fields", None) or [field.name for field in dataclasses.fields(of)]
    known = {*declared, *dir(of)}
    return tuple(name for name in kind.DESCRIPTOR.fields_by_name if name in known)


def seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def duration(value_s: float) -> duration_pb2.Duration:
    """Converts seconds to a Duration. Raises InvalidArgumentError if it cannot hold them."""
    if not abs(value_s) < 315_576_000_000:  # also NaN
        raise errors.InvalidArgumentError(f"{value_s} s is not a duration", argument="duration")
    whole = int(value_s)
    nanos = round((value_s - whole) * 1e9)
    if abs(nanos) == 1_000_000_000:  # the fraction was rounded up to a second
        whole, nanos = whole + (1 if nanos > 0 else -1), 0
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


# Specs


def _spec_fields() -> Iterator[tuple[str, FieldDescriptor]]:
    """Yields each setting's name with its message field, which has the name without "_s"."""
    fields: Any = types_pb2.GroupSpec.DESCRIPTOR.fields_by_name
    for setting in dataclasses.fields(specs.GroupSpec):
        yield setting.name, fields.get(setting.name) or fields[setting.name.removesuffix("_s")]


def _is_duration(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and kind.full_name == "google.protobuf.Duration"


def _is_absent(message: types_pb2.GroupSpec, field: FieldDescriptor) -> bool:
    """Returns whether a message lacks a setting, because an older version sent it."""
    return field.message_type is None and field.has_presence and not message.HasField(field.name)


def _setting_to_proto(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:  # "drop" becomes ON_OVERFLOW_DROP
        return field.enum_type.values_by_name[f"{field.name}_{value}".upper()].number
    if _is_duration(field):
        return duration(value)
    if field.name == "workspace":
        return _workspace_to_proto(value)
    if field.name == "mesh_axes":
        return [types_pb2.MeshAxis(name=name, size=size) for name, size in value]
    return value


def _setting_from_proto(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        found = field.enum_type.values_by_number.get(value)
        return str(value) if found is None else found.name.lower().removeprefix(f"{field.name}_")
    if _is_duration(field):
        return seconds(value)
    if field.name == "workspace":
        size = value.WhichOneof("size")
        return "auto" if size is None else getattr(value, size)
    if field.name == "mesh_axes":
        return tuple((axis.name, axis.size) for axis in value)
    return value


def _workspace_to_proto(value: workspace.Setting) -> types_pb2.Workspace:
    if isinstance(value, str):
        return types_pb2.Workspace()
    if isinstance(value, int):
        return types_pb2.Workspace(bytes=value)
    return types_pb2.Workspace(factor=value)


def _unknown_fields(message: types_pb2.GroupSpec | types_pb2.Workspace) -> set[int]:
    fields: Any = UnknownFieldSet(message)
    return {field.field_number for field in fields}


def group_spec_to_proto(spec: specs.GroupSpec) -> types_pb2.GroupSpec:
    return types_pb2.GroupSpec(
        **{
            field.name: _setting_to_proto(field, getattr(spec, name))
            for name, field in _spec_fields()
        }
    )


def group_spec_from_proto(message: types_pb2.GroupSpec) -> specs.GroupSpec:
    """Converts a group's spec; absent settings get their defaults.

    Raises:
        InvalidArgumentError: a field is invalid; the message names the field.
        VersionSkewError: the message has settings of a newer version.
    """
    if unknown := sorted(_unknown_fields(message) | _unknown_fields(message.workspace)):
        raise errors.VersionSkewError(
            f"group {message.name!r} has settings (fields {unknown[:8]}) that version "
            f"{ep_runtime.__version__} does not know; leave out settings that are newer, or "
            "upgrade every daemon and client of the group",
            fields=unknown[:8],
            version=ep_runtime.__version__,
        )
    for axes in (message.mesh_axes, message.ep_axis, message.outer_axes):
        specs.check_axis_count(len(axes))
    return specs.make_group_spec(
        **{
            name: _setting_from_proto(field, getattr(message, field.name))
            for name, field in _spec_fields()
            if not _is_absent(message, field)
        }
    )


def layer_spec_to_proto(spec: layer_specs.LayerSpec) -> types_pb2.LayerSpec:
    return filled(types_pb2.LayerSpec, spec)


def layer_spec_from_proto(message: types_pb2.LayerSpec) -> layer_specs.LayerSpec:
    """Converts a layer's spec. Raises InvalidArgumentError naming an invalid field."""
    return layer_specs.LayerSpec(
        name=message.name,
        top_k=message.top_k,
        alignment=message.alignment if message.HasField("alignment") else None,
        in_flight=message.in_flight,
        num_experts=message.num_experts if message.HasField("num_experts") else None,
        hidden_size=message.hidden_size if message.HasField("hidden_size") else None,
    )


def stack_spec_to_proto(stack: LayerStackSpec) -> types_pb2.LayerStackSpec:
    return types_pb2.LayerStackSpec(
        layer=layer_spec_to_proto(stack.spec), num_layers=stack.num_layers
    )


def stack_spec_from_proto(message: types_pb2.LayerStackSpec) -> LayerStackSpec:
    """Converts a stack's spec. Raises InvalidArgumentError naming an invalid field."""
    if not 1 <= message.num_layers <= specs.MAX_STACK_LAYERS:
        raise errors.InvalidArgumentError(
            f"stack {message.layer.name!r}: num_layers must be 1 to {specs.MAX_STACK_LAYERS}, "
            f"got {message.num_layers}",
            argument="num_layers",
        )
    return LayerStackSpec(layer_spec_from_proto(message.layer), message.num_layers)


def registered_to_proto(layer: RegisteredLayer) -> types_pb2.RegisteredLayer:
    return filled(types_pb2.RegisteredLayer, layer, spec=layer_spec_to_proto(layer.spec))


def registered_from_proto(message: types_pb2.RegisteredLayer) -> RegisteredLayer:
    return RegisteredLayer(
        spec=layer_spec_from_proto(message.spec),
        num_layers=message.num_layers,
        base_id=message.base_id,
        handle_base=message.handle_base,
        already_registered=message.already_registered,
    )


# Errors


class RpcFailure(NamedTuple):
    """An error in the form that gRPC sends: status code, text and trailers."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_ERROR_TEXT]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_short(item) for item in list(value)[:_MAX_ERROR_LIST]]
    return value


def _fields_json(error: errors.EpRuntimeError) -> str:
    fields = {name: _short(value) for name, value in error.fields.items()}
    text = json.dumps(fields, default=str)
    return text if len(text) <= 4 * _MAX_ERROR_TEXT else json.dumps({"cut": True})


def _fields_from_json(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def reason(error_class: type[errors.EpRuntimeError]) -> str:
    """Returns ErrorInfo.reason of a class, such as SPEC_MISMATCH for SpecMismatchError."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", error_class.__name__.removesuffix("Error")).upper()


def error_to_status(error: errors.EpRuntimeError) -> RpcFailure:
    """Converts an error to a status code, a text and a google.rpc.Status with one ErrorInfo."""
    cls = type(error)
    message = str(error)[:_MAX_ERROR_TEXT]
    info = error_details_pb2.ErrorInfo(
        reason=reason(cls),
        domain=ERROR_DOMAIN,
        metadata={"class": cls.__name__, "fields": _fields_json(error)},
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    status = status_pb2.Status(
        code=code_pb2.Code.Value(cls.grpc_code), message=message, details=[packed]
    )
    metadata = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    return RpcFailure(grpc.StatusCode[cls.grpc_code], message, metadata)


def error_from_rpc(error: grpc.RpcError) -> errors.EpRuntimeError:
    """Converts a failed call to our error.

    A failure without our details becomes the class that is nearest to its status code.
    """
    message = _call(error, "details") or str(error)
    for key, value in _call(error, "trailing_metadata") or ():
        if key == STATUS_DETAILS_KEY:
            found = _error_from_details(value)
            if found is not None:
                return found
    code = _call(error, "code")
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    ):
        return errors.RuntimeUnavailableError(f"no answer from the daemon: {message}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.VersionSkewError(f"the daemon does not know this call: {message}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.InvalidArgumentError(message)
    return errors.EpRuntimeError(f"{code.name if code else 'UNKNOWN'}: {message}")


def _call(error: grpc.RpcError, method: str) -> Any:
    """Calls a method of grpc.Call, which RpcError instances have but its class does not declare."""
    function = getattr(error, method, None)
    return function() if function is not None else None


def _error_from_details(serialized: bytes) -> errors.EpRuntimeError | None:
    info = error_details_pb2.ErrorInfo()
    try:
        status = status_pb2.Status.FromString(serialized)
        for detail in status.details:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return errors.from_name(
                    info.metadata["class"],
                    status.message,
                    _fields_from_json(info.metadata["fields"]),
                )
    except DecodeError:
        pass
    return None


def error_to_detail(error: errors.EpRuntimeError) -> types_pb2.ErrorDetail:
    """Converts an error to the message that fd.sock sends."""
    return types_pb2.ErrorDetail(
        class_name=type(error).__name__,
        message=str(error)[:_MAX_ERROR_TEXT],
        fields_json=_fields_json(error),
    )


def error_from_detail(detail: types_pb2.ErrorDetail) -> errors.EpRuntimeError:
    return errors.from_name(
        detail.class_name, detail.message, _fields_from_json(detail.fields_json)
    )


def channel_options(extra: Iterable[tuple[str, Any]] = ()) -> list[tuple[str, Any]]:
    """Returns channel options that bound reconnects, and notice dead daemons within 15 s."""
    return [
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Time limit of one attempt with its handshake, which may take long on a busy machine. If
        # nobody listens, an attempt on a unix socket fails at once.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # keepalive_timeout_ms alone does nothing in current gRPC; the ping timeout decides.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *extra,
    ]
