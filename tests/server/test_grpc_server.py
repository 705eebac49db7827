"""No path of a request ends a server of the daemon."""

from __future__ import annotations

import socket

import fuzz_frames
import grpc
import pytest
from cluster_places import place
from raw_client import WAIT_S, Stubs

from ep_runtime import wire
from ep_runtime.v1 import session_service_pb2
from ep_runtime_server.nodes.config import ClusterConfig, parse_endpoint
from ep_runtime_server.rpc import interceptor

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
    """The kinds of the whole frames."""
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


def test_a_method_that_is_not_there_is_unimplemented(daemon):
    stubs = Stubs(daemon.directory, wire.API_SOCKET)
    method = stubs.channel.unary_unary(
        "/ep_runtime.v1.SessionService/Later",
        session_service_pb2.GetServerInfoRequest.SerializeToString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        method(session_service_pb2.GetServerInfoRequest(), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    stubs.close()


def test_what_a_service_of_grpc_has_and_we_do_not_is_no_error_of_ours(caplog):
    failure = interceptor._failure_of("/grpc.health.v1.Health/List", NotImplementedError())
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert "grpc.health.v1.Health/List" in failure.message
    assert not caplog.records
