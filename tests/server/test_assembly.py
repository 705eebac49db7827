"""The coordinator's decisions on groups: one view or none, also after a restart."""

from __future__ import annotations

import asyncio

import pytest
from harness import FakeClock
from raw_client import make_spec

from ep_runtime.errors import GroupBusyError, SpecMismatchError
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.cluster.assembly import Assemblies
from ep_runtime_server.cluster.views import NodeClaim, NodePart, NodeReport, Outcome
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.facts import ClusterFacts

OWNER = Owner(7, "job", "moe")
SPEC = make_spec(ranks=2, transport="xla")
OTHER, THIRD = (
    make_spec(ranks=2, transport="xla", hidden_size=SPEC.hidden_size * n) for n in (2, 3)
)
CLAIMS = {"b": (NodeClaim("s-b", 1, (0,)),), "c": (NodeClaim("s-c", 2, (1,)),)}


class Coordinator:
    """Decides on a journal; `restart` starts a new coordinator on the same one."""

    def __init__(self, path) -> None:
        self._path = path
        self.clock = FakeClock()
        self.start()

    def start(self) -> None:
        self.facts = ClusterFacts(Journal(self._path, Failpoints(), name="cluster", synced=True))
        self.decisions = Assemblies(self.facts, self.clock, EventLog(self.clock))

    def restart(self) -> None:
        self.facts.close()
        self.start()

    async def join(
        self, node: str, claims=None, *, spec=SPEC, generation=1, known=(), wait_s: float = 5.0
    ):
        found = CLAIMS.get(node, CLAIMS["b"]) if claims is None else claims
        part = NodePart(node, spec, found, generation)
        return await self.decisions.join(OWNER, part, list(known), wait_s)

    async def both(self):
        """Returns the view that b and c get."""
        (first, _), (second, _) = await asyncio.gather(self.join("b", known=[1]), self.join("c"))
        assert first is not None
        assert first == second
        return first

    async def unequal(self) -> None:
        """b claims its rank, and c is refused for its spec."""
        assert await self.join("b") == (None, [1])
        with pytest.raises(SpecMismatchError):
            await self.join("c", spec=OTHER)

    def report(self, node: str, epoch: int, error: str = "") -> None:
        self.decisions.report(node, OWNER, epoch, error)

    async def outcome(self, epoch: int, wait_s: float = 0.0) -> Outcome:
        return (await self.decisions.outcome(OWNER, epoch, wait_s))[0]


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path / "cluster")
    yield made
    made.facts.close()


async def test_a_view_holds_once_every_node_reported(coordinator):
    view = await coordinator.both()
    assert [(m.rank, m.node) for m in view.members] == [(0, "b"), (1, "c")]
    for node in ("b", "b", "x"):
        coordinator.report(node, view.epoch)
        assert await coordinator.outcome(view.epoch) is Outcome.UNSPECIFIED
    waiting = asyncio.ensure_future(coordinator.outcome(view.epoch, 5.0))
    coordinator.report("c", view.epoch)
    assert await waiting is Outcome.COMMITTED
    coordinator.report("b", view.epoch, "too late to say no")
    coordinator.decisions.node_gone("b")
    assert await coordinator.outcome(view.epoch) is Outcome.COMMITTED


async def test_what_was_decided_is_known_to_the_next_life_and_the_rest_is_given_up(coordinator):
    first = await coordinator.both()
    coordinator.report("b", first.epoch)
    coordinator.report("c", first.epoch)
    coordinator.restart()
    assert await coordinator.outcome(first.epoch) is Outcome.COMMITTED
    second = await coordinator.both()
    coordinator.report("b", second.epoch)
    coordinator.restart()
    coordinator.report("c", second.epoch)
    assert await coordinator.outcome(second.epoch) is Outcome.ABORTED
    third = await coordinator.both()
    assert first.epoch < second.epoch < third.epoch


