"""Token movement and blocks by several processes, each with GPUs of its own."""

from __future__ import annotations

import json

import cases
import pytest
from gpu.jobs import gpu_blocks, layouts

_NAMES = [case.name for case in cases.CASES if case.name != "one device"]
_IN_ALL = ["plain", "dp x ep"]

_SCRIPT = """
from gpu.jobs import gpu_cases
say(done=gpu_cases.run_cases(json.loads(os.environ["TEST_CASES"])))
hear()
"""


_BLOCKS = """
from gpu.jobs import gpu_blocks
say(done=gpu_blocks.run_blocks(json.loads(os.environ["TEST_CASES"])))
hear()
"""


def _run(layout: str, names: list[str], gpus: int, address: str, script: str = _SCRIPT) -> None:
    with layouts.job(
        script,
        layout,
        gpus,
        EP_RUNTIME_ADDRESS=address,
        EP_RUNTIME_DEBUG="1",
        TEST_CASES=json.dumps(names),
    ) as job:
        assert job.heard(240) == [{"done": names}] * job.processes
        job.tell()
        job.finish()


@pytest.mark.parametrize("part", range(len(layouts.LAYOUTS)), ids=[*layouts.LAYOUTS])
def test_movement_by_several_processes_equals_the_reference(
    job_gpus: int, address: str, part: int
) -> None:
    """Each layout takes some of the cases; the test below takes all, for minutes."""
    names = [*_IN_ALL, *[name for name in _NAMES if name not in _IN_ALL][part::8]]
    _run([*layouts.LAYOUTS][part], names, job_gpus, address)


@pytest.mark.skipif(layouts.TRANSPORT == "xla", reason="has no block calls")
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_blocks_by_several_processes_are_near_float64(
    job_gpus: int, address: str, layout: str
) -> None:
    _run(layout, [*gpu_blocks.BLOCKS], job_gpus, address, _BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_every_case_in_every_layout_equals_the_reference(
    job_gpus: int, address: str, layout: str
) -> None:
    _run(layout, _NAMES, job_gpus, address)
