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
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    API_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
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
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    job: str
    labels: _containers.ScalarMap[str, str]
    process_index: int
    def __init__(self, job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., process_index: _Optional[int] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "heartbeat_interval", "uid", "pid")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    heartbeat_interval: _duration_pb2.Duration
    uid: int
    pid: int
    def __init__(self, session_id: _Optional[str] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: int
    def __init__(self, progress: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("state", "incarnation")
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    incarnation: str
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class WatchSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchSessionResponse(_message.Message):
    __slots__ = ("drain", "fence", "group")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    drain: DrainEvent
    fence: FenceEvent
    group: GroupEvent
    def __init__(self, drain: _Optional[_Union[DrainEvent, _Mapping]] = ..., fence: _Optional[_Union[FenceEvent, _Mapping]] = ..., group: _Optional[_Union[GroupEvent, _Mapping]] = ...) -> None: ...

class DrainEvent(_message.Message):
    __slots__ = ("deadline", "taken_back")
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BACK_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    taken_back: bool
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., taken_back: bool = ...) -> None: ...

class FenceEvent(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class GroupEvent(_message.Message):
    __slots__ = ("group", "generation", "state", "reason", "lost_ranks", "lost_members")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOST_RANKS_FIELD_NUMBER: _ClassVar[int]
    LOST_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    generation: int
    state: _types_pb2.GroupState
    reason: str
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    lost_members: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupMember]
    def __init__(self, group: _Optional[str] = ..., generation: _Optional[int] = ..., state: _Optional[_Union[_types_pb2.GroupState, str]] = ..., reason: _Optional[str] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., lost_members: _Optional[_Iterable[_Union[_types_pb2.GroupMember, _Mapping]]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("failed",)
    FAILED_FIELD_NUMBER: _ClassVar[int]
    failed: bool
    def __init__(self, failed: bool = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
