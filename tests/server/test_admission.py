"""Identifies callers before reading a byte, and limits the bytes of one user's running calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import eventually
from http2_calls import UnreadCalls
from raw_client import WAIT_S, Stubs, make_spec, new_op_id

from ep_runtime import errors, layer_specs, wire
from ep_runtime.v1 import group_service_pb2, layer_service_pb2, session_service_pb2, types_pb2
from ep_runtime_server.callers import admission
from ep_runtime_server.rpc import interceptor

MIB = 1 << 20


def empty_layers(size_bytes: int) -> bytes:
    """A request in which every two bytes become a separate message."""
    one = layer_service_pb2.RegisterLayersRequest(layers=[types_pb2.LayerSpec()])
    return one.SerializeToString() * (size_bytes // 2)


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as told:
        return int(told.read().split()[1]) * 4096


def send(stubs, data: bytes, metadata=()):
    call = stubs.channel.unary_unary("/ep_runtime.v1.LayerService/RegisterLayers")
    return call.future(data, timeout=WAIT_S, metadata=metadata)


def code_of(call) -> grpc.StatusCode:
    with contextlib.suppress(grpc.RpcError):
        call.result(WAIT_S)
    return call.code()


def health_code(daemon) -> grpc.StatusCode:
    with grpc.insecure_channel(f"unix:{daemon.directory}/{wire.API_SOCKET}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return code_of(check.future(health_pb2.HealthCheckRequest(), timeout=WAIT_S))


GET_GROUP = group_service_pb2.GetGroupRequest(name="moe")


@pytest.fixture
def parsed(monkeypatch):
    """Names of the methods whose requests have been parsed."""
    seen = []
    before = interceptor._parsed

    def note(method, handler, data):
        seen.append(method.rpartition("/")[2])
        return before(method, handler, data)

    monkeypatch.setattr(interceptor, "_parsed", note)
    return seen


@pytest.mark.parametrize("metadata", [(), ((wire.TOKEN_KEY, "0" * 64),)], ids=["none", "wrong"])
def test_nothing_of_a_stranger_is_parsed(daemon, parsed, metadata):
    stranger = Stubs(daemon.directory, wire.API_SOCKET)
    calls = [send(stranger, empty_layers(MIB - 100), metadata) for _ in range(20)]
    assert {code_of(call) for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
    stranger.close()
    assert parsed == []


def test_memory_of_the_daemon_does_not_grow_with_what_strangers_send(daemon_process):
    daemon = daemon_process()
    stranger = Stubs(daemon.directory, wire.API_SOCKET)
    code_of(send(stranger, b""))
    before = rss_bytes(daemon.pid)
    calls = [send(stranger, empty_layers(MIB - 100)) for _ in range(23)]
    assert {code_of(call) for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
    assert rss_bytes(daemon.pid) - before < 32 * MIB
    stranger.close()


def test_what_one_user_sends_at_once_is_parsed_some_at_a_time(daemon_process):
    daemon = daemon_process()
    client = daemon.client()
    before = rss_bytes(daemon.pid)
    data = empty_layers(MIB - 100)
    calls = [send(client, data, client.metadata) for _ in range(12)]
    assert {code_of(call) for call in calls} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert rss_bytes(daemon.pid) - before < 256 * MIB  # all of them together are 560 bytes


def test_a_message_over_a_megabyte_is_refused(daemon, parsed):
    client = daemon.client()
    parsed.clear()
    assert code_of(send(client, bytes(MIB + 1), client.metadata)) is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert parsed == []


def test_the_largest_legitimate_request_fits(daemon):
    client = daemon.client()
    group = client.create(make_spec()).group
    number = (1 << 31) - 1
    layers = [
        types_pb2.LayerSpec(
            name=f"{i:0120}",
            top_k=number,
            alignment=number,
            in_flight=number,
            num_experts=number,
            hidden_size=number,
        )
        for i in range(wire.MAX_LAYERS_PER_CALL)
    ]
    request = layer_service_pb2.RegisterLayersRequest(
        op_id=new_op_id(), group="moe", generation=group.generation, layers=layers
    )
    assert request.ByteSize() < wire.MAX_REQUEST_BYTES
    registered = [
        types_pb2.RegisteredLayer(spec=layer, base_id=(1 << 63) - 1, handle_base=number)
        for layer in layers
    ]
    restore = client.groups.RestoreGroup, registered
    assert sum(item.ByteSize() + 3 for item in restore[1]) < wire.MAX_REQUEST_BYTES


def test_a_call_that_sends_nothing_ends_in_time(daemon, monkeypatch):
    monkeypatch.setattr(interceptor, "READ_S", 0.05)
    client = daemon.client()
    call = client.channel.stream_unary("/ep_runtime.v1.SessionService/Heartbeat")

    over = threading.Event()

    def nothing():
        over.wait(WAIT_S)
        yield from ()

    ended = call.future(nothing(), timeout=WAIT_S, metadata=client.metadata)
    ended.add_done_callback(lambda _: over.set())
    assert code_of(ended) is grpc.StatusCode.INVALID_ARGUMENT
    assert "no request came" in ended.details()
    assert code_of(call.future(iter(()), timeout=WAIT_S, metadata=client.metadata)) is (
        grpc.StatusCode.INVALID_ARGUMENT
    )


def test_server_info_needs_no_token_and_reads_nothing(daemon, parsed):
    stranger = Stubs(daemon.directory, wire.API_SOCKET)
    call = stranger.channel.unary_unary("/ep_runtime.v1.SessionService/GetServerInfo")
    answer = session_service_pb2.GetServerInfoResponse.FromString(call(b"\xff" * 1000, timeout=5))
    assert answer.api_versions == ["v1"]
    assert parsed == []
    stranger.close()


def test_watches_of_health_take_nothing_from_others(daemon, monkeypatch):
    monkeypatch.setattr(admission, "MAX_HEALTH_CALLS_PER_USER", 8)
    stranger = Stubs(daemon.directory, wire.API_SOCKET)
    health = health_pb2_grpc.HealthStub(stranger.channel)
    request = health_pb2.HealthCheckRequest(service="")
    streams = [health.Watch(request) for _ in range(8)]
    for stream in streams:
        assert next(stream).status == health_pb2.HealthCheckResponse.SERVING
    refused = health.Watch(request)
    with pytest.raises(grpc.RpcError) as caught:
        next(refused)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert health.Check(request, timeout=WAIT_S).status == health_pb2.HealthCheckResponse.SERVING
    daemon.client().create(make_spec())
    daemon.ask("Drain")
    for stream in streams:  # every one of them is notified of a change
        assert next(stream).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stream.cancel()
    eventually(lambda: next(health.Watch(request)) is not None)
    stranger.close()


def test_a_user_who_reads_no_answers_has_few_of_them(daemon, monkeypatch):
    """An answer stays in the daemon if HTTP/2's windows have no room."""
    monkeypatch.setattr(admission, "MAX_HEALTH_CALLS_PER_USER", 8)
    with UnreadCalls(daemon.directory) as unread:
        for _ in range(12):
            unread.send("/grpc.health.v1.Health/Check")
        eventually(lambda: health_code(daemon) is grpc.StatusCode.RESOURCE_EXHAUSTED)
    eventually(lambda: health_code(daemon) is grpc.StatusCode.OK)


