import datetime

from ep_runtime.v1 import node_service_pb2 as _node_service_pb2
from ep_runtime.v1 import session_service_pb2 as _session_service_pb2
from ep_runtime.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClusterLink(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLUSTER_LINK_UNSPECIFIED: _ClassVar[ClusterLink]
    CLUSTER_LINK_COORDINATOR: _ClassVar[ClusterLink]
    CLUSTER_LINK_JOINING: _ClassVar[ClusterLink]
    CLUSTER_LINK_JOINED: _ClassVar[ClusterLink]
    CLUSTER_LINK_LOST: _ClassVar[ClusterLink]
    CLUSTER_LINK_REFUSED: _ClassVar[ClusterLink]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_CONNECTED: _ClassVar[SessionState]
    SESSION_STATE_ACTIVE: _ClassVar[SessionState]
    SESSION_STATE_SUSPECT: _ClassVar[SessionState]
    SESSION_STATE_FENCED: _ClassVar[SessionState]
    SESSION_STATE_CLOSED: _ClassVar[SessionState]
    SESSION_STATE_DEAD: _ClassVar[SessionState]

class BufferState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFER_STATE_UNSPECIFIED: _ClassVar[BufferState]
    BUFFER_STATE_LEASED: _ClassVar[BufferState]
    BUFFER_STATE_RETAINED: _ClassVar[BufferState]
    BUFFER_STATE_QUARANTINED: _ClassVar[BufferState]
CLUSTER_LINK_UNSPECIFIED: ClusterLink
CLUSTER_LINK_COORDINATOR: ClusterLink
CLUSTER_LINK_JOINING: ClusterLink
CLUSTER_LINK_JOINED: ClusterLink
CLUSTER_LINK_LOST: ClusterLink
CLUSTER_LINK_REFUSED: ClusterLink
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_CONNECTED: SessionState
SESSION_STATE_ACTIVE: SessionState
SESSION_STATE_SUSPECT: SessionState
SESSION_STATE_FENCED: SessionState
SESSION_STATE_CLOSED: SessionState
SESSION_STATE_DEAD: SessionState
BUFFER_STATE_UNSPECIFIED: BufferState
BUFFER_STATE_LEASED: BufferState
BUFFER_STATE_RETAINED: BufferState
BUFFER_STATE_QUARANTINED: BufferState

class GetStatusRequest(_message.Message):
    __slots__ = ("node",)
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("server_version", "incarnation", "pid", "directory", "uptime", "state", "num_sessions", "num_groups", "num_layers", "num_handles", "pools", "num_fds", "max_fds", "rss_bytes", "loop_lag", "journal", "recovery", "late_ranks", "cluster", "loop_lag_p99", "loop_lag_worst", "failing_tasks", "users", "user_limits", "drain", "silent_processes")
    server_version: str
    incarnation: str
    pid: int
    directory: str
    uptime: _duration_pb2.Duration
    state: _session_service_pb2.ServerState
    num_sessions: int
    num_groups: int
    num_layers: int
    num_handles: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    num_fds: int
    max_fds: int
    rss_bytes: int
    loop_lag: _duration_pb2.Duration
    journal: JournalStatus
    recovery: RecoveryStatus
    late_ranks: _containers.RepeatedCompositeFieldContainer[LateRank]
    cluster: ClusterStatus
    loop_lag_p99: _duration_pb2.Duration
    loop_lag_worst: _duration_pb2.Duration
    failing_tasks: _containers.RepeatedScalarFieldContainer[str]
    users: _containers.RepeatedCompositeFieldContainer[UserUsage]
    user_limits: UserLimits
    drain: DrainStatus
    silent_processes: _containers.RepeatedCompositeFieldContainer[SilentProcess]
    def __init__(self, server_version: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., directory: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state: _Optional[_Union[_session_service_pb2.ServerState, str]] = ..., num_sessions: _Optional[int] = ..., num_groups: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_handles: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., num_fds: _Optional[int] = ..., max_fds: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., loop_lag: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., journal: _Optional[_Union[JournalStatus, _Mapping]] = ..., recovery: _Optional[_Union[RecoveryStatus, _Mapping]] = ..., late_ranks: _Optional[_Iterable[_Union[LateRank, _Mapping]]] = ..., cluster: _Optional[_Union[ClusterStatus, _Mapping]] = ..., loop_lag_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., loop_lag_worst: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failing_tasks: _Optional[_Iterable[str]] = ..., users: _Optional[_Iterable[_Union[UserUsage, _Mapping]]] = ..., user_limits: _Optional[_Union[UserLimits, _Mapping]] = ..., drain: _Optional[_Union[DrainStatus, _Mapping]] = ..., silent_processes: _Optional[_Iterable[_Union[SilentProcess, _Mapping]]] = ...) -> None: ...

class DrainStatus(_message.Message):
    __slots__ = ("by", "since", "ends_in")
    by: str
    since: _duration_pb2.Duration
    ends_in: _duration_pb2.Duration
    def __init__(self, by: _Optional[str] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ends_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UserUsage(_message.Message):
    __slots__ = ("uid", "num_sessions", "num_groups", "num_layers", "host_bytes", "num_fds", "journal_bytes", "gpu_bytes")
    uid: int
    num_sessions: int
    num_groups: int
    num_layers: int
    host_bytes: int
    num_fds: int
    journal_bytes: int
    gpu_bytes: int
    def __init__(self, uid: _Optional[int] = ..., num_sessions: _Optional[int] = ..., num_groups: _Optional[int] = ..., num_layers: _Optional[int] = ..., host_bytes: _Optional[int] = ..., num_fds: _Optional[int] = ..., journal_bytes: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class UserLimits(_message.Message):
    __slots__ = ("max_sessions", "max_groups", "max_layers", "max_host_bytes", "max_fds", "max_journal_bytes", "max_retain", "max_gpu_bytes", "max_fds_of_all")
    max_sessions: int
    max_groups: int
    max_layers: int
    max_host_bytes: int
    max_fds: int
    max_journal_bytes: int
    max_retain: _duration_pb2.Duration
    max_gpu_bytes: int
    max_fds_of_all: int
    def __init__(self, max_sessions: _Optional[int] = ..., max_groups: _Optional[int] = ..., max_layers: _Optional[int] = ..., max_host_bytes: _Optional[int] = ..., max_fds: _Optional[int] = ..., max_journal_bytes: _Optional[int] = ..., max_retain: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_gpu_bytes: _Optional[int] = ..., max_fds_of_all: _Optional[int] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("node", "coordinator", "link", "since", "error", "cluster_id", "epoch", "insecure", "nodes", "num_answered", "certificates", "certificates_error")
    node: str
    coordinator: str
    link: ClusterLink
    since: _duration_pb2.Duration
    error: str
    cluster_id: str
    epoch: int
    insecure: bool
    nodes: _containers.RepeatedCompositeFieldContainer[_node_service_pb2.NodeInfo]
    num_answered: int
    certificates: _containers.RepeatedCompositeFieldContainer[CertificateStatus]
    certificates_error: str
    def __init__(self, node: _Optional[str] = ..., coordinator: _Optional[str] = ..., link: _Optional[_Union[ClusterLink, str]] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., error: _Optional[str] = ..., cluster_id: _Optional[str] = ..., epoch: _Optional[int] = ..., insecure: bool = ..., nodes: _Optional[_Iterable[_Union[_node_service_pb2.NodeInfo, _Mapping]]] = ..., num_answered: _Optional[int] = ..., certificates: _Optional[_Iterable[_Union[CertificateStatus, _Mapping]]] = ..., certificates_error: _Optional[str] = ...) -> None: ...

class CertificateStatus(_message.Message):
    __slots__ = ("path", "left")
    path: str
    left: _duration_pb2.Duration
    def __init__(self, path: _Optional[str] = ..., left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class JournalStatus(_message.Message):
    __slots__ = ("error", "bytes", "cut_bytes")
    error: str
    bytes: int
    cut_bytes: int
    def __init__(self, error: _Optional[str] = ..., bytes: _Optional[int] = ..., cut_bytes: _Optional[int] = ...) -> None: ...

class RecoveryStatus(_message.Message):
    __slots__ = ("under_way", "left", "num_sessions", "num_awaited", "adopted_bytes", "awaited_bytes", "lost_bytes")
    under_way: bool
    left: _duration_pb2.Duration
    num_sessions: int
    num_awaited: int
    adopted_bytes: int
    awaited_bytes: int
    lost_bytes: int
    def __init__(self, under_way: bool = ..., left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_sessions: _Optional[int] = ..., num_awaited: _Optional[int] = ..., adopted_bytes: _Optional[int] = ..., awaited_bytes: _Optional[int] = ..., lost_bytes: _Optional[int] = ...) -> None: ...

class LateRank(_message.Message):
    __slots__ = ("group", "job", "uid", "generation", "world_rank", "pid", "process_index", "since", "waiting_ranks", "layer", "op", "handle", "message")
    group: str
    job: str
    uid: int
    generation: int
    world_rank: int
    pid: int
    process_index: int
    since: _duration_pb2.Duration
    waiting_ranks: _containers.RepeatedScalarFieldContainer[int]
    layer: str
    op: str
    handle: int
    message: str
    def __init__(self, group: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ..., world_rank: _Optional[int] = ..., pid: _Optional[int] = ..., process_index: _Optional[int] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waiting_ranks: _Optional[_Iterable[int]] = ..., layer: _Optional[str] = ..., op: _Optional[str] = ..., handle: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SilentProcess(_message.Message):
    __slots__ = ("session_id", "job", "uid", "pid", "process_index", "since", "process_state")
    session_id: str
    job: str
    uid: int
    pid: int
    process_index: int
    since: _duration_pb2.Duration
    process_state: str
    def __init__(self, session_id: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ..., process_index: _Optional[int] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., process_state: _Optional[str] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("device", "limit_bytes", "leased_bytes", "retained_bytes", "quarantined_bytes", "num_buffers")
    device: str
    limit_bytes: int
    leased_bytes: int
    retained_bytes: int
    quarantined_bytes: int
    num_buffers: int
    def __init__(self, device: _Optional[str] = ..., limit_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., retained_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., num_buffers: _Optional[int] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "state", "uid", "pid", "job", "labels", "process_index", "client_version", "groups", "create_time", "age", "since_heartbeat", "progress", "since_end")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    session_id: str
    state: SessionState
    uid: int
    pid: int
    job: str
    labels: _containers.ScalarMap[str, str]
    process_index: int
    client_version: str
    groups: _containers.RepeatedScalarFieldContainer[str]
    create_time: _timestamp_pb2.Timestamp
    age: _duration_pb2.Duration
    since_heartbeat: _duration_pb2.Duration
    progress: int
    since_end: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ..., job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., process_index: _Optional[int] = ..., client_version: _Optional[str] = ..., groups: _Optional[_Iterable[str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., since_heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., progress: _Optional[int] = ..., since_end: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "node")
    page_size: int
    page_token: str
    node: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "name", "node")
    page_size: int
    page_token: str
    name: str
    node: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., name: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups", "next_page_token")
    groups: _containers.RepeatedCompositeFieldContainer[GroupInfo]
    next_page_token: str
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GroupInfo(_message.Message):
    __slots__ = ("group", "num_layers", "num_handles", "total_bytes", "age", "poison_reason", "late_ranks", "wanted_ranks", "nccl_version", "nccl_state", "gpus")
    group: _types_pb2.Group
    num_layers: int
    num_handles: int
    total_bytes: int
    age: _duration_pb2.Duration
    poison_reason: str
    late_ranks: _containers.RepeatedCompositeFieldContainer[LateRank]
    wanted_ranks: _containers.RepeatedScalarFieldContainer[int]
    nccl_version: str
    nccl_state: str
    gpus: _containers.RepeatedCompositeFieldContainer[RankGpu]
    def __init__(self, group: _Optional[_Union[_types_pb2.Group, _Mapping]] = ..., num_layers: _Optional[int] = ..., num_handles: _Optional[int] = ..., total_bytes: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., poison_reason: _Optional[str] = ..., late_ranks: _Optional[_Iterable[_Union[LateRank, _Mapping]]] = ..., wanted_ranks: _Optional[_Iterable[int]] = ..., nccl_version: _Optional[str] = ..., nccl_state: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[RankGpu, _Mapping]]] = ...) -> None: ...

class RankGpu(_message.Message):
    __slots__ = ("world_rank", "device", "gpu_index")
    world_rank: int
    device: str
    gpu_index: int
    def __init__(self, world_rank: _Optional[int] = ..., device: _Optional[str] = ..., gpu_index: _Optional[int] = ...) -> None: ...

class AdminServiceListLayersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "group", "node")
    page_size: int
    page_token: str
    group: str
    node: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., group: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class AdminServiceListLayersResponse(_message.Message):
    __slots__ = ("layers", "next_page_token")
    layers: _containers.RepeatedCompositeFieldContainer[LayerInfo]
    next_page_token: str
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class LayerInfo(_message.Message):
    __slots__ = ("layer", "group", "job", "uid", "generation")
    layer: _types_pb2.RegisteredLayer
    group: str
    job: str
    uid: int
    generation: int
    def __init__(self, layer: _Optional[_Union[_types_pb2.RegisteredLayer, _Mapping]] = ..., group: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ListHandlesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "group", "layer", "node", "age")
    page_size: int
    page_token: str
    group: str
    layer: str
    node: str
    age: _duration_pb2.Duration
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., group: _Optional[str] = ..., layer: _Optional[str] = ..., node: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListHandlesResponse(_message.Message):
    __slots__ = ("handles", "next_page_token")
    handles: _containers.RepeatedCompositeFieldContainer[HandleInfo]
    next_page_token: str
    def __init__(self, handles: _Optional[_Iterable[_Union[HandleInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class HandleInfo(_message.Message):
    __slots__ = ("layer", "handle", "index", "group", "job", "uid", "generation", "pids", "state", "last_op", "epoch", "lane", "calls", "rows", "dropped_rows", "age", "rounds")
    layer: str
    handle: int
    index: int
    group: str
    job: str
    uid: int
    generation: int
    pids: _containers.RepeatedScalarFieldContainer[int]
    state: str
    last_op: str
    epoch: int
    lane: int
    calls: int
    rows: int
    dropped_rows: int
    age: _duration_pb2.Duration
    rounds: int
    def __init__(self, layer: _Optional[str] = ..., handle: _Optional[int] = ..., index: _Optional[int] = ..., group: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ..., pids: _Optional[_Iterable[int]] = ..., state: _Optional[str] = ..., last_op: _Optional[str] = ..., epoch: _Optional[int] = ..., lane: _Optional[int] = ..., calls: _Optional[int] = ..., rows: _Optional[int] = ..., dropped_rows: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rounds: _Optional[int] = ...) -> None: ...

class ListBuffersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "group", "node")
    page_size: int
    page_token: str
    group: str
    node: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., group: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ListBuffersResponse(_message.Message):
    __slots__ = ("buffers", "next_page_token")
    buffers: _containers.RepeatedCompositeFieldContainer[BufferInfo]
    next_page_token: str
    def __init__(self, buffers: _Optional[_Iterable[_Union[BufferInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BufferInfo(_message.Message):
    __slots__ = ("buffer_id", "bytes", "device", "kind", "state", "group", "job", "uid", "generation", "world_rank", "mapped_by", "age", "gpu_index")
    buffer_id: str
    bytes: int
    device: str
    kind: _types_pb2.WindowKind
    state: BufferState
    group: str
    job: str
    uid: int
    generation: int
    world_rank: int
    mapped_by: _containers.RepeatedScalarFieldContainer[int]
    age: _duration_pb2.Duration
    gpu_index: int
    def __init__(self, buffer_id: _Optional[str] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ..., kind: _Optional[_Union[_types_pb2.WindowKind, str]] = ..., state: _Optional[_Union[BufferState, str]] = ..., group: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ..., world_rank: _Optional[int] = ..., mapped_by: _Optional[_Iterable[int]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., gpu_index: _Optional[int] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "after_sequence", "node")
    page_size: int
    page_token: str
    after_sequence: int
    node: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., after_sequence: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class ListEventsResponse(_message.Message):
    __slots__ = ("events", "next_page_token")
    events: _containers.RepeatedCompositeFieldContainer[EventInfo]
    next_page_token: str
    def __init__(self, events: _Optional[_Iterable[_Union[EventInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class EventInfo(_message.Message):
    __slots__ = ("sequence", "time", "kind", "session_id", "group", "message", "fields_json")
    sequence: int
    time: _timestamp_pb2.Timestamp
    kind: str
    session_id: str
    group: str
    message: str
    fields_json: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kind: _Optional[str] = ..., session_id: _Optional[str] = ..., group: _Optional[str] = ..., message: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class ListRanksRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "group", "node")
    page_size: int
    page_token: str
    group: str
    node: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., group: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ListRanksResponse(_message.Message):
    __slots__ = ("ranks", "next_page_token")
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    next_page_token: str
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("group", "job", "uid", "generation", "world_rank", "pid", "state", "op", "layer", "handle", "epoch", "waiting_for", "since", "silent")
    group: str
    job: str
    uid: int
    generation: int
    world_rank: int
    pid: int
    state: str
    op: str
    layer: str
    handle: int
    epoch: int
    waiting_for: int
    since: _duration_pb2.Duration
    silent: _duration_pb2.Duration
    def __init__(self, group: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ..., world_rank: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., op: _Optional[str] = ..., layer: _Optional[str] = ..., handle: _Optional[int] = ..., epoch: _Optional[int] = ..., waiting_for: _Optional[int] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., silent: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListTalliesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "group", "node", "age")
    page_size: int
    page_token: str
    group: str
    node: str
    age: _duration_pb2.Duration
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., group: _Optional[str] = ..., node: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListTalliesResponse(_message.Message):
    __slots__ = ("ranks", "next_page_token")
    ranks: _containers.RepeatedCompositeFieldContainer[RankTally]
    next_page_token: str
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankTally, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RankTally(_message.Message):
    __slots__ = ("group", "job", "uid", "generation", "world_rank", "read", "now", "calls", "rows", "dropped_rows", "row_bytes", "device", "first_expert", "ops", "layers")
    group: str
    job: str
    uid: int
    generation: int
    world_rank: int
    read: _duration_pb2.Duration
    now: RankInfo
    calls: int
    rows: int
    dropped_rows: int
    row_bytes: int
    device: str
    first_expert: int
    ops: _containers.RepeatedCompositeFieldContainer[OpTally]
    layers: _containers.RepeatedCompositeFieldContainer[LoadTally]
    def __init__(self, group: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., generation: _Optional[int] = ..., world_rank: _Optional[int] = ..., read: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., now: _Optional[_Union[RankInfo, _Mapping]] = ..., calls: _Optional[int] = ..., rows: _Optional[int] = ..., dropped_rows: _Optional[int] = ..., row_bytes: _Optional[int] = ..., device: _Optional[str] = ..., first_expert: _Optional[int] = ..., ops: _Optional[_Iterable[_Union[OpTally, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LoadTally, _Mapping]]] = ...) -> None: ...

class OpTally(_message.Message):
    __slots__ = ("op", "calls", "time_ns", "wait_ns", "peers")
    op: str
    calls: int
    time_ns: int
    wait_ns: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerTally]
    def __init__(self, op: _Optional[str] = ..., calls: _Optional[int] = ..., time_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerTally, _Mapping]]] = ...) -> None: ...

class PeerTally(_message.Message):
    __slots__ = ("world_rank", "arrival_ns", "wait_ns")
    world_rank: int
    arrival_ns: int
    wait_ns: int
    def __init__(self, world_rank: _Optional[int] = ..., arrival_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ...) -> None: ...

class LoadTally(_message.Message):
    __slots__ = ("layer", "calls", "time_ns", "wait_ns", "tokens", "rows")
    layer: str
    calls: int
    time_ns: int
    wait_ns: int
    tokens: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[str] = ..., calls: _Optional[int] = ..., time_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ..., tokens: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline", "shutdown")
    deadline: _duration_pb2.Duration
    shutdown: bool
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., shutdown: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_sessions",)
    num_sessions: int
    def __init__(self, num_sessions: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("was_drained",)
    was_drained: bool
    def __init__(self, was_drained: bool = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("session_id", "reason")
    session_id: str
    reason: str
    def __init__(self, session_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ("groups",)
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class ReclaimRequest(_message.Message):
    __slots__ = ("name", "job", "uid", "all_retained")
    name: str
    job: str
    uid: int
    all_retained: bool
    def __init__(self, name: _Optional[str] = ..., job: _Optional[str] = ..., uid: _Optional[int] = ..., all_retained: bool = ...) -> None: ...

class ReclaimResponse(_message.Message):
    __slots__ = ("groups", "freed_bytes", "quarantined_bytes")
    groups: _containers.RepeatedScalarFieldContainer[str]
    freed_bytes: int
    quarantined_bytes: int
    def __init__(self, groups: _Optional[_Iterable[str]] = ..., freed_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ...) -> None: ...
