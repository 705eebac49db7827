"""A process that receives clients' descriptors and passes on those that cannot block.

    python -I -S descriptor_child.py INBOX

For every connection that comes on the socket INBOX it takes the next packet's descriptors, and
answers with one of the words below, MEMORY with the descriptors. Then it closes its own copies; of
a file of a user's own file system that lasts as long as the user likes, and no signal ends it.

Takes nothing from the package: it starts while a client waits.
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

_ANCILLARY_BYTES = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * MAX_FDS)  # the sender's, and fds

# Major number of NVIDIA's devices in Linux; GPU memory has no other files.
_NVIDIA_MAJOR = 195
# Linux stat.h, fcntl.h. With these flags statx answers from the kernel, without the file system.
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 0x1
_STATX_BYTES, _MODE, _RDEV_MAJOR = 256, slice(28, 30), slice(128, 132)


def is_memory(fd: int) -> bool:
    """A memfd, or NVIDIA's driver, which exports memory of GPUs as its own device."""
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
    """The word for the next packet, and its descriptors."""
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
                except OSError:  # it went away
                    word = FOREIGN
            socket.send_fds(inbox, [word], fds if word == MEMORY else [])
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main()
