"""Calls other nodes' daemons, on one channel per node, with our certificate and a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from ep_runtime import wire
from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError
from ep_runtime.v1 import admin_service_pb2, node_service_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.nodes.certificates import Certificates
from ep_runtime_server.nodes.seal import Seal

_NODE_SERVICE = node_service_pb2.DESCRIPTOR.services_by_name["NodeService"]
_ADMIN_SERVICE = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]


class Peers:
    """The channels to other nodes' daemons. For the event loop's thread only."""

    def __init__(
        self,
        certificates: Certificates | None,
        clock: Clock,
        seal: Seal | None,
        before_asking: Callable[[], Awaitable[None]],
    ) -> None:
        """`seal` seals requests on plain TCP, if set; each call first awaits `before_asking()`."""
        self._seal = seal
        self._before_asking = before_asking
        self._certificates = certificates
        self._clock = clock
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._silent: dict[str, tuple[float, float]] = {}  # first and last failure in a row

    def silent_since_s(self, address: str, heard_s: float) -> float | None:
        """Returns since when calls to an address have failed, on the monotonic clock.

        None if the last call got an answer or failed long ago, or the node reported since then.
        """
        if address not in self._silent:
            return None
        first_s, last_s = self._silent[address]
        old = self._clock.monotonic_s() - last_s > limits.NODE_LEASE_S
        return None if old or heard_s > last_s else first_s

    def _channel(self, name: str, address: str) -> grpc.aio.Channel:
        key = (name, address)
        if key not in self._channels:
            self._channels[key] = self._open(name, address)
        return self._channels[key]

    def _open(self, name: str, address: str) -> grpc.aio.Channel:
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=wire.channel_options([]))
        tls = self._certificates.tls
        credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
        # Check the node's name in the certificate, not the address that we call.
        extra = [("grpc.ssl_target_name_override", name)] if name else []
        options = wire.channel_options(extra)
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def ask(
        self, name: str, address: str, method: str, request: Any, *, within_s: float
    ) -> Any:
        """Calls a unary RPC of NodeService, and returns the parsed answer.

        Raises:
            EpRuntimeError: see `ask_on`; or the answer cannot be parsed.
        """
        data = await self.ask_on(name, address, method, request, within_s=within_s)
        method_type = _NODE_SERVICE.methods_by_name[method]
        try:
            return message_factory.GetMessageClass(method_type.output_type).FromString(data)
        except DecodeError as error:
            raise EpRuntimeError(
                f"the answer of node {name!r} at {address} to {method} cannot be read", node=name
            ) from error

    async def ask_on(
        self, name: str, address: str, method: str, request: Any, *, within_s: float
    ) -> bytes:
        """Calls a unary RPC of NodeService or AdminService, and returns the answer's bytes.

        Args:
            name: the node that must answer; "" for any daemon with a certificate for the address.

        Raises:
            RuntimeUnavailableError: no answer; `fields` has node, address and since_s, for how
                long calls to this address have failed.
            EpRuntimeError: the other daemon raised it.
        """
        await self._before_asking()
        channel: Any = self._channel(name, address)
        service = _NODE_SERVICE if method in _NODE_SERVICE.methods_by_name else _ADMIN_SERVICE
        path = f"/{service.full_name}/{method}"
        data = request.SerializeToString()
        call = channel.unary_unary(path)
        metadata = self._seal.of(path, data) if self._seal is not None else ()
        try:
            answer: bytes = await call(data, timeout=within_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            ours = wire.error_from_rpc(error)
            if not isinstance(ours, RuntimeUnavailableError) or ours.fields:
                self._silent.pop(address, None)  # the daemon did answer
                raise ours from error
            now = self._clock.monotonic_s()
            first_s, _ = self._silent.get(address, (now, now))
            self._silent[address] = (first_s, now)
            ended = self._ended(error)
            reason = ended or _reason(error)
            raise RuntimeUnavailableError(
                f"node {name!r} at {address} does not answer: {reason}"
                if name
                else f"nobody answers at {address}: {reason}",
                node=name,
                address=address,
                since_s=now - first_s,
                certificate=ended,
            ) from error
        self._silent.pop(address, None)
        return answer

    def _ended(self, error: grpc.aio.AioRpcError) -> str:
        """Returns a reason if a call may have failed because a certificate ended; else ""."""
        if "certificate has expired" in (error.details() or ""):
            return "its certificate has ended, by this host's clock"
        refused = error.code() is grpc.StatusCode.UNAVAILABLE  # a TLS refusal closes the connection
        return self._certificates.ended if refused and self._certificates is not None else ""

    async def renew(self) -> None:
        """Uses current certificates for new calls; running calls finish on old connections."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(c.close(limits.NODE_LEASE_S) for c in channels.values()))

    async def drop(self, keep: set[str]) -> None:
        """Closes the channels to all other addresses."""
        for key in [key for key in self._channels if key[1] not in keep]:
            await self._channels.pop(key).close()
            self._silent.pop(key[1], None)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels = {}


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    details = error.details() or error.code().name
    return details.removeprefix("failed to connect to all addresses; last error: ")[:200]
