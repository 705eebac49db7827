"""A process that lost a peer: ended after its time, unless it goes on."""

from __future__ import annotations

import pytest
from child_programs import run_python

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
