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

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_JOINED: _ClassVar[NodeState]
    NODE_STATE_UNREACHABLE: _ClassVar[NodeState]
    NODE_STATE_ABSENT: _ClassVar[NodeState]
    NODE_STATE_REFUSED: _ClassVar[NodeState]

class ViewOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VIEW_OUTCOME_UNSPECIFIED: _ClassVar[ViewOutcome]
    VIEW_OUTCOME_COMMITTED: _ClassVar[ViewOutcome]
    VIEW_OUTCOME_ABORTED: _ClassVar[ViewOutcome]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_JOINED: NodeState
NODE_STATE_UNREACHABLE: NodeState
NODE_STATE_ABSENT: NodeState
NODE_STATE_REFUSED: NodeState
VIEW_OUTCOME_UNSPECIFIED: ViewOutcome
VIEW_OUTCOME_COMMITTED: ViewOutcome
VIEW_OUTCOME_ABORTED: ViewOutcome

class NodeIdentity(_message.Message):
    __slots__ = ("node", "node_id", "incarnation", "boot_id", "host_name", "uid", "pid", "address", "server_version", "api_versions")
    node: str
    node_id: str
    incarnation: str
    boot_id: str
    host_name: str
    uid: int
    pid: int
    address: str
    server_version: str
    api_versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., boot_id: _Optional[str] = ..., host_name: _Optional[str] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., server_version: _Optional[str] = ..., api_versions: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("identity", "coordinator", "state", "since", "why")
    identity: NodeIdentity
    coordinator: bool
    state: NodeState
    since: _duration_pb2.Duration
    why: str
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., coordinator: bool = ..., state: _Optional[_Union[NodeState, str]] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class JoinClusterRequest(_message.Message):
    __slots__ = ("identity", "epoch")
    identity: NodeIdentity
    epoch: int
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class JoinClusterResponse(_message.Message):
    __slots__ = ("cluster_id", "epoch", "lease_id", "lease", "report_interval", "nodes", "nodes_version")
    cluster_id: str
    epoch: int
    lease_id: str
    lease: _duration_pb2.Duration
    report_interval: _duration_pb2.Duration
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    nodes_version: int
    def __init__(self, cluster_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., report_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., nodes_version: _Optional[int] = ...) -> None: ...

class ReportNodeRequest(_message.Message):
    __slots__ = ("node", "lease_id", "nodes_version")
    node: str
    lease_id: str
    nodes_version: int
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ..., nodes_version: _Optional[int] = ...) -> None: ...

class ReportNodeResponse(_message.Message):
    __slots__ = ("epoch", "nodes", "nodes_version")
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    nodes_version: int
    def __init__(self, epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., nodes_version: _Optional[int] = ...) -> None: ...

class LeaveClusterRequest(_message.Message):
    __slots__ = ("node", "lease_id")
    node: str
    lease_id: str
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class LeaveClusterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupKey(_message.Message):
    __slots__ = ("uid", "job", "name")
    uid: int
    job: str
    name: str
    def __init__(self, uid: _Optional[int] = ..., job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class NodeClaim(_message.Message):
    __slots__ = ("world_ranks", "session_id", "pid")
    world_ranks: _containers.RepeatedScalarFieldContainer[int]
    session_id: str
    pid: int
    def __init__(self, world_ranks: _Optional[_Iterable[int]] = ..., session_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class ViewMember(_message.Message):
    __slots__ = ("world_rank", "node", "session_id", "pid")
    world_rank: int
    node: str
    session_id: str
    pid: int
    def __init__(self, world_rank: _Optional[int] = ..., node: _Optional[str] = ..., session_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class GroupView(_message.Message):
    __slots__ = ("epoch", "attempt", "members")
    epoch: int
    attempt: int
    members: _containers.RepeatedCompositeFieldContainer[ViewMember]
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., members: _Optional[_Iterable[_Union[ViewMember, _Mapping]]] = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("node", "lease_id", "key", "spec", "claims", "missing_ranks", "wait", "generation")
    node: str
    lease_id: str
    key: GroupKey
    spec: _types_pb2.GroupSpec
    claims: _containers.RepeatedCompositeFieldContainer[NodeClaim]
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    wait: _duration_pb2.Duration
    generation: int
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ..., key: _Optional[_Union[GroupKey, _Mapping]] = ..., spec: _Optional[_Union[_types_pb2.GroupSpec, _Mapping]] = ..., claims: _Optional[_Iterable[_Union[NodeClaim, _Mapping]]] = ..., missing_ranks: _Optional[_Iterable[int]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class JoinGroupResponse(_message.Message):
    __slots__ = ("view", "missing_ranks")
    view: GroupView
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, view: _Optional[_Union[GroupView, _Mapping]] = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportInitRequest(_message.Message):
    __slots__ = ("node", "lease_id", "key", "epoch", "error")
    node: str
    lease_id: str
    key: GroupKey
    epoch: int
    error: str
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ..., key: _Optional[_Union[GroupKey, _Mapping]] = ..., epoch: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ReportInitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AwaitGroupRequest(_message.Message):
    __slots__ = ("node", "lease_id", "key", "epoch", "wait")
    node: str
    lease_id: str
    key: GroupKey
    epoch: int
    wait: _duration_pb2.Duration
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ..., key: _Optional[_Union[GroupKey, _Mapping]] = ..., epoch: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AwaitGroupResponse(_message.Message):
    __slots__ = ("outcome", "reason")
    outcome: ViewOutcome
    reason: str
    def __init__(self, outcome: _Optional[_Union[ViewOutcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class GetViewIdsRequest(_message.Message):
    __slots__ = ("node", "lease_id", "key", "epoch", "num_domains")
    node: str
    lease_id: str
    key: GroupKey
    epoch: int
    num_domains: int
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ..., key: _Optional[_Union[GroupKey, _Mapping]] = ..., epoch: _Optional[int] = ..., num_domains: _Optional[int] = ...) -> None: ...

class GetViewIdsResponse(_message.Message):
    __slots__ = ("unique_ids", "nccl_version")
    unique_ids: _containers.RepeatedScalarFieldContainer[bytes]
    nccl_version: str
    def __init__(self, unique_ids: _Optional[_Iterable[bytes]] = ..., nccl_version: _Optional[str] = ...) -> None: ...

class TellGroupRequest(_message.Message):
    __slots__ = ("node", "key", "epoch", "lost_ranks", "left_ranks", "why", "others", "reports")
    node: str
    key: GroupKey
    epoch: int
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    left_ranks: _containers.RepeatedScalarFieldContainer[int]
    why: str
    others: _containers.RepeatedScalarFieldContainer[str]
    reports: _containers.RepeatedCompositeFieldContainer[NodeReport]
    def __init__(self, node: _Optional[str] = ..., key: _Optional[_Union[GroupKey, _Mapping]] = ..., epoch: _Optional[int] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., left_ranks: _Optional[_Iterable[int]] = ..., why: _Optional[str] = ..., others: _Optional[_Iterable[str]] = ..., reports: _Optional[_Iterable[_Union[NodeReport, _Mapping]]] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("node", "lost_ranks", "left_ranks", "why")
    node: str
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    left_ranks: _containers.RepeatedScalarFieldContainer[int]
    why: str
    def __init__(self, node: _Optional[str] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., left_ranks: _Optional[_Iterable[int]] = ..., why: _Optional[str] = ...) -> None: ...

class TellGroupResponse(_message.Message):
    __slots__ = ("told", "unheard")
    told: bool
    unheard: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, told: bool = ..., unheard: _Optional[_Iterable[str]] = ...) -> None: ...
