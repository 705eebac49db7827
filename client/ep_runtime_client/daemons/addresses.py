"""Parses addresses of daemons, and checks their socket directories before trusting anything there.

The process that serves these sockets gets our groups and the rows they move. Before a byte is sent,
the directory and the listening process must belong to our user, to root, or to a user whom the
caller named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from ep_runtime import env, trust
from ep_runtime.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
)

DIRECTORY, EMBEDDED, NODE, NONE = "directory", "embedded", "node", "none"
_ADDRESSES = '"unix:///dir", "unix:///dir?uid=N", "embedded", "node" or "none"'
_UID = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class SocketDirectory:
    """The socket directory of a daemon, and the users who may own it.

    Attributes:
        directory: an absolute path.
        uid: user of the daemon, if the caller names one: then the listening process proves its
            identity, and the parent directories are not checked.
    """

    directory: Path
    uid: int | None = None

    @property
    def address(self) -> str:
        """The address for `connect`, with the user's id only if `connect` needs it."""
        return f"unix://{self.directory}" + (f"?uid={self.uid}" if self._needs_uid() else "")

    def _needs_uid(self) -> bool:
        if self.uid is None or self.uid not in (0, os.geteuid()):
            return self.uid is not None
        try:
            trust.check_parents(self.directory, {0, os.geteuid()})
        except (PermissionDeniedError, OSError):
            return True
        return False

    @property
    def _uids(self) -> set[int]:
        return {0, os.geteuid()} | ({self.uid} if self.uid is not None else set())

    def unavailable(self, reason: str) -> RuntimeUnavailableError:
        """Makes the error of a daemon that does not answer."""
        return RuntimeUnavailableError(
            f"no daemon answers at {self.address}: {reason}; start one with "
            f"`ep-runtime serve --dir {self.directory}`",
            address=self.address,
            answered=False,
        )

    def open(self) -> int:
        """Opens a descriptor of the directory; the caller closes it. `path_of` names sockets in it.

        Raises:
            PermissionDeniedError: another user could have made the directory.
            InvalidArgumentError: the path is not a directory.
            RuntimeUnavailableError: the directory does not exist.
        """
        try:
            return trust.open_directory(self.directory, self._uids, with_parents=self.uid is None)
        except PermissionDeniedError as error:
            raise self._untrusted(error) from error
        except PermissionError as error:
            raise self._forbidden(self.directory) from error
        except NotADirectoryError as error:
            raise InvalidArgumentError(
                f"{self.directory} is not a directory; give the daemon's socket directory",
                argument="address",
            ) from error
        except OSError as error:
            raise self.unavailable(error.strerror or str(error)) from error

    def check(self) -> None:
        """Raises PermissionDeniedError if the directory, existing or not yet made, is not safe."""
        try:
            trust.check_parents(self.directory, self._uids)
        except PermissionDeniedError as error:
            raise self._untrusted(error) from error
        with contextlib.suppress(RuntimeUnavailableError):
            os.close(self.open())

    @contextlib.contextmanager
    def connected(self, name: str, kind: int, timeout_s: float) -> Iterator[socket.socket]:
        """Connects to one of the directory's sockets. Raises as `open` and `check_listener`."""
        pinned = self.open()
        try:
            with socket.socket(socket.AF_UNIX, kind) as connection:
                self._connect(connection, pinned, name, timeout_s)
                yield connection
        finally:
            os.close(pinned)

    def check_listener(self, pinned: int, name: str, timeout_s: float) -> None:
        """Checks that a trusted user's process listens on a stream socket of the opened directory.

        Raises:
            PermissionDeniedError: we may not connect, or another user's process listens.
            RuntimeUnavailableError: no process listens there.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            self._connect(probe, pinned, name, timeout_s)

    def _connect(self, connection: socket.socket, pinned: int, name: str, timeout_s: float) -> None:
        # Use SO_SNDTIMEO, because Python's timeout does not wait if the listener's backlog is full.
        wait_s = min(timeout_s, 1e6)
        left = struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6) or 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, left)
        try:
            connection.connect(path_of(pinned, name))
            connection.settimeout(timeout_s)
            trust.check_peer(connection, self.directory / name, self._uids)
        except PermissionDeniedError as error:
            raise self._untrusted(error) from error
        except PermissionError as error:
            raise self._forbidden(self.directory / name) from error
        except OSError as error:
            raise self.unavailable(error.strerror or str(error)) from error

    def _forbidden(self, path: Path) -> PermissionDeniedError:
        return PermissionDeniedError(
            f"uid {os.geteuid()} may not open {path}", path=str(path), uid=os.geteuid()
        )

    def _untrusted(self, error: PermissionDeniedError) -> PermissionDeniedError:
        return PermissionDeniedError(
            f"{self.address} is not trusted: {error}, so another user could pose as the daemon. If "
            f"you know whose daemon is there, name its user (unix://{self.directory}?uid=UID). "
            "Otherwise remove the directory, or name one of your own: by the address, by "
            "RUNTIME_DIRECTORY, or by XDG_RUNTIME_DIR unless you are root",
            directory=str(self.directory),
            **error.fields,
        )


def path_of(pinned: int, name: str) -> str:
    """Returns a socket's path through a directory's descriptor, which no rename can redirect."""
    return f"/proc/self/fd/{pinned}/{name}"


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
