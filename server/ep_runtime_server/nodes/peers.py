"""Calls to the daemons of other nodes: one channel each, our certificate, bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory

from ep_runtime import wire
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime.v1 import admin_service_pb2, node_service_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.nodes.config import Tls
from ep_runtime_server.nodes.seal import Seal


async def _at_once() -> None:
    """Where nothing has to be written first."""


class Peers:
    """Lives on the event loop's thread."""

    def __init__(
        self,
        tls: Tls | None,
        clock: Clock,
        seal: Seal | None = None,
        before_asking: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        """`seal` goes on every request of plain TCP, where there is one; `before_asking()` returns
        once what we know may be told."""
        self._seal = seal
        self._before_asking = before_asking
        self._credentials = (
            grpc.ssl_channel_credentials(
                root_certificates=tls.authority,
                private_key=tls.key,
                certificate_chain=tls.certificate,
            )
            if tls is not None
            else None
        )
        self._clock = clock
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._silent: dict[str, tuple[float, float]] = {}  # first and last failure in a row

    def silent_since_s(self, address: str, heard_s: float) -> float | None:
        """When the calls to it began to fail.

        None where the last one got an answer, failed long ago, or it was heard of since.
        """
        if address not in self._silent:
            return None
        first_s, last_s = self._silent[address]
        old = self._clock.monotonic_s() - last_s > limits.NODE_LEASE_S
        return None if old or heard_s > last_s else first_s

    def _channel(self, name: str, address: str) -> grpc.aio.Channel:
        key = (name, address)
        if key not in self._channels:
            extra = []
            if name and self._credentials is not None:
                # The certificate says which node it is; by which address it is reached says less.
                extra = [("grpc.ssl_target_name_override", name)]
            options = wire.channel_options(extra)
            self._channels[key] = (
                grpc.aio.secure_channel(address, self._credentials, options=options)
                if self._credentials is not None
                else grpc.aio.insecure_channel(address, options=options)
            )
        return self._channels[key]

    async def ask(
        self, name: str, address: str, method: str, request: Any, *, within_s: float
    ) -> Any:
        """The answer of one unary RPC: NodeService's, or a reading one of AdminService.

        Args:
            name: which node must answer; "" for whoever has a certificate for the address.

        Raises:
            RuntimeUnavailableError: no answer; `fields` has node, address and since_s, the time
                since the calls to that address began to fail.
            EpRuntimeError: what the other daemon raised.
        """
        await self._before_asking()
        channel: Any = self._channel(name, address)
        path, answer_type = _rpc(method)
        data = request.SerializeToString()
        call = channel.unary_unary(path, response_deserializer=answer_type.FromString)
        metadata = self._seal.of(path, data) if self._seal is not None else ()
        try:
            answer = await call(data, timeout=within_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            ours = wire.error_from_rpc(error)
            if not isinstance(ours, RuntimeUnavailableError) or ours.fields:
                self._silent.pop(address, None)  # it did answer
                raise ours from error
            now = self._clock.monotonic_s()
            first_s, _ = self._silent.get(address, (now, now))
            self._silent[address] = (first_s, now)
            raise RuntimeUnavailableError(
                f"node {name!r} at {address} does not answer: {_reason(error)}"
                if name
                else f"nobody answers at {address}: {_reason(error)}",
                node=name,
                address=address,
                since_s=now - first_s,
            ) from error
        self._silent.pop(address, None)
        return answer

    async def drop(self, keep: set[str]) -> None:
        """Closes the channels to all other addresses."""
        for key in [key for key in self._channels if key[1] not in keep]:
            await self._channels.pop(key).close()
            self._silent.pop(key[1], None)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels = {}


def _rpc(method: str) -> tuple[str, Any]:
    """The full name of an RPC and the type of its answer."""
    node = node_service_pb2.DESCRIPTOR.services_by_name["NodeService"]
    admin = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
    service = node if method in node.methods_by_name else admin
    answer = service.methods_by_name[method].output_type
    return f"/{service.full_name}/{method}", message_factory.GetMessageClass(answer)


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    details = error.details() or error.code().name
    return details.removeprefix("failed to connect to all addresses; last error: ")[:200]
