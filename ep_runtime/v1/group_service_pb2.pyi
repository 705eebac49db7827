import datetime

from ep_runtime.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateGroupRequest(_message.Message):
    __slots__ = ("op_id", "spec", "world_ranks", "replace", "wait", "device_uuids")
    op_id: str
    spec: _types_pb2.GroupSpec
    world_ranks: _containers.RepeatedScalarFieldContainer[int]
    replace: bool
    wait: _duration_pb2.Duration
    device_uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, op_id: _Optional[str] = ..., spec: _Optional[_Union[_types_pb2.GroupSpec, _Mapping]] = ..., world_ranks: _Optional[_Iterable[int]] = ..., replace: bool = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., device_uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateGroupResponse(_message.Message):
    __slots__ = ("group", "reattached")
    group: _types_pb2.Group
    reattached: bool
    def __init__(self, group: _Optional[_Union[_types_pb2.Group, _Mapping]] = ..., reattached: bool = ...) -> None: ...

class AcquireWindowsRequest(_message.Message):
    __slots__ = ("name", "generation", "world_ranks")
    name: str
    generation: int
    world_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., world_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class AcquireWindowsResponse(_message.Message):
    __slots__ = ("ticket", "descriptors", "time_to_live")
    ticket: str
    descriptors: _containers.RepeatedCompositeFieldContainer[_types_pb2.WindowDescriptor]
    time_to_live: _duration_pb2.Duration
    def __init__(self, ticket: _Optional[str] = ..., descriptors: _Optional[_Iterable[_Union[_types_pb2.WindowDescriptor, _Mapping]]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReportAttachedRequest(_message.Message):
    __slots__ = ("name", "generation", "wait")
    name: str
    generation: int
    wait: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReportAttachedResponse(_message.Message):
    __slots__ = ("group",)
    group: _types_pb2.Group
    def __init__(self, group: _Optional[_Union[_types_pb2.Group, _Mapping]] = ...) -> None: ...

class RestoreGroupRequest(_message.Message):
    __slots__ = ("spec", "generation", "world_ranks", "layers", "device_uuids", "window_ranks")
    spec: _types_pb2.GroupSpec
    generation: int
    world_ranks: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegisteredLayer]
    device_uuids: _containers.RepeatedScalarFieldContainer[str]
    window_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[_types_pb2.GroupSpec, _Mapping]] = ..., generation: _Optional[int] = ..., world_ranks: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[_Union[_types_pb2.RegisteredLayer, _Mapping]]] = ..., device_uuids: _Optional[_Iterable[str]] = ..., window_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class RestoreGroupResponse(_message.Message):
    __slots__ = ("group", "wanted_ranks")
    group: _types_pb2.Group
    wanted_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[_Union[_types_pb2.Group, _Mapping]] = ..., wanted_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseGroupRequest(_message.Message):
    __slots__ = ("name", "generation")
    name: str
    generation: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class CloseGroupResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class GetGroupRequest(_message.Message):
    __slots__ = ("name",)
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetGroupResponse(_message.Message):
    __slots__ = ("group", "layers")
    group: _types_pb2.Group
    layers: _containers.RepeatedCompositeFieldContainer[_types_pb2.RegisteredLayer]
    def __init__(self, group: _Optional[_Union[_types_pb2.Group, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[_types_pb2.RegisteredLayer, _Mapping]]] = ...) -> None: ...
