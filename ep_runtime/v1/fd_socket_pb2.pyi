from ep_runtime.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("api_versions", "client_version", "pid", "resume_token")
    api_versions: _containers.RepeatedScalarFieldContainer[str]
    client_version: str
    pid: int
    resume_token: str
    def __init__(self, api_versions: _Optional[_Iterable[str]] = ..., client_version: _Optional[str] = ..., pid: _Optional[int] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_token", "session_id", "incarnation", "server_version", "resumed")
    session_token: str
    session_id: str
    incarnation: str
    server_version: str
    resumed: bool
    def __init__(self, session_token: _Optional[str] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., server_version: _Optional[str] = ..., resumed: bool = ...) -> None: ...

class RedeemTicket(_message.Message):
    __slots__ = ("session_token", "ticket")
    session_token: str
    ticket: str
    def __init__(self, session_token: _Optional[str] = ..., ticket: _Optional[str] = ...) -> None: ...

class FdBatch(_message.Message):
    __slots__ = ("first", "total", "descriptors")
    first: int
    total: int
    descriptors: _containers.RepeatedCompositeFieldContainer[_types_pb2.WindowDescriptor]
    def __init__(self, first: _Optional[int] = ..., total: _Optional[int] = ..., descriptors: _Optional[_Iterable[_Union[_types_pb2.WindowDescriptor, _Mapping]]] = ...) -> None: ...

class ReturnWindows(_message.Message):
    __slots__ = ("session_token", "group", "descriptors")
    session_token: str
    group: str
    descriptors: _containers.RepeatedCompositeFieldContainer[_types_pb2.WindowDescriptor]
    def __init__(self, session_token: _Optional[str] = ..., group: _Optional[str] = ..., descriptors: _Optional[_Iterable[_Union[_types_pb2.WindowDescriptor, _Mapping]]] = ...) -> None: ...

class WindowsReturned(_message.Message):
    __slots__ = ("num_adopted", "wanted_ranks")
    num_adopted: int
    wanted_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_adopted: _Optional[int] = ..., wanted_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Condition(_message.Message):
    __slots__ = ("refusal",)
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class FdRequest(_message.Message):
    __slots__ = ("hello", "redeem_ticket", "return_windows", "probe")
    hello: Hello
    redeem_ticket: RedeemTicket
    return_windows: ReturnWindows
    probe: Probe
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., redeem_ticket: _Optional[_Union[RedeemTicket, _Mapping]] = ..., return_windows: _Optional[_Union[ReturnWindows, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ...) -> None: ...

class FdReply(_message.Message):
    __slots__ = ("welcome", "fd_batch", "error", "windows_returned", "condition")
    welcome: Welcome
    fd_batch: FdBatch
    error: _types_pb2.ErrorDetail
    windows_returned: WindowsReturned
    condition: Condition
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., fd_batch: _Optional[_Union[FdBatch, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., windows_returned: _Optional[_Union[WindowsReturned, _Mapping]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...
