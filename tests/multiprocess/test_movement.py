"""Token movement over several processes: the cases of the ops' tests, in equal programs."""

from __future__ import annotations

import json

import pytest
from multiprocess.launch import Job

_SOME = ["dp x ep", "drops"]
# More processes change where rows go, not their values.
_CASES = """
from multiprocess import movement_job
say(done=movement_job.main(json.loads(os.environ["TEST_CASES"])))
"""


def _run(processes: int, devices: int, names: list[str], address: str) -> None:
    with Job(
        _CASES,
        processes=processes,
        devices=devices,
        EP_RUNTIME_ADDRESS=address,
        EP_RUNTIME_DEBUG="1",
        TEST_CASES=json.dumps(names),
    ) as job:
        assert job.heard(240) == [{"done": names}] * processes
        job.finish()


def test_movement_equals_the_reference(address: str) -> None:
    _run(2, 2, _SOME, address)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 1)], ids=["2x4", "4x1"])
@pytest.mark.parametrize("part", range(3))
def test_every_case_equals_the_reference(
    address: str, processes: int, devices: int, part: int
) -> None:
    import cases

    rest = [case.name for case in cases.CASES if case.name not in _SOME][part::3]
    # Groups over a part of the job's devices leave processes without a rank.
    names = [name for name in rest if name != "one device"]
    _run(processes, devices, names, address)
