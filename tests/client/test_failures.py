"""Finds the runtime's errors inside XLA's, and ends a process that cannot continue."""

from __future__ import annotations

import json
import os

import pytest
from child_programs import run_python

import ep_runtime as ep
from ep_runtime import board, board_abi, specs
from ep_runtime.v1 import types_pb2
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.groups import formed, health

_TEXT = (
    "INTERNAL: custom call failed: EP_RUNTIME/CapacityOverflowError: layer moe/0 overflowed "
    '{"layer": "moe/0", "rank": 3, "demand": 130, "capacity": 128} [[fusion.3]]'
)


def test_error_of_reads_class_message_and_fields_out_of_xlas_text() -> None:
    error = ep.error_of(RuntimeError(_TEXT))
    assert isinstance(error, ep.CapacityOverflowError)
    assert str(error) == "layer moe/0 overflowed"
    assert error.fields == {"layer": "moe/0", "rank": 3, "demand": 130, "capacity": 128}


def test_error_of_returns_our_own_error_and_none_for_others() -> None:
    ours = ep.StaleHandleError("gone", layer="a")
    assert ep.error_of(ours) is ours
    assert ep.error_of(ValueError("something else")) is None


def test_error_of_follows_the_cause_but_not_an_error_that_was_dealt_with() -> None:
    outer = RuntimeError("wrapped")
    outer.__cause__ = RuntimeError(_TEXT)
    assert isinstance(ep.error_of(outer), ep.CapacityOverflowError)
    later = KeyError("later")
    later.__context__ = RuntimeError(_TEXT)
    assert ep.error_of(later) is None


def test_translate_errors_raises_the_class_from_the_original() -> None:
    original = RuntimeError(_TEXT)
    with pytest.raises(ep.CapacityOverflowError) as caught, ep.translate_errors():
        raise original
    assert caught.value.__cause__ is original


def test_translate_errors_leaves_everything_else_alone() -> None:
    with pytest.raises(KeyError), ep.translate_errors():
        raise KeyError("a")
    ours = ep.OpTimeoutError("late")
    with pytest.raises(ep.OpTimeoutError) as caught, ep.translate_errors():
        raise ours
    assert caught.value is ours
    with ep.translate_errors():
        pass


class Told:
    """A group that has ended by the second time it is read."""

    name = "moe"

    def __init__(self) -> None:
        self._looks = iter([False])

    def require_whole(self) -> None:
        if next(self._looks, True):
            raise ep.PeerLostError("group 'moe': processes of node b are gone: ranks [3]")


@pytest.fixture
def told():
    group = Told()
    live_groups.add(group)
    yield group
    live_groups.remove(group)


_GLOO = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:40879"


def test_a_failed_collective_is_a_lost_peer_once_the_daemon_tells_so(told) -> None:
    original = RuntimeError(_GLOO)
    told_so = pytest.raises(ep.PeerLostError, match="processes of node b are gone")
    with told_so as caught, ep.translate_errors():
        raise original
    assert caught.value.__cause__ is original


def test_a_failed_collective_of_programs_without_groups_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="Gloo"), ep.translate_errors():
        raise RuntimeError(_GLOO)


@pytest.mark.parametrize(
    ("layer", "text", "fields"),
    [(None, "gone", {"rank": 1}), ("a", "layer 'a': gone", {"rank": 1, "layer": "a"})],
)
def test_an_error_is_raised_again_as_a_copy_with_its_cause(layer, text, fields) -> None:
    error = ep.PeerLostError("gone", rank=1)
    with pytest.raises(ep.PeerLostError) as caught:
        error.raise_again(layer)
    assert caught.value.__cause__ is error
    assert (str(caught.value), caught.value.fields) == (text, fields)
    assert (str(error), error.fields) == ("gone", {"rank": 1})


@pytest.mark.parametrize(
    ("said", "rank", "told"),
    [
        ("process 9 of rank 1 closed it", {"rank": 1}, "g.*generation 1, was replaced by uid 0"),
        ("it was replaced", {}, "dispatch of layer a: it was replaced"),
    ],
    ids=["closed first", "replaced"],
)
def test_a_replaced_group_ends_by_its_order_and_not_by_who_closed_it(said, rank, told) -> None:
    spec = specs.GroupSettings(
        name="g", ep_axis="ep", num_experts=4, hidden_size=8, max_tokens_per_rank=4
    ).on((("ep", 2),))
    buf = bytearray(board.board_bytes(spec))
    board.format_board(buf, board.board_layout(spec), 1)
    board.poison(buf, 1, board_abi.PoisonReason.CLOSED, by=board.By(0, 9))
    fd = os.memfd_create("board")
    os.write(fd, buf)
    memory = formed.Memory([(types_pb2.WindowDescriptor(world_rank=-1), fd)])
    of_group = health.GroupHealth(formed.Formed(spec, 1, None, False, memory=memory), "job")
    said = f"EP_RUNTIME/StaleHandleError: dispatch of layer a: {said} {json.dumps(rank)}"
    live_groups.report("g", said)
    with pytest.raises(ep.StaleHandleError, match=told):
        of_group.require_whole(None)
    memory.close()


_SCRIPT = """
import atexit, sys, threading
from ep_runtime.errors import PeerLostError
from ep_runtime_client.sessions.watchdog import Watchdog

class Lost:
    name = "g"
    def require_whole(self):
        raise PeerLostError("prepare of layer a: process 7 of rank 3 is gone")

grace_s, patience_s, word = eval(sys.argv[1])
atexit.register(threading.Event().wait, 1.0)  # as JAX waits for the dead
watchdog = Watchdog(grace_s)
watchdog.over(Lost(), PeerLostError("process 7 of rank 3 is gone", rank=3), patience_s)
if word:
    getattr(watchdog, word)()
sys.stdout.write("kept")
threading.Event().wait(0.6)
sys.stdout.write(", ran on")
"""
_ABORT = """
import ctypes, threading
from ep_runtime.errors import PeerLostError
from ep_runtime_client.sessions import watchdog
from ep_runtime_client.base.layers import live_groups

class Lost:
    name = "g"
    def require_whole(self):
        raise PeerLostError("process 7 of rank 3 is gone")

library = ctypes.CDLL("libstdc++.so.6")
watchdog._name_aborts()
group = Lost()
live_groups.add(group)
thread = threading.Thread(target=library["_ZSt9terminatev"])
thread.start()
thread.join()
"""


def test_an_abort_of_cpp_after_a_loss_says_who_was_lost() -> None:
    done = run_python("-c", _ABORT, code=1)
    assert "PeerLostError: process 7 of rank 3 is gone" in done.stderr


@pytest.mark.parametrize(
    ("grace_s", "patience_s", "word", "out", "code"),
    [
        (0.2, 0.0, None, "kept", 1),
        (0.2, 1.0, None, "kept, ran on", 1),
        (0.2, None, None, "kept, ran on", 0),
        (0.2, 0.0, "stop", "kept, ran on", 0),
        (0.2, 0.0, "closed", "kept, ran on", 1),
        (None, 0.0, None, "kept, ran on", 0),
        (None, 0.0, "closed", "kept, ran on", 0),
    ],
)
def test_a_process_that_does_not_go_on_is_ended(
    grace_s: float | None, patience_s: float | None, word: str | None, out: str, code: int
) -> None:
    done = run_python("-c", _SCRIPT, repr((grace_s, patience_s, word)), code=code)
    assert done.stdout == out
    assert "PeerLostError: process 7 of rank 3 is gone" in done.stderr  # at once
    assert ("PeerLostError: prepare of layer a" in done.stderr) == (code == 1)
