"""The life of a group as a table: (state, event) -> state. What is not in it is a bug."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Values are the names on the wire."""

    FORMING = "FORMING"
    READY = "READY"
    BROKEN = "BROKEN"
    RETAINED = "RETAINED"
    CLOSED = "CLOSED"


class Event(enum.Enum):
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


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.FORMING, Event.ALL_ATTACHED): State.READY,
    (State.FORMING, Event.CLAIMANT_LOST): State.FORMING,
    (State.FORMING, Event.MEMBER_LOST): State.BROKEN,
    (State.FORMING, Event.MEMBER_LEFT): State.BROKEN,
    (State.FORMING, Event.EMPTIED): State.RETAINED,
    (State.FORMING, Event.EMPTIED_FOR_GOOD): State.CLOSED,
    (State.FORMING, Event.FAILED): State.CLOSED,
    (State.FORMING, Event.TAKEN_AWAY): State.CLOSED,
    (State.READY, Event.MEMBER_LOST): State.BROKEN,
    (State.READY, Event.CONNECTION_LOST): State.BROKEN,
    # The others may still be inside the last call, which needs nothing more of the one who left.
    (State.READY, Event.MEMBER_LEFT): State.READY,
    (State.READY, Event.EMPTIED): State.RETAINED,
    (State.READY, Event.EMPTIED_FOR_GOOD): State.CLOSED,
    (State.READY, Event.CLAIMED_AGAIN): State.FORMING,
    (State.READY, Event.TAKEN_AWAY): State.CLOSED,
    (State.BROKEN, Event.MEMBER_LOST): State.BROKEN,
    (State.BROKEN, Event.MEMBER_LEFT): State.BROKEN,
    (State.BROKEN, Event.EMPTIED): State.RETAINED,
    (State.BROKEN, Event.EMPTIED_FOR_GOOD): State.CLOSED,
    (State.BROKEN, Event.CLAIMED_AGAIN): State.FORMING,
    (State.BROKEN, Event.TAKEN_AWAY): State.CLOSED,
    (State.RETAINED, Event.CLAIMED_AGAIN): State.FORMING,
    (State.RETAINED, Event.EXPIRED): State.CLOSED,
    (State.RETAINED, Event.TAKEN_AWAY): State.CLOSED,
}


def next_state(state: State, event: Event) -> State:
    """Raises RuntimeError for an event that cannot happen in that state: a bug of the daemon."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"event {event.name} in state {state.name}") from None
