"""NCCL unique ids of groups: one set per generation, made by a separate process.

The process is the bootstrap root and ends with its generation. NCCL's root waits without a timeout
for each rank, and fails if a rank joins twice. So it is neither the daemon nor a client, and no
set of ids is used twice. Ids are secrets: only the daemon, the process and members hold them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Awaitable, Callable

from ep_runtime import env, nccl
from ep_runtime.errors import (
    EpRuntimeError,
    PoolExhaustedError,
    RuntimeUnavailableError,
    StaleHandleError,
)
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.supervision import tell_failure
from ep_runtime_server.callers.quotas import Quotas
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import Owner

_CHILD = "ep_runtime_server.nccl.unique_id_child"
# Time to make ids, which includes loading libnccl (400 MB) from a cold disk.
MAKE_S = 30.0


@dataclasses.dataclass(frozen=True)
class UniqueIds:
    """One id per EP domain, and the version of the libnccl that made them."""

    ids: tuple[bytes, ...] = dataclasses.field(repr=False)  # not shown, because ids are secret
    version: str


# Descriptors per process: its input, its pidfd, and both ends of a pipe until it answers.
PROCESS_FDS = 4


class IdProcess:
    """One process that makes ids: call `make`, then `kill` or `close`, on the event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._ended = False

    async def make(self, count: int, life_s: float) -> UniqueIds:
        """Starts the process, which lives at most `life_s`, and returns its ids.

        Raises:
            RuntimeUnavailableError: libnccl is missing, the process cannot be started, or it does
                not answer.
        """
        try:
            reader, writer = os.pipe()
        except OSError as error:
            raise _not_started(error) from error
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *(["-I"] if sys.flags.isolated else ["-P"]), "-m", _CHILD),
                    *(str(writer), str(count), str(life_s)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    pass_fds=(writer,),
                    env=env.daemon_environment(),
                )
            except OSError as error:
                raise _not_started(error) from error
            finally:
                os.close(writer)
            self._process = process
            if self._ended:  # killed while it started
                self.kill()
            return await _read(reader, count)
        finally:
            os.close(reader)

    @property
    def over(self) -> bool:
        """Returns whether the process was killed or has ended."""
        return self._ended or (self._process is not None and self._process.returncode is not None)

    def kill(self) -> None:
        """Kills the process without waiting; asyncio reaps it."""
        self._ended = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Kills the process and waits until it is gone."""
        self.kill()
        if self._process is not None:
            await self._process.wait()


def _not_started(error: OSError) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(
        f"the process that makes NCCL unique ids cannot be started: {error}", library=nccl.LIBRARY
    )


async def _read(reader: int, count: int) -> UniqueIds:
    """Reads the ids that the process wrote. Raises RuntimeUnavailableError."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(os.dup(reader), "rb", 0)
    )
    try:
        async with asyncio.timeout(MAKE_S):
            line = await stream.readline()
        said = json.loads(line)
    except (TimeoutError, ValueError) as error:
        raise RuntimeUnavailableError(
            f"the process that makes NCCL unique ids ended, or did not answer within {MAKE_S:g} s",
            library=nccl.LIBRARY,
        ) from error
    finally:
        transport.close()
    if "error" in said:
        raise RuntimeUnavailableError(
            f"the daemon makes no NCCL unique ids: {said['error']}", library=nccl.LIBRARY
        )
    ids = tuple(bytes.fromhex(text) for text in said["ids"])
    assert len(ids) == count
    return UniqueIds(ids, nccl.version_text(said["version"]))


# How long ranks may take to join; clients give up earlier.
JOIN_S = 600.0
# Limit of concurrent processes, because each loads libnccl.
MAX_PROCESSES_PER_USER = 64


@dataclasses.dataclass(eq=False)
class _Set:
    """The ids of one generation, and the state of their communicators."""

    group: GroupRecord
    generation: int
    epoch: int
    until_s: float
    making: asyncio.Task[UniqueIds] | None = None  # None if the processes asked for none
    process: IdProcess | None = None
    version: str = ""
    ready: set[int] = dataclasses.field(default_factory=set)  # world ranks that have joined
    error: str = ""

    @property
    def is_current(self) -> bool:
        group = self.group
        same = group.generation == self.generation and group.epoch == self.epoch
        return same and group.state in (State.FORMING, State.READY)


