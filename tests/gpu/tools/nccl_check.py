"""Communicators on the GPUs of this machine, without JAX and without a daemon.

    python tests/gpu/tools/nccl_check.py

One process drives all GPUs. Prints a line per case with its time, then `N of M wrong`; exits with 1
where one is. NCCL_DEBUG=INFO shows what NCCL does meanwhile.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ep_runtime import native, nccl
from ep_runtime.errors import EpRuntimeError, OpTimeoutError, PeerLostError
from ep_runtime_client.nccl import beside

BUDGET_S = 60.0
ROUNDS = 10
CLOSED_WITHIN_S = 15.0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * nccl.UNIQUE_ID_BYTES)]


class Check:
    """The cases; each raises an error if something is wrong."""

    def __init__(self) -> None:
        self.gpus = len(native.library("cuda").devices())
        self.library = nccl.library()

    def version(self) -> str:
        return nccl.version_text(self.library.version())

    def ids(self, count: int) -> list[bytes]:
        """Unique ids; their bootstrap root is a thread of this process."""
        loaded, found = ctypes.CDLL(nccl.LIBRARY), []
        for _ in range(count):
            unique_id = UniqueId()
            assert loaded.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
            found.append(bytes(unique_id.bytes))
        return found

    def group(self, *, ep_size: int = 0, missing: int = 0, **purpose: Any) -> nccl.NcclGroup:
        """Communicators of all GPUs except the last `missing`, whose ranks never come."""
        size = ep_size or self.gpus
        ours = tuple(range(self.gpus - missing))
        ranks = nccl.Ranks("check", 1, size, ours, ours, BUDGET_S, **purpose)
        return self.library.make_group(ranks, self.ids(self.gpus // size))

    def all_join(self) -> str:
        made = self.group()
        started = time.monotonic()
        made.init(BUDGET_S)
        taken = time.monotonic() - started
        assert made.check() is None
        self.close(made)
        return f"{self.gpus} ranks in {taken:.2f} s, with a first exchange"

    def beside_windows(self) -> str:
        """Communicators as groups with windows get them: NCCL connects at the first call."""
        made = self.group(carries_rows=False, max_channels=beside.CHANNELS)
        times = []
        for step in (made.init, made.try_sum, made.try_sum):
            started = time.monotonic()
            step(BUDGET_S)
            times.append(f"{time.monotonic() - started:.2f} s")
        self.close(made)
        return f"{beside.CHANNELS} channel: join, two exact all-reduces in {', '.join(times)}"

    def close(self, made: nccl.NcclGroup) -> None:
        started = time.monotonic()
        made.close()
        taken = time.monotonic() - started
        assert taken < CLOSED_WITHIN_S, f"closing took {taken:.1f} s"

    def two_domains(self) -> str:
        if self.gpus < 2 or self.gpus % 2:
            return "skipped: needs an even number of GPUs"
        made = self.group(ep_size=self.gpus // 2)
        made.init(BUDGET_S)
        self.close(made)
        return f"2 domains of {self.gpus // 2}"

    def absent_rank(self) -> str:
        if self.gpus < 2:
            return "skipped: needs 2 GPUs"
        made = self.group(missing=1)
        started = time.monotonic()
        try:
            made.init(3.0)
        except OpTimeoutError:
            taken = time.monotonic() - started
        else:
            raise AssertionError("a group without its last rank formed")
        assert taken < 3.0 + CLOSED_WITHIN_S, f"ended after {taken:.1f} s"
        self.close(made)
        return f"ended after {taken:.1f} s of 3"

    def abort_while_joining(self) -> str:
        if self.gpus < 2:
            return "skipped: needs 2 GPUs"
        made = self.group(missing=1)
        raised: list[EpRuntimeError] = []

        def init() -> None:
            try:
                made.init(BUDGET_S)
            except EpRuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=init)
        thread.start()
        thread.join(1.0)
        started = time.monotonic()
        made.abort(PeerLostError("the check says so", rank=1))
        thread.join(CLOSED_WITHIN_S)
        assert not thread.is_alive(), "init did not end"
        assert isinstance(raised[0], PeerLostError), raised
        self.close(made)
        return f"ended {time.monotonic() - started:.2f} s after the abort"

    def again_and_again(self) -> str:
        started = time.monotonic()
        for turn in range(ROUNDS):
            made = self.group()
            made.init(BUDGET_S)
            made.abort(PeerLostError("the check says so", rank=turn % self.gpus))
            assert made.check() is not None
            self.close(made)
        return f"{ROUNDS} times, {(time.monotonic() - started) / ROUNDS:.2f} s each"


def main() -> int:
    check, wrong = Check(), 0
    cases: list[tuple[str, Callable[[], str]]] = [
        ("version", check.version),
        ("all ranks join", check.all_join),
        ("two domains", check.two_domains),
        ("a rank never comes", check.absent_rank),
        ("abort while joining", check.abort_while_joining),
        ("abort and form again", check.again_and_again),
        ("beside windows", check.beside_windows),
        ("all ranks join", check.all_join),
    ]
    for name, case in cases:
        started = time.monotonic()
        try:
            said, mark = case(), "ok"
        except (AssertionError, EpRuntimeError) as error:
            said, mark, wrong = f"{type(error).__name__}: {error}", "WRONG", wrong + 1
        taken = time.monotonic() - started
        print(f"{mark:6}{name:24}{taken:7.2f} s  {said}", flush=True)  # noqa: T201
    print(f"{wrong} of {len(cases)} wrong")  # noqa: T201
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
