"""A client without the client library: packets, stubs, and processes that can be killed."""

from __future__ import annotations

import mmap
import os
import uuid
from pathlib import Path

import grpc
from raw_packets import WAIT_S, close_fds, connect, give_back, hello, make_spec, receive, redeem  # noqa: F401 - tests take them from here
from raw_process import Process

from ep_runtime import services, wire
from ep_runtime.v1 import (
    admin_service_pb2,
    group_service_pb2,
    layer_service_pb2,
    session_service_pb2,
)


def new_op_id() -> str:
    return uuid.uuid4().hex


class Stubs:
    """Stubs of one socket; errors are raised as our classes."""

    def __init__(self, directory: Path, socket_name: str, metadata=()) -> None:
        self.channel = grpc.insecure_channel(
            f"unix:{directory}/{socket_name}", options=wire.channel_options()
        )
        self.metadata = tuple(metadata)
        self.sessions = services.stub(self.channel, session_service_pb2.DESCRIPTOR)
        self.groups = services.stub(self.channel, group_service_pb2.DESCRIPTOR)
        self.layers = services.stub(self.channel, layer_service_pb2.DESCRIPTOR)
        self.admin = services.stub(self.channel, admin_service_pb2.DESCRIPTOR)

    def call(self, method, request, *, timeout=WAIT_S):
        try:
            return method(request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise wire.error_from_rpc(error) from None

    def close(self) -> None:
        self.channel.close()


class Client(Stubs):
    """One session of `process`, or of this process if it is None."""

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

    def resume(self, job: str = "job") -> bool:
        """Says hello again after the daemon restarted; returns whether the daemon
        knew the session.
        """
        if self.process is None:
            welcome = hello(self.directory, resume_token=self.token)
            answer = welcome.session_token, welcome.session_id, welcome.resumed
        else:
            answer = self.process.do("resume", self.directory, self.token)
        self.channel.close()
        self.token, self.session_id, resumed = answer
        metadata = ((wire.TOKEN_KEY, self.token), (wire.PID_KEY, str(self.pid)))
        super().__init__(self.directory, wire.API_SOCKET, metadata)
        self.open(job)
        return resumed

    def restore(self, group, ranks=None, layers=(), windows=(), uuids=()):
        """Calls RestoreGroup. `windows` are the world ranks whose windows are held;
        by default all.
        """
        request = group_service_pb2.RestoreGroupRequest(
            spec=group.spec,
            generation=group.generation,
            world_ranks=range(len(group.members)) if ranks is None else ranks,
            layers=[wire.registered_to_proto(layer) for layer in layers],
            window_ranks=windows,
            device_uuids=uuids,
        )
        return self.call(self.groups.RestoreGroup, request)

    def give_back(self, group):
        """Returns windows that `fetch` fetched: (descriptors that the daemon took, ranks still
        wanted).
        """
        return self.process.do("give_back", self.directory, self.token, group.spec.name)

    def in_parent(self, group) -> mmap.mmap:
        """Maps the board of a process's group in this process (a child's descriptors are ours)."""
        number = self.process.do("board_fd")
        fd = os.open(f"/proc/{self.pid}/fd/{number}", os.O_RDWR)
        try:
            return mmap.mmap(fd, group.board_bytes)
        finally:
            os.close(fd)

    def return_windows(self, group, found):
        """Calls ReturnWindows with [(descriptor, fd)]."""
        return give_back(self.directory, self.token, group.spec.name, found)

    def open(self, job: str, **more) -> session_service_pb2.OpenSessionResponse:
        return self.call(
            self.sessions.OpenSession, session_service_pb2.OpenSessionRequest(job=job, **more)
        )

    def how(self) -> dict:
        """Arguments of a call that nobody waits for."""
        return {"timeout": 2 * WAIT_S, "metadata": self.metadata}

    def create_request(
        self, spec, ranks=None, *, uuids=(), wait_s=WAIT_S, op_id=None, replace=False
    ):
        return group_service_pb2.CreateGroupRequest(
            op_id=op_id or new_op_id(),
            spec=wire.group_spec_to_proto(spec),
            world_ranks=range(spec.world_size) if ranks is None else ranks,
            device_uuids=uuids,
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
        """Acquires and redeems a ticket; in this process it returns [(descriptor, fd)]."""
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
        """Creates, fetches and reports; returns the READY group."""
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

    def beat(self, progress: int = 0) -> session_service_pb2.HeartbeatResponse:
        """Sends a heartbeat; returns the answer."""
        request = session_service_pb2.HeartbeatRequest(progress=progress)
        return self.call(self.sessions.Heartbeat, request)

    def goodbye(self) -> None:
        self.call(self.sessions.CloseSession, session_service_pb2.CloseSessionRequest())
