"""A client without the client library: packets, stubs, and processes that can be killed."""

from __future__ import annotations

import array
import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import uuid
from pathlib import Path

import grpc

from ep_runtime import board, specs, wire
from ep_runtime.v1 import (
    admin_service_pb2_grpc,
    fd_socket_pb2,
    group_service_pb2,
    group_service_pb2_grpc,
    layer_service_pb2,
    layer_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)

WAIT_S = 10.0  # no test waits longer for anything


def make_spec(name: str = "moe", ranks: int = 2, **changes) -> specs.GroupSpec:
    arguments: dict = {
        "name": name,
        "mesh_axes": (("ep", ranks),),
        "ep_axis": "ep",
        "num_experts": 4 * ranks,
        "hidden_size": 16,
        "max_tokens_per_rank": 8,
        "max_top_k": 2,
        "alignment": 4,
        "retain_s": 0.0,
    }
    return specs.make_group_spec(**{**arguments, **changes})


# Packets


def connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(WAIT_S)
    connection.connect(str(Path(directory) / wire.FD_SOCKET))
    return connection


def receive(connection: socket.socket) -> tuple[fd_socket_pb2.FdReply, list[int]]:
    data, ancillary, flags, _ = connection.recvmsg(
        wire.MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * wire.MAX_FDS_PER_PACKET), 0
    )
    assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
    if not data:
        raise ConnectionResetError("fd.sock closed the connection")
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload)
    reply = fd_socket_pb2.FdReply.FromString(data)
    if reply.WhichOneof("reply") == "error":
        raise wire.error_from_detail(reply.error)
    return reply, list(fds)


def hello(directory: Path, **changes) -> fd_socket_pb2.Welcome:
    greeting = {"api_versions": ["v1"], "client_version": "raw", "pid": os.getpid(), **changes}
    with connect(directory) as connection:
        connection.send(
            fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(**greeting)).SerializeToString()
        )
        return receive(connection)[0].welcome


def redeem(directory: Path, token: str, ticket: str):
    """[(descriptor, fd)] of a ticket; the caller closes them."""
    request = fd_socket_pb2.RedeemTicket(session_token=token, ticket=ticket)
    found = []
    with connect(directory) as connection:
        connection.send(fd_socket_pb2.FdRequest(redeem_ticket=request).SerializeToString())
        while True:
            reply, fds = receive(connection)
            batch = reply.fd_batch
            assert batch.first == len(found)
            found.extend(zip(batch.descriptors, fds, strict=True))
            if len(found) == batch.total:
                return found


def give_back(directory: Path, token: str, group: str, found) -> fd_socket_pb2.WindowsReturned:
    """Returns [(descriptor, fd)] to a daemon that started again; the caller keeps the fds."""
    answer = fd_socket_pb2.WindowsReturned()
    with connect(directory) as connection:
        for first in range(0, len(found), wire.MAX_FDS_PER_PACKET):
            part = found[first : first + wire.MAX_FDS_PER_PACKET]
            request = fd_socket_pb2.ReturnWindows(
                session_token=token, group=group, descriptors=[item for item, _ in part]
            )
            packet = fd_socket_pb2.FdRequest(return_windows=request).SerializeToString()
            socket.send_fds(connection, [packet], [fd for _, fd in part])
            answer = receive(connection)[0].windows_returned
    return answer


# Processes


def _child_hello(state, directory):
    welcome = hello(directory)
    return welcome.session_token, welcome.session_id


def _child_redeem(state, directory, token, ticket):
    state["fds"] = redeem(directory, token, ticket)
    return [(d.world_rank, d.bytes, d.generation, os.fstat(fd).st_ino) for d, fd in state["fds"]]


def _child_resume(state, directory, token):
    welcome = hello(directory, resume_token=token)
    return welcome.session_token, welcome.session_id, welcome.resumed


def _child_give_back(state, directory, token, group):
    answer = give_back(directory, token, group, state["fds"])
    return answer.num_adopted, list(answer.wanted_ranks)


def _child_board(state):
    """What the board of the fetched windows says: (generation, poison generation, reason, rank)."""
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
    """Leaves a child of ours behind that keeps every descriptor open; returns its pid."""
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


def _child_hello_on_forked(state, directory):
    """Connects, then lets a forked child say hello on that connection; its answer's class."""
    connection = connect(directory)
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            request = fd_socket_pb2.Hello(api_versions=["v1"], pid=os.getpid())
            connection.send(fd_socket_pb2.FdRequest(hello=request).SerializeToString())
            receive(connection)
            os.write(writer, b"welcome")
        except Exception as error:  # noqa: BLE001 - its class is the result
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer = os.read(reader, 100).decode()
    os.wait()
    return answer


def _child_window_bytes(state):
    return [mapped[0] for mapped in state["maps"][1:]]


_COMMANDS = {
    "window_bytes": _child_window_bytes,
    "hello": _child_hello,
    "redeem": _child_redeem,
    "map": _child_map,
    "resume": _child_resume,
    "give_back": _child_give_back,
    "board": _child_board,
    "fork": _child_fork,
    "hello_on_forked": _child_hello_on_forked,
}


def _child_main(pipe) -> None:
    state: dict = {}
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send((True, _COMMANDS[name](state, *arguments)))
            except Exception as error:  # noqa: BLE001 - the test raises it
                pipe.send((False, error))


