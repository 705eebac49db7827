"""Measures a daemon's loop lag and memory under anything that users and strangers may send.

    python tests/bench/daemon_attacks.py

With server, client and tests on PYTHONPATH. Each attack has a daemon of its own. Lag is its own
figure (`status`): the worst delay of its event loop while the attack ran. A busy machine adds to
it, so that of an idle daemon comes first.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from harness import DaemonProcess
from http2_calls import UnreadCalls
from raw_client import Client, Stubs, close_fds, connect, make_spec, new_op_id

from ep_runtime import board, board_abi, errors, wire
from ep_runtime.v1 import fd_socket_pb2, group_service_pb2, layer_service_pb2, types_pb2

SAMPLED_S = 2.0  # long enough for several rounds of the reaper
_pause = threading.Event()  # never set: waits of a given length


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as told:
        return int(told.read().split()[1]) * 4096


def idle(daemon: DaemonProcess, client: Client) -> None:
    _pause.wait(SAMPLED_S)


def header(field: str, value: int) -> Callable[[DaemonProcess, Client], None]:
    """An attack: writes one field of the board's header, calls every list, and pauses."""

    def attack(daemon: DaemonProcess, client: Client) -> None:
        found = client.fetch(client.create(make_spec("header")).group)
        with mmap.mmap(found[0][1], found[0][0].bytes) as mapped:
            header = board_abi.BoardHeaderStruct.from_buffer(mapped)
            setattr(header, field, value)
            del header
            for method in ("ListRanks", "ListHandles", "ListGroups"):
                daemon.ask(method)
            _pause.wait(SAMPLED_S)
        close_fds(found)

    return attack


def chain(daemon: DaemonProcess, client: Client) -> None:
    """Makes a board of 1,024 ranks, each of which waits for the next one."""
    spec = make_spec("chain", ranks=1024, hidden_size=1, max_tokens_per_rank=1, num_experts=1024)
    found = client.fetch(client.create(spec).group)
    offset = board.board_layout(spec).ranks_offset
    with mmap.mmap(found[0][1], found[0][0].bytes) as mapped:
        for rank in range(1023):
            record = board_abi.RankRecordStruct.from_buffer(mapped, offset + 128 * rank)
            record.state, record.waiting_for = board_abi.RankState.WAITING, rank + 1
        del record
        for _ in range(5):
            daemon.status()
        _pause.wait(SAMPLED_S)
    close_fds(found)


def sent(stubs: Any, request: bytes, times: int, metadata: Any = ()) -> None:
    call = stubs.channel.unary_unary("/ep_runtime.v1.LayerService/RegisterLayers")
    calls = [call.future(request, timeout=60, metadata=metadata) for _ in range(times)]
    for each in calls:
        with contextlib.suppress(grpc.RpcError):
            each.result()


def empties(size_bytes: int) -> bytes:
    one = layer_service_pb2.RegisterLayersRequest(layers=[types_pb2.LayerSpec()])
    return one.SerializeToString() * (size_bytes // 2)


def strangers(size_bytes: int) -> Callable[[DaemonProcess, Client], None]:
    def attack(daemon: DaemonProcess, client: Client) -> None:
        stranger = Stubs(daemon.directory, wire.API_SOCKET)
        sent(stranger, empties(size_bytes), 23)
        stranger.close()

    return attack


def served(daemon: DaemonProcess, client: Client) -> None:
    sent(client, empties((1 << 20) - 100), 23, client.metadata)


def axes(daemon: DaemonProcess, client: Client) -> None:
    request = client.create_request(make_spec("axes"))
    request.spec.mesh_axes.extend(types_pb2.MeshAxis(name=f"a{i}", size=1) for i in range(50_000))
    for _ in range(5):
        with contextlib.suppress(errors.EpRuntimeError):
            client.call(client.groups.CreateGroup, request)


def layers(count: int, *, equal: bool) -> Callable[[DaemonProcess, Client], None]:
    def attack(daemon: DaemonProcess, client: Client) -> None:
        group = client.create(make_spec("layers")).group
        request = layer_service_pb2.RegisterLayersRequest(
            op_id=new_op_id(),
            group="layers",
            generation=group.generation,
            layers=[
                types_pb2.LayerSpec(name="l" if equal else f"l{i}", top_k=1, in_flight=1)
                for i in range(count)
            ],
        )
        for _ in range(5):
            request.op_id = new_op_id()
            with contextlib.suppress(errors.EpRuntimeError):
                client.call(client.layers.RegisterLayers, request, timeout=60)

    return attack


def refused_hellos(daemon: DaemonProcess, client: Client) -> None:
    hello = fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(api_versions=["v9"], pid=1))
    for _ in range(2200):
        with contextlib.suppress(OSError), connect(daemon.directory) as connection:
            connection.send(hello.SerializeToString())
            connection.recv(4096)


