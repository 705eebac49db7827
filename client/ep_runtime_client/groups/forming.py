"""Forms a group, once and never per step: claims ranks, fetches and maps windows, reports."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import uuid

from ep_runtime import device_layout, env, native, nccl, specs, wire
from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError, SessionFencedError
from ep_runtime.v1 import group_service_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.client import DaemonClient
from ep_runtime_client.groups.formed import Formed, Memory, fetch, restore
from ep_runtime_client.nccl import beside, communicators

_log = logging.getLogger("ep_runtime")

# The daemon answers by `wait`; the call's own deadline only ends a call without an answer.
_GRACE_S = 5.0

# Transports with rows in windows whose groups also get NCCL communicators.
WITH_NCCL_BESIDE = ("nvlink",)

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_TOP_PAD_BYTES = 64 << 20

# In place of the descriptor of another node's window.
_NOT_HERE = -1


@dataclasses.dataclass(frozen=True)
class Claim:
    """World ranks that this process claims, with the CUDA ordinal of each on GPUs."""

    ranks: tuple[int, ...]
    ordinals: tuple[int, ...] = ()


def form(client: DaemonClient, spec: specs.GroupSpec, claim: Claim, *, replace: bool) -> Formed:
    """Creates the group at the daemon and maps its windows here.

    Raises:
        SpecMismatchError, GroupBusyError, GroupNotReadyError, PoolExhaustedError: from the daemon.
    """
    if not client.has_daemon:
        return Formed(spec, 0, None, False, claim.ranks)
    formation = _Formation(client, spec, claim, replace=replace)
    try:
        return client.run(formation.attempt)
    except BaseException:
        formation.leave()
        raise


class _Formation:
    """Forms one group; continues where it stopped if the daemon restarts.

    A process that hears that the group is READY continues with it. So a process that has mapped the
    group must not start again if only its own answer was lost: the others would not join again.
    """

    def __init__(
        self, client: DaemonClient, spec: specs.GroupSpec, claim: Claim, *, replace: bool
    ) -> None:
        self._client = client
        self._spec = spec
        self._claim = claim
        self._replace = replace
        self._uuids = _uuids(spec, claim)
        self._formed: Formed | None = None

    def attempt(self, control: transport.ControlChannel) -> Formed:
        """Takes the group to READY, from creation or from the state that this process holds."""
        if self._formed is not None and not self._goes_on(control, self._formed):
            self.leave()
        if self._formed is None:
            self._formed = self._create(control)
        if self._spec.transport == "nccl":
            self._formed = self._with_nccl(control, self._formed)
        wait_s = self._client.timeout_s
        report = group_service_pb2.ReportAttachedRequest(
            name=self._spec.name, generation=self._formed.generation, wait=wire.duration(wait_s)
        )
        control.call(control.groups.ReportAttached, report, timeout_s=wait_s + _GRACE_S)
        if self._spec.transport in WITH_NCCL_BESIDE and self._spec.ep_size > 1:
            self._formed = self._beside_nccl(control, self._formed)
        return self._formed

    def _nccl_ranks(self, formed: Formed) -> nccl.Ranks:
        return communicators.ranks_of(
            formed.spec, formed.generation, formed.ranks, self._claim.ordinals
        )

    def _with_nccl(self, control: transport.ControlChannel, formed: Formed) -> Formed:
        """Returns the group with the communicators that carry its rows."""
        held = formed.native_group
        if held is None or isinstance(held, communicators.GroupWithNccl):
            return formed
        ranks = self._nccl_ranks(formed)
        made = communicators.make(control, nccl.library(), ranks, self._client.timeout_s)
        watch = communicators.Watch(
            made,
            formed.spec.name,
            functools.partial(_left, formed),
            functools.partial(_say_failed, self._client, ranks),
        )
        group = communicators.GroupWithNccl(held.library, held.number, made, ranks, watch)
        return dataclasses.replace(formed, native_group=group)

    def _beside_nccl(self, control: transport.ControlChannel, formed: Formed) -> Formed:
        """Starts making communicators for a group on windows, in addition to these."""
        held, ranks = formed.native_group, self._nccl_ranks(formed)
        if held is None or isinstance(held, beside.GroupBesideNccl):
            return formed
        if not env.wants_nccl():  # report it, so that the others do not wait for us
            communicators.report(control, ranks, "", "EP_RUNTIME_NCCL is 0 there")
            return formed
        try:
            beside.load_kernels(nccl.library(), ranks.ordinals)
        except EpRuntimeError as error:
            _log.warning("group %r goes on without NCCL communicators: %s", ranks.name, error)
            communicators.report(control, ranks, "", str(error))
            return formed
        made = beside.Beside(self._client.run, ranks)
        group = beside.GroupBesideNccl(held.library, held.number, made)
        return dataclasses.replace(formed, native_group=group)

    def _create(self, control: transport.ControlChannel) -> Formed:
        wait_s = self._client.timeout_s
        request = group_service_pb2.CreateGroupRequest(
            op_id=uuid.uuid4().hex,
            spec=wire.group_spec_to_proto(self._spec),
            world_ranks=self._claim.ranks,
            device_uuids=self._uuids,
            replace=self._replace,
            wait=wire.duration(wait_s),
        )
        answer = control.call(
            control.groups.CreateGroup, request, timeout_s=wait_s + _GRACE_S, for_all=True
        )
        generation = int(answer.group.generation)
        spec = dataclasses.replace(self._spec, node_size=int(answer.group.spec.node_size))
        memory, native_group = Memory([]), None
        try:
            if answer.group.window_bytes:
                memory = fetch(self._client, control, spec.name, generation)
            if spec.transport in native.PLATFORMS:
                here = [int(m.world_rank) for m in answer.group.members if not m.node]
                native_group = _map(spec, generation, memory, self._claim, here, self._client.job)
        except BaseException:
            leave(self._client, spec.name, generation, native_group)
            memory.close()
            raise
        reattached, ranks = bool(answer.reattached), self._claim.ranks
        return Formed(spec, generation, native_group, reattached, ranks, memory, self._uuids)

    def _goes_on(self, control: transport.ControlChannel, formed: Formed) -> bool:
        """Whether the restarted daemon still knows the group that this process holds."""
        try:
            restore(self._client, control, formed)
        except (RuntimeUnavailableError, SessionFencedError):
            raise
        except EpRuntimeError:
            return False
        return True

    def leave(self) -> None:
        """Leaves the group if this process holds it."""
        formed, self._formed = self._formed, None
        if formed is not None:
            leave(self._client, self._spec.name, formed.generation, formed.native_group)
            formed.memory.close()


def _left(formed: Formed) -> list[int]:
    """Returns the ranks that have left an EP group in which this process has ranks."""
    size = formed.spec.ep_size
    ours = {rank // size for rank in formed.ranks}
    return [
        rank for rank in formed.memory.left() if rank // size in ours and rank not in formed.ranks
    ]


def _say_failed(client: DaemonClient, ranks: nccl.Ranks, error: str) -> None:
    """Reports that a communicator failed although all processes of the group live."""
    if not client.has_daemon:
        return
    with contextlib.suppress(EpRuntimeError):  # the group's calls report it in any case
        version = communicators.version_of(nccl.library())
        communicators.report(client.control, ranks, version, error)


def _uuids(spec: specs.GroupSpec, claim: Claim) -> tuple[str, ...]:
    """Returns the UUIDs of the ranks' GPUs, because ordinals differ between processes."""
    if not device_layout.on_device(spec):
        return ()
    found = native.library("cuda").devices()
    return tuple(found[ordinal] for ordinal in claim.ordinals)


