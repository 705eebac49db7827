"""NCCL unique ids of groups that form across nodes: the coordinator makes them, per view.

They are no part of the view, which is written down and told to whoever asks; a node that is to make
communicators asks for them, and a view that is given up takes its ids along.
"""

from __future__ import annotations

import asyncio

from ep_runtime.errors import InvalidArgumentError, PeerLostError
from ep_runtime_server.cluster.assembly import Assemblies
from ep_runtime_server.cluster.views import Outcome
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nccl.id_process import IdProcess, UniqueIds
from ep_runtime_server.nccl.unique_ids import JOIN_S

MAX_DOMAINS = 4096


class ViewIds:
    """Lives on the event loop's thread of the coordinator."""

    def __init__(self, assemblies: Assemblies) -> None:
        self._assemblies = assemblies
        # Ids that are being made, and the task that ends their process; by owner and epoch.
        self._made: dict[tuple[Owner, int], asyncio.Task[UniqueIds]] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def of(self, owner: Owner, epoch: int, count: int) -> UniqueIds:
        """The ids of a view that is being decided, the same for every node of it.

        Raises:
            InvalidArgumentError: no number of EP domains.
            PeerLostError: the view is given up, or committed already.
            RuntimeUnavailableError: as IdProcess.make.
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
            watch = loop.create_task(self._watch(key, process))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
        return await asyncio.shield(self._made[key])

    async def _watch(self, key: tuple[Owner, int], process: IdProcess) -> None:
        """Waits until the attempt is over, whatever its outcome."""
        try:
            await asyncio.wait({self._made[key]})
            await self._assemblies.outcome(*key, JOIN_S)
        finally:
            made = self._made.pop(key)
            made.cancel()
            await asyncio.gather(made, return_exceptions=True)
            await process.close()

    async def close(self) -> None:
        """Ends every process."""
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
