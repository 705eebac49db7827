"""Counts layers whose calls ran in chunks, from the boards."""

from __future__ import annotations

import pytest
from harness import eventually
from raw_client import make_spec
from written_group import Group

from ep_runtime import board
from ep_runtime.board_abi import HandleRecordStruct
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.wire import LayerStackSpec
from ep_runtime_server.groups import chunked_calls


@pytest.fixture
def job(daemon):
    """A group with three layers."""
    client = daemon.client()
    layers = [LayerSpec("moe", top_k=1, in_flight=2)]
    stacks = [LayerStackSpec(LayerSpec("s", top_k=1), 2)]
    yield Group(client, make_spec(workspace=1.25), layers=layers, stacks=stacks)
    client.goodbye()


def told(daemon):
    events = daemon.ask("ListEvents").events
    return [event for event in events if event.kind == "layer.rounds"]


def test_rounds_of_a_handle_are_listed(daemon, job):
    job.handle(1, rounds=3)
    job.handle(3, rounds=5)
    shown = {(x.layer, x.handle): x.rounds for x in daemon.ask("ListHandles").handles}
    assert shown == {("moe", 0): 0, ("moe", 1): 3, ("s[0]", 0): 0, ("s[1]", 0): 5}


def test_a_layer_is_told_once_when_it_first_ran_in_parts(daemon, job):
    assert told(daemon) == []
    job.handle(1, rounds=3)
    eventually(lambda: told(daemon), within_s=3 * chunked_calls.CHECK_EVERY_S)
    (event,) = told(daemon)
    assert event.group == "moe"
    assert "'moe' ran in chunks" in event.message
    assert "more rows than workspace=1.25 holds; layers 'moe'" in event.message
    # More chunks, or its other handle, report nothing new; another layer does.
    job.handle(1, rounds=4)
    job.handle(0, rounds=1)
    job.handle(3, rounds=1)
    eventually(lambda: len(told(daemon)) == 2, within_s=3 * chunked_calls.CHECK_EVERY_S)
    assert told(daemon)[1].message.endswith("layers 's[1]'")


def test_many_layers_are_one_event(daemon):
    client = daemon.client()
    spec = make_spec()
    group = Group(client, spec, stacks=[LayerStackSpec(LayerSpec("s", top_k=1), 100)])
    # As one write, because a read between two writes would report fewer.
    records = b"".join(bytes(HandleRecordStruct(rounds=1)) for _ in range(100))
    first = board.board_layout(spec).handles_offset
    group.map[first : first + len(records)] = records
    eventually(lambda: told(daemon), within_s=3 * chunked_calls.CHECK_EVERY_S)
    (event,) = told(daemon)
    assert event.message.endswith("'s[6]', 's[7]' and 92 more")
    client.goodbye()
