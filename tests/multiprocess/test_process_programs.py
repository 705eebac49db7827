"""Programs over several processes: equal HLO, microbatches, gradients, warm starts, long runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import preloaded
from multiprocess.gradients_job import ALL_ROWS
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


CALLS = 100


@pytest.fixture(scope="module")
def full_sockets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return preloaded("full_sockets", tmp_path_factory.mktemp("preloaded"))


def _gradients(call: str, address: str, library: str) -> Any:
    script = f"""
from multiprocess import gradients_job
say(wrong=gradients_job.{call}, full=gradients_job.times_full())
"""
    with Job(script, processes=2, devices=4, EP_RUNTIME_ADDRESS=address, LD_PRELOAD=library) as job:
        said = job.heard(240)
        job.finish()
    assert all(each["full"] for each in said)
    return [each["wrong"] for each in said]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(name, marks=[] if name == "fsdp on K'" else pytest.mark.slow)
        for name in ALL_ROWS
    ],
)
def test_a_row_of_the_table_gives_the_same_right_bits(
    address: str, full_sockets: str, row: str
) -> None:
    found = _gradients(f"run_rows([{row!r}], {CALLS})", address, full_sockets)
    assert found == 2 * [{row: [0, 0]}]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memfd", "xla"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_blocks_in_a_scan_with_remat_give_the_same_right_bits(
    address: str, full_sockets: str, transport: str, dtype: str, tolerance: float
) -> None:
    call = f"run_model({CALLS}, transport={transport!r}, dtype={dtype!r}, tolerance={tolerance})"
    assert _gradients(call, address, full_sockets) == 2 * [[0, 0]]


_SCRIPT = """
from multiprocess import programs_job
say(**programs_job.warm(os.environ["TEST_CACHE"], runs=3))
hear()
"""


def _start(address: str, cache: Path) -> list[dict[str, Any]]:
    """Checks every value of the programs; returns what each process found in the cache."""
    with Job(
        _SCRIPT,
        processes=2,
        devices=2,
        EP_RUNTIME_ADDRESS=address,
        TEST_CACHE=str(cache),
    ) as job:
        found = job.heard()
        job.end()
    return found


def test_a_second_start_with_the_cache_ends_with_the_right_values(
    address: str, tmp_path: Path
) -> None:
    # Process 0 loads every program; JAX decides what the others do.
    (first, *_), (second, *_) = (_start(address, tmp_path) for _ in range(2))
    assert first["misses"] > 0
    assert (second["misses"], second["hits"]) == (0, first["hits"] + first["misses"])
