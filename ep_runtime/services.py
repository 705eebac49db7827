"""Makes client stubs and server handlers for the gRPC service of a proto file.

The file's descriptor lists all RPCs with their messages, so generated gRPC code is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass


def stub(channel: grpc.Channel, file: FileDescriptor) -> Any:
    """Returns an object with one callable per RPC, named like the RPC."""
    service = _service(file)
    made = SimpleNamespace()
    for method, request, answer in _methods(service):
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        path = f"/{service.full_name}/{method.name}"
        call = kind(path, request.SerializeToString, answer.FromString)
        setattr(made, method.name, call)
    return made


def add_to_server(server: grpc.aio.Server, file: FileDescriptor, servicer: object) -> None:
    """Makes a server answer each RPC with the servicer's method of the same name."""
    service = _service(file)
    handlers: dict[str, Any] = {}
    for method, request, answer in _methods(service):
        kind = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        work = getattr(servicer, method.name)
        handlers[method.name] = kind(work, request.FromString, answer.SerializeToString)
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_registered_method_handlers(service.full_name, handlers)


def _service(file: FileDescriptor) -> Any:
    (service,) = file.services_by_name.values()
    return service


def _methods(service: Any) -> Iterator[tuple[MethodDescriptor, Any, Any]]:
    """Yields each RPC with the classes of its request and answer."""
    for method in service.methods:
        yield method, GetMessageClass(method.input_type), GetMessageClass(method.output_type)
