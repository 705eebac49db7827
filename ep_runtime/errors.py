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

A call that this platform lacks raises a plain NotImplementedError.

Every class fixes its gRPC status code and says if a retry may help. `wire.py` maps them to and
from gRPC; the native library writes `EP_RUNTIME/<class name>: text {json fields}` into XLA's error
text, which `parse` reads back.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, NoReturn


class EpRuntimeError(Exception):
    """Base class of every error that the runtime raises.

    Attributes:
        fields: the names and numbers of this error as plain values (str, int, float, bool, list).
        grpc_code: name of the gRPC status code this class travels as.
    """

    grpc_code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields: dict[str, Any] = fields

    def raise_again(self, layer: str | None = None) -> NoReturn:
        """Raises a copy of this error, with this one as its cause.

        Args:
            layer: a layer whose name goes before the message and into `fields`.

        Raises:
            EpRuntimeError: of this error's class.

        Cost: none.
        """
        if layer is None:
            raise type(self)(str(self), **self.fields) from self
        raise type(self)(f"layer {layer!r}: {self}", **{**self.fields, "layer": layer}) from self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0] if self.args else "", self.fields)


class InvalidArgumentError(EpRuntimeError, ValueError):
    """Raised when an argument is wrong.

    The message names the argument, what it must be and what it was.
    """

    grpc_code = "INVALID_ARGUMENT"


class SpecMismatchError(EpRuntimeError):
    """Raised when two processes, or two calls, give one name different settings.

    `fields`: object, field, theirs, ours.
    """

    grpc_code = "ALREADY_EXISTS"


class CapacityOverflowError(EpRuntimeError):
    """Raised when a rank would receive more rows than its slab holds and on_overflow is "error".

    The step fails on every rank of the group. Processes and group stay usable.

    `fields`: layer, rank, demand, capacity.
    """

    grpc_code = "RESOURCE_EXHAUSTED"


class GroupNotReadyError(EpRuntimeError):
    """Raised when some processes of a group have not joined by the deadline; a retry may help.

    `fields`: group, missing_ranks.
    """

    grpc_code = "DEADLINE_EXCEEDED"


class PeerLostError(EpRuntimeError):
    """Raised when a process of the group died, or was fenced, while other ranks waited for it.

    The job may succeed when it is started again.

    `fields`: rank, process, layer, op, epoch.
    """

    grpc_code = "ABORTED"


class OpTimeoutError(EpRuntimeError):
    """Raised when a rank that is alive did not arrive at a call within op_timeout_s.

    `fields`: rank, layer, op, epoch, waited_s.
    """

    grpc_code = "DEADLINE_EXCEEDED"


class StaleHandleError(EpRuntimeError):
    """Raised when a call uses a layer or group that was closed, reclaimed, replaced or formed anew.

    The message names the caller that reclaimed or replaced it.
    """

    grpc_code = "FAILED_PRECONDITION"


class SessionFencedError(EpRuntimeError):
    """Raised when an operator has cut off (fenced) this session; connect and create groups again.

    The message names the user who fenced it.
    """

    grpc_code = "UNAUTHENTICATED"


class GroupBusyError(EpRuntimeError):
    """Raised when a living process already holds a rank of the group.

    A retry helps once that process has ended.

    `fields`: rank, pid.
    """

    grpc_code = "UNAVAILABLE"


class RuntimeUnavailableError(EpRuntimeError):
    """Raised when no daemon answers at the address, or the daemon is draining; a retry may help.

    `fields`: address; answered, False if nothing answered at all.
    """

    grpc_code = "UNAVAILABLE"


class PermissionDeniedError(EpRuntimeError):
    """Raised when the daemon does not serve this user, or its directory cannot be trusted.

    A directory cannot be trusted if another user may have made it. A token of another process or
    user is denied too.
    """

    grpc_code = "PERMISSION_DENIED"


class PoolExhaustedError(EpRuntimeError):
    """Raised when the daemon or this user has reached a limit, for example of memory.

    A retry helps after others free memory.

    `fields`: asked_bytes, free_bytes, limit_bytes, holders (for other users only their sum). For a
    user's limit: resource, uid, asked, held, limit.
    """

    grpc_code = "RESOURCE_EXHAUSTED"


class VersionSkewError(EpRuntimeError):
    """Raised when client and daemon, or package and native library, have incompatible versions.

    `fields`: client and daemon, or library and package.
    """

    grpc_code = "UNIMPLEMENTED"


def _all_classes() -> dict[str, type[EpRuntimeError]]:
    found: dict[str, type[EpRuntimeError]] = {EpRuntimeError.__name__: EpRuntimeError}
    pending = [EpRuntimeError]
    while pending:
        for child in pending.pop().__subclasses__():
            found[child.__name__] = child
            pending.append(child)
    return found


__all__ = sorted(_all_classes())


def __dir__() -> list[str]:
    return __all__


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
