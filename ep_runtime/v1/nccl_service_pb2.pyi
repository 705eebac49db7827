from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetUniqueIdsRequest(_message.Message):
    __slots__ = ("name", "generation")
    name: str
    generation: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class GetUniqueIdsResponse(_message.Message):
    __slots__ = ("unique_ids", "nccl_version")
    unique_ids: _containers.RepeatedScalarFieldContainer[bytes]
    nccl_version: str
    def __init__(self, unique_ids: _Optional[_Iterable[bytes]] = ..., nccl_version: _Optional[str] = ...) -> None: ...

class ReportCommunicatorsRequest(_message.Message):
    __slots__ = ("name", "generation", "nccl_version", "error")
    name: str
    generation: int
    nccl_version: str
    error: str
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., nccl_version: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ReportCommunicatorsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
