"""Processes of a job: the client library's calls to the daemon, in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
from typing import TYPE_CHECKING, Any

from ep_runtime import errors, wire
from ep_runtime.specs import GroupSpec
from ep_runtime.v1 import group_service_pb2 as pb
from ep_runtime.v1 import nccl_service_pb2
from ep_runtime_server.callers.credentials import Caller, GivenOrder, Peer
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups import attachment
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import Owner
from schedules.daemons import GoneError, Life

if TYPE_CHECKING:
    from schedules.cluster import SimulatedCluster

UID, JOB = 0, "job"
ORDER = GivenOrder(Caller(0, 1), "drill")
_LOOKS_EACH_S = 0.05


@dataclasses.dataclass
class Held:
    """A process's group: READY, or forming."""

    spec: GroupSpec
    generation: int
    epoch: int
    fds: dict[int, int]  # by world rank; -1 is the board


@dataclasses.dataclass
class Claim:
    """A create that waits at the daemon."""

    process: Process
    spec: GroupSpec
    since_s: float
    wait_s: float


class Process:
    """One process on a node, with the same world ranks in every group."""

    def __init__(self, cluster: SimulatedCluster, node: str, ranks: tuple[int, ...]) -> None:
        self.cluster = cluster
        self.node = node
        self.ranks = ranks
        self.pid = next(cluster.pids)
        self.alive = True
        self.refused_s = -1e9  # refused for its spec
        self.ended_s = 0.0
        self.exit_fd = os.eventfd(0)
        self.held: Held | None = None
        self.closed: list[tuple[str, int]] = []  # that the daemon does not know yet
        self._token = ""
        self._session: SessionRecord | None = None
        self.life: Life | None = None  # a daemon that knows it and its group
        self._ops = itertools.count(1)

    @property
    def session_id(self) -> str:
        return self._session.session_id if self._session is not None else ""

    # Calls to the daemon

    async def _daemon(self) -> Life:
        """Returns the node's daemon once it knows our session; waits while the daemon is away."""
        while (life := self.cluster.life(self.node)) is None:
            await asyncio.sleep(_LOOKS_EACH_S)
        if life is not self.life:
            self._session = life.do(self._resume, life)
            life.do(life.runtime.open_session, self._session, JOB, {}, 0)
            if self.held is not None:
                await self._restore(life, self.held)
            self.life = life
            for name, generation in self.closed:
                await self._ask(life, life.groups.CloseGroup, _closing(name, generation))
            self.closed = []
        return life

    def _resume(self, life: Life) -> SessionRecord:
        peer = Peer(self.pid, UID, frozenset(), os.dup(self.exit_fd))
        sessions = life.runtime.sessions
        session = None
        if self._token:
            with contextlib.suppress(errors.EpRuntimeError):
                session = sessions.resume(self._token, peer)
        if session is None:
            session = sessions.hello(peer, self.pid, "1")
            self._token = session.token
            self._drop()
        peer.close()
        return session

    async def _ask(self, life: Life, method: Any, request: Any) -> Any:
        assert self._session is not None
        await asyncio.sleep(0)
        return await life.ask(self._session, method, request)

    async def _restore(self, life: Life, held: Held) -> None:
        request = pb.RestoreGroupRequest(
            spec=wire.group_spec_to_proto(held.spec),
            generation=held.generation,
            world_ranks=self.ranks,
            window_ranks=[rank for rank in held.fds if rank >= 0],
        )
        try:
            answer = await self._ask(life, life.groups.RestoreGroup, request)
            wanted = [(r, held.generation, held.fds[r]) for r in answer.wanted_ranks]
            if wanted:
                returns = life.runtime.rejoin.return_windows
                life.do(returns, self._session, held.spec.name, wanted)
        except errors.EpRuntimeError as error:
            self.cluster.say(f"{self} could not restore: {error}")
            self._drop()
            await self._ask(life, life.groups.CloseGroup, _closing(held.spec.name, held.generation))

    # Steps of a process

    async def form(self, spec: GroupSpec, wait_s: float, *, replace: bool = False) -> str:
        """Forms the group as the client library does; returns READY or the name of the error."""
        if self.held is not None:
            await self.close()
        while True:
            try:
                return await self._attempt(await self._daemon(), spec, wait_s, replace)
            except GoneError:
                await asyncio.sleep(_LOOKS_EACH_S)
            except errors.EpRuntimeError as error:
                self.cluster.say(f"{self} gets {type(error).__name__}: {error}")
                if isinstance(error, errors.SpecMismatchError) and not replace:
                    self.cluster.refused(self, spec)
                if isinstance(error, errors.GroupBusyError):
                    self.cluster.busy(self, error.fields["pid"])
                await self.close()
                return type(error).__name__

    async def _attempt(self, life: Life, spec: GroupSpec, wait_s: float, replace: bool) -> str:
        loop = asyncio.get_running_loop()
        if self.held is None:
            claim = Claim(self, spec, loop.time(), wait_s)
            self.cluster.claims.append(claim)
            request = pb.CreateGroupRequest(
                op_id=f"op{next(self._ops)}",
                spec=wire.group_spec_to_proto(spec),
                world_ranks=self.ranks,
                replace=replace,
                wait=wire.duration(wait_s),
            )
            try:
                answer = await self._ask(life, life.groups.CreateGroup, request)
            finally:
                self.cluster.claims.remove(claim)
                self.cluster.waited("create", self, loop.time() - claim.since_s, wait_s)
            group = answer.group
            filled = dataclasses.replace(spec, node_size=int(group.spec.node_size))
            self.held = Held(filled, int(group.generation), int(group.epoch), {})
            if group.window_bytes:
                self._fetch(life, self.held)
        since_s, held = loop.time(), self.held
        report = pb.ReportAttachedRequest(
            name=spec.name, generation=held.generation, wait=wire.duration(wait_s)
        )
        try:
            answer = await self._ask(life, life.groups.ReportAttached, report)
        finally:
            self.cluster.waited("attach", self, loop.time() - since_s, wait_s)
        held.epoch = int(answer.group.epoch)
        self.cluster.say(f"{self} has {spec.name!r}, epoch {held.epoch}")
        return "READY"

    def _fetch(self, life: Life, held: Held) -> None:
        runtime = life.runtime

        def fetch() -> dict[int, int]:
            assert self._session is not None
            group = runtime.groups.get(self._session, held.spec.name)
            secret, _ = attachment.acquire(
                runtime.attach_tokens, self._session, group, held.generation, ()
            )
            buffers, _ = attachment.redeem(runtime.attach_tokens, self._session, secret)
            with attachment.exported(buffers) as fds:
                return {
                    buffer.world_rank: os.dup(fd) for buffer, fd in zip(buffers, fds, strict=True)
                }

        held.fds = life.do(fetch)

    async def ids(self) -> None:
        """Asks for the NCCL ids of its group; the cluster compares them."""
        await self._of_nccl("GetUniqueIds")

    async def disconnected(self) -> None:
        """Reports that it cannot reach the other members of its group."""
        await self._of_nccl("ReportCommunicators", error="no route")

    async def _of_nccl(self, method: str, **more: Any) -> None:
        if self.held is not None:
            make = getattr(nccl_service_pb2, f"{method}Request")
            request = make(name=self.held.spec.name, generation=self.held.generation, **more)
            with contextlib.suppress(GoneError, errors.EpRuntimeError):
                life = await self._daemon()
                await self._ask(life, getattr(life.nccl, method), request)

    def group(self) -> GroupRecord | None:
        """The record of its group at its daemon."""
        life = self.cluster.life(self.node)
        if life is None or self.held is None:
            return None
        group = life.runtime.groups.find(Owner(UID, JOB, self.held.spec.name))
        same = group is not None and group.generation == self.held.generation
        return group if same else None

    async def work(self, most_s: float) -> None:
        """Works until its group is not READY any more, as a step's error would show."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + most_s
        while self.held is not None and loop.time() < end_s:
            group = self.group()
            if self.cluster.life(self.node) is not None and (
                group is None or group.state.value != "READY"
            ):
                return
            await asyncio.sleep(_LOOKS_EACH_S)

    async def close(self) -> None:
        """Unmaps its group and reports it, now or once the daemon is back."""
        held = self.held
        self._drop()
        if held is None:
            return
        self.closed.append((held.spec.name, held.generation))
        while self.closed:
            try:
                life = await self._daemon()
                for item in list(self.closed):
                    await self._ask(life, life.groups.CloseGroup, _closing(*item))
                    self.closed.remove(item)
            except GoneError:
                await asyncio.sleep(_LOOKS_EACH_S)

    def _drop(self) -> None:
        held, self.held = self.held, None
        for fd in held.fds.values() if held is not None else ():
            os.close(fd)

    def goodbye(self) -> None:
        """Ends the session in good order, then the process."""
        life = self.life
        if life is not None and life.alive and self._session is not None:
            self._drop()
            life.do(life.runtime.sessions.close, self._session)
        self.die()

    def fenced(self) -> bool:
        """An operator fences the process; returns whether its daemon refuses it from then on."""
        life = self.life
        if life is None or life is not self.cluster.life(self.node):
            return True
        life.do(life.runtime.sessions.fence, self._session, ORDER)
        try:
            life.runtime.sessions.authenticate_live(self._token, None)
        except errors.SessionFencedError:
            return True
        return False

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self.ended_s = asyncio.get_running_loop().time()
            self.cluster.say(f"{self} ends")
            self._drop()
            os.eventfd_write(self.exit_fd, 1)

    def forget(self) -> None:
        """Returns its descriptors, whatever it is doing."""
        self._drop()
        os.close(self.exit_fd)

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        return f"process {self.pid} on {self.node} (ranks {ranks})"


def _closing(name: str, generation: int) -> pb.CloseGroupRequest:
    return pb.CloseGroupRequest(name=name, generation=generation)
