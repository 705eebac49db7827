"""How long the ranks of a group waited for each other in some steps, as their boards tell it.

A wait is told from 4 us on, by the longest that a call waited for a word of one peer: what a slower
GPU costs the others, and what an exchange's way takes where that is longer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from ep_runtime_bench.base.moe_cases import RankWait
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.cli.ranks import tallies
from ep_runtime_client.groups.group import Group
from ep_runtime_client.sessions.session import Session

TIMEOUT_S = 10.0  # of an answer of the daemon


def waited(session: Session, group: Group, run: Callable[[], int]) -> list[RankWait]:
    """What each rank waited in each op, in a step; run() says how many steps it made.

    Empty where the group's calls tell no board. Cost: two looks at the board beside run().

    Raises:
        RuntimeUnavailableError: no daemon answers at the session's address.
    """
    with source.open_source(session.address, timeout_s=TIMEOUT_S) as daemon:
        before = tallies.look(daemon, group.name, None)
        steps = run()
        after = tallies.look(daemon, group.name, None)
    # Other jobs may have a group of that name.
    ours = [one for one in tallies.between(before, after) if one.group.job == session.job]
    return [wait for one in ours for wait in _by_op(one, steps)]


def _by_op(one: tallies.Interval, steps: int) -> list[RankWait]:
    by_op: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for (op, peer), seconds in one.waits_s.items():
        by_op[op][peer] = seconds
    found = []
    for op, (calls, _) in one.ops.items():
        peers = by_op[op]
        longest = max(peers, key=lambda peer: peers[peer], default=None)
        if calls > 0:
            step_s = sum(peers.values()) / steps
            found.append(RankWait(one.world_rank, op.lower(), calls / steps, step_s, longest))
    return found
