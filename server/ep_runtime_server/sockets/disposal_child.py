"""Closes every descriptor that arrives on socket FD: `python -I -S disposal_child.py FD`.

Imports nothing from the package, so that it starts fast, because a connection waits for it.
"""

import os
import socket
import sys


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as inbox:
        while True:
            data, fds, _, _ = socket.recv_fds(inbox, 1, 64)
            if not data:
                return
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main()