def hellos_at_once(daemon: DaemonProcess, client: Client) -> None:
    """Opens as many connections as one user may have, ten times."""
    hello = fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(api_versions=["v1"], pid=1))
    for _ in range(10):
        with contextlib.ExitStack() as held:
            connections = [held.enter_context(connect(daemon.directory)) for _ in range(250)]
            daemon.status()
            for connection in connections:
                connection.send(hello.SerializeToString())
            for connection in connections:
                connection.recv(4096)


def unread_answers(daemon: DaemonProcess, client: Client) -> None:
    """Opens 20 connections with 250 calls each, and gives no answer room to arrive."""
    client.create(make_spec("unread"))
    request = group_service_pb2.GetGroupRequest(name="unread").SerializeToString()
    with contextlib.ExitStack() as held:
        for _ in range(20):
            calls = held.enter_context(UnreadCalls(daemon.directory))
            for number in range(250):
                if number % 2:
                    calls.send("/grpc.health.v1.Health/Check")
                else:
                    method = "/ep_runtime.v1.GroupService/GetGroup"
                    calls.send(method, request, client.metadata)
        _pause.wait(SAMPLED_S)


ATTACKS: dict[str, Callable[[DaemonProcess, Client], None]] = {
    "nothing": idle,
    "ranks_offset = 2^64 - 64": header("ranks_offset", 2**64 - 64),
    "world_size = 2^32 - 1": header("world_size", 2**32 - 1),
    "1,024 ranks in a chain": chain,
    "stranger, 23 x 16 MiB": strangers(16 << 20),
    "stranger, 23 x 1 MiB": strangers((1 << 20) - 100),
    "served, 23 x 1 MiB of empty messages": served,
    "5 x 50,000 mesh axes": axes,
    "5 x 70,000 equal layers": layers(70_000, equal=True),
    "5 x 4,096 equal layers": layers(4096, equal=True),
    "5 x 4,096 layers": layers(4096, equal=False),
    "2,200 refused hellos": refused_hellos,
    "10 x 250 hellos at once": hellos_at_once,
    "5,000 calls whose answers nobody reads": unread_answers,
}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    say(f"{'attack':40} {'worst lag':>10} {'p99':>9} {'RSS before':>11} {'after':>8}  healthy")
    for name, attack in ATTACKS.items():
        with tempfile.TemporaryDirectory() as directory:
            daemon = DaemonProcess(Path(directory) / "d", "--log-level", "error")
            client = daemon.client()
            before = rss_bytes(daemon.pid)
            attack(daemon, client)
            status = daemon.status()
            lag = [
                lag.ToTimedelta().total_seconds() * 1e3
                for lag in (status.loop_lag, status.loop_lag_p99)
            ]
            after = rss_bytes(daemon.pid)
            say(
                f"{name:40} {lag[0]:7.1f} ms {lag[1]:6.1f} ms {before / 1e6:8.1f} MB "
                f"{after / 1e6:5.1f} MB  {daemon.healthy()}"
            )
            daemon.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
