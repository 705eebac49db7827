"""Opens only regular files, and limits how many bytes are read.

Opening a FIFO would wait for its other end; reading /dev/zero or a sparse file would fill memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 1 << 20  # limit for files that people write: certificates, keys, lists of nodes
MOST_BYTES_OF_END = 64 << 20  # limit for files that programs append to; events need much less

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class KindError(OSError):
    """Raised if a path is another kind of file; `strerror` says which kind."""


def kind_error(mode: int, wanted: int) -> KindError:
    """Makes the error for a file of kind `mode` (st_mode) instead of `wanted` (stat.S_IFREG...)."""
    kind = _KINDS.get(stat.S_IFMT(mode), "of no kind that is known")
    return KindError(errno.EINVAL, f"it is {kind}, and must be {_KINDS[wanted]}")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Opens a regular file without waiting; returns its descriptor, as os.open.

    Raises:
        KindError: the path is not a regular file, or with O_NOFOLLOW a symbolic link.
        OSError: the file cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EISDIR, errno.ELOOP):
            raise
        about = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW)
        raise kind_error(about.st_mode, stat.S_IFREG) from error
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        os.close(fd)
        raise kind_error(about.st_mode, stat.S_IFREG)
    return fd


def read(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a whole regular file. Raises as `open_regular`, and OSError if it is too long."""
    with open(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            size = os.fstat(file.fileno()).st_size
            raise OSError(errno.EFBIG, f"it must have at most {most_bytes} bytes, got {size}")
    return data


def read_end(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES_OF_END) -> bytes:
    """Reads the last `most_bytes` of a regular file. Raises as `open_regular`."""
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes)


def remove_socket(path: Path) -> None:
    """Removes a socket if it exists. Raises KindError for anything else, and OSError."""
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISSOCK(mode):
            raise kind_error(mode, stat.S_IFSOCK)
        os.unlink(path)
    except FileNotFoundError:
        return


def boot_id() -> str:
    """Returns the id of the host's current boot; a reboot ends all processes and memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # /proc is hidden
        return "unknown"