@pytest.mark.parametrize("how", ["says no", "gone", "joins again", "says nothing"])
async def test_one_node_ends_an_attempt_for_all_and_the_next_has_another_epoch(coordinator, how):
    view = await coordinator.both()
    coordinator.report("c", view.epoch)
    if how == "says no":
        coordinator.report("b", view.epoch, "a process ended")
    elif how == "gone":
        coordinator.decisions.node_gone("b")
    elif how == "joins again":
        assert await coordinator.join("b", wait_s=0.0) == (None, [1])
    else:
        coordinator.clock.advance(limits.NODE_INIT_S)
        coordinator.decisions.tick()
    assert await coordinator.outcome(view.epoch) is Outcome.ABORTED
    coordinator.report("b", view.epoch)
    assert await coordinator.outcome(view.epoch) is Outcome.ABORTED
    again = await coordinator.both()
    assert again.epoch > view.epoch
    assert again.attempt == 2
    for node in ("b", "c"):
        coordinator.report(node, again.epoch)
    assert (await coordinator.both()).attempt == 1  # counts restart when it is READY


async def test_a_view_made_between_two_calls_of_a_node_is_given_to_the_second(coordinator):
    assert await coordinator.join("b") == (None, [1])
    view, _ = await coordinator.join("c")
    assert view is not None
    assert await coordinator.join("b", known=[1]) == (view, [])
    # Given only once: a node that asks again has not received it, or cannot use it.
    assert await coordinator.join("b", wait_s=0.0) == (None, [1])
    assert await coordinator.outcome(view.epoch) is Outcome.ABORTED


async def test_a_view_is_not_given_to_a_node_that_wants_another_spec_by_then(coordinator):
    assert await coordinator.join("b") == (None, [1])
    view, _ = await coordinator.join("c")
    assert view is not None
    # The same process claims the same rank of another group with that name.
    assert await coordinator.join("b", spec=OTHER, generation=2, wait_s=0.0) == (None, [1])
    assert await coordinator.outcome(view.epoch) is Outcome.ABORTED


@pytest.mark.parametrize("then", ["asks again", "has more claims", "begins anew", "comes late"])
async def test_a_node_refused_between_two_calls_hears_it_in_those_that_follow(coordinator, then):
    more = (*CLAIMS["b"], NodeClaim("s-b2", 1, (1,)))
    assert await coordinator.join("b") == (None, [1])
    with pytest.raises(SpecMismatchError, match="on node 'b'"):
        await coordinator.join("c", spec=OTHER)
    if then in ("asks again", "has more claims"):
        claims = None if then == "asks again" else more
        for _ in range(2):  # the first answer may have been lost
            with pytest.raises(SpecMismatchError, match="on node 'c'"):
                await coordinator.join("b", claims, known=[1])
        return
    if then == "comes late":
        coordinator.clock.advance(limits.NODE_REFUSAL_LIFE_S)
        coordinator.decisions.tick()
    generation = 1 if then == "comes late" else 2
    assert await coordinator.join("b", generation=generation, wait_s=0.0) == (None, [1])


async def test_a_node_whose_claims_were_on_the_way_hears_of_another_spec_too(coordinator):
    claim = (NodeClaim("s-d", 3, (0,)),)
    await coordinator.unequal()
    with pytest.raises(SpecMismatchError, match="on node 'c'"):
        await coordinator.join("d", claim, wait_s=0.0)
    coordinator.clock.advance(limits.NODE_DIFFERS_S)
    assert await coordinator.join("e", claim, wait_s=0.0) == (None, [1])


async def test_processes_that_come_to_a_node_that_heard_of_another_spec_hear_of_it_too(coordinator):
    await coordinator.unequal()
    new = (NodeClaim("s-new", 3, (0,)),)
    with pytest.raises(SpecMismatchError, match="on node 'c'"):
        await coordinator.join("b", new, generation=2, wait_s=0.0)
    # Nodes that learned of it retry; others may have repaired it.
    assert await coordinator.join("b", new, generation=3, wait_s=0.0) == (None, [1])
    more = {"spec": THIRD, "generation": 4, "wait_s": 0.0}
    assert await coordinator.join("b", (NodeClaim("s-4", 4, (0,)),), **more) == (None, [1])


async def test_a_spec_that_a_node_refused_is_told_to_others_and_claims_nothing(coordinator):
    claim = (NodeClaim("s-d", 3, (0,)),)
    waiting = asyncio.ensure_future(coordinator.join("b", known=[1]))
    await asyncio.sleep(0)
    coordinator.decisions.differ(OWNER, NodePart("c", SPEC, CLAIMS["c"]))
    await asyncio.sleep(0)
    assert not waiting.done()  # nor has any node a view
    coordinator.decisions.differ(OWNER, NodePart("c", OTHER, CLAIMS["c"]))
    for call in (waiting, coordinator.join("d", claim, wait_s=0.0)):
        with pytest.raises(SpecMismatchError, match="on node 'c'"):
            await call


