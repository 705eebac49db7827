"""Every error of the runtime, in one tree.

    Exception
    └── EpRuntimeError                  base; carries `fields`, a dict of names and numbers
        ├── InvalidArgumentError        (also ValueError) the caller's argument is wrong
        ├── SpecMismatchError           two processes, or two calls, described one name differently
        ├── CapacityOverflowError       more rows for a rank than its slab holds, in error mode
        ├── GroupNotReadyError          members are missing at the deadline; names the ranks
        ├── PeerLostError               a member's process died, or was fenced, while others waited
        ├── OpTimeoutError              a live member did not arrive within op_timeout_s
        ├── StaleHandleError            the layer or group of this handle is gone or was re-created
        ├── SessionFencedError          an operator cut this session off
        ├── GroupBusyError              a rank is claimed by a process that lives
        ├── RuntimeUnavailableError     no daemon answers at the address
        ├── PermissionDeniedError       not served: the wrong user, or another process's token
        ├── PoolExhaustedError          a limit of memory, or of the user; names asked and held
        └── VersionSkewError            client, daemon or native library are of different versions

What this platform cannot do is a plain NotImplementedError.

Every class fixes its gRPC status code and says where a retry may help. `wire.py` maps them to and
from gRPC; the native library writes `EP_RUNTIME/<class name>: text {json fields}` into XLA's error
text, which `parse` reads back.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar


class EpRuntimeError(Exception):
    """Base of all errors of the runtime.

    Attributes:
        fields: the names and numbers of this error as plain values (str, int, float, bool, list).
        grpc_code: name of the gRPC status code this class travels as.
    """

    grpc_code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields: dict[str, Any] = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0] if self.args else "", self.fields)


class InvalidArgumentError(EpRuntimeError, ValueError):
    """An argument is wrong. The message names it, what was wanted and what was given."""

    grpc_code = "INVALID_ARGUMENT"


class SpecMismatchError(EpRuntimeError):
    """One name, two specs. `fields`: object, field, theirs, ours."""

    grpc_code = "ALREADY_EXISTS"


class CapacityOverflowError(EpRuntimeError):
    """A rank would receive more rows than its slab holds, in a group with on_overflow="error".

    The step fails on every rank of the group; processes, context and group live on.
    `fields`: layer, rank, demand, capacity.
    """

    grpc_code = "RESOURCE_EXHAUSTED"


class GroupNotReadyError(EpRuntimeError):
    """Not every member of the group joined by the deadline; a retry may help.

    `fields`: group, missing_ranks.
    """

    grpc_code = "DEADLINE_EXCEEDED"


class PeerLostError(EpRuntimeError):
    """A member died, or its session was fenced, while others waited; the job's next start may
    succeed.

    `fields`: rank, process, layer, op, epoch.
    """

    grpc_code = "ABORTED"


class OpTimeoutError(EpRuntimeError):
    """A live member did not arrive in op_timeout_s. `fields`: rank, layer, op, epoch, waited_s."""

    grpc_code = "DEADLINE_EXCEEDED"


class StaleHandleError(EpRuntimeError):
    """The layer or group behind a handle is gone: closed, reclaimed, replaced, or of another
    generation. The message names who reclaimed or replaced it."""

    grpc_code = "FAILED_PRECONDITION"


class SessionFencedError(EpRuntimeError):
    """This session was fenced: connect again and create the groups anew. The message names who
    fenced it."""

    grpc_code = "UNAUTHENTICATED"


class GroupBusyError(EpRuntimeError):
    """A rank of the group is claimed by a process that lives; a retry helps when it has ended.

    `fields`: rank, pid.
    """

    grpc_code = "UNAVAILABLE"


class RuntimeUnavailableError(EpRuntimeError):
    """No daemon answers at the address, or it is draining; a retry may help.

    `fields`: address; answered, False where nobody spoke at all.
    """

    grpc_code = "UNAVAILABLE"


class PermissionDeniedError(EpRuntimeError):
    """The daemon does not serve this user, the token belongs to another process or user, or the
    daemon's directory could be another user's doing."""

    grpc_code = "PERMISSION_DENIED"


class PoolExhaustedError(EpRuntimeError):
    """A limit of the daemon, or of the user, is reached; a retry helps when others gave back.

    `fields`: asked_bytes, free_bytes, limit_bytes, holders (of other users only their sum); of a
    user's limit resource, uid, asked, held, limit.
    """

    grpc_code = "RESOURCE_EXHAUSTED"


class VersionSkewError(EpRuntimeError):
    """Client and daemon share no protocol version, or the native library and what calls it are
    of different ones. `fields`: client and daemon, or library and package."""

    grpc_code = "UNIMPLEMENTED"


def _all_classes() -> dict[str, type[EpRuntimeError]]:
    found: dict[str, type[EpRuntimeError]] = {EpRuntimeError.__name__: EpRuntimeError}
    pending = [EpRuntimeError]
    while pending:
        for child in pending.pop().__subclasses__():
            found[child.__name__] = child
            pending.append(child)
    return found


def _rebuild(cls: type[EpRuntimeError], message: str, fields: dict[str, Any]) -> EpRuntimeError:
    return cls(message, **fields)


def from_name(class_name: str, message: str, fields: dict[str, Any]) -> EpRuntimeError:
    """The error of that class name; an unknown name gives the base class."""
    return _all_classes().get(class_name, EpRuntimeError)(message, **fields)


# The native library writes one line: EP_RUNTIME/<Class>: <message> {"layer": "moe/0", ...}
_NATIVE_TEXT = re.compile(
    r"EP_RUNTIME/(?P<cls>\w+): (?P<message>[^\n]*?) (?P<fields>\{[^\n]*?\})(?=\s|$)"
)


def parse(text: str) -> EpRuntimeError | None:
    """The first of our errors inside a longer text (XLA wraps handler errors), or None."""
    match = _NATIVE_TEXT.search(text)
    if match is None:
        return None
    try:
        fields = json.loads(match["fields"])
    except json.JSONDecodeError:
        fields = {}
    return from_name(match["cls"], match["message"], fields)
