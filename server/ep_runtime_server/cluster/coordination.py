"""A node's calls to the coordinator about groups: direct calls on its own node, else RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ep_runtime import wire
from ep_runtime.errors import (
    InvalidArgumentError,
    PeerLostError,
    PoolExhaustedError,
    RuntimeUnavailableError,
    StaleHandleError,
)
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.supervision import Tasks
from ep_runtime_server.cluster import views
from ep_runtime_server.cluster.assembly import Assemblies
from ep_runtime_server.cluster.relay import Relay
from ep_runtime_server.cluster.views import GroupView, NodePart, NodeReport, Outcome
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nccl.unique_ids import JOIN_S, MAKE_S, IdProcess, UniqueIds
from ep_runtime_server.nodes.membership import Membership

# Errors that may occur while daemons start and end, after which a call may be repeated.
TRY_AGAIN = (RuntimeUnavailableError, StaleHandleError, PoolExhaustedError)


class OwnCoordination:
    """Calls the coordinator directly, on its own node; see node_service.proto."""

    def __init__(
        self,
        node: str,
        assemblies: Assemblies,
        view_ids: ViewIds,
        relay: Relay,
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        """`durable()` waits until decisions are on disk, before a caller gets them."""
        self._durable = durable
        self._relay = relay
        self._node = node
        self._assemblies = assemblies
        self._view_ids = view_ids

    async def join(
        self, owner: Owner, part: NodePart, known_missing: list[int]
    ) -> tuple[GroupView | None, list[int]]:
        answer = await self._assemblies.join(owner, part, known_missing, limits.NODE_POLL_S)
        await self._durable()
        return answer

    async def differ(self, owner: Owner, part: NodePart) -> None:
        self._assemblies.differ(owner, part)

    async def report(self, owner: Owner, epoch: int, error: str) -> None:
        self._assemblies.report(self._node, owner, epoch, error)
        await self._durable()

    async def outcome(self, owner: Owner, epoch: int) -> tuple[Outcome, str]:
        answer = await self._assemblies.outcome(owner, epoch, limits.NODE_POLL_S)
        await self._durable()
        return answer

    async def ended(
        self, owner: Owner, epoch: int, report: NodeReport, others: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        self._assemblies.ended(owner, epoch, report)
        return await self._relay.pass_on(owner, epoch, report, others)

    async def unique_ids(self, owner: Owner, epoch: int, count: int) -> UniqueIds:
        return await self._view_ids.of(owner, epoch, count)


class RemoteCoordination:
    """Calls the coordinator by RPC, on all other nodes; may raise RuntimeUnavailableError."""

    def __init__(
        self, node: str, membership: Membership, ask: Callable[[str, Any, float], Any]
    ) -> None:
        """`ask(method, request, within_s)` makes one RPC to the coordinator."""
        self._node = node
        self._membership = membership
        self._ask = ask

    async def _call(self, kind: Any, owner: Owner, wait_s: float = 0.0, **more: Any) -> Any:
        """Makes the RPC of a request's class, which may wait for `wait_s` at the coordinator."""
        lease_id, key = self._membership.lease_id, views.key_to_proto(owner)
        request = kind(node=self._node, lease_id=lease_id, key=key, **more)
        method = kind.DESCRIPTOR.name.removesuffix("Request")
        return await self._ask(method, request, wait_s + limits.NODE_RPC_S)

    async def _join(
        self, owner: Owner, part: NodePart, wait_s: float = 0.0, **more: Any
    ) -> pb.JoinGroupResponse:
        spec, claims = wire.group_spec_to_proto(part.spec), views.claims_to_proto(part.claims)
        more |= {"spec": spec, "claims": claims, "generation": part.generation}
        return await self._call(pb.JoinGroupRequest, owner, wait_s, **more)

    async def join(
        self, owner: Owner, part: NodePart, known_missing: list[int]
    ) -> tuple[GroupView | None, list[int]]:
        wait_s, wait = limits.NODE_POLL_S, wire.duration(limits.NODE_POLL_S)
        answer = await self._join(owner, part, wait_s, missing_ranks=known_missing, wait=wait)
        view = views.view_from_proto(answer.view) if answer.HasField("view") else None
        return view, list(answer.missing_ranks)

    async def differ(self, owner: Owner, part: NodePart) -> None:
        await self._join(owner, part)

    async def report(self, owner: Owner, epoch: int, error: str) -> None:
        await self._call(pb.ReportInitRequest, owner, epoch=epoch, error=error[:500])

    async def outcome(self, owner: Owner, epoch: int) -> tuple[Outcome, str]:
        wait_s, wait = limits.NODE_POLL_S, wire.duration(limits.NODE_POLL_S)
        answer: pb.AwaitGroupResponse = await self._call(
            pb.AwaitGroupRequest, owner, wait_s, epoch=epoch, wait=wait
        )
        name = pb.ViewOutcome.Name(answer.outcome).removeprefix("VIEW_OUTCOME_")
        return Outcome(name), answer.reason

    async def ended(
        self, owner: Owner, epoch: int, report: NodeReport, others: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        request = views.report_to_proto(owner, epoch, report, others)
        within_s = limits.NODE_TOLD_S if others else limits.NODE_RPC_S
        answer: pb.TellGroupResponse = await self._ask("TellGroup", request, within_s)
        return others.intersection(answer.unheard) if answer.told else others

    async def unique_ids(self, owner: Owner, epoch: int, count: int) -> UniqueIds:
        answer: pb.GetViewIdsResponse = await self._call(
            pb.GetViewIdsRequest, owner, MAKE_S, epoch=epoch, num_domains=count
        )
        return UniqueIds(tuple(answer.unique_ids), answer.nccl_version)


# Calls to the coordinator; see node_service.proto.
Coordination = OwnCoordination | RemoteCoordination
MAX_DOMAINS = 4096


class ViewIds:
    """Makes and shares NCCL unique ids of each view, on the coordinator's event loop.

    The ids are secret, so they are not part of the view. A node asks for them when it makes
    communicators. When a view is decided or given up, the process of its ids ends.
    """

    def __init__(self, assemblies: Assemblies, events: EventLog) -> None:
        self._assemblies = assemblies
        # Tasks that make ids, by owner and epoch; and the tasks that end the ids' processes.
        self._made: dict[tuple[Owner, int], asyncio.Task[UniqueIds]] = {}
        self.watches = Tasks(events, "unique ids of a view")

    async def of(self, owner: Owner, epoch: int, count: int) -> UniqueIds:
        """Returns the ids of an undecided view, the same for each of its nodes.

        Raises:
            InvalidArgumentError: `count` is not a possible number of EP domains.
            PeerLostError: the view was given up, or is already committed.
            RuntimeUnavailableError: see IdProcess.make.
        """
        if not 1 <= count <= MAX_DOMAINS:
            raise InvalidArgumentError(
                f"num_domains must be 1 to {MAX_DOMAINS}, got {count}", argument="num_domains"
            )
        outcome, reason = await self._assemblies.outcome(owner, epoch, 0.0)
        if outcome is not Outcome.UNSPECIFIED:
            raise PeerLostError(
                f"group {owner.name!r}, epoch {epoch}, cannot form: {reason or outcome.value}",
                group=owner.name,
                epoch=epoch,
            )
        key = owner, epoch
        if key not in self._made:
            process = IdProcess()
            loop = asyncio.get_running_loop()
            self._made[key] = loop.create_task(process.make(count, JOIN_S))
            self.watches.start(self._watch(key, process))
        return await asyncio.shield(self._made[key])

    async def _watch(self, key: tuple[Owner, int], process: IdProcess) -> None:
        """Waits until the view is decided or JOIN_S has passed, then ends the process."""
        try:
            await asyncio.wait({self._made[key]})
            await self._assemblies.outcome(*key, JOIN_S)
        finally:
            made = self._made.pop(key)
            made.cancel()
            await asyncio.gather(made, return_exceptions=True)
            await process.close()
