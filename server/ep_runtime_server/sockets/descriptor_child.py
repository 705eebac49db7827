"""A process that receives clients' descriptors and passes on only those of memory.

    python -I -S descriptor_child.py INBOX

For each connection received on the socket INBOX, the process takes the next packet's descriptors.
It answers with one of the words below, and sends the descriptors with MEMORY. Then it closes its
own copies. Closing a file of a user's own file system (FUSE) may hang for as long as the user
likes, and no signal ends that.

Imports nothing from the package, so that it starts fast, because a client waits for it.
"""

import array
import ctypes
import fcntl
import os
import socket
import stat
import sys

MEMORY, FOREIGN, TOO_MANY = b"memory", b"foreign", b"too many"
MAX_FDS = 64

_ANCILLARY_BYTES = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * MAX_FDS)  # sender and fds

# Linux's major number of NVIDIA's devices; files of GPU memory always have this number.
_NVIDIA_MAJOR = 195
# From Linux's stat.h and fcntl.h. With these flags statx does not ask the file system.
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 0x1
_STATX_BYTES, _MODE, _RDEV_MAJOR = 256, slice(28, 30), slice(128, 132)


def is_memory(fd: int) -> bool:
    """Returns whether a descriptor is a memfd, or GPU memory exported by NVIDIA's driver."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return _is_of_nvidia(fd)
    return True


def _is_of_nvidia(fd: int) -> bool:
    told = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if ctypes.CDLL(None).statx(fd, b"", flags, _STATX_TYPE, told):
        return False
    mode, major = (int.from_bytes(told.raw[at], sys.byteorder) for at in (_MODE, _RDEV_MAJOR))
    return stat.S_ISCHR(mode) and major == _NVIDIA_MAJOR


def _taken(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receives the next packet; returns the answer's word and the packet's descriptors."""
    _, ancillary, flags, _ = connection.recvmsg(
        1, _ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    if flags & socket.MSG_CTRUNC or len(fds) > MAX_FDS:
        return TOO_MANY, fds.tolist()
    return (MEMORY if all(map(is_memory, fds)) else FOREIGN), fds.tolist()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as inbox:
        while True:
            data, copies, _, _ = socket.recv_fds(inbox, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            fds: list[int] = []
            with socket.socket(fileno=copies[0]) as connection:
                try:
                    word, fds = _taken(connection)
                except OSError:  # the client disconnected
                    word = FOREIGN
            socket.send_fds(inbox, [word], fds if word == MEMORY else [])
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main()
