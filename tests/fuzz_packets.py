"""Sends odd packets to fd.sock, with and without descriptors."""

from __future__ import annotations

import array
import collections
import contextlib
import os
import random
import select
import socket
from collections.abc import Iterator
from pathlib import Path

from fuzz_messages import OddMessages
from fuzzing import Answers
from raw_client import Client, connect, make_spec, redeem

from ep_runtime import wire
from ep_runtime.v1 import fd_socket_pb2 as pb
from ep_runtime.v1 import types_pb2

_ANCILLARY = socket.CMSG_SPACE(4 * wire.MAX_FDS_PER_PACKET)
ANSWER_S = 5.0  # less than the daemon's limit for silent connections
_NUM_FDS = [1, 2, 2, 2, 2, 3, wire.MAX_FDS_PER_PACKET, wire.MAX_FDS_PER_PACKET + 1, 253]


def _models(client: Client, group: types_pb2.Group, ticket: str) -> list[pb.FdRequest]:
    item = types_pb2.WindowDescriptor(world_rank=0, bytes=4096, generation=group.generation)
    return [
        pb.FdRequest(hello=pb.Hello(api_versions=["v1"], client_version="1", pid=os.getpid())),
        pb.FdRequest(redeem_ticket=pb.RedeemTicket(session_token=client.token, ticket=ticket)),
        pb.FdRequest(
            return_windows=pb.ReturnWindows(
                session_token=client.token, group=group.spec.name, descriptors=[item, item]
            )
        ),
    ]


@contextlib.contextmanager
def _descriptors(windows: list[int]) -> Iterator[list[int]]:
    """Returns one descriptor of each kind, and descriptors of a group."""
    with contextlib.ExitStack() as held:
        tcp = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        reached = held.enter_context(socket.create_connection(tcp.getsockname()))
        pair = [held.enter_context(end) for end in socket.socketpair()]
        epoll = held.enter_context(select.epoll())
        fds = [*os.pipe(), os.eventfd(0), os.pidfd_open(os.getpid()), os.open("/", os.O_RDONLY)]
        fds += [os.open("/dev/null", os.O_RDWR), os.memfd_create("odd"), os.memfd_create("large")]
        os.ftruncate(fds[-1], 1 << 40)
        for fd in fds:
            held.callback(os.close, fd)
        epoll.register(pair[0])
        yield [*fds, *windows, *(item.fileno() for item in (tcp, reached, *pair, epoll))]


class _Sender:
    def __init__(self, directory: Path, numbers: random.Random, *, with_fds: bool) -> None:
        self._directory, self._numbers, self._with_fds = directory, numbers, with_fds
        self._client = Client(directory)
        self._group = self._client.create(make_spec(f"g{os.getpid()}")).group
        models = _models(self._client, self._group, self._ticket())
        self._well = models[-1].SerializeToString()  # with its own descriptors, which come back
        self._windows: list[int] = []
        self._odd = OddMessages(numbers, *models)
        self.answers: Answers = collections.Counter()

    def _ticket(self) -> str:
        return self._client.ticket(self._group).ticket

    def send_all(self, inputs: int) -> None:
        held = redeem(self._directory, self._client.token, self._ticket())
        self._windows = [fd for _, fd in held]
        with _descriptors(self._windows) as fds:
            while inputs > 0:
                if self._numbers.random() < 0.05:
                    self._odd.told["ticket"].append(self._ticket())
                inputs -= self._use_connection(fds, min(inputs, self._numbers.choice([1, 1, 2, 9])))

    def _use_connection(self, fds: list[int], packets: int) -> int:
        """Returns how many packets the daemon took, as far as known."""
        with connect(self._directory) as connection:
            connection.settimeout(ANSWER_S)
            for number in range(packets):
                data = self._packet()
                try:
                    self._send(connection, data, fds)
                    if self._numbers.random() < 0.9 and not self._answered(connection, data):
                        return number + 1
                except TimeoutError:
                    raise AssertionError(f"no answer to {data.hex():.4000}") from None
                except OSError as error:
                    self.answers[type(error).__name__] += 1
                    return number + 1
        return packets

    def _packet(self) -> bytes:
        chance = self._numbers.random()
        if self._with_fds and self._numbers.random() < 0.05:  # random values would seldom be valid
            return self._well
        if chance < 0.01:
            return self._numbers.randbytes(wire.MAX_PACKET_BYTES + self._numbers.randint(-1, 100))
        return b"" if chance < 0.02 else self._odd.encoded(pb.FdRequest)

    def _send(self, connection: socket.socket, data: bytes, fds: list[int]) -> None:
        if not self._with_fds or self._numbers.random() < 0.1:
            connection.send(data)
            return
        count = self._numbers.choice(_NUM_FDS)
        chosen = self._numbers.choices([*fds, connection.fileno()], k=count)
        if data is self._well:
            chosen = self._windows[:2]
        socket.send_fds(connection, [data], chosen)

    def _answered(self, connection: socket.socket, data: bytes) -> bool:
        """Whether an answer came and the connection is still open."""
        answer, ancillary, _, _ = connection.recvmsg(wire.MAX_PACKET_BYTES, _ANCILLARY)
        for _, _, payload in ancillary:
            came = array.array("i")
            came.frombytes(payload)
            for fd in came:
                os.close(fd)
        if not answer:
            self.answers["end"] += 1
            return False
        reply = pb.FdReply.FromString(answer)
        kind = reply.WhichOneof("reply")
        self.answers[reply.error.class_name if kind == "error" else str(kind)] += 1
        assert reply.error.class_name != "EpRuntimeError", f"{reply} to {data.hex():.4000}"
        self._odd.learn(reply)
        return True


def fuzz_packets(
    directory: Path, numbers: random.Random, inputs: int, *, with_fds: bool = False
) -> Answers:
    """Sends packets to fd.sock, most of them with descriptors if `with_fds`."""
    sender = _Sender(directory, numbers, with_fds=with_fds)
    sender.send_all(inputs)
    return sender.answers