@pytest.mark.parametrize("where", ["joins", "was refused there"])
async def test_who_claims_a_rank_of_another_with_another_spec_ends_nobody_s_wait(
    coordinator, where
):
    stray = (NodeClaim("s-d", 3, (0,)),)
    assert await coordinator.join("b") == (None, [1])
    if where == "joins":
        with pytest.raises(SpecMismatchError, match="on node 'b'"):
            await coordinator.join("d", stray, spec=OTHER)
    else:
        coordinator.decisions.differ(OWNER, NodePart("d", OTHER, stray))
    assert await coordinator.join("b", wait_s=0.0) == (None, [1])
    view, _ = await coordinator.join("c")
    assert view is not None


async def test_nodes_that_agree_by_now_hear_nothing_of_the_spec_before(coordinator):
    await coordinator.unequal()
    anew = asyncio.ensure_future(coordinator.join("b", generation=2, known=[1]))
    await asyncio.sleep(0)
    view, _ = await coordinator.join("c", generation=2)
    assert view is not None
    assert await anew == (view, [])


@pytest.mark.parametrize("viewed", [False, True])
async def test_what_a_node_claims_no_more_is_free_for_others_at_once(coordinator, viewed):
    assert await coordinator.join("b") == (None, [1])
    if viewed:  # and no process on b claims it
        view, _ = await coordinator.join("c")
        assert view is not None
    with pytest.raises(GroupBusyError):
        await coordinator.join("d", CLAIMS["b"], wait_s=0.0)
    coordinator.decisions.ended(OWNER, 0, NodeReport("b", (), ()))
    assert await coordinator.join("d", CLAIMS["b"], wait_s=0.0) == (None, [1])
    if viewed:
        assert await coordinator.outcome(view.epoch) is Outcome.ABORTED


async def test_every_node_that_waits_hears_of_another_spec(coordinator):
    spec = make_spec(ranks=3, transport="xla")
    other = make_spec(ranks=3, transport="xla", hidden_size=spec.hidden_size * 2)
    waiting = [
        asyncio.ensure_future(coordinator.join("b", spec=spec, known=[2])),
        asyncio.ensure_future(coordinator.join("c", spec=spec, known=[2])),
    ]
    await asyncio.sleep(0)  # both nodes ask
    with pytest.raises(SpecMismatchError):
        await coordinator.join("d", (NodeClaim("s-d", 3, (2,)),), spec=other)
    for call in waiting:
        with pytest.raises(SpecMismatchError, match="on node 'd'"):
            await asyncio.wait_for(call, 2.0)


async def test_claims_end_with_their_call_or_soon_after(coordinator):
    waiting = asyncio.ensure_future(coordinator.join("b", known=[1]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await coordinator.join("c", wait_s=0.0) == (None, [0])
    coordinator.clock.advance(limits.NODE_CLAIM_LIFE_S)
    coordinator.decisions.tick()
    assert await coordinator.join("b", wait_s=0.0) == (None, [1])


async def test_nodes_that_wait_are_not_called_for_every_claim_of_another(coordinator):
    """Calls and answers match one to one: 64 calls for each claim would be 4,096."""
    count, calls = 64, 0
    spec = make_spec(ranks=count, transport="xla")

    async def forms(rank: int):
        nonlocal calls
        known: list[int] = []
        while True:
            calls += 1
            claims = (NodeClaim(f"s-{rank}", rank + 2, (rank,)),)
            view, known = await coordinator.join(f"n{rank}", claims, spec=spec, known=known)
            if view is not None:
                return view

    forming = []
    for rank in range(count):
        forming.append(asyncio.ensure_future(forms(rank)))
        for _ in range(5):  # turns of the loop, after which every notified node has asked again
            await asyncio.sleep(0)
    assert len({view.epoch for view in await asyncio.gather(*forming)}) == 1
    assert calls <= 6 * count


async def test_a_waiting_node_hears_at_once_which_ranks_are_missing_still(coordinator):
    spec = make_spec(ranks=3, transport="xla")
    waiting = asyncio.ensure_future(coordinator.join("b", spec=spec, known=[1, 2]))
    await asyncio.sleep(0)
    answer = await coordinator.join("c", spec=spec)
    assert answer == await waiting == (None, [2])
