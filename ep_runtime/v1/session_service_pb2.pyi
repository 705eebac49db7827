import datetime

from ep_runtime.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_RECOVERING: _ClassVar[ServerState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_RECOVERING: ServerState

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "incarnation", "api_versions", "features", "state", "pid")
    server_version: str
    incarnation: str
    api_versions: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedScalarFieldContainer[str]
    state: ServerState
    pid: int
    def __init__(self, server_version: _Optional[str] = ..., incarnation: _Optional[str] = ..., api_versions: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[ServerState, str]] = ..., pid: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("job", "labels", "process_index")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    job: str
    labels: _containers.ScalarMap[str, str]
    process_index: int
    def __init__(self, job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., process_index: _Optional[int] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "heartbeat_interval", "uid", "pid")
    session_id: str
    heartbeat_interval: _duration_pb2.Duration
    uid: int
    pid: int
    def __init__(self, session_id: _Optional[str] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("progress",)
    progress: int
    def __init__(self, progress: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("state", "incarnation")
    state: ServerState
    incarnation: str
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class WatchSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchSessionResponse(_message.Message):
    __slots__ = ("drain", "fence", "group")
    drain: DrainEvent
    fence: FenceEvent
    group: GroupEvent
    def __init__(self, drain: _Optional[_Union[DrainEvent, _Mapping]] = ..., fence: _Optional[_Union[FenceEvent, _Mapping]] = ..., group: _Optional[_Union[GroupEvent, _Mapping]] = ...) -> None: ...

class DrainEvent(_message.Message):
    __slots__ = ("deadline", "taken_back")
    deadline: _duration_pb2.Duration
    taken_back: bool
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., taken_back: bool = ...) -> None: ...

class FenceEvent(_message.Message):
    __slots__ = ("reason",)
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class GroupEvent(_message.Message):
    __slots__ = ("group", "generation", "state", "reason", "lost_ranks", "lost_members")
    group: str
    generation: int
    state: _types_pb2.GroupState
    reason: str
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    lost_members: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupMember]
    def __init__(self, group: _Optional[str] = ..., generation: _Optional[int] = ..., state: _Optional[_Union[_types_pb2.GroupState, str]] = ..., reason: _Optional[str] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., lost_members: _Optional[_Iterable[_Union[_types_pb2.GroupMember, _Mapping]]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("failed",)
    failed: bool
    def __init__(self, failed: bool = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndPeerRequest(_message.Message):
    __slots__ = ("session_id", "reason")
    session_id: str
    reason: str
    def __init__(self, session_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndPeerResponse(_message.Message):
    __slots__ = ("pid", "killed", "awaited")
    pid: int
    killed: bool
    awaited: str
    def __init__(self, pid: _Optional[int] = ..., killed: bool = ..., awaited: _Optional[str] = ...) -> None: ...
