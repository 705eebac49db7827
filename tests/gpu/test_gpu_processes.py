"""Token movement and blocks by several processes, each with GPUs of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
from daemon_fixtures import wait_gone
from gpu.jobs import gpu_blocks, layouts

from ep_runtime_client.cli.daemon import source

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


@contextlib.contextmanager
def _done(
    layout: str, names: list[str], gpus: int, script: str = _SCRIPT, **environment: str
) -> Iterator[None]:
    """A job that has run the cases and has not ended."""
    with layouts.job(
        script,
        layout,
        gpus,
        EP_RUNTIME_DEBUG="1",
        TEST_CASES=json.dumps(names),
        **environment,
    ) as job:
        assert job.heard(240) == [{"done": names}] * job.processes
        yield
        job.end()


def _run(layout: str, names: list[str], gpus: int, address: str, script: str = _SCRIPT) -> None:
    with _done(layout, names, gpus, script, EP_RUNTIME_ADDRESS=address):
        pass


@pytest.mark.parametrize("part", range(len(layouts.LAYOUTS)), ids=[*layouts.LAYOUTS])
def test_movement_by_several_processes_equals_the_reference(
    job_gpus: int, address: str, part: int
) -> None:
    """Each layout runs some of the cases; the test below runs all, for minutes."""
    names = [*_IN_ALL, *[name for name in _NAMES if name not in _IN_ALL][part::8]]
    _run([*layouts.LAYOUTS][part], names, job_gpus, address)


def test_processes_that_see_one_gpu_each_share_the_daemon_that_the_first_starts(
    job_gpus: int, directory: Path
) -> None:
    environment = {"EP_RUNTIME_ADDRESS": "node", "RUNTIME_DIRECTORY": str(directory)}
    with (
        _done("one GPU each, visible alone", _IN_ALL, job_gpus, **environment),
        source.open_source(f"unix://{directory}/node", timeout_s=60) as daemon,
    ):
        pid = daemon.status()["pid"]
    wait_gone(pid)


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