class UniqueIdBook:
    """Keeps the unique ids of all groups. Use it on the event loop's thread only."""

    def __init__(self, clock: Clock, events: EventLog, quotas: Quotas) -> None:
        self._clock = clock
        self._events = events
        self._quotas = quotas
        self._sets: dict[str, _Set] = {}  # by group id
        # Asks the coordinator for ids of a group across nodes: (owner, epoch, number of domains).
        self.of_view: Callable[[Owner, int, int], Awaitable[UniqueIds]] | None = None

    async def of(self, session: SessionRecord, group: GroupRecord, generation: int) -> UniqueIds:
        """Returns the ids of a group's generation; the first call makes them.

        Raises:
            StaleHandleError: the generation is not current, the group is not formed, or a process
                failed to use the ids.
            PermissionDeniedError: the session is not a member.
            RuntimeUnavailableError: libnccl is missing, or the process does not answer.
            PoolExhaustedError: the user has too many such processes, or too few descriptors left.
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
        if found.error or found.making is None:
            raise StaleHandleError(
                f"group {group.owner.name!r}, generation {generation}: "
                f"{found.error or 'its processes joined without ids'}; create it again",
                group=group.owner.name,
                generation=generation,
            )
        made = await asyncio.shield(found.making)
        found.version = made.version
        return made

    def _processes(self) -> collections.Counter[int]:
        """Counts running and starting processes by uid."""
        return collections.Counter(
            found.group.owner.uid
            for found in self._sets.values()
            if (found.making is not None and not found.making.done())
            or (found.process is not None and not found.process.over)
        )

    def fds(self) -> collections.Counter[int]:
        """Returns the number of descriptors of each user's processes, by uid."""
        return collections.Counter(
            {uid: PROCESS_FDS * count for uid, count in self._processes().items()}
        )

    def _begin(self, group: GroupRecord) -> _Set:
        self._end(group.group_id)
        uid = group.owner.uid
        held = self._processes()[uid]
        if held >= MAX_PROCESSES_PER_USER:
            raise PoolExhaustedError(
                f"uid {uid} has {held} groups that make NCCL communicators, the limit is "
                f"{MAX_PROCESSES_PER_USER}; retry when some are done",
                resource="processes",
                uid=uid,
                asked=1,
                held=held,
                limit=MAX_PROCESSES_PER_USER,
            )
        self._quotas.check(uid, fds=PROCESS_FDS)
        until_s = self._clock.monotonic_s() + JOIN_S
        found = _Set(group, group.generation, group.epoch, until_s)
        found.making = asyncio.get_running_loop().create_task(self._make(found))
        found.making.add_done_callback(_take_error)
        self._sets[group.group_id] = found
        self._log("nccl.unique_ids", group, f"unique ids for {group.spec.num_domains} EP domains")
        return found

    async def _make(self, found: _Set) -> UniqueIds:
        group, count = found.group, found.group.spec.num_domains
        try:
            if group.remote and self.of_view is not None:
                try:
                    return await self.of_view(group.owner, group.epoch, count)
                except RuntimeUnavailableError as error:
                    # Set a field, because clients take an error without fields as a sign that
                    # their own daemon is gone.
                    raise RuntimeUnavailableError(
                        f"cannot get NCCL unique ids from the coordinator: {error}",
                        library=nccl.LIBRARY,
                    ) from error
            found.process = IdProcess()
            return await found.process.make(count, JOIN_S)
        except Exception as error:
            ours = isinstance(error, EpRuntimeError)
            found.error = str(error) if ours else "a fault of the daemon"
            if not ours:
                tell_failure(self._events, f"NCCL unique ids of group {group.owner}", error)
            self._stop(found)
            raise

    def report(
        self, session: SessionRecord, group: GroupRecord, generation: int, version: str, error: str
    ) -> None:
        """Records that the session's ranks have made their communicators, or failed to.

        Raises:
            StaleHandleError: another generation.
            PermissionDeniedError: the session is not a member.
        """
        member = group.member(session, generation)
        found = self._sets.get(group.group_id)
        if found is None or found.generation != generation:  # the process got no ids
            found = _Set(group, group.generation, group.epoch, 0.0)
            self._sets[group.group_id] = found
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

    def state_of(self, group: GroupRecord) -> tuple[str, str]:
        """Returns (NCCL version, state) for people; empty if nobody asked for ids."""
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
        """Ends processes whose generation has ended or whose JOIN_S has passed."""
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
        if found.process is not None:
            found.process.kill()

    async def close(self) -> None:
        """Kills the processes that make ids, and waits for their ends; the daemon then ends."""
        sets, self._sets = list(self._sets.values()), {}
        making = [found.making for found in sets if found.making is not None]
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        for found in sets:
            if found.process is not None:
                await found.process.close()

    def _log(self, kind: str, group: GroupRecord, message: str) -> None:
        self._events.add(
            kind, f"group {group.owner}, generation {group.generation}: {message}", **group.fields
        )


def _take_error(task: asyncio.Task[UniqueIds]) -> None:
    """Marks a task's error as retrieved, because possibly no one awaits the task."""
    if not task.cancelled():
        task.exception()
