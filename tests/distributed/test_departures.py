"""What the death of a process ends in the others."""

from __future__ import annotations

from ep_runtime_client.daemons.departures import departures
from ep_runtime_client.distributed.peers import Peers

ALL = {0: 10, 1: 11, 2: 12}
TWO = {0: 10, 1: 11}


class Waiting:
    """An RPC in which the daemon waits for all processes of a group."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_death_ends_groups_that_form_unless_the_others_have_met_without_it() -> None:
    followed, before, after = Peers(), Waiting(), Waiting()
    departures.keep(ALL)
    with departures.ending(before):
        followed._end_waits(2)
    assert before.cancelled
    followed.passed({2})
    departures.keep(TWO)
    with departures.ending(after):
        followed._end_waits(2)  # told late
    assert not after.cancelled
