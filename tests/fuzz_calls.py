"""Sends odd calls of every RPC of every service to each of a daemon's ports."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import grpc
from fuzz_messages import Method, OddMessages, every_method
from fuzzing import Answers
from google.protobuf.message import DecodeError
from raw_client import WAIT_S, Client, make_spec

from ep_runtime import layer_specs, wire
from ep_runtime.v1 import (
    group_service_pb2,
    layer_service_pb2,
    nccl_service_pb2,
    node_service_pb2,
    session_service_pb2,
    types_pb2,
)
from ep_runtime_server.nodes.seal import KEY, Seal

UNDER_WAY = 64
# A call that waits on purpose ends by its deadline.
DEADLINES_S = [0.02, 0.3, 0.3, 0.3]
# These are not answers: the daemon failed or ended.
_FAILED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
Metadata = tuple[tuple[str, Any], ...]
NO_METHOD = "Method not found"
_SESSIONS = 8
_NEW_SESSION_EVERY = 50


_LAYER = layer_specs.LayerSpec("l", top_k=1, alignment=4)


def _models() -> list[Any]:
    stack = wire.LayerStackSpec(_LAYER, 3)
    return [
        wire.group_spec_to_proto(make_spec(transport="xla")),
        wire.group_spec_to_proto(make_spec("h", retain_s=1.0)),
        wire.layer_spec_to_proto(_LAYER),
        wire.stack_spec_to_proto(stack),
        wire.registered_to_proto(wire.RegisteredLayer(_LAYER, 0, 1, 0)),
        wire.duration(0.0),
        wire.duration(0.01),
        wire.duration(3600.0),
        session_service_pb2.OpenSessionRequest(job="job", labels={"a": "b"}),
        node_service_pb2.GroupKey(uid=os.getuid(), job="job", name="moe"),
        node_service_pb2.NodeClaim(world_ranks=[0], session_id="s", pid=1),
        *(
            kind(node="b", key=node_service_pb2.GroupKey(job="job", name="moe"))
            for kind in (
                node_service_pb2.ReportInitRequest,
                node_service_pb2.AwaitGroupRequest,
                node_service_pb2.GetViewIdsRequest,
                node_service_pb2.TellGroupRequest,
            )
        ),
        node_service_pb2.ReportNodeRequest(node="b"),
        node_service_pb2.JoinGroupRequest(
            node="b",
            key=node_service_pb2.GroupKey(job="job", name="moe"),
            spec=wire.group_spec_to_proto(make_spec(transport="xla")),
            claims=[node_service_pb2.NodeClaim(world_ranks=[0, 1], session_id="s", pid=1)],
            generation=1,
        ),
        node_service_pb2.NodeIdentity(
            node="b",
            node_id="id",
            incarnation="1",
            boot_id="boot",
            host_name="host",
            pid=7,
            address="127.0.0.1:1",
            server_version="0.2.0",
            api_versions=["v1"],
        ),
    ]


def _models_of(group: types_pb2.Group) -> list[Any]:
    """Draws requests that a member of that group would send."""
    name, generation = group.spec.name, group.generation
    ranks = [member.world_rank for member in group.members]
    layer = wire.layer_spec_to_proto(_LAYER)
    other = wire.group_spec_to_proto(make_spec("c"))
    return [
        group_service_pb2.CreateGroupRequest(spec=other, world_ranks=ranks),
        group_service_pb2.RestoreGroupRequest(
            spec=group.spec, generation=generation, world_ranks=ranks
        ),
        layer_service_pb2.RegisterLayersRequest(group=name, generation=generation, layers=[layer]),
        *(
            kind(name=name, generation=generation)
            for kind in (
                group_service_pb2.AcquireWindowsRequest,
                group_service_pb2.ReportAttachedRequest,
                nccl_service_pb2.GetUniqueIdsRequest,
            )
        ),
    ]


@dataclasses.dataclass
class Port:
    """A port at which a daemon answers calls.

    Args:
        channel: to it.
        odd: makes what is sent there, and learns of what is answered.
        sign: the metadata of a call, by its method and bytes.
    """

    channel: grpc.Channel
    odd: OddMessages
    sign: Callable[[str, bytes], Metadata] = lambda path, data: ()
    over: bool = False  # the session has ended, according to the daemon


class Calls:
    """Calls that still run, and results of those that ended."""

    def __init__(self, numbers: random.Random) -> None:
        self._numbers = numbers
        self._room = threading.Semaphore(UNDER_WAY)
        self._told = threading.Lock()
        self.answers: Answers = collections.Counter()
        self.failures: list[str] = []
        self._answered: collections.deque[Any] = collections.deque(maxlen=UNDER_WAY)

    def start(self, port: Port, method: Method) -> None:
        assert self._room.acquire(timeout=WAIT_S), f"no call ended within {WAIT_S} s"
        self._learn()
        data = port.odd.encoded(method.request)
        metadata = self._metadata(port.sign(method.path, data))
        how = {"timeout": self._numbers.choice(DEADLINES_S), "metadata": metadata}
        try:
            if method.streams:
                call = port.channel.unary_stream(method.path)(data, **how)
            else:
                call = port.channel.unary_unary(method.path).future(data, **how)
        except ValueError:  # metadata that gRPC itself does not send
            self._room.release()
            return
        call.add_done_callback(lambda done: self._ended(port, method, data, done))

    def _learn(self) -> None:
        """Repeats successful calls with changes, and sends back values from answers."""
        while self._answered:
            odd, method, data, answer = self._answered.popleft()
            with contextlib.suppress(DecodeError):  # a message without fields is not read
                odd.add_model(method.request.FromString(data))
            odd.learn(method.answer.FromString(answer))

    def _metadata(self, metadata: Metadata) -> Metadata:
        """Metadata, sometimes with an odd entry."""
        if self._numbers.random() > 0.05:
            return metadata
        keys = [wire.TOKEN_KEY, wire.PID_KEY, KEY, "x", "grpc-timeout", "te", "x-bin"]
        values = ["", "0", "-1", "99999999999999999999", "a.b.c", "x" * 4000, " ", "~"]
        key = self._numbers.choice(keys)
        value: Any = self._numbers.choice(values)
        kept = tuple(item for item in metadata if item[0] != key)
        return (*kept, (key, value.encode() if key.endswith("-bin") else value))

    def _ended(self, port: Port, method: Method, data: bytes, call: Any) -> None:
        try:
            code, details = call.code(), call.details() or ""
            port.over = port.over or code is grpc.StatusCode.UNAUTHENTICATED
            with self._told:
                self.answers[code.name] += 1
                if code is grpc.StatusCode.OK and not method.streams:
                    self.answers[method.path] += 1
                    self._answered.append((port.odd, method, data, call.result()))
                if code in _FAILED:
                    self.failures.append(f"{method.path} {data.hex():.4000}: {code} {details}")
        finally:
            self._room.release()

    def finish(self) -> Answers:
        for _ in range(UNDER_WAY):
            assert self._room.acquire(timeout=WAIT_S), f"a call did not end within {WAIT_S} s"
        assert not self.failures, "\n".join(self.failures[:3])
        return self.answers


def served_methods(port: Port, without: Container[str] = ()) -> list[Method]:
    """Finds the methods a port serves from the errors that malformed requests get."""

    def is_there(method: Method) -> bool:
        data = b"\xff"
        how = {"timeout": WAIT_S, "metadata": port.sign(method.path, data)}
        call = port.channel.stream_stream(method.path)(iter([data]), **how)
        try:
            next(call)
        except grpc.RpcError as error:
            return NO_METHOD not in (error.details() or "")
        call.cancel()
        return True

    return [m for m in every_method() if m.path.rpartition("/")[2] not in without and is_there(m)]


def _channel(directory: Path, name: str) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{directory}/{name}", options=wire.channel_options())


def _send(
    port_of: Callable[[int], Port], numbers: random.Random, inputs: int, methods: list[Method]
) -> Answers:
    calls = Calls(numbers)
    for number in range(inputs):
        calls.start(port_of(number), numbers.choice(methods))
    return calls.finish()


def fuzz_session(directory: Path, numbers: random.Random, inputs: int) -> Answers:
    """Calls over api.sock in sessions with a group each; a session that was lost
    says hello again.
    """
    ports: dict[int, Port] = {}
    channel = _channel(directory, wire.API_SOCKET)

    def port_of(number: int) -> Port:
        place = number % _SESSIONS
        if place not in ports or ports[place].over:
            client = Client(directory)
            group = client.ready(make_spec(f"g{os.getpid()}-{number}", transport="xla"))
            client.close()
            odd, metadata = OddMessages(numbers, *_models(), *_models_of(group)), client.metadata
            ports[place] = Port(channel, odd, lambda path, data: metadata)
        return ports[place]

    return _send(port_of, numbers, inputs, served_methods(port_of(0)))


def fuzz_stranger(directory: Path, numbers: random.Random, inputs: int) -> Answers:
    """Calls over api.sock without a token."""
    port = Port(_channel(directory, wire.API_SOCKET), OddMessages(numbers, *_models()))
    return _send(lambda number: port, numbers, inputs, served_methods(port))


def fuzz_admin(directory: Path, numbers: random.Random, inputs: int) -> Answers:
    """Calls all but Drain over admin.sock, while sessions come that it may fence."""
    port = Port(_channel(directory, wire.ADMIN_SOCKET), OddMessages(numbers, *_models()))

    def port_of(number: int) -> Port:
        if number % _NEW_SESSION_EVERY == 0:
            client = Client(directory)
            client.ready(make_spec(f"g{os.getpid()}-{number}", retain_s=3600.0))
            client.close()
        return port

    return _send(port_of, numbers, inputs, served_methods(port, without={"Drain"}))


def fuzz_drain(directory: Path, numbers: random.Random, inputs: int) -> Answers:
    """Calls only Drain, after which a daemon admits nothing, or ends."""
    port = Port(_channel(directory, wire.ADMIN_SOCKET), OddMessages(numbers, *_models()))
    drain = [method for method in every_method() if method.path.endswith("/Drain")]
    return _send(lambda number: port, numbers, inputs, drain)


def fuzz_plain_node(
    directory: Path, numbers: random.Random, inputs: int, *, address: str, secret: bytes
) -> Answers:
    """Calls over the cluster port in plain TCP, with the secret."""
    channel = grpc.insecure_channel(address, options=wire.channel_options())
    port = Port(channel, OddMessages(numbers, *_models()), Seal(secret).of)
    return _send(lambda number: port, numbers, inputs, served_methods(port))


def fuzz_tls_node(
    directory: Path, numbers: random.Random, inputs: int, *, address: str, pki: Path, node: str
) -> Answers:
    """Calls over the cluster port in TLS, with the certificate of `node`."""
    pem, key, authority = ((pki / f).read_bytes() for f in (f"{node}.pem", f"{node}.key", "ca.pem"))
    channel = grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(authority, key, pem),
        options=[*wire.channel_options(), ("grpc.ssl_target_name_override", "a")],
    )
    port = Port(channel, OddMessages(numbers, *_models()))
    return _send(lambda number: port, numbers, inputs, served_methods(port))
