"""Gradients of weights over two processes with one GPU each: right, and the same bits by every
call.

Every row of the table of sharding rules, of two devices: fsdp, or tp, is the axis between them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu.jobs import layouts
from multiprocess.gradients_job import ALL_ROWS

CALLS = 3 if layouts.TRIAL else 100

_SCRIPT = f"""
from gpu.jobs import layouts
from multiprocess import gradients_job
say(wrong=gradients_job.run_rows(
    json.loads(os.environ["TEST_CASES"]), {CALLS}, width=512, transport=layouts.TRANSPORT,
    dtype="bfloat16", tolerance=0.02,
))
hear()
"""


def test_every_row_of_the_table_gives_the_same_right_bits(gpus: list[Any], address: str) -> None:
    if len(gpus) < 2:
        pytest.skip(f"needs 2 GPUs or more, JAX sees {len(gpus)}")
    names = [*ALL_ROWS]
    with layouts.job(
        _SCRIPT,
        "one GPU each, visible alone",
        2,
        EP_RUNTIME_ADDRESS=address,
        TEST_CASES=json.dumps(names),
    ) as job:
        assert job.heard(240) == 2 * [{"wrong": dict.fromkeys(names, [0, 0])}]
        job.end()
