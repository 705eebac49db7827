import datetime

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
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_JOINED: NodeState
NODE_STATE_UNREACHABLE: NodeState
NODE_STATE_ABSENT: NodeState

class NodeIdentity(_message.Message):
    __slots__ = ("node", "node_id", "incarnation", "boot_id", "host_name", "uid", "pid", "address", "server_version", "api_versions")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSIONS_FIELD_NUMBER: _ClassVar[int]
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
    __slots__ = ("identity", "coordinator", "state", "since")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    coordinator: bool
    state: NodeState
    since: _duration_pb2.Duration
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., coordinator: bool = ..., state: _Optional[_Union[NodeState, str]] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class JoinClusterRequest(_message.Message):
    __slots__ = ("identity", "epoch")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    epoch: int
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class JoinClusterResponse(_message.Message):
    __slots__ = ("cluster_id", "epoch", "lease_id", "lease", "report_interval", "nodes")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    epoch: int
    lease_id: str
    lease: _duration_pb2.Duration
    report_interval: _duration_pb2.Duration
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, cluster_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., report_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class ReportNodeRequest(_message.Message):
    __slots__ = ("node", "lease_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    lease_id: str
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReportNodeResponse(_message.Message):
    __slots__ = ("epoch", "nodes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class LeaveClusterRequest(_message.Message):
    __slots__ = ("node", "lease_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    lease_id: str
    def __init__(self, node: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class LeaveClusterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
