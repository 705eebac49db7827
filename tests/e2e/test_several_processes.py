"""Jobs of several processes under jax.distributed: what this version says and what it does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from daemon_fixtures import Program

Start = Callable[..., Program]

_PROGRAM = """
coordinator, index = os.environ["TEST_COORDINATOR"], int(os.environ["TEST_INDEX"])
jax.distributed.initialize(coordinator, num_processes=2, process_id=index)
try:
    ep.connect("embedded")
except ep.InvalidArgumentError as error:
    say(embedded=str(error))
session = ep.connect()
mesh = mesh_of(8)
say(job=session.job, devices=len(jax.devices()))
try:
    session.create_group("g", mesh, **ARGUMENTS)
except NotImplementedError as error:
    say(memfd=str(error))
group = session.create_group("g", mesh, **ARGUMENTS, transport="xla")
say(generation=group.generation, slabs=group.spec.num_slabs)
hear()
group.close()
session.close()
"""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_processes_share_a_group_of_transport_xla_and_learn_what_is_missing(
    run_program: Start, address: str, directory: Path
) -> None:
    coordinator = f"127.0.0.1:{_free_port()}"
    programs = [
        run_program(
            _PROGRAM,
            EP_RUNTIME_ADDRESS=address,
            TEST_COORDINATOR=coordinator,
            TEST_INDEX=str(index),
        )
        for index in range(2)
    ]
    for program in programs:
        assert "this job has 2" in program.heard()["embedded"]
    assert [program.heard() for program in programs] == [{"job": coordinator, "devices": 8}] * 2
    for program in programs:
        text = program.heard()["memfd"]
        assert "spans processes [0, 1]" in text
        assert 'transport="xla" works across processes' in text
    formed = [program.heard() for program in programs]
    assert formed[0] == formed[1]
    assert formed[0]["slabs"] == 8
    for program in programs:
        program.tell()
    assert [program.finish() for program in programs] == [0, 0]
