"""The daemon answers anything that arrives on its sockets, and no other client suffers."""

from __future__ import annotations

import os
import socket

import fuzz_frames
import grpc
import pytest
from cluster_places import place
from harness import eventually
from raw_client import WAIT_S, connect, hello, make_spec, new_op_id, receive

from ep_runtime import errors, services, wire
from ep_runtime.v1 import (
    fd_socket_pb2,
    group_service_pb2,
    nccl_service_pb2,
    session_service_pb2,
)
from ep_runtime_server.nodes.config import ClusterConfig, parse_endpoint
from ep_runtime_server.rpc import interceptor


def raw_call(client, method: str, data: bytes, *, timeout=WAIT_S):
    call = client.channel.unary_unary(
        f"/ep_runtime.v1.{method}", request_serializer=None, response_deserializer=None
    )
    return client.call(call, data, timeout=timeout)


@pytest.mark.parametrize("method", ["GroupService/CreateGroup", "SessionService/OpenSession"])
def test_bytes_that_are_no_message_are_an_invalid_argument(daemon, method):
    client = daemon.client()
    with pytest.raises(errors.InvalidArgumentError, match="not a message of its type"):
        raw_call(client, method, b"\xff\xff\xff")


def test_the_status_code_and_error_info_are_on_the_wire(daemon):
    client = daemon.client()
    with pytest.raises(grpc.RpcError) as caught:
        client.groups.GetGroup(
            group_service_pb2.GetGroupRequest(name="none"),
            timeout=WAIT_S,
            metadata=client.metadata,
        )
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    status = rpc_status.from_call(caught.value)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("STALE_HANDLE", "ep-runtime")


def test_a_unary_call_without_deadline_is_refused(daemon):
    client = daemon.client()
    with pytest.raises(errors.InvalidArgumentError, match="needs a deadline"):
        client.call(client.sessions.Heartbeat, session_service_pb2.HeartbeatRequest(), timeout=None)


def test_a_connection_carries_thousands_of_calls_that_work_and_that_fail(daemon):
    """Makes far more calls than may run at once: calls that ended must not count."""
    client = daemon.client()
    unknown = group_service_pb2.GetGroupRequest(name="none")
    for _ in range(1000):
        client.beat()
        with pytest.raises(errors.StaleHandleError):
            client.call(client.groups.GetGroup, unknown)


def test_an_unknown_method_is_version_skew(daemon):
    with pytest.raises(errors.VersionSkewError):
        raw_call(daemon.client(), "GroupService/FromTheFuture", b"")


def test_an_empty_create_names_the_field(daemon):
    client = daemon.client()
    request = group_service_pb2.CreateGroupRequest(op_id=new_op_id())
    with pytest.raises(errors.InvalidArgumentError, match="group name"):
        client.call(client.groups.CreateGroup, request)


@pytest.mark.parametrize("wait_s", [-1.0, 3601.0])
def test_a_wait_out_of_range_is_refused(daemon, wait_s):
    client = daemon.client()
    request = group_service_pb2.CreateGroupRequest(
        op_id=new_op_id(),
        spec=wire.group_spec_to_proto(make_spec()),
        world_ranks=[0, 1],
        wait=wire.duration(wait_s),
    )
    with pytest.raises(errors.InvalidArgumentError, match="wait must be"):
        client.call(client.groups.CreateGroup, request)


@pytest.mark.parametrize(
    "labels", [{f"k{i}": "" for i in range(33)}, {"k": "v" * 300}], ids=["many", "long"]
)
def test_labels_are_bounded(daemon, labels):
    with pytest.raises(errors.InvalidArgumentError, match="labels"):
        daemon.client(job=None).open("job", labels=labels)


def test_an_oversized_packet_is_refused(daemon):
    with connect(daemon.directory) as connection:
        connection.send(b"x" * (wire.MAX_PACKET_BYTES + 1))
        with pytest.raises(errors.InvalidArgumentError, match="at most 65536 bytes"):
            receive(connection)


def test_descriptors_sent_to_the_daemon_are_not_kept(daemon):
    fds = daemon.status().num_fds
    hello = fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(api_versions=["v1"]))
    for _ in range(20):
        with connect(daemon.directory) as connection:
            socket.send_fds(connection, [hello.SerializeToString()], [0, 1, 2])
            with pytest.raises(errors.InvalidArgumentError, match="carries no descriptors"):
                receive(connection)
            with pytest.raises(ConnectionError):
                receive(connection)
    assert daemon.status().num_fds <= fds + 1  # to the process that closes them
    assert daemon.status().num_sessions == 0


def pushed_until_closed(connection) -> bool:
    """Sends as much as fits; returns True once the daemon has closed the connection."""
    try:
        for _ in range(1000):
            connection.send(b"nonsense")
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def test_a_client_that_reads_no_answers_loses_its_connection(daemon):
    with connect(daemon.directory) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        eventually(lambda: pushed_until_closed(connection), within_s=WAIT_S)
    daemon.client()


