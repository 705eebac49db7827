"""What `bench connect` says of communicators beside windows, without GPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ep_runtime.errors import OpTimeoutError
from ep_runtime_bench.control import beside_cost
from ep_runtime_client.nccl import beside

_LOG = """
host:1:2 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, \
32 p2p channels, 8 p2p channels per peer
host:1:3 [1] NCCL INFO 1 coll channels, 0 collnet channels, 0 nvls channels, \
2 p2p channels, 1 p2p channels per peer
"""


def test_channels_are_those_of_the_last_communicator(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    assert beside_cost.channels(log) == {}
    log.write_text(_LOG)
    assert [*beside_cost.channels(log).values()] == [1, 2, 1]


def test_memory_is_that_of_the_gpu_with_most_more_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside_cost.grown_mib([10, 20], [12, 90]) == 70
    assert beside_cost.grown_mib([], []) is None

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert beside_cost.used_mib() == []


class Made:
    def try_sum(self, budget_s: float) -> None:
        assert budget_s > 0


class Beside:
    ready_after_s = 2.5

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def await_ready(self, timeout_s: float) -> Made:
        if self._error is not None:
            raise self._error
        return Made()


def costs(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> dict[str, Any]:
    used = iter([[100], [120], [160]])
    monkeypatch.setattr(beside_cost, "used_mib", lambda: next(used))
    library: Any = None
    made: Any = Beside(error)

    class Group:
        native_group = beside.GroupBesideNccl(library, 1, made)

    return beside_cost.costs(Group(), [40])


def test_costs_are_told_beside_those_of_a_process_without(monkeypatch: pytest.MonkeyPatch) -> None:
    found = costs(monkeypatch, None)
    assert found["ms from create_group to READY"] == 2500
    assert [value for what, value in found.items() if what.startswith("MiB")] == [60, 80, 120]
    rows = beside_cost.rows(found, {"MiB of a GPU after the first call": 58})
    assert rows[0] == {"what": "MiB of a GPU after the first call", "beside": 60, "without": 58}
    assert rows[1]["without"] is None


def test_a_process_that_got_none_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = costs(monkeypatch, OpTimeoutError("they did not come"))
    assert found["why there are none"] == "they did not come"
