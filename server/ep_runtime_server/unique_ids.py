"""NCCL unique ids of groups: one set per generation, made by a process that ends with it.

That process is the bootstrap root. It waits for every rank without a bound of its own and ends on a
rank that joins twice, so it is neither the daemon nor a client, and no set of ids is used again.
Ids are secrets: they are in this process's memory and in answers to members, nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import sys

from ep_runtime import env, nccl
from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError, StaleHandleError
from ep_runtime_server.clock import Clock
from ep_runtime_server.events import EventLog
from ep_runtime_server.group_fsm import State
from ep_runtime_server.groups import Group
from ep_runtime_server.sessions import Session

_CHILD = "ep_runtime_server.unique_id_child"
# Loading libnccl, 400 MB, from a cold disk.
MAKE_S = 30.0
# How long ranks may take to join; a client waits less.
JOIN_S = 600.0


@dataclasses.dataclass(frozen=True)
class UniqueIds:
    """One id per EP domain, and the version of the libnccl that made them."""

    ids: tuple[bytes, ...]
    version: str


@dataclasses.dataclass(eq=False)
class _Set:
    """The ids of one generation, and what became of them."""

    group: Group
    generation: int
    epoch: int
    until_s: float
    making: asyncio.Task[UniqueIds] = dataclasses.field(init=False)
    process: asyncio.subprocess.Process | None = None
    version: str = ""
    ready: set[int] = dataclasses.field(default_factory=set)  # world ranks
    error: str = ""

    @property
    def is_current(self) -> bool:
        group = self.group
        same = group.generation == self.generation and group.epoch == self.epoch
        return same and group.state in (State.FORMING, State.READY)


class UniqueIdBook:
    """Lives on the event loop's thread."""

    def __init__(self, clock: Clock, events: EventLog) -> None:
        self._clock = clock
        self._events = events
        self._sets: dict[str, _Set] = {}  # by group id

    async def of(self, session: Session, group: Group, generation: int) -> UniqueIds:
        """The ids of the group's generation, made when the first process asks.

        Raises:
            StaleHandleError: another generation, not formed yet, or a process failed with the ids.
            PermissionDeniedError: the session is no member.
            RuntimeUnavailableError: no libnccl here, or its process does not answer.
        """
        group.member(session, generation)
        if not group.formed:
            raise StaleHandleError(
                f"group {group.owner.name!r} is not formed; finish CreateGroup first",
                group=group.owner.name,
            )
        found = self._sets.get(group.group_id)
        if found is None or (found.generation, found.epoch) != (generation, group.epoch):
            found = self._begin(group)
        if found.error:
            raise StaleHandleError(
                f"group {group.owner.name!r}, generation {generation}: {found.error}; create it "
                "again",
                group=group.owner.name,
                generation=generation,
            )
        made = await asyncio.shield(found.making)
        found.version = made.version
        return made

    def _begin(self, group: Group) -> _Set:
        self._end(group.group_id)
        until_s = self._clock.monotonic_s() + JOIN_S
        found = _Set(group, group.generation, group.epoch, until_s)
        found.making = asyncio.get_running_loop().create_task(self._make(found))
        found.making.add_done_callback(_look)
        self._sets[group.group_id] = found
        self._log("nccl.unique_ids", group, f"unique ids for {group.spec.num_domains} EP domains")
        return found

    async def _make(self, found: _Set) -> UniqueIds:
        reader, writer = os.pipe()
        try:
            count = found.group.spec.num_domains
            try:
                found.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *(["-I"] if sys.flags.isolated else ["-P"]), "-m", _CHILD),
                    *(str(writer), str(count), str(JOIN_S)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    pass_fds=(writer,),
                    env=env.unique_id_environment(),
                )
            finally:
                os.close(writer)
            return await self._read(reader, count)
        except EpRuntimeError as error:
            found.error = str(error)
            raise
        finally:
            os.close(reader)
            if found.error:
                self._stop(found)

    async def _read(self, reader: int, count: int) -> UniqueIds:
        """What the process wrote. Raises RuntimeUnavailableError."""
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        pipe = os.fdopen(os.dup(reader), "rb", 0)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        try:
            async with asyncio.timeout(MAKE_S):
                line = await stream.readline()
            said = json.loads(line)
        except (TimeoutError, ValueError) as error:
            raise RuntimeUnavailableError(
                "the process that makes NCCL unique ids ended, or did not answer within "
                f"{MAKE_S:g} s"
            ) from error
        finally:
            transport.close()
        if "error" in said:
            raise RuntimeUnavailableError(f"the daemon makes no NCCL unique ids: {said['error']}")
        ids = tuple(bytes.fromhex(text) for text in said["ids"])
        assert len(ids) == count
        return UniqueIds(ids, nccl.version_text(said["version"]))

    def report(
        self, session: Session, group: Group, generation: int, version: str, error: str
    ) -> None:
        """What became of the communicators of the session's ranks.

        Raises:
            StaleHandleError: another generation.
            PermissionDeniedError: the session is no member.
        """
        member = group.member(session, generation)
        found = self._sets.get(group.group_id)
        if found is None or found.generation != generation:  # it could not get any
            found = self._sets[group.group_id] = _without_ids(group, error)
        if error:
            found.error = found.error or f"rank {member.ranks[0]}: {error[:300]}"
            self._log("nccl.failed", group, found.error)
            self._stop(found)
            return
        found.version = version
        found.ready.update(member.ranks)
        if len(found.ready) == group.spec.world_size - len(group.remote):
            self._log("nccl.ready", group, f"NCCL {version} communicators of every rank here")
            self._stop(found)

    def state_of(self, group: Group) -> tuple[str, str]:
        """(version, state) for people; empty where nothing was asked for."""
        found = self._sets.get(group.group_id)
        if found is None or found.generation != group.generation:
            return "", ""
        ranks = group.spec.world_size - len(group.remote)
        if found.error:
            return found.version, f"none: {found.error}"
        if len(found.ready) < ranks:
            return found.version, f"forming, {len(found.ready)} of {ranks} ranks"
        return found.version, f"ready, {ranks} ranks" if found.is_current else "aborted"

    def tick(self) -> None:
        """Ends processes whose generation is over, or that waited for long enough."""
        now = self._clock.monotonic_s()
        for group_id, found in list(self._sets.items()):
            if found.group.state is State.CLOSED:
                self._end(group_id)
            elif not found.is_current or found.until_s <= now:
                self._stop(found)

    def _end(self, group_id: str) -> None:
        found = self._sets.pop(group_id, None)
        if found is not None:
            self._stop(found)

    def _stop(self, found: _Set) -> None:
        process, found.process = found.process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # asyncio reaps it

    async def close(self) -> None:
        """Ends every process. The daemon is about to end."""
        sets, self._sets = list(self._sets.values()), {}
        processes = [found.process for found in sets if found.process is not None]
        for found in sets:
            found.making.cancel()
            self._stop(found)
        ends = [*(found.making for found in sets), *(process.wait() for process in processes)]
        await asyncio.gather(*ends, return_exceptions=True)

    def _log(self, kind: str, group: Group, message: str) -> None:
        self._events.add(
            kind,
            f"group {group.owner}, generation {group.generation}: {message}",
            group=group.owner.name,
            generation=group.generation,
            level=logging.INFO,
        )


def _look(task: asyncio.Task[UniqueIds]) -> None:
    """Nobody may be waiting any more; the error is in the set."""
    if not task.cancelled():
        task.exception()


def _without_ids(group: Group, error: str) -> _Set:
    async def none() -> UniqueIds:
        raise StaleHandleError(error)

    making = asyncio.get_running_loop().create_task(none())
    making.add_done_callback(_look)
    found = _Set(group, group.generation, group.epoch, 0.0)
    found.making = making
    return found
