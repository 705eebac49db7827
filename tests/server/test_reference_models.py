"""The daemon's state machines beside a reference (`walks`): 10,000 random steps, or TEST_STEPS.

TEST_STEPS=1000000 python -m pytest tests/server/test_reference_models.py -n 0
"""

from __future__ import annotations

import asyncio
import os

import pytest
from walks.groups import GroupsWalk
from walks.nodes import NodesWalk
from walks.sessions import SessionsWalk
from walks.walk import Walk
from walks.windows import WindowsWalk

from ep_runtime_server.groups.fsm import TRANSITIONS, State, Trigger

STEPS = int(os.environ.get("TEST_STEPS", "10000"))
WALKS = 10
# What each walk must have come to, of so many steps.
REACHED = {
    SessionsWalk: {"CONNECTED", "ACTIVE", "SUSPECT", "FENCED", "CLOSED", "DEAD", "ok"},
    NodesWalk: {"joined", "taken", "JOINED", "UNREACHABLE", "report ok", "report StaleHandleError"},
    WindowsWalk: {"leased", "retained", "quarantined", "full", "freed by its last holder"},
    GroupsWalk: {"none", "FORMING", "READY", "BROKEN", "RETAINED", "busy", "expired", "fenced"},
}


@pytest.mark.timeout(60 + STEPS // 20)
@pytest.mark.parametrize("walk", REACHED, ids=lambda walk: walk.__name__)
def test_random_steps_agree_with_the_reference(walk: type[Walk]) -> None:
    steps = max(1, STEPS // len(REACHED) // WALKS)
    seen: set[str] = set()

    async def walks(seed: int) -> None:
        own = walk(seed)
        for _ in range(steps):
            await own.step()
        await own.end()
        seen.update(own.seen)

    for seed in range(WALKS):
        print(f"seed {seed}")  # noqa: T201 - shown when it fails
        asyncio.run(walks(seed))
    assert REACHED[walk] <= seen


def test_a_daemon_that_does_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSITIONS, (State.READY, Trigger.MEMBER_LOST), State.READY)

    async def walks() -> None:
        for seed in range(WALKS):
            own = GroupsWalk(seed)
            try:
                for _ in range(200):
                    await own.step()
            finally:
                await own.end()

    with pytest.raises(AssertionError, match="the daemon says .*READY.* the reference .*BROKEN"):
        asyncio.run(walks())
