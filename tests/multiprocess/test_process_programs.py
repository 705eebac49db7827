"""Programs over several processes: equal HLO, many independent calls, microbatches, long runs."""

from __future__ import annotations

from typing import Any

import pytest
from multiprocess.launch import Job

_LAYOUTS = pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 1)], ids=["2x4", "4x1"])


def _run(call: str, processes: int, devices: int, address: str, within_s: float = 200) -> Any:
    script = f"from multiprocess import programs_job\nsay(**programs_job.{call})\n"
    with Job(
        script,
        processes=processes,
        devices=devices,
        life_s=within_s + 80,
        EP_RUNTIME_ADDRESS=address,
    ) as job:
        said = job.heard(within_s)
        job.finish()
    assert all(row == said[0] for row in said)
    return said[0]


def test_thirty_twin_layers_share_two_lanes_and_every_process_lowers_the_same(
    address: str,
) -> None:
    assert len(_run("twins(30, 50)", 2, 4, address)["hlo"]) == 64


def test_four_microbatches_give_their_own_values(address: str) -> None:
    assert _run("microbatches(20, 2)", 2, 4, address) == {"steps": 20}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@_LAYOUTS
def test_ten_thousand_steps_of_two_groups_with_random_pauses(
    address: str, processes: int, devices: int
) -> None:
    call = "soak(10_000, index)"
    assert _run(call, processes, devices, address, within_s=1000)["steps"] == 10_000
