"""--watch ends at Ctrl-C, wherever that meets it."""

from __future__ import annotations

import argparse
import os
import signal

import pytest

from ep_runtime_client.cli.daemon import watching

_ENDS_AT = 2
_MOST = 50


class Interrupts:
    """Ctrl-C while this is finalized: Python says that it ignored the exception, and goes on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_ends_a_watch_also_where_its_exception_is_lost() -> None:
    calls = 0

    def once() -> int:
        nonlocal calls
        calls += 1
        assert calls < _MOST
        if calls == _ENDS_AT:
            Interrupts()
        return 0

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        watching.repeat(argparse.Namespace(watch=0.01, output="json"), once)
    assert calls == _ENDS_AT
    assert signal.getsignal(signal.SIGINT) is before
