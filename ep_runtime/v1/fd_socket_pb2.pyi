from ep_runtime.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("api_versions", "client_version", "pid", "resume_token")
    API_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    api_versions: _containers.RepeatedScalarFieldContainer[str]
    client_version: str
    pid: int
    resume_token: str
    def __init__(self, api_versions: _Optional[_Iterable[str]] = ..., client_version: _Optional[str] = ..., pid: _Optional[int] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_token", "session_id", "incarnation", "server_version", "resumed")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    session_token: str
    session_id: str
    incarnation: str
    server_version: str
    resumed: bool
    def __init__(self, session_token: _Optional[str] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., server_version: _Optional[str] = ..., resumed: bool = ...) -> None: ...

class RedeemTicket(_message.Message):
    __slots__ = ("session_token", "ticket")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session_token: str
    ticket: str
    def __init__(self, session_token: _Optional[str] = ..., ticket: _Optional[str] = ...) -> None: ...

class FdBatch(_message.Message):
    __slots__ = ("first", "total", "descriptors")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    first: int
    total: int
    descriptors: _containers.RepeatedCompositeFieldContainer[_types_pb2.WindowDescriptor]
    def __init__(self, first: _Optional[int] = ..., total: _Optional[int] = ..., descriptors: _Optional[_Iterable[_Union[_types_pb2.WindowDescriptor, _Mapping]]] = ...) -> None: ...

class ReturnWindows(_message.Message):
    __slots__ = ("session_token", "group", "descriptors")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    session_token: str
    group: str
    descriptors: _containers.RepeatedCompositeFieldContainer[_types_pb2.WindowDescriptor]
    def __init__(self, session_token: _Optional[str] = ..., group: _Optional[str] = ..., descriptors: _Optional[_Iterable[_Union[_types_pb2.WindowDescriptor, _Mapping]]] = ...) -> None: ...

class WindowsReturned(_message.Message):
    __slots__ = ("num_adopted", "wanted_ranks")
    NUM_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    WANTED_RANKS_FIELD_NUMBER: _ClassVar[int]
    num_adopted: int
    wanted_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_adopted: _Optional[int] = ..., wanted_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Condition(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class FdRequest(_message.Message):
    __slots__ = ("hello", "redeem_ticket", "return_windows", "probe")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REDEEM_TICKET_FIELD_NUMBER: _ClassVar[int]
    RETURN_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    redeem_ticket: RedeemTicket
    return_windows: ReturnWindows
    probe: Probe
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., redeem_ticket: _Optional[_Union[RedeemTicket, _Mapping]] = ..., return_windows: _Optional[_Union[ReturnWindows, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ...) -> None: ...

class FdReply(_message.Message):
    __slots__ = ("welcome", "fd_batch", "error", "windows_returned", "condition")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FD_BATCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_RETURNED_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    fd_batch: FdBatch
    error: _types_pb2.ErrorDetail
    windows_returned: WindowsReturned
    condition: Condition
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., fd_batch: _Optional[_Union[FdBatch, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., windows_returned: _Optional[_Union[WindowsReturned, _Mapping]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...
