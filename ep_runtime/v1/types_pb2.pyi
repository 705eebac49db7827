import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_MEMFD: _ClassVar[Transport]
    TRANSPORT_NVLINK: _ClassVar[Transport]
    TRANSPORT_NCCL: _ClassVar[Transport]
    TRANSPORT_XLA: _ClassVar[Transport]
    TRANSPORT_STATE: _ClassVar[Transport]

class OnOverflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_OVERFLOW_UNSPECIFIED: _ClassVar[OnOverflow]
    ON_OVERFLOW_DROP: _ClassVar[OnOverflow]
    ON_OVERFLOW_ERROR: _ClassVar[OnOverflow]

class CombinePrecision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMBINE_PRECISION_UNSPECIFIED: _ClassVar[CombinePrecision]
    COMBINE_PRECISION_FAST: _ClassVar[CombinePrecision]
    COMBINE_PRECISION_EXACT: _ClassVar[CombinePrecision]
    COMBINE_PRECISION_FP8: _ClassVar[CombinePrecision]

class Partitioning(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARTITIONING_UNSPECIFIED: _ClassVar[Partitioning]
    PARTITIONING_AUTO: _ClassVar[Partitioning]
    PARTITIONING_RULE: _ClassVar[Partitioning]
    PARTITIONING_SHARD_MAP: _ClassVar[Partitioning]

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_FORMING: _ClassVar[GroupState]
    GROUP_STATE_READY: _ClassVar[GroupState]
    GROUP_STATE_BROKEN: _ClassVar[GroupState]
    GROUP_STATE_RETAINED: _ClassVar[GroupState]
    GROUP_STATE_CLOSED: _ClassVar[GroupState]

class WindowKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WINDOW_KIND_UNSPECIFIED: _ClassVar[WindowKind]
    WINDOW_KIND_BOARD: _ClassVar[WindowKind]
    WINDOW_KIND_WINDOW: _ClassVar[WindowKind]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_MEMFD: Transport
TRANSPORT_NVLINK: Transport
TRANSPORT_NCCL: Transport
TRANSPORT_XLA: Transport
TRANSPORT_STATE: Transport
ON_OVERFLOW_UNSPECIFIED: OnOverflow
ON_OVERFLOW_DROP: OnOverflow
ON_OVERFLOW_ERROR: OnOverflow
COMBINE_PRECISION_UNSPECIFIED: CombinePrecision
COMBINE_PRECISION_FAST: CombinePrecision
COMBINE_PRECISION_EXACT: CombinePrecision
COMBINE_PRECISION_FP8: CombinePrecision
PARTITIONING_UNSPECIFIED: Partitioning
PARTITIONING_AUTO: Partitioning
PARTITIONING_RULE: Partitioning
PARTITIONING_SHARD_MAP: Partitioning
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_FORMING: GroupState
GROUP_STATE_READY: GroupState
GROUP_STATE_BROKEN: GroupState
GROUP_STATE_RETAINED: GroupState
GROUP_STATE_CLOSED: GroupState
WINDOW_KIND_UNSPECIFIED: WindowKind
WINDOW_KIND_BOARD: WindowKind
WINDOW_KIND_WINDOW: WindowKind

class MeshAxis(_message.Message):
    __slots__ = ("name", "size")
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Workspace(_message.Message):
    __slots__ = ("factor", "bytes")
    factor: float
    bytes: int
    def __init__(self, factor: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("name", "mesh_axes", "ep_axis", "outer_axes", "num_experts", "hidden_size", "max_tokens_per_rank", "recv_capacity_per_rank", "max_top_k", "max_token_dtype", "alignment", "lanes", "on_overflow", "combine_precision", "transport", "partitioning", "op_timeout", "retain", "num_sms", "node_size", "workspace", "overlap", "spare_experts")
    name: str
    mesh_axes: _containers.RepeatedCompositeFieldContainer[MeshAxis]
    ep_axis: _containers.RepeatedScalarFieldContainer[str]
    outer_axes: _containers.RepeatedScalarFieldContainer[str]
    num_experts: int
    hidden_size: int
    max_tokens_per_rank: int
    recv_capacity_per_rank: int
    max_top_k: int
    max_token_dtype: str
    alignment: int
    lanes: int
    on_overflow: OnOverflow
    combine_precision: CombinePrecision
    transport: Transport
    partitioning: Partitioning
    op_timeout: _duration_pb2.Duration
    retain: _duration_pb2.Duration
    num_sms: int
    node_size: int
    workspace: Workspace
    overlap: bool
    spare_experts: int
    def __init__(self, name: _Optional[str] = ..., mesh_axes: _Optional[_Iterable[_Union[MeshAxis, _Mapping]]] = ..., ep_axis: _Optional[_Iterable[str]] = ..., outer_axes: _Optional[_Iterable[str]] = ..., num_experts: _Optional[int] = ..., hidden_size: _Optional[int] = ..., max_tokens_per_rank: _Optional[int] = ..., recv_capacity_per_rank: _Optional[int] = ..., max_top_k: _Optional[int] = ..., max_token_dtype: _Optional[str] = ..., alignment: _Optional[int] = ..., lanes: _Optional[int] = ..., on_overflow: _Optional[_Union[OnOverflow, str]] = ..., combine_precision: _Optional[_Union[CombinePrecision, str]] = ..., transport: _Optional[_Union[Transport, str]] = ..., partitioning: _Optional[_Union[Partitioning, str]] = ..., op_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retain: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_sms: _Optional[int] = ..., node_size: _Optional[int] = ..., workspace: _Optional[_Union[Workspace, _Mapping]] = ..., overlap: bool = ..., spare_experts: _Optional[int] = ...) -> None: ...

class LayerSpec(_message.Message):
    __slots__ = ("name", "top_k", "alignment", "in_flight", "num_experts", "hidden_size")
    name: str
    top_k: int
    alignment: int
    in_flight: int
    num_experts: int
    hidden_size: int
    def __init__(self, name: _Optional[str] = ..., top_k: _Optional[int] = ..., alignment: _Optional[int] = ..., in_flight: _Optional[int] = ..., num_experts: _Optional[int] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class LayerStackSpec(_message.Message):
    __slots__ = ("layer", "num_layers")
    layer: LayerSpec
    num_layers: int
    def __init__(self, layer: _Optional[_Union[LayerSpec, _Mapping]] = ..., num_layers: _Optional[int] = ...) -> None: ...

class RegisteredLayer(_message.Message):
    __slots__ = ("spec", "num_layers", "base_id", "handle_base", "already_registered")
    spec: LayerSpec
    num_layers: int
    base_id: int
    handle_base: int
    already_registered: bool
    def __init__(self, spec: _Optional[_Union[LayerSpec, _Mapping]] = ..., num_layers: _Optional[int] = ..., base_id: _Optional[int] = ..., handle_base: _Optional[int] = ..., already_registered: bool = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("world_rank", "session_id", "pid", "attached", "node")
    world_rank: int
    session_id: str
    pid: int
    attached: bool
    node: str
    def __init__(self, world_rank: _Optional[int] = ..., session_id: _Optional[str] = ..., pid: _Optional[int] = ..., attached: bool = ..., node: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("spec", "job", "uid", "generation", "state", "members", "window_bytes", "board_bytes", "create_time", "retained_left", "epoch", "attempt")
    spec: GroupSpec
    job: str
    uid: int
    generation: int
    state: GroupState
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    window_bytes: int
    board_bytes: int
    create_time: _timestamp_pb2.Timestamp
    retained_left: _duration_pb2.Duration
    epoch: int
    attempt: int
    def __init__(self, spec: _Optional[_Union[GroupSpec, _Mapping]] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ..., state: _Optional[_Union[GroupState, str]] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ..., window_bytes: _Optional[int] = ..., board_bytes: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., retained_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class WindowDescriptor(_message.Message):
    __slots__ = ("kind", "world_rank", "bytes", "generation")
    kind: WindowKind
    world_rank: int
    bytes: int
    generation: int
    def __init__(self, kind: _Optional[_Union[WindowKind, str]] = ..., world_rank: _Optional[int] = ..., bytes: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("class_name", "message", "fields_json")
    class_name: str
    message: str
    fields_json: str
    def __init__(self, class_name: _Optional[str] = ..., message: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...
