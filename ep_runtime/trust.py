"""Checks which users control a socket: by the path's directories, and the kernel's credentials.

A path is only as trustworthy as the users who can change it. `open_directory` walks a path once,
checks each step, and returns a descriptor. The descriptor refers to the checked directory even if
the path changes later.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path

from ep_runtime.errors import PermissionDeniedError

_PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40  # the kernel's limit too
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_UIDS = 2**32 - 1
UCRED = struct.Struct("iII")  # pid, uid, gid; of SO_PEERCRED and SCM_CREDENTIALS


def open_directory(path: Path, uids: Collection[int], *, with_parents: bool = True) -> int:
    """Opens a directory that only `uids` can have made; returns an O_PATH descriptor to close.

    Args:
        path: an absolute path. It may contain symbolic links of `uids`, but not as its last part.
        uids: users who may own the directory and all parts of its path.
        with_parents: check the path's other parts too; pass False if the caller checks the
            listening process in another way.

    Raises:
        PermissionDeniedError: another user owns a part of the path or can change it; `fields` has
            path and uid of this part.
        OSError: the directory cannot be reached.
    """
    found = _walk(path, uids) if with_parents else os.open(path, _PATH_ONLY)
    try:
        _check_end(path, os.fstat(found), uids)
    except BaseException:
        os.close(found)
        raise
    return found


def check_parents(path: Path, uids: Collection[int]) -> None:
    """Checks all existing directories on the way to `path`. Raises as `open_directory`."""
    with contextlib.suppress(FileNotFoundError):
        os.close(_walk(path, uids))


def ids_of(connection: socket.socket) -> tuple[int, int, int]:
    """Returns pid, uid and gid of a unix socket's other end, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    pid, uid, gid = UCRED.unpack(raw)
    return pid, uid, gid


def check_peer(connection: socket.socket, path: Path, uids: Collection[int]) -> None:
    """Raises PermissionDeniedError unless the socket's other end belongs to one of `uids`."""
    _, uid, _ = ids_of(connection)
    if uid not in uids:
        raise PermissionDeniedError(
            f"a process of uid {uid} serves {path}", path=str(path), uid=uid
        )


def _walk(path: Path, uids: Collection[int]) -> int:
    """Opens the path step by step, and checks each part except the last."""
    with contextlib.ExitStack() as opened:

        def open_part(name: str, at: int | None = None) -> int:
            fd = os.open(name, _PATH_ONLY, dir_fd=at)
            opened.callback(os.close, fd)
            return fd

        here, walked, links = open_part("/"), Path("/"), 0
        left = list(reversed(path.parts[1:]))
        while left:
            _check_parent(walked, os.fstat(here), uids)
            name = left.pop()
            found = open_part(name, here)
            about = os.fstat(found)
            if not left or not stat.S_ISLNK(about.st_mode):
                here, walked = found, walked / name
                continue
            links += 1
            _check_owner(walked / name, about, uids)
            if links > _MAX_LINKS:
                raise _refused(walked / name, about, "is one symbolic link too many")
            target = os.readlink("", dir_fd=found)
            left += [part for part in reversed(Path(target).parts) if part != "/"]
            if target.startswith("/"):
                here, walked = open_part("/"), Path("/")
        return os.dup(here)


def _check_end(path: Path, about: os.stat_result, uids: Collection[int]) -> None:
    if stat.S_ISLNK(about.st_mode):
        raise _refused(path, about, "is a symbolic link")
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if about.st_uid not in uids:
        raise _refused(path, about, f"belongs to uid {about.st_uid}")
    if about.st_mode & _OTHERS_WRITE:
        raise _refused(
            path, about, f"has mode {about.st_mode & 0o7777:04o}: others can write to it"
        )


def _check_parent(path: Path, about: os.stat_result, uids: Collection[int]) -> None:
    _check_owner(path, about, uids)
    writable = about.st_mode & _OTHERS_WRITE
    if writable == stat.S_IWGRP and _is_private_group(about):
        return
    # In a sticky directory nobody can rename or remove another user's entries.
    if writable and not about.st_mode & stat.S_ISVTX:
        raise _refused(
            path,
            about,
            f"has mode {about.st_mode & 0o7777:04o}: others can put something else in its place",
        )


def _check_owner(path: Path, about: os.stat_result, uids: Collection[int]) -> None:
    if about.st_uid in uids or (about.st_uid == _overflow_uid() and not _sees_all_uids()):
        return
    raise _refused(path, about, f"belongs to uid {about.st_uid}")


def _refused(path: Path, about: os.stat_result, what: str) -> PermissionDeniedError:
    return PermissionDeniedError(f"{path} {what}", path=str(path), uid=about.st_uid)


def _is_private_group(about: os.stat_result) -> bool:
    """Returns whether a file's group is root, or the private group of the file's owner."""
    if about.st_gid == 0:
        return True
    try:
        name, group = pwd.getpwuid(about.st_uid).pw_name, grp.getgrgid(about.st_gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _sees_all_uids() -> bool:
    """Returns whether all uids are mapped; else root's files seem to have the overflow uid."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return True
    return sum(int(line.split()[2]) for line in lines) >= _ALL_UIDS


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return 65534
