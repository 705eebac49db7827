"""Gradients of weights that lie over processes: the same bits by every call, and right ones.

Sockets between the processes are full now and then, as they are where a receiver is late: that is
when gloo's reduce-scatter sends wrong values.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import preloaded
from multiprocess.gradients_job import ALL_ROWS
from multiprocess.launch import Job

CALLS = 100


@pytest.fixture(scope="module")
def full_sockets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return preloaded("full_sockets", tmp_path_factory.mktemp("preloaded"))


def _run(call: str, address: str, library: str) -> Any:
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
    found = _run(f"run_rows([{row!r}], {CALLS})", address, full_sockets)
    assert found == 2 * [{row: [0, 0]}]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memfd", "xla"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_blocks_in_a_scan_with_remat_give_the_same_right_bits(
    address: str, full_sockets: str, transport: str, dtype: str, tolerance: float
) -> None:
    call = f"run_model({CALLS}, transport={transport!r}, dtype={dtype!r}, tolerance={tolerance})"
    assert _run(call, address, full_sockets) == 2 * [[0, 0]]