def _map(
    spec: specs.GroupSpec,
    generation: int,
    memory: Memory,
    claim: Claim,
    here: list[int],
    job: str,
) -> native.OpenGroup:
    """Maps the board and the windows of `here`, the world ranks on this node."""
    from ep_runtime_client.ops.kernels import ffi

    platform = native.PLATFORMS[spec.transport]
    if spec.transport == "memfd":
        keep_freed_memory()
    # Register here and not when an op is first traced, because exported programs and stored
    # executables never trace.
    ffi.ensure_registered(platform)
    found = {int(item.world_rank): fd for item, fd in memory.of(range(-1, spec.world_size))}
    if sorted(found) != [-1, *here]:
        raise EpRuntimeError(
            f"group {spec.name!r}: the daemon sent a board and windows as {sorted(found)}, wanted "
            f"-1 (the board) and {here}"
        )
    library = native.library(platform)
    number = library.open_group(
        spec,
        generation=generation,
        board_fd=found[-1],
        window_fds=[found.get(rank, _NOT_HERE) for rank in range(spec.world_size)],
        debug=env.debug(),
        local_ranks=claim.ranks,
        gpus=on_gpus(claim) if claim.ordinals else None,
        job=job,
    )
    return native.OpenGroup(library, number)


def on_gpus(claim: Claim) -> native.OnGpus:
    """Describes how this process drives its ranks."""
    return native.OnGpus(tuple(claim.ordinals), tell_progress=env.tells_progress())


def leave(
    client: DaemonClient, name: str, generation: int, native_group: native.OpenGroup | None
) -> None:
    """Unmaps the windows and leaves the group; tells an unreachable daemon later."""
    unmap(native_group)
    if client.has_daemon:
        client.say_left(name, generation)


def unmap(native_group: native.OpenGroup | None) -> None:
    """Unmaps the windows after running calls, for which it waits a bounded time."""
    if native_group is not None:
        native_group.close()


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next buffers; returns whether it does. Logs once.

    XLA on CPU allocates every large result from glibc, which returns memory above 32 MiB to the
    system at once. The kernel then clears every page again for the next call: with rows of 4 KiB
    this costs as much as moving them. With this setting the process's memory stays at its peak.
    Nothing changes with EP_RUNTIME_KEEP_MEMORY=0, if the user has set glibc's own variables, or
    without glibc.
    """
    if not env.keep_memory() or env.malloc_is_set():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))
    if not all(mallopt(parameter, value) for parameter, value in wanted):
        return False
    _log.info(
        "memory that this process frees is kept for its next buffers (glibc's mallopt); "
        "EP_RUNTIME_KEEP_MEMORY=0 returns it to the system"
    )
    return True
