"""All errors of the runtime, as one tree of classes.

    Exception
    └── EpRuntimeError                  base; carries `fields`, a dict of names and numbers
        ├── InvalidArgumentError        (also ValueError) the caller's argument is wrong
        ├── SpecMismatchError           two processes or calls gave one name different settings
        ├── CapacityOverflowError       a rank's slab is too small, with on_overflow="error"
        ├── GroupNotReadyError          members are missing at the deadline; names their ranks
        ├── PeerLostError               a member's process ended, or was fenced, while others waited
        ├── OpTimeoutError              a live member did not arrive within op_timeout_s
        ├── StaleHandleError            a handle's layer or group was closed or re-created
        ├── SessionFencedError          an operator cut this session off
        ├── GroupBusyError              a running process already has a rank
        ├── RuntimeUnavailableError     no daemon answers at the address
        ├── PermissionDeniedError       the wrong user, or another process's token
        ├── PoolExhaustedError          a limit of memory or of the user; names asked and held
        └── VersionSkewError            client, daemon or native library have incompatible versions

A call that this platform does not support raises Python's NotImplementedError.

Each class has a gRPC status code, and its docstring says if a retry may help. `wire.py` converts
errors to and from gRPC. The native library writes `EP_RUNTIME/<class name>: text {json fields}`
into XLA's error text, which `parse` reads.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, ClassVar, NoReturn


class EpRuntimeError(Exception):
    """Base class of all errors that the runtime raises.

    Attributes:
        fields: details of this error by name, as plain values (str, int, float, bool, list).
        grpc_code: name of the gRPC status code that stands for this class.
    """

    grpc_code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields: dict[str, Any] = fields

    def raise_again(self, layer: str | None = None) -> NoReturn:
        """Raises a copy of this error, with this one as its cause.

        Args:
            layer: name of a layer to put before the message and into `fields`.

        Raises:
            EpRuntimeError: always; an error of this error's class.

        Cost: none.
        """
        if layer is None:
            raise type(self)(str(self), **self.fields) from self
        raise type(self)(f"layer {layer!r}: {self}", **{**self.fields, "layer": layer}) from self

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self.fields), self.args or ("",)


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
    """Raised when a call uses a layer or group that was closed, reclaimed, replaced or re-formed.

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


def from_name(class_name: str, message: str, fields: dict[str, Any]) -> EpRuntimeError:
    """Makes an error from its class's name; an unknown name gives the base class."""
    return _all_classes().get(class_name, EpRuntimeError)(message, **fields)


# The native library writes a line: EP_RUNTIME/<Class>: <message> {"layer": "moe/0", ...}
_NATIVE_TEXT = re.compile(
    r"EP_RUNTIME/(?P<cls>\w+): (?P<message>[^\n]*?) (?P<fields>\{[^\n]*?\})(?=\s|$)"
)


def parse(text: str) -> EpRuntimeError | None:
    """Finds the first of our errors in a text, because XLA wraps handler errors; or None."""
    match = _NATIVE_TEXT.search(text)
    if match is None:
        return None
    try:
        fields = json.loads(match["fields"])
    except json.JSONDecodeError:
        fields = {}
    return from_name(match["cls"], match["message"], fields)
