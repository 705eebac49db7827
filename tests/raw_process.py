"""Client processes that run a test's commands until they are killed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from raw_packets import WAIT_S, close_fds, connect, give_back, hello, redeem

from ep_runtime import board, trust, wire
from ep_runtime.board_abi import BoardHeaderStruct
from ep_runtime.v1 import types_pb2


def _child_hello(state, directory):
    welcome = hello(directory)
    return welcome.session_token, welcome.session_id


def _child_redeem(state, directory, token, ticket):
    close_fds(state.pop("fds", ()))
    state["fds"] = redeem(directory, token, ticket)
    return [(d.world_rank, d.bytes, d.generation, os.fstat(fd).st_ino) for d, fd in state["fds"]]


def _child_resume(state, directory, token):
    welcome = hello(directory, resume_token=token)
    return welcome.session_token, welcome.session_id, welcome.resumed


def _child_give_back(state, directory, token, group):
    answer = give_back(directory, token, group, state["fds"])
    return answer.num_adopted, list(answer.wanted_ranks)


def _child_give_back_none(state, directory, token, group, generation):
    item = types_pb2.WindowDescriptor(world_rank=0, bytes=4096, generation=generation)
    with open("/dev/null") as file:
        give_back(directory, token, group, [(item, file.fileno())])


def _child_spoil_board(state, generation):
    (item, fd), *_ = state["fds"]
    with mmap.mmap(fd, item.bytes) as mapped:
        BoardHeaderStruct.from_buffer(mapped).generation = generation


def _child_board(state):
    """Reads (generation, poison generation, reason, rank) from the board of the fetched windows."""
    (item, fd), *_ = state["fds"]
    with mmap.mmap(fd, item.bytes) as mapped:
        header = board.read_header(mapped)
    return (
        header.generation,
        header.poison_generation,
        header.poison_reason.name,
        header.poison_rank,
    )


def _child_map(state):
    state["maps"] = [mmap.mmap(fd, d.bytes) for d, fd in state["fds"]]
    for mapped in state["maps"][1:]:
        mapped[0] = 7
    return len(state["maps"])


def _child_fork(state, directory):
    """Forks a child that keeps every descriptor open after we end; returns its pid."""
    state["connection"] = connect(directory)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    os.close(reader)
    return pid


def _child_board_fd(state):
    return state["fds"][0][1]


def _child_become(state, uid):
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def _child_squat(state, directory):
    """Listens on sockets with the daemon's names; every user may connect."""
    directory.mkdir()
    directory.chmod(0o755)
    kinds = {wire.FD_SOCKET: socket.SOCK_SEQPACKET}
    state["listening"] = []
    for name in (wire.API_SOCKET, wire.FD_SOCKET, wire.ADMIN_SOCKET):
        listener = socket.socket(socket.AF_UNIX, kinds.get(name, socket.SOCK_STREAM))
        listener.bind(str(directory / name))
        listener.listen()
        (directory / name).chmod(0o666)
        state["listening"].append(listener)


def _child_linger(state, directory, linger_s, packets):
    """Sends packets, the last with a TCP socket whose last close waits for `linger_s`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.create_connection(listener.getsockname())
        state.setdefault("unread", []).append(listener.accept()[0])
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(b"x" * 65536)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger_s))
    with connect(directory) as connection, sender, contextlib.suppress(ConnectionError):
        for data in packets[:-1]:
            connection.send(data)
        socket.send_fds(connection, [packets[-1]], [sender.fileno()])


def _child_heard(state):
    """Returns the bytes that clients have sent to the squatted sockets so far."""
    said = []
    for listener in state["listening"]:
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                with connection, contextlib.suppress(BlockingIOError, ConnectionError):
                    said.append(connection.recv(1 << 16))
    return [data for data in said if data]


def _child_enter_namespace(state, uid):
    """Becomes a user in a namespace without other users: root appears as the overflow uid."""
    _child_become(state, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: it owns its files in /proc again
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        raise PermissionError(ctypes.get_errno(), "no user namespaces here")
    with open("/proc/self/uid_map", "w") as uid_map:
        uid_map.write(f"{uid} {uid} 1")


def _child_open_trusted(state, path, uids):
    os.close(trust.open_directory(path, uids))


def _child_open(state, path):
    os.close(os.open(path, os.O_RDWR))


def _child_inodes(state):
    return [os.fstat(fd).st_ino for _, fd in state["fds"]]


def _child_close(state):
    close_fds(state.pop("fds"))


def _child_window_bytes(state):
    return [mapped[0] for mapped in state["maps"][1:]]


def _child_call(state, module, name, *arguments):
    """Calls a function of a module that this process has not imported yet."""
    return getattr(importlib.import_module(module), name)(state, *arguments)


def _child_main(pipe) -> None:
    state: dict = {}
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send((True, globals()[f"_child_{name}"](state, *arguments)))
            except Exception as error:  # noqa: BLE001 - the test raises it
                pipe.send((False, error))


# Children of one server that has already imported the slow modules.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["raw_process", "jax"])


def run_script(script: str, environment: dict[str, str], log: Path, *ends: Connection) -> None:
    """Runs a script in this child as `python -c` would. `ends` become its standard input, and the
    descriptor in TEST_TALK_FD through which it talks to a test.
    """
    stdin, talk = (os.dup(end.fileno()) for end in ends)
    output = os.open(log, os.O_WRONLY)
    for number, fd in enumerate((stdin, output, output)):
        os.dup2(fd, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the process's life
    os.environ.clear()
    os.environ.update(environment, TEST_TALK_FD=str(talk))
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
    atexit._run_exitfuncs()


class Process:
    """A separate process that runs commands until it is killed."""

    def __init__(self) -> None:
        self._pipe, other = FORKS.Pipe()
        self._process = FORKS.Process(target=_child_main, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._asked = threading.Lock()
        self.pid = self._process.pid

    def do(self, name: str, *arguments):
        with self._asked:
            self._pipe.send((name, arguments))
            if not self._pipe.poll(WAIT_S):
                raise TimeoutError(name)
            ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value

    def kill(self) -> None:
        """Sends SIGKILL and reaps; a caller that waits for an answer gets its error before that."""
        self._process.kill()
        self._process.join(WAIT_S)
        with self._asked:
            self._process.close()
            self._pipe.close()
