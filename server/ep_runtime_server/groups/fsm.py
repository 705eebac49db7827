"""The state machine of a group: a table (state, event) -> state of all allowed changes."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """States of a group; the values are the protocol's names."""

    FORMING = "FORMING"
    READY = "READY"
    BROKEN = "BROKEN"
    RETAINED = "RETAINED"
    CLOSED = "CLOSED"


class Trigger(enum.Enum):
    ALL_ATTACHED = "every member mapped its windows"
    CLAIMANT_LOST = "a process left before every rank was claimed; others still claim"
    MEMBER_LOST = "a process died; others live"
    CONNECTION_LOST = "its processes live and do not reach each other any more"
    MEMBER_LEFT = "a process closed the group; others use it"
    EMPTIED = "no process is left, memory stays for a while"
    EMPTIED_FOR_GOOD = "no process is left, memory goes at once"
    CLAIMED_AGAIN = "a process of the same job claims ranks under a new generation"
    EXPIRED = "the retained time is over"
    FAILED = "the memory could not be had"
    TAKEN_AWAY = "reclaimed by an operator, replaced by another spec, or its session was fenced"


TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.FORMING, Trigger.ALL_ATTACHED): State.READY,
    (State.FORMING, Trigger.CLAIMANT_LOST): State.FORMING,
    (State.FORMING, Trigger.MEMBER_LOST): State.BROKEN,
    (State.FORMING, Trigger.MEMBER_LEFT): State.BROKEN,
    (State.FORMING, Trigger.EMPTIED): State.RETAINED,
    (State.FORMING, Trigger.EMPTIED_FOR_GOOD): State.CLOSED,
    (State.FORMING, Trigger.FAILED): State.CLOSED,
    (State.FORMING, Trigger.TAKEN_AWAY): State.CLOSED,
    (State.READY, Trigger.MEMBER_LOST): State.BROKEN,
    (State.READY, Trigger.CONNECTION_LOST): State.BROKEN,
    # Other ranks may still finish their last call, which does not need the rank that left.
    (State.READY, Trigger.MEMBER_LEFT): State.READY,
    (State.READY, Trigger.EMPTIED): State.RETAINED,
    (State.READY, Trigger.EMPTIED_FOR_GOOD): State.CLOSED,
    (State.READY, Trigger.CLAIMED_AGAIN): State.FORMING,
    (State.READY, Trigger.TAKEN_AWAY): State.CLOSED,
    (State.BROKEN, Trigger.MEMBER_LOST): State.BROKEN,
    (State.BROKEN, Trigger.MEMBER_LEFT): State.BROKEN,
    (State.BROKEN, Trigger.EMPTIED): State.RETAINED,
    (State.BROKEN, Trigger.EMPTIED_FOR_GOOD): State.CLOSED,
    (State.BROKEN, Trigger.CLAIMED_AGAIN): State.FORMING,
    (State.BROKEN, Trigger.TAKEN_AWAY): State.CLOSED,
    (State.RETAINED, Trigger.CLAIMED_AGAIN): State.FORMING,
    (State.RETAINED, Trigger.EXPIRED): State.CLOSED,
    (State.RETAINED, Trigger.TAKEN_AWAY): State.CLOSED,
}


def next_state(state: State, event: Trigger) -> State:
    """Returns the state after an event. Raises RuntimeError if the table lacks it: a bug."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"event {event.name} in state {state.name}") from None