def test_bytes_of_answers_that_nobody_reads_are_counted(daemon, monkeypatch):
    client = daemon.client()
    client.register(client.create(make_spec()).group, [layer_specs.LayerSpec("x" * 100, top_k=1)])
    size = client.call(client.groups.GetGroup, GET_GROUP).ByteSize()
    monkeypatch.setattr(admission, "MAX_ANSWER_BYTES_PER_USER", 4 * size)

    def code() -> grpc.StatusCode:
        return code_of(client.groups.GetGroup.future(GET_GROUP, **client.how()))

    with UnreadCalls(daemon.directory) as unread:
        for _ in range(4):
            method = "/ep_runtime.v1.GroupService/GetGroup"
            unread.send(method, GET_GROUP.SerializeToString(), client.metadata)
        eventually(lambda: code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    eventually(lambda: code() is grpc.StatusCode.OK)


def test_one_users_calls_of_health_are_not_anothers(monkeypatch):
    monkeypatch.setattr(admission, "MAX_HEALTH_CALLS_PER_USER", 2)
    admitted = admission.Admission()
    held = [admitted.health_call("uid 1", "Watch") for _ in range(2)]
    with pytest.raises(errors.PoolExhaustedError, match="uid 1 has 2 calls of Watch"):
        admitted.health_call("uid 1", "Watch")
    admitted.health_call("uid 1", "Check").end()
    admitted.health_call("uid 2", "Watch").end()
    for call in held:
        call.end()
        call.end()  # its caller has left as well
    admitted.health_call("uid 1", "Watch").end()
    assert not admitted._users


def test_what_has_no_lists_in_it_is_short(daemon, parsed):
    client = daemon.client()
    parsed.clear()
    call = client.channel.unary_unary("/ep_runtime.v1.SessionService/Heartbeat")
    sent = call.future(bytes(interceptor.MAX_SHORT_BYTES + 1), **client.how())
    assert code_of(sent) is grpc.StatusCode.INVALID_ARGUMENT
    assert parsed == []


def test_one_user_cannot_take_the_calls_of_another(monkeypatch):
    monkeypatch.setattr(admission, "MAX_CALLS_PER_USER", 3)
    admitted = admission.Admission()
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.callback(admitted.call("uid 1").end)
        with pytest.raises(errors.PoolExhaustedError, match="got 3 of uid 1 and 3 in all"):
            admitted.call("uid 1")
        held.callback(admitted.call("uid 2").end)
    for _ in range(5):
        admitted.call("uid 1").end()


async def test_room_is_given_in_turn_and_comes_back_from_who_goes_away():
    room = admission.Room(10)
    await room.take(8)
    big = asyncio.ensure_future(room.take(5))
    small = asyncio.ensure_future(room.take(1))
    gone = asyncio.ensure_future(room.take(9))
    await asyncio.sleep(0)
    assert not small.done()  # it arrived after the large one
    gone.cancel()
    room.give(8)
    await asyncio.gather(big, small)
    room.give(6)
    await room.take(10)
