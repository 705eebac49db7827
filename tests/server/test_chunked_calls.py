"""Layers whose calls ran in chunks, as the boards tell it."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from harness import eventually
from raw_client import close_fds, make_spec

from ep_runtime import board
from ep_runtime.board_abi import HandleRecordStruct
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.wire import LayerStackSpec
from ep_runtime_server.groups import chunked_calls


class Board:
    """A client's view of the handles of a new group."""

    def __init__(self, client, spec, layers, stacks) -> None:
        group = client.create(spec).group
        fetched = client.fetch(group)
        self._map = mmap.mmap(fetched[0][1], fetched[0][0].bytes)
        close_fds(fetched)
        client.attached(group)
        client.register(group, layers, stacks)
        self._first = board.board_layout(spec).handles_offset

    def add(self, handle: int, rounds: int) -> None:
        at = self._first + handle * ctypes.sizeof(HandleRecordStruct)
        HandleRecordStruct.from_buffer(self._map, at).rounds += rounds

    def add_to_all(self, handles: int) -> None:
        """A round of each, as one write: a look between two would tell of fewer."""
        records = b"".join(bytes(HandleRecordStruct(rounds=1)) for _ in range(handles))
        self._map[self._first : self._first + len(records)] = records


@pytest.fixture
def job(daemon):
    """The board of a group with three layers."""
    client = daemon.client()
    layers = [LayerSpec("moe", top_k=1, in_flight=2)]
    stacks = [LayerStackSpec(LayerSpec("s", top_k=1), 2)]
    yield Board(client, make_spec(workspace=1.25), layers, stacks)
    client.goodbye()


def told(daemon):
    events = daemon.ask("ListEvents").events
    return [event for event in events if event.kind == "layer.rounds"]


def test_rounds_of_a_handle_are_listed(daemon, job):
    job.add(1, 3)
    job.add(3, 5)
    shown = {(x.layer, x.handle): x.rounds for x in daemon.ask("ListHandles").handles}
    assert shown == {("moe", 0): 0, ("moe", 1): 3, ("s[0]", 0): 0, ("s[1]", 0): 5}


def test_a_layer_is_told_once_when_it_first_ran_in_parts(daemon, job):
    assert told(daemon) == []
    job.add(1, 3)
    eventually(lambda: told(daemon), within_s=3 * chunked_calls.CHECK_EVERY_S)
    (event,) = told(daemon)
    assert event.group == "moe"
    assert "'moe' ran in chunks" in event.message
    assert "more rows than workspace=1.25 holds; layers 'moe'" in event.message
    # More of it, and its other handle, say nothing new; another layer does.
    job.add(1, 1)
    job.add(0, 1)
    job.add(3, 1)
    eventually(lambda: len(told(daemon)) == 2, within_s=3 * chunked_calls.CHECK_EVERY_S)
    assert told(daemon)[1].message.endswith("layers 's[1]'")


def test_many_layers_are_one_event(daemon):
    client = daemon.client()
    shown = Board(client, make_spec(), [], [LayerStackSpec(LayerSpec("s", top_k=1), 100)])
    shown.add_to_all(100)
    eventually(lambda: told(daemon), within_s=3 * chunked_calls.CHECK_EVERY_S)
    (event,) = told(daemon)
    assert event.message.endswith("'s[6]', 's[7]' and 92 more")
    client.goodbye()
