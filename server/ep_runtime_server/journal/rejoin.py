"""Takes back groups and descriptors from processes after a restart of the daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
from collections.abc import Mapping, Sequence

from ep_runtime import board
from ep_runtime.allowed_names import check_new_name
from ep_runtime.board_abi import PoisonReason
from ep_runtime.errors import InvalidArgumentError, SpecMismatchError, StaleHandleError
from ep_runtime.specs import GroupSpec
from ep_runtime.wire import RegisteredLayer
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.fsm import State, Trigger
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.journal import shapes
from ep_runtime_server.journal.recovery import Recovery
from ep_runtime_server.memory.devices import Allocation, HostDevice, is_memfd
from ep_runtime_server.memory.window_sets import Buffer
from ep_runtime_server.memory.windows import Owner, WindowPool, WindowSet, WindowState


@dataclasses.dataclass(frozen=True)
class Holding:
    """The group, layers and windows that a process reports that it holds."""

    spec: GroupSpec
    generation: int
    ranks: tuple[int, ...]
    layers: tuple[RegisteredLayer, ...]
    uuids: tuple[str, ...] = ()  # UUIDs of the ranks' GPUs
    windows: tuple[int, ...] = ()  # world ranks of the held windows; empty for all


class Rejoin:
    """Carries out RestoreGroup and ReturnWindows."""

    def __init__(self, groups: Groups, pool: WindowPool, recovery: Recovery) -> None:
        self._groups = groups
        self._pool = pool
        self._recovery = recovery

    async def restore_group(
        self, session: SessionRecord, claim: Holding
    ) -> tuple[GroupRecord, list[int]]:
        """Restores a process's membership; also returns the world ranks whose windows are missing.

        Raises:
            StaleHandleError: the group no longer exists, or is at another generation.
            SpecMismatchError: the spec or the layers differ.
            GroupBusyError: another process has one of the ranks.
            InvalidArgumentError: the process claims other ranks than before the restart.
            SessionFencedError: the session ended while the daemon parsed its request.
        """
        session.check_live()
        group = self._group_of(session, claim)
        member = group.members.get(session.session_id)
        if member is None:
            if not group.restoring:
                raise StaleHandleError(
                    f"process {session.pid} is not a member of group {claim.spec.name!r} at "
                    f"generation {claim.generation}; create it again",
                    group=claim.spec.name,
                )
            group.check_free(session, claim.ranks)
            group.claim(session, claim.ranks, claim.uuids)
            member = group.members[session.session_id]
        if member.ranks != claim.ranks:
            raise InvalidArgumentError(
                f"world_ranks must be {list(member.ranks)} as before, got {list(claim.ranks)}",
                argument="world_ranks",
            )
        await group.layers.rejoin(claim.layers, takes_word=self._recovery.takes_word)
        group.member(session, claim.generation)  # may have changed in await
        member.attached = True
        if group.windows is not None:
            if group.restoring:
                group.windows.assume(dict(zip(claim.ranks, claim.uuids, strict=False)))
            group.windows.hold(session.session_id)  # a cut journal may lack the holder
        self._settle(group)
        return group, self._wanted(group)

    def _wanted(self, group: GroupRecord) -> list[int]:
        if group.has_windows and group.windows is None:
            raise StaleHandleError(
                f"the memory of group {group.owner.name!r} is gone; create the group again",
                group=group.owner.name,
            )
        return group.windows.wanted_ranks if group.windows is not None else []

    def _group_of(self, session: SessionRecord, claim: Holding) -> GroupRecord:
        group = self._groups.find(Owner(session.uid, session.job, claim.spec.name))
        known = group.generation if group is not None else 0
        # The journal may lack the end of a formation, which the group's processes know.
        ended = group is not None and not group.formed and not group.members
        least = known if ended else known + 1
        if self._recovery.takes_word and least <= claim.generation <= shapes.MAX_GENERATION:
            if group is None:
                check_new_name("group", claim.spec.name)
            else:
                self._groups.take_away(group, PoisonReason.CLOSED, "a newer state of it came back")
            group = self._make(session, claim)
        if group is None:
            raise StaleHandleError(
                f"no group {claim.spec.name!r} in job {session.job!r}; create it again",
                group=claim.spec.name,
            )
        difference = group.resolved.difference(claim.spec)
        if difference is not None:
            field, theirs, ours = difference
            raise SpecMismatchError(
                f"group {claim.spec.name!r} has {field}={theirs}, this call says {ours}",
                object=claim.spec.name,
                field=field,
                theirs=theirs,
                ours=ours,
            )
        group.check_generation(claim.generation)
        return group

    def _make(self, session: SessionRecord, claim: Holding) -> GroupRecord:
        """Makes a group that only its processes know; READY once all its memory has come back."""
        owner = Owner(session.uid, session.job, claim.spec.name)
        asked = dataclasses.replace(claim.spec, node_size=0)
        group = GroupRecord(owner, asked, claim.generation)
        group.node_size = claim.spec.node_size
        group.restoring = group.formed = group.reattached = True
        if group.has_windows:
            held = claim.windows or range(claim.spec.world_size)
            group.windows = self._pool.expect(owner, claim.spec, claim.generation, held)
        self._groups.begin(group)
        return group

    def _settle(self, group: GroupRecord) -> None:
        complete = group.windows is None or not group.windows.wanted_ranks
        if group.state is State.FORMING and complete and not group.unattached_ranks:
            group.advance(Trigger.ALL_ATTACHED)
        group.notify()
        self._recovery.settle()

    # Descriptors

    def check_return(
        self, session: SessionRecord, name: str, generations: Sequence[int]
    ) -> GroupRecord:
        """Checks that the session may return windows of these generations; returns the group.

        Raises what `return_windows` raises.
        """
        group = self._groups.get(session, name)
        for generation in generations:
            group.member(session, generation)
        return group

    def return_windows(
        self, session: SessionRecord, name: str, found: Sequence[tuple[int, int, int]]
    ) -> tuple[int, list[int]]:
        """Adopts windows given as (world rank, generation, fd).

        The caller must close its descriptors. Adopts either all of the missing windows or none.

        Returns:
            The number of adopted windows, and the world ranks still missing.

        Raises:
            StaleHandleError: the group or generation does not exist.
            PermissionDeniedError: the session is not a member.
            InvalidArgumentError: a descriptor is not the group's memory.
        """
        group = self.check_return(session, name, [generation for _, generation, _ in found])
        self._wanted(group)
        windows = group.windows
        if windows is None:
            return 0, []
        taken = self.adopt(windows, {rank: fd for rank, _, fd in found})
        self._settle(group)
        return taken, windows.wanted_ranks

    def adopt(self, windows: WindowSet, fds: Mapping[int, int]) -> int:
        """Adopts duplicates of the missing windows' descriptors; returns how many.

        Raises:
            InvalidArgumentError: a descriptor is not the set's memory.
            PoolExhaustedError: a window that the journal lacks would exceed a limit.
        """
        by_rank = {buffer.world_rank: buffer for buffer in windows.buffers}
        unknown = sorted(set(fds) - set(by_rank))
        if unknown:
            raise InvalidArgumentError(
                f"world_rank must be of {sorted(by_rank)}, got {unknown[0]}", argument="world_rank"
            )
        for device in {buffer.device for buffer in windows.buffers}:
            new = [b for b in windows.buffers if b.world_rank in fds and not b.counted]
            asked = sum(b.size_bytes for b in new if b.device == device)
            self._pool.check_room(device, asked, windows.owner.uid)
        allocations: dict[int, Allocation] = {}
        mapped: mmap.mmap | None = None
        try:
            for rank, fd in fds.items():
                if by_rank[rank].allocation is None:
                    allocations[rank] = self._checked(by_rank[rank], fd)
            self._check_distinct(allocations)
            if -1 in allocations:
                mapped = _checked_board(allocations[-1], windows)
        except BaseException:
            for allocation in allocations.values():
                try:
                    allocation.free()
                except Exception:  # noqa: BLE001 - no set counts this memory
                    logging.getLogger(__name__).exception("memory that came back is not let go")
            raise
        windows.adopt(allocations, mapped)
        self._forget_elsewhere(windows)
        self._recovery.adopted(sum(item.size_bytes for item in allocations.values()))
        return len(allocations)

    def _forget_elsewhere(self, windows: WindowSet) -> None:
        """Stops awaiting the returned memory for quarantined sets without a group.

        A cut journal may name such a set but lack its group, which then came back as a new set.
        """
        ours = {b.identity for b in windows.buffers if b.allocation is not None} - {None}
        for other in self._pool.sets:
            if other is windows or other.state is not WindowState.QUARANTINED:
                continue
            other.buffers = [
                b for b in other.buffers if b.allocation is not None or b.identity not in ours
            ]
            if not other.buffers:
                for holder in sorted(other.holders):
                    self._pool.drop_holder(holder, other)

    def _checked(self, buffer: Buffer, fd: int) -> Allocation:
        device = self._pool.device(buffer.device)
        if isinstance(device, HostDevice) and not is_memfd(fd):
            # Check before the dup, because closing a copy of another file may block.
            raise InvalidArgumentError(
                "the descriptor is not the group's memory: it is not a memfd"
            )
        ours = os.dup(fd)
        try:
            allocation = device.adopt(ours, buffer.size_bytes)
        except BaseException:
            os.close(ours)
            raise
        if None not in (buffer.identity, allocation.identity) and (
            buffer.identity != allocation.identity
        ):
            allocation.free()
            raise InvalidArgumentError(
                f"the descriptor of rank {buffer.world_rank} is another file than the group's: "
                f"device and inode {allocation.identity}, wanted {buffer.identity}",
                argument="fd",
            )
        return allocation

    def _check_distinct(self, allocations: Mapping[int, Allocation]) -> None:
        """Checks that no file is used as two windows."""
        taken = {
            buffer.identity
            for windows in self._pool.sets
            for buffer in windows.buffers
            if buffer.allocation is not None
        }
        for rank, allocation in allocations.items():
            if allocation.identity is None:  # GPU memory, which `device.adopt` has checked
                continue
            if allocation.identity in taken:
                raise InvalidArgumentError(
                    f"the descriptor of rank {rank} is another window's", argument="fd"
                )
            taken.add(allocation.identity)


def _checked_board(allocation: Allocation, windows: WindowSet) -> mmap.mmap:
    mapped = allocation.map()
    try:
        header = board.read_header(mapped)
        # A board without holders gets a new header before its next use, so accept any generation.
        wanted = windows.generation if windows.holders else header.generation
        # The layout gives the offsets for reading the board, so it must fit the file's size.
        size_bytes = windows.layout.board_bytes
        if (header.generation, allocation.size_bytes) != (wanted, size_bytes):
            raise InvalidArgumentError(
                f"the board is of generation {header.generation} and {allocation.size_bytes} "
                f"bytes, wanted {wanted} and {size_bytes}",
                argument="fd",
            )
    except BaseException:
        with contextlib.suppress(BufferError):  # the traceback may hold a view
            mapped.close()
        raise
    return mapped
