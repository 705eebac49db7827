"""The coordinator's part in forming groups across nodes: collects claims, and decides on views.

Forming is a two-phase commit. The coordinator saves a new epoch and gives all nodes the same view.
Each node reports that its processes attached. Then the coordinator saves the decision before it
answers. It gives up an epoch without a saved decision, also after a restart. For the event loop's
thread only.
"""

from __future__ import annotations

from ep_runtime.errors import GroupBusyError, PoolExhaustedError, SpecMismatchError
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.cluster.views import (
    Assembly,
    GroupView,
    NodePart,
    NodeReport,
    Outcome,
    Proposal,
    ViewMember,
    view_or_news,
)
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.facts import ClusterFacts


class Assemblies:
    """All groups that form across nodes, by owner."""

    def __init__(self, facts: ClusterFacts, clock: Clock, events: EventLog) -> None:
        self._facts = facts
        self._clock = clock
        self._events = events
        self._all: dict[Owner, Assembly] = {}

    async def join(
        self, owner: Owner, part: NodePart, known_missing: list[int], wait_s: float
    ) -> tuple[GroupView | None, list[int]]:
        """Adds a node's claims; returns the view, or missing ranks other than `known_missing`.

        Raises:
            SpecMismatchError: another node's spec differs; its calls end with this error too.
            GroupBusyError: a rank is claimed on another node.
            PoolExhaustedError: too many groups form, or the epoch cannot be saved.
        """
        assembly = self._all.get(owner) or self._new(owner)
        proposal = assembly.proposal
        if proposal is not None and proposal.awaits(part):
            proposal.delivered.add(part.node)
            return proposal.view, []
        self._give_up_view_of(assembly, owner, part.node, "joins again")
        assembly.hear(part)
        self._check_spec(assembly, owner, part)
        _check_ranks(assembly, owner, part)
        assembly.put(part)
        try:
            self._propose(assembly, owner)
            await view_or_news(assembly, part, known_missing, wait_s)
        except BaseException:  # the node cancelled its call, or the epoch cannot be saved
            assembly.drop(part)
            raise
        if part.error is not None:
            raise part.error
        part.waits = False
        part.until_s = self._clock.monotonic_s() + limits.NODE_CLAIM_LIFE_S
        if part.view is not None and assembly.proposal is not None:
            assembly.proposal.delivered.add(part.node)
        return part.view, assembly.missing

    def differ(self, owner: Owner, part: NodePart) -> None:
        """Ends other nodes' waits if their specs differ from the spec of refused processes.

        Raises:
            PoolExhaustedError: too many groups form.
        """
        assembly = self._all.get(owner) or self._new(owner)
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
        """Raises SpecMismatchError if the spec differs from the spec of another node."""
        now = self._clock.monotonic_s()
        for other in (*assembly.others(part)[:1], assembly.differing(part, now)):
            error = _mismatch(owner, other, part) if other is not None else None
            if error is not None:
                _refuse_others(assembly, owner, part, now)
                assembly.refuse(part, error, now)
                raise error

    def _propose(self, assembly: Assembly, owner: Owner) -> None:
        """Makes a view for all nodes once no rank is missing."""
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
        proposal = assembly.proposal if assembly is not None else None
        if assembly is None or proposal is None or proposal.view.epoch != epoch:
            return None
        return assembly, proposal

    def report(self, node: str, owner: Owner, epoch: int, error: str) -> None:
        """Takes a node's report on a view; ignores reports on decided or unknown views.

        Raises:
            PoolExhaustedError: the decision cannot be saved; the node will repeat its report.
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

    def ended(self, owner: Owner, epoch: int, report: NodeReport) -> None:
        """Frees the ranks of the node's processes that ended or left the group.

        With epoch 0, the node withdraws all its claims and cannot use an undecided view.
        """
        assembly, node = self._all.get(owner), report.node
        if assembly is not None and not epoch:
            self._withdraw(assembly, owner, node, "claims nothing any more")
        found = self._proposal(owner, epoch)
        if found is not None:
            _, proposal = found
            own = proposal.view.ranks_of(node)
            proposal.ended |= own.intersection((*report.lost_ranks, *report.left_ranks))

    async def outcome(self, owner: Owner, epoch: int, wait_s: float) -> tuple[Outcome, str]:
        """Waits for the decision on a view; returns the outcome and the reason."""
        found = self._proposal(owner, epoch)
        if found is not None:
            assembly, proposal = found
            await assembly.decided.until(lambda: not proposal.open, wait_s)
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
        """Gives up an undecided view that includes a node which cannot use it, for reason `why`."""
        proposal = assembly.proposal
        if proposal is not None and node in proposal.view.nodes:
            self._give_up(assembly, owner, f"node {node!r} {why}")

    def _withdraw(self, assembly: Assembly, owner: Owner, node: str, why: str) -> None:
        """Drops a node's claims, and its undecided view for reason `why`."""
        part = assembly.parts.get(node)
        if part is not None:
            assembly.drop(part)
        self._give_up_view_of(assembly, owner, node, why)

    def node_gone(self, node: str) -> None:
        """Drops the claims and views of a node that left, lost its lease, or restarted."""
        for owner, assembly in list(self._all.items()):
            assembly.refused.pop(node, None)
            self._withdraw(assembly, owner, node, "is gone")
            if assembly.proposal is not None:
                # Free its ranks, so that the job can move to another node if the processes ended.
                assembly.proposal.ended |= assembly.proposal.view.ranks_of(node)

    def tick(self) -> None:
        """Drops expired claims, and gives up views that were not decided in time."""
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
                    proposal.until_s = now + limits.NODE_INIT_S  # nodes may ask for the reason
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
    """Ends the waits of other nodes whose specs differ from the spec of `part`.

    Ends no waits if other nodes claim the part's ranks, because the group may form without it.
    """
    if assembly.unclaimed_elsewhere(part):
        for other in assembly.others(part):
            error = _mismatch(owner, part, other)
            if error is not None:
                assembly.refuse(other, error, now_s)


def _check_ranks(assembly: Assembly, owner: Owner, part: NodePart) -> None:
    """Raises GroupBusyError if a process of another node holds one of the ranks."""
    for rank in sorted(part.ranks):
        holder = assembly.proposal.holder(rank) if assembly.proposal is not None else None
        # Ignore holders on the node of `part`, which checks its processes itself.
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
    """Makes the error for two nodes with different specs; None if the specs are equal."""
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