def test_connections_to_api_sock_that_say_nothing_are_dropped(daemon):
    fds = daemon.status().num_fds
    idle = []
    for _ in range(100):
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(str(daemon.directory / wire.API_SOCKET))
    eventually(lambda: daemon.status().num_fds >= fds + 150)
    eventually(lambda: daemon.status().num_fds <= fds + 110, within_s=5.0)  # our own ends stay
    daemon.client()
    for connection in idle:
        connection.close()


def test_admin_rpcs_on_admin_sock_need_no_token_and_sessions_do_not_exist_there(daemon):
    assert daemon.status().pid == os.getpid()
    with pytest.raises(errors.VersionSkewError):
        daemon.admin.call(
            daemon.admin.sessions.GetServerInfo, session_service_pb2.GetServerInfoRequest()
        )


def test_events_are_numbered_timed_and_followed(daemon):
    daemon.client().create(make_spec())
    events = daemon.ask("ListEvents").events
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [e.kind for e in events][:3] == ["server.serving", "session.hello", "session.active"]
    assert all(event.time.seconds > 1.6e9 for event in events)
    last = events[-1].sequence
    daemon.client()
    newer = daemon.ask("ListEvents", after_sequence=last).events
    assert [event.kind for event in newer] == ["session.hello", "session.active"]


def test_no_secret_reaches_the_events(daemon):
    client = daemon.client()
    ticket = client.ticket(client.create(make_spec()).group).ticket
    text = str(daemon.ask("ListEvents")) + str(daemon.ask("ListSessions"))
    assert client.token not in text
    assert ticket not in text


ORDERS_TO_A_TERMINAL = "\x1b[2J\rroot"


@pytest.mark.parametrize("version", [ORDERS_TO_A_TERMINAL, "1" * 257])
def test_a_clients_version_is_text_that_prints(daemon, version):
    with pytest.raises(errors.InvalidArgumentError, match="client_version must be printable"):
        hello(daemon.directory, client_version=version)
    assert daemon.status().num_sessions == 0


def test_what_a_client_says_went_wrong_is_kept_as_text_that_prints(daemon):
    client = daemon.client()
    group = client.ready(make_spec())
    nccl = services.stub(client.channel, nccl_service_pb2.DESCRIPTOR)

    def report(**said):
        request = nccl_service_pb2.ReportCommunicatorsRequest(
            name="moe", generation=group.generation, **said
        )
        client.call(nccl.ReportCommunicators, request)

    with pytest.raises(errors.InvalidArgumentError, match="nccl_version must be printable"):
        report(nccl_version=ORDERS_TO_A_TERMINAL)
    report(error=ORDERS_TO_A_TERMINAL)
    told = str([event.message for event in daemon.ask("ListEvents").events])
    assert r"\\x1b[2J\\rroot" in told


PATHS = [
    b"\xf9",
    b"/\xf9\xff",
    b"/ep_runtime.v1.SessionService/\xc3",
    b"",
    b"/",
    b"/" + b"x" * 4000,
]


def request(path: bytes) -> bytes:
    headers = [
        *((b":method", b"POST"), (b":scheme", b"http"), (b":path", path)),
        *((b":authority", b"localhost"), (b"te", b"trailers")),
        (b"content-type", b"application/grpc"),
    ]
    opened = fuzz_frames.frame(
        fuzz_frames.HEADERS, fuzz_frames.END_HEADERS, 1, fuzz_frames.header_block(headers)
    )
    data = fuzz_frames.frame(fuzz_frames.DATA, fuzz_frames.END_STREAM, 1, bytes(5))
    settings = fuzz_frames.frame(fuzz_frames.SETTINGS, 0, 0, b"")
    return fuzz_frames.PREFACE + settings + opened + data


def send(connection: socket.socket, data: bytes) -> None:
    """Sends a call and waits for headers on its stream, or for the end of the connection."""
    connection.settimeout(WAIT_S)
    connection.sendall(data)
    answer = b""
    while bytes([fuzz_frames.HEADERS]) not in kinds(answer):
        part = connection.recv(1 << 16)
        if not part:
            return
        answer += part


def kinds(answer: bytes) -> bytes:
    """Returns the kinds of the complete frames."""
    found = b""
    while len(answer) >= 9:
        found += answer[3:4]
        answer = answer[9 + int.from_bytes(answer[:3], "big") :]
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("port", [wire.API_SOCKET, wire.ADMIN_SOCKET, "cluster"])
def test_any_path_is_refused_and_others_are_answered(start_daemon, path, port):
    address = place()
    endpoint = parse_endpoint(address, "listen")
    daemon = start_daemon(cluster=ClusterConfig("a", endpoint, secret=b"a secret of this cluster"))
    if port == "cluster":
        connection = socket.create_connection((endpoint.host, endpoint.port))
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(daemon.directory / port))
    with connection:
        send(connection, request(path))
    daemon.status()
    assert daemon.healthy()
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/ep_runtime.v1.NodeService/ReportNode")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_what_a_service_of_grpc_has_and_we_do_not_is_no_error_of_ours(caplog):
    failure = interceptor._failure_of("/grpc.health.v1.Health/List", NotImplementedError())
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert "grpc.health.v1.Health/List" in failure.message
    assert not caplog.records