class Process:
    """A process of its own that does what it is told, until it is killed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["raw_client"])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_child_main, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.pid = self._process.pid

    def do(self, name: str, *arguments):
        self._pipe.send((name, arguments))
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(name)
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        self._process.kill()
        self._process.join(WAIT_S)
        self._process.close()
        self._pipe.close()


# RPCs


def new_op_id() -> str:
    return uuid.uuid4().hex


class Stubs:
    """Stubs of one socket; errors come as ours."""

    def __init__(self, directory: Path, socket_name: str, metadata=()) -> None:
        self.channel = grpc.insecure_channel(
            f"unix:{directory}/{socket_name}", options=wire.channel_options()
        )
        self.metadata = tuple(metadata)
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self.channel)
        self.groups = group_service_pb2_grpc.GroupServiceStub(self.channel)
        self.layers = layer_service_pb2_grpc.LayerServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    def call(self, method, request, *, timeout=WAIT_S):
        try:
            return method(request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise wire.error_from_rpc(error) from None

    def close(self) -> None:
        self.channel.close()


class Client(Stubs):
    """One session; `process` None makes it this process's."""

    def __init__(self, directory: Path, *, process: Process | None = None, job: str | None = "job"):
        self.directory = directory
        self.process = process
        if process is None:
            welcome = hello(directory)
            self.token, self.session_id = welcome.session_token, welcome.session_id
        else:
            self.token, self.session_id = process.do("hello", directory)
        self.pid = process.pid if process is not None else os.getpid()
        metadata = ((wire.TOKEN_KEY, self.token), (wire.PID_KEY, str(self.pid)))
        super().__init__(directory, wire.API_SOCKET, metadata)
        if job is not None:
            self.open(job)

    def resume(self) -> bool:
        """Says hello again after the daemon started again; whether it knew the session."""
        if self.process is None:
            welcome = hello(self.directory, resume_token=self.token)
            answer = welcome.session_token, welcome.session_id, welcome.resumed
        else:
            answer = self.process.do("resume", self.directory, self.token)
        self.channel.close()
        self.token, self.session_id, resumed = answer
        metadata = ((wire.TOKEN_KEY, self.token), (wire.PID_KEY, str(self.pid)))
        super().__init__(self.directory, wire.API_SOCKET, metadata)
        self.open("job")
        return resumed

    def restore(self, group, ranks=None, layers=()):
        """RestoreGroup; the answer."""
        request = group_service_pb2.RestoreGroupRequest(
            spec=group.spec,
            generation=group.generation,
            world_ranks=range(len(group.members)) if ranks is None else ranks,
            layers=[wire.registered_to_proto(layer) for layer in layers],
        )
        return self.call(self.groups.RestoreGroup, request)

    def give_back(self, group):
        """(descriptors that the daemon took, ranks still wanted); what `fetch` fetched there."""
        return self.process.do("give_back", self.directory, self.token, group.spec.name)

    def open(self, job: str, **more) -> session_service_pb2.OpenSessionResponse:
        return self.call(
            self.sessions.OpenSession, session_service_pb2.OpenSessionRequest(job=job, **more)
        )

    def how(self) -> dict:
        """Arguments of a call that is not waited for."""
        return {"timeout": 2 * WAIT_S, "metadata": self.metadata}

    def create_request(self, spec, ranks=None, *, wait_s=WAIT_S, op_id=None, replace=False):
        return group_service_pb2.CreateGroupRequest(
            op_id=op_id or new_op_id(),
            spec=wire.group_spec_to_proto(spec),
            world_ranks=range(spec.world_size) if ranks is None else ranks,
            replace=replace,
            wait=wire.duration(wait_s),
        )

    def create(self, spec, ranks=None, *, wait_s=WAIT_S, **more):
        request = self.create_request(spec, ranks, wait_s=wait_s, **more)
        return self.call(self.groups.CreateGroup, request, timeout=wait_s + WAIT_S)

    def ticket(self, group, ranks=()):
        return self.call(
            self.groups.AcquireWindows,
            group_service_pb2.AcquireWindowsRequest(
                name=group.spec.name, generation=group.generation, world_ranks=ranks
            ),
        )

    def fetch(self, group, ranks=()):
        """Acquires and redeems; in this process [(descriptor, fd)]."""
        ticket = self.ticket(group, ranks).ticket
        if self.process is not None:
            return self.process.do("redeem", self.directory, self.token, ticket)
        return redeem(self.directory, self.token, ticket)

    def attached_request(self, group, *, wait_s=WAIT_S):
        return group_service_pb2.ReportAttachedRequest(
            name=group.spec.name, generation=group.generation, wait=wire.duration(wait_s)
        )

    def attached(self, group, *, wait_s=WAIT_S):
        request = self.attached_request(group, wait_s=wait_s)
        return self.call(self.groups.ReportAttached, request, timeout=wait_s + WAIT_S).group

    def ready(self, spec, **more):
        """Creates, fetches and reports; the READY group."""
        group = self.create(spec, **more).group
        if spec.transport != "xla":
            close_fds(self.fetch(group))
        return self.attached(group)

    def close_group(self, group) -> int:
        request = group_service_pb2.CloseGroupRequest(
            name=group.spec.name, generation=group.generation
        )
        return self.call(self.groups.CloseGroup, request).freed_bytes

    def register(self, group, layers=(), stacks=(), *, op_id=None):
        request = layer_service_pb2.RegisterLayersRequest(
            op_id=op_id or new_op_id(),
            group=group.spec.name,
            generation=group.generation,
            layers=[wire.layer_spec_to_proto(layer) for layer in layers],
            stacks=[wire.stack_spec_to_proto(stack) for stack in stacks],
        )
        answer = self.call(self.layers.RegisterLayers, request)
        registered = wire.registered_from_proto
        return [registered(x) for x in answer.layers], [registered(x) for x in answer.stacks]

    def goodbye(self) -> None:
        self.call(self.sessions.CloseSession, session_service_pb2.CloseSessionRequest())


def close_fds(found) -> None:
    for descriptor, fd in (item for item in found if len(item) == 2):
        assert descriptor.bytes > 0
        os.close(fd)
