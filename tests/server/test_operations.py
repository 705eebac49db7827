"""Answers kept for retries: a limited number and size for each session."""

from __future__ import annotations

import asyncio

import pytest
from harness import FakeClock
from raw_client import WAIT_S

from ep_runtime.v1 import group_service_pb2, types_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.callers import operations


def answer(size: int) -> group_service_pb2.CreateGroupResponse:
    return group_service_pb2.CreateGroupResponse(group=types_pb2.Group(job="x" * size))


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.operations = operations.Operations(self.clock)
        self.runs: list[str] = []

    async def run(self, session_id: str, op_id: str, size: int = 10):
        async def work():
            self.runs.append(op_id)
            return answer(size)

        request = group_service_pb2.CreateGroupRequest(op_id=op_id)
        return await self.operations.run(session_id, op_id, request, work)

    def kept(self, session_id: str) -> int:
        found = self.operations._of_session.get(session_id, {})
        return sum(operation.kept_bytes for operation in found.values())


@pytest.fixture
def scene():
    return Scene()


async def test_a_retry_gets_the_answer_of_before(scene):
    first = await scene.run("s", "a")
    assert await scene.run("s", "a") is first
    await scene.run("other", "a")
    assert scene.runs == ["a", "a"]


@pytest.mark.parametrize(("size", "count"), [(60_000, 100), (10, 3000)])
async def test_answers_of_one_session_are_bounded_and_its_youngest_stay(scene, size, count):
    await scene.run("quiet", "kept", size)
    for number in range(count):
        await scene.run("s", str(number), size)
    runs = len(scene.runs)
    await scene.run("s", str(count - 1), size)
    await scene.run("quiet", "kept", size)
    assert len(scene.runs) == runs
    assert scene.kept("s") <= operations.MAX_KEPT_BYTES_OF_SESSION
    assert len(scene.operations._of_session["s"]) <= operations.MAX_KEPT


async def test_old_answers_and_ended_sessions_leave_nothing(scene):
    await scene.run("s", "a")
    await scene.run("t", "a")
    await scene.run("t", "big", operations.MAX_KEPT_BYTES + 1)
    scene.operations.forget_session("s")
    scene.clock.advance(limits.OPERATION_LIFE_S)
    scene.operations.expire()
    assert scene.operations._of_session == {}


async def test_a_fault_of_work_whose_caller_went_away_is_in_the_log(scene, caplog):
    begun, gate = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        await gate.wait()
        raise ZeroDivisionError("a bug")

    request = group_service_pb2.CreateGroupRequest(op_id="a")
    caller = asyncio.create_task(scene.operations.run("s", "a", request, work))
    await begun.wait()
    caller.cancel()
    await asyncio.wait({caller}, timeout=WAIT_S)
    gate.set()
    while scene.operations._of_session:
        await asyncio.sleep(0)
    assert "CreateGroupRequest failed, and its caller had gone" in caplog.text
    assert "ZeroDivisionError: a bug" in caplog.text
