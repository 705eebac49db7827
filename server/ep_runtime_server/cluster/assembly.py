"""The coordinator's part in forming groups across nodes: collects claims, gives views, decides.

A view is prepared, then committed: every node gets the same one under an epoch that was written
before, every node says that its processes attached, and the decision is written before anybody
hears of it. An epoch without a written decision is given up, also by a coordinator that starts
again. Knows no socket; lives on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from ep_runtime.errors import (
    GroupBusyError,
    PoolExhaustedError,
    SpecMismatchError,
)
from ep_runtime.specs import GroupSpec
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.cluster.views import (
    Assembly,
    GroupView,
    NodeClaim,
    NodePart,
    Outcome,
    Proposal,
    ViewMember,
    view_or_news,
)
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.facts import ClusterFacts


class Assemblies:
    """Every group that forms across nodes, by owner."""

    def __init__(self, facts: ClusterFacts, clock: Clock, events: EventLog) -> None:
        self._facts = facts
        self._clock = clock
        self._events = events
        self._all: dict[Owner, Assembly] = {}

    async def join(
        self,
        node: str,
        owner: Owner,
        spec: GroupSpec,
        claims: tuple[NodeClaim, ...],
        *,
        generation: int = 0,
        known_missing: list[int],
        wait_s: float,
    ) -> tuple[GroupView | None, list[int]]:
        """The view, or the ranks that are missing once these are others than the known ones.

        Args:
            generation: of the group on the node; another one of it was not refused yet.

        Raises:
            SpecMismatchError: the other nodes' differs; their calls end with it too.
            GroupBusyError: a rank is claimed on another node.
            PoolExhaustedError: too many groups form, or the epoch cannot be written.
        """
        assembly = self._all.get(owner) or self._new(owner)
        proposal = assembly.proposal
        if proposal is not None and proposal.awaits(node, spec, claims):
            proposal.delivered.add(node)
            return proposal.view, []
        self._give_up_view_of(assembly, owner, node, "joins again")
        part = NodePart(node, spec, claims, generation)
        assembly.hear(part)
        self._check_spec(assembly, owner, part)
        _check_ranks(assembly, owner, part)
        assembly.put(part)
        try:
            self._propose(assembly, owner)
            await view_or_news(assembly, part, known_missing, wait_s)
        except BaseException:  # the node is gone, or wants something else
            assembly.drop(part)
            raise
        if part.error is not None:
            raise part.error
        part.waits = False
        part.until_s = self._clock.monotonic_s() + limits.NODE_CLAIM_LIFE_S
        if part.view is not None and assembly.proposal is not None:
            assembly.proposal.delivered.add(node)
        return part.view, assembly.missing

    def differ(
        self, node: str, owner: Owner, spec: GroupSpec, claims: tuple[NodeClaim, ...]
    ) -> None:
        """Ends waits elsewhere that differ from a spec whose processes the node refused.

        Raises:
            PoolExhaustedError: too many groups form.
        """
        assembly = self._all.get(owner) or self._new(owner)
        part = NodePart(node, spec, claims)
        now = self._clock.monotonic_s()
        _refuse_others(assembly, owner, part, now)
        assembly.note_refused(part, now)

    def _new(self, owner: Owner) -> Assembly:
        if len(self._all) >= limits.MAX_ASSEMBLIES:
            raise PoolExhaustedError(
                f"at most {limits.MAX_ASSEMBLIES} groups form across nodes at once; retry"
            )
        return self._all.setdefault(owner, Assembly())

    def _check_spec(self, assembly: Assembly, owner: Owner, part: NodePart) -> None:
        """Raises SpecMismatchError if the spec differs from another node's."""
        now = self._clock.monotonic_s()
        for other in (*assembly.others(part)[:1], assembly.differing(part, now)):
            error = _mismatch(owner, other, part) if other is not None else None
            if error is not None:
                _refuse_others(assembly, owner, part, now)
                assembly.refuse(part, error, now)
                raise error

    def _propose(self, assembly: Assembly, owner: Owner) -> None:
        """Gives every node the view, once no rank is missing."""
        if assembly.missing:
            return
        epoch = self._facts.next_epoch()
        members = [
            ViewMember(rank, part.node, claim.session_id, claim.pid)
            for part in assembly.parts.values()
            for rank, claim in part.ranks.items()
        ]
        members.sort(key=lambda member: member.rank)
        view = GroupView(epoch, assembly.attempts + 1, tuple(members))
        until_s = self._clock.monotonic_s() + limits.NODE_INIT_S
        spec = next(iter(assembly.parts.values())).spec
        assembly.proposal = Proposal(view, spec, until_s)
        for part in assembly.parts.values():
            part.view = view
        assembly.clear()
        self._log("cluster.view", owner, view, f"{len(view.nodes)} nodes have every rank")
        assembly.notify()

    # Decisions

    def _proposal(self, owner: Owner, epoch: int) -> tuple[Assembly, Proposal] | None:
        assembly = self._all.get(owner)
        if assembly is None or assembly.proposal is None:
            return None
        if assembly.proposal.view.epoch != epoch:
            return None
        return assembly, assembly.proposal

    def report(self, node: str, owner: Owner, epoch: int, error: str) -> None:
        """Takes a node's report on a view; ignores it if the view is decided or unknown.

        Raises:
            PoolExhaustedError: the decision cannot be written; the node repeats its report.
        """
        found = self._proposal(owner, epoch)
        if found is None:
            return
        assembly, proposal = found
        if not proposal.open or node not in proposal.view.nodes:
            return
        if error:
            self._give_up(assembly, owner, f"node {node!r}: {error}")
            return
        proposal.attached.add(node)
        if proposal.attached == proposal.view.nodes:
            self._facts.commit(owner.path, epoch)
            proposal.outcome = Outcome.COMMITTED
            assembly.attempts = 0
            self._log("cluster.committed", owner, proposal.view, "every node attached")
            assembly.notify()

    def ended(self, node: str, owner: Owner, epoch: int, ranks: Iterable[int]) -> None:
        """Frees the ranks of the node's processes that ended or left the group.

        Epoch 0: it claims nothing any more, and can use no view that is not decided.
        """
        assembly = self._all.get(owner)
        if assembly is not None and not epoch:
            part = assembly.parts.get(node)
            if part is not None:
                assembly.drop(part)
            self._give_up_view_of(assembly, owner, node, "claims nothing any more")
        found = self._proposal(owner, epoch)
        if found is not None:
            _, proposal = found
            own = {member.rank for member in proposal.view.members if member.node == node}
            proposal.ended |= own.intersection(ranks)

    async def outcome(self, owner: Owner, epoch: int, wait_s: float) -> tuple[Outcome, str]:
        """Returns what became of a view, and why."""
        found = self._proposal(owner, epoch)
        if found is not None:
            assembly, proposal = found
            await assembly.wait(lambda: not proposal.open, wait_s)
            return proposal.outcome, proposal.reason
        if self._facts.committed_epoch(owner.path) == epoch:
            return Outcome.COMMITTED, ""
        return Outcome.ABORTED, f"the coordinator does not know epoch {epoch} any more"

    def _give_up(self, assembly: Assembly, owner: Owner, reason: str) -> None:
        proposal = assembly.proposal
        if proposal is None or not proposal.open:
            return
        proposal.outcome, proposal.reason = Outcome.ABORTED, reason[:500]
        assembly.attempts += 1
        self._log("cluster.given_up", owner, proposal.view, reason)
        assembly.notify()

    def _give_up_view_of(self, assembly: Assembly, owner: Owner, node: str, why: str) -> None:
        """Gives up the view of a node that joins again and so lacks it, or cannot use it."""
        proposal = assembly.proposal
        if proposal is not None and node in proposal.view.nodes:
            self._give_up(assembly, owner, f"node {node!r} {why}")

    def node_gone(self, node: str) -> None:
        """Drops a node that left, lost its lease, or started again."""
        for owner, assembly in list(self._all.items()):
            assembly.refused.pop(node, None)
            part = assembly.parts.get(node)
            if part is not None:
                assembly.drop(part)
            proposal = assembly.proposal
            if proposal is not None and node in proposal.view.nodes:
                self._give_up(assembly, owner, f"node {node!r} is gone")
                # Its processes may live. If not, the job must be able to move to another node.
                proposal.ended |= {m.rank for m in proposal.view.members if m.node == node}

    def tick(self) -> None:
        """Drops claims that nobody renewed and views that nobody decided."""
        now = self._clock.monotonic_s()
        for owner, assembly in list(self._all.items()):
            for part in list(assembly.parts.values()):
                if not part.waits and part.until_s <= now:
                    assembly.drop(part)
            assembly.forget_refused(now)
            proposal = assembly.proposal
            if proposal is not None and proposal.until_s <= now and not proposal.lives:
                if proposal.open:
                    waited = sorted(proposal.view.nodes - proposal.attached)
                    self._give_up(assembly, owner, f"nodes {waited} said nothing")
                    proposal.until_s = now + limits.NODE_INIT_S  # who asks hears why
                else:
                    assembly.proposal = None
            if not assembly.parts and not assembly.refused and assembly.proposal is None:
                del self._all[owner]

    def _log(self, kind: str, owner: Owner, view: GroupView, message: str) -> None:
        self._events.add(
            kind,
            f"group {owner}, epoch {view.epoch}, attempt {view.attempt}: {message}",
            **owner.fields,
            epoch=view.epoch,
            attempt=view.attempt,
        )


