"""The socket directory, which one daemon at a time locks and cleans up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from urllib.parse import quote

from ep_runtime import env, files, wire
from ep_runtime.errors import EpRuntimeError, InvalidArgumentError, PermissionDeniedError

LOCK_FILE = "lock"
JOURNAL_FILE = "journal"
CLUSTER_FILE = "cluster"
EVENTS_FILE = "events"
AUDIT_FILE = "audit"
RPC_SOCKET = "rpc.sock"  # gRPC's socket behind api.sock
ORDERS_SOCKET = "ops.sock"  # gRPC's socket behind admin.sock
SOCKETS = (wire.API_SOCKET, wire.FD_SOCKET, wire.ADMIN_SOCKET, RPC_SOCKET, ORDERS_SOCKET)
_OURS_ALONE = (wire.ADMIN_SOCKET, RPC_SOCKET, ORDERS_SOCKET)


class DirectoryBusyError(EpRuntimeError):
    """Raised if another daemon serves the directory. `fields`: directory, pid."""

    grpc_code = "UNAVAILABLE"


def _unusable(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"cannot use {path}: {error.strerror}; remove that file, or take another --dir",
        argument="dir",
    )


class SocketDirectory:
    """A directory locked before any bind, because gRPC silently replaces existing sockets."""

    def __init__(self, path: Path, *, open_to_others: bool) -> None:
        """Creates and locks the directory.

        Raises:
            DirectoryBusyError: another daemon serves the directory; the error has its pid.
            PermissionDeniedError: another user owns the directory or can write to it.
            InvalidArgumentError: the directory cannot be created or reached, its name is too long,
                or one of its file names is taken by something else.
        """
        try:
            self.path = self._prepare(path, open_to_others=open_to_others)
        except OSError as error:
            raise InvalidArgumentError(
                f"cannot use {path} as socket directory: {error.strerror}", argument="dir"
            ) from error
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._lock_fd = files.open_regular(self.path / LOCK_FILE, flags)
        except OSError as error:
            raise _unusable(self.path / LOCK_FILE, error) from error
        self._open_to_others = open_to_others
        self._inodes: dict[str, tuple[int, int]] = {}
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock_fd)
            raise DirectoryBusyError(
                f"another daemon (pid {pid}) serves {self.path}", directory=str(self.path), pid=pid
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        for name in SOCKETS:  # remove sockets of a killed daemon
            try:
                files.remove_socket(self.path / name)
            except OSError as error:
                raise _unusable(self.path / name, error) from error

    @staticmethod
    def _prepare(path: Path, *, open_to_others: bool) -> Path:
        """Creates the directory if missing; an existing one, such as /tmp, keeps its mode."""
        existed = path.exists()
        directory = env.make_directory(path, mode=0o755 if open_to_others else 0o700)
        if not existed:
            os.chmod(directory, 0o755 if open_to_others else 0o700)  # overrides the umask
        mode = os.stat(directory).st_mode & 0o777
        if mode & 0o022:
            raise PermissionDeniedError(
                f"{directory} has mode {mode:04o}: users who can write to it could replace the "
                "daemon's sockets; use a directory for the daemon alone",
                path=str(directory),
            )
        if open_to_others and mode & 0o011 != 0o011:
            raise InvalidArgumentError(
                f"{directory} has mode {mode:04o}: the users to serve cannot reach it; "
                f"chmod 0755 {directory}",
                argument="dir",
            )
        return directory

    def address(self, name: str) -> str:
        """Returns the URI that gRPC binds, with special characters quoted."""
        return f"unix:{quote(str(self.path / name))}"

    def bind(self, name: str, kind: int) -> socket.socket:
        """Returns a bound socket that does not listen yet. Raises InvalidArgumentError."""
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            listener.bind(str(self.path / name))
        except OSError as error:
            listener.close()
            raise _unusable(self.path / name, error) from error
        return listener

    def sockets_bound(self) -> None:
        """Sets the modes of the sockets, and notes which files this daemon made."""
        for name in SOCKETS:
            others = self._open_to_others and name not in _OURS_ALONE
            os.chmod(self.path / name, 0o666 if others else 0o600)
            found = os.stat(self.path / name)
            self._inodes[name] = (found.st_dev, found.st_ino)

    def close(self, *, remove: bool = False) -> None:
        """Removes this daemon's sockets, and unlocks the directory.

        With `remove` the directory is removed too, because it was made only for this daemon.
        """
        for name, inode in self._inodes.items():
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self.path / name)
                if (found.st_dev, found.st_ino) == inode:
                    os.unlink(self.path / name)
        self._inodes = {}
        if remove:
            with contextlib.suppress(OSError):
                for name in (JOURNAL_FILE, CLUSTER_FILE, EVENTS_FILE, AUDIT_FILE, LOCK_FILE):
                    (self.path / name).unlink(missing_ok=True)
                os.rmdir(self.path)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
