"""Parses addresses of daemons, and finds the socket directory that each one means."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from ep_runtime import env
from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_client.daemons.socket_directory import SocketDirectory

DIRECTORY, EMBEDDED, NODE, NONE = "directory", "embedded", "node", "none"
_ADDRESSES = '"unix:///dir", "unix:///dir?uid=N", "embedded", "node" or "none"'
_UID = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class Address:
    """A parsed address.

    Attributes:
        kind: DIRECTORY, EMBEDDED, NODE or NONE.
        directory: directory of the daemon's sockets; None for "embedded" and "none".
        uid: a further user who may own the daemon, besides our user and root, if the address names
            one.
    """

    kind: str
    directory: Path | None = None
    uid: int | None = None

    @property
    def key(self) -> str:
        """A key that is equal for addresses of the same daemon."""
        return self.kind if self.directory is None else os.path.realpath(self.directory)


def parse_address(text: str, argument: str = "address") -> Address:
    """Parses an address of `connect`.

    Raises:
        InvalidArgumentError: the text has none of the four forms, a relative or too long directory,
            or a uid that is not a number.
    """
    if text in (EMBEDDED, NONE):
        return Address(text)
    if text == NODE:
        return Address(NODE, env.check_directory(env.runtime_directory() / "node"))
    path, named, uid = text.removeprefix("unix://").partition("?uid=")
    if not path.startswith("/") or (named and not _UID.fullmatch(uid)):
        raise InvalidArgumentError(
            f"{argument} must be {_ADDRESSES}, got {text!r}", argument=argument
        )
    return Address(DIRECTORY, env.check_directory(path), int(uid) if named else None)


def daemon_place(text: str | None) -> SocketDirectory:
    """Finds the daemon for the command line: `text`, $EP_RUNTIME_ADDRESS, or the default.

    Raises:
        InvalidArgumentError: `text` names a daemon that other processes cannot reach.
        RuntimeUnavailableError: $EP_RUNTIME_ADDRESS names such a daemon, as some jobs want it.
    """
    argument = "--address" if text is not None else "EP_RUNTIME_ADDRESS"
    named = text if text is not None else env.address()
    if named is None:
        return SocketDirectory(env.runtime_directory())
    address = parse_address(named, argument)
    if address.directory is not None:
        return SocketDirectory(address.directory, address.uid)
    none = f"{argument}={named!r} names no daemon to ask"
    if text is not None:
        raise InvalidArgumentError(f"{none}; give unix:///dir", argument=argument)
    raise RuntimeUnavailableError(f"{none}; give --address unix:///dir", answered=False)