def _refuse_others(assembly: Assembly, owner: Owner, part: NodePart, now_s: float) -> None:
    """Ends the waits of parts that differ from this one.

    Ends none if other nodes have its ranks, because the group may then form without it.
    """
    if assembly.unclaimed_elsewhere(part):
        for other in assembly.others(part):
            error = _mismatch(owner, part, other)
            if error is not None:
                assembly.refuse(other, error, now_s)


def _check_ranks(assembly: Assembly, owner: Owner, part: NodePart) -> None:
    """Raises GroupBusyError if another node's process has one of the ranks."""
    for rank in sorted(part.ranks):
        holder = assembly.proposal.holder(rank) if assembly.proposal is not None else None
        # A node knows its own processes better.
        taken = assembly.claimed.get(rank) or (holder and (holder.node, holder.pid))
        if taken and taken[0] != part.node:
            node, pid = taken
            raise GroupBusyError(
                f"rank {rank} of group {owner.name!r} is claimed by process {pid} on node "
                f"{node!r}, which is still alive; node {part.node!r} claims it too",
                group=owner.name,
                rank=rank,
                pid=pid,
                node=node,
            )


def _mismatch(owner: Owner, other: NodePart, part: NodePart) -> SpecMismatchError | None:
    """Describes how the other part's spec differs; None if it is the same."""
    difference = other.spec.difference(part.spec)
    if difference is None:
        return None
    field, theirs, ours = difference
    return SpecMismatchError(
        f"group {owner.name!r} has {field}={theirs} on node {other.node!r} and {field}={ours} on "
        f"node {part.node!r}; make them equal",
        object=owner.name,
        node=other.node,
        field=field,
        theirs=theirs,
        ours=ours,
    )
