"""NCCL unique ids of groups that form across nodes, which the coordinator makes per view.

The ids are secret, so they are not part of the view. A node asks for them when it makes
communicators. When a view is decided or given up, the process of its ids ends.
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
    """Makes and shares the ids of each view, on the coordinator's event loop."""

    def __init__(self, assemblies: Assemblies) -> None:
        self._assemblies = assemblies
        # Tasks that make ids, by owner and epoch; and the tasks that end the ids' processes.
        self._made: dict[tuple[Owner, int], asyncio.Task[UniqueIds]] = {}
        self._watches: set[asyncio.Task[None]] = set()

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
            watch = loop.create_task(self._watch(key, process))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
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

    async def close(self) -> None:
        """Ends every process."""
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
