"""The coordinator's part in reports of ended processes: tells all nodes of a view in few calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ep_runtime.errors import EpRuntimeError
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.supervision import Tasks
from ep_runtime_server.cluster import views
from ep_runtime_server.cluster.views import NodeReport
from ep_runtime_server.memory.windows import Owner

# Sends a request to a node's daemon; returns whether the daemon knows what it asks for.
Teller = Callable[[str, pb.TellGroupRequest], Awaitable[bool]]
# A report, the nodes that it is for, and the future of those nodes that did not take it.
_Queued = tuple[NodeReport, frozenset[str], asyncio.Future[frozenset[str]]]


class Relay:
    """Passes reports on, on the event loop; keeps none, so their senders answer for them.

    Reports of a view go out in rounds, with a pause after each. Reports that come during a round or
    its pause wait for the next round, and go in one call to each node. So a node gets a few calls
    when a view ends, although all nodes report their processes.
    """

    def __init__(self, node: str, tell: Teller, events: EventLog) -> None:
        self._node = node
        self._tell = tell
        self._queues: dict[tuple[Owner, int], list[_Queued]] = {}
        self.tasks = Tasks(events, "passing reports on")

    async def pass_on(
        self, owner: Owner, epoch: int, report: NodeReport, others: frozenset[str]
    ) -> frozenset[str]:
        """Tells `others`; returns those that did not take the report within NODE_ROUND_S."""
        others -= {self._node}
        if not others:
            return others
        queue = self._queues.get((owner, epoch))
        if queue is None:
            queue = self._queues[owner, epoch] = []
            self.tasks.start(self._run(owner, epoch, queue))
        unheard: asyncio.Future[frozenset[str]] = asyncio.get_running_loop().create_future()
        queue.append((report, others, unheard))
        return await unheard

    async def _run(self, owner: Owner, epoch: int, queue: list[_Queued]) -> None:
        taken: list[_Queued] = []
        try:
            while queue:
                taken[:] = queue
                queue.clear()
                nodes = frozenset().union(*(others for _, others, _ in taken))
                reports = [report for report, _, _ in taken]
                silent = await self._round(owner, epoch, reports, nodes)
                for _, others, unheard in taken:
                    if not unheard.done():  # else its sender waits no longer
                        unheard.set_result(others & silent)
                pause_s = limits.NODE_NEWS_EACH_S * len(nodes)
                await asyncio.sleep(min(pause_s, limits.NODE_ROUND_S))
        finally:
            del self._queues[owner, epoch]
            for _, others, unheard in (*taken, *queue):
                if not unheard.done():
                    unheard.set_result(others)

    async def _round(
        self, owner: Owner, epoch: int, reports: list[NodeReport], nodes: frozenset[str]
    ) -> frozenset[str]:
        """Tells the nodes; returns those that did not answer in time, or are too old for it."""
        request = views.passed_on(self._node, owner, epoch, reports)
        told: set[str] = set()

        async def tell(node: str) -> None:
            try:
                if await self._tell(node, request):
                    told.add(node)
            except EpRuntimeError:  # the sender tells this node, and learns the reason
                pass

        calls = [asyncio.ensure_future(tell(node)) for node in sorted(nodes)]
        try:
            await asyncio.wait(calls, timeout=limits.NODE_ROUND_S)
        finally:
            for call in calls:
                call.cancel()
        return nodes - told
