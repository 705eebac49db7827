"""Calls native code from host programs: sizes, meetings, index arithmetic, old drivers."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import get_args

import pytest
from block_sizes import random_setting, random_sizes
from child_programs import run_to_end
from host_programs import CSRC, HERE, compiled

from ep_runtime import workspace
from ep_runtime.board_abi import MAX_WORLD_RANKS


def line(sizes: workspace.BlockSizes, found: workspace.Workspace) -> str:
    numbers = (
        sizes.tokens,
        sizes.top_k,
        sizes.capacity,
        sizes.experts,
        sizes.hidden_size,
        sizes.mlp_dim,
        sizes.columns,
        sizes.ep_size,
        sizes.alignment,
        found.rows,
        found.kept_rows,
        sizes.element_bytes,
        get_args(workspace.Scaling).index(sizes.scaling),
        sizes.lane_rows,
        sizes.spare,
        int(sizes.nodes > 1 and sizes.packed_bytes > 0),
    )
    return " ".join(map(str, numbers))


def test_both_sides_agree_on_parts_and_bytes_and_no_regions_meet(tmp_path: Path) -> None:
    draw = random.Random(1)
    asked = []
    for sizes in random_sizes(1):
        keep = draw.choice(["first", "nothing"])
        factor = draw.choice([0.5, 1.25, 64.0])
        setting = random_setting(draw)
        asked.append((sizes, workspace.of_block(sizes, setting, keep=keep, keep_factor=factor)))
    program = compiled(tmp_path, "block_workspace", "cuda/block/workspace.cc")
    run = run_to_end(program, given="\n".join(line(*each) for each in asked))
    native = [tuple(map(int, text.split())) for text in run.stdout.splitlines()]
    assert native == [
        (found.part_tokens, found.parts, found.forward_bytes, found.backward_bytes, 0)
        for _, found in asked
    ]
    assert len({parts > 0 for _, parts, *_ in native}) == 2


def orders_and_lanes(lanes: int, count: int, draw: random.Random) -> tuple[list[str], list[str]]:
    """Draws orders that fill and drain the queue; returns them and the lanes'
    holders after each.
    """
    orders: list[str] = []
    wanted: list[str] = []
    held: list[int] = []
    queue: list[int] = []
    filling = True
    for number in range(count):
        filling = not held or (filling and len(queue) < 4)
        if filling and draw.random() < 0.9:
            orders.append(f"join {number}")
            queue.append(number)
        elif queue and draw.random() < 0.3:  # its ranks give up before it gets a lane
            orders.append(f"fail {queue.pop(draw.randrange(len(queue)))}")
        elif held:
            orders.append(f"leave {held.pop(draw.randrange(len(held)))}")
        while queue and len(held) < lanes:
            held.append(queue.pop(0))
        if len(wanted) < len(orders):
            wanted.append("".join(f"{call} " for call in sorted(held)))
    return orders, wanted


def test_calls_get_the_lanes_in_turn_however_often_the_queue_runs_dry(tmp_path: Path) -> None:
    program = compiled(tmp_path, "meetings", "core/meeting/meeting.cc", "core/base/status.cc")
    for lanes in (1, 2, 3):
        orders, wanted = orders_and_lanes(lanes, 300, random.Random(lanes))
        assert wanted.count("") > 1  # the queue is empty
        run = run_to_end(program, given="\n".join([str(lanes), *orders]))
        assert run.stdout.splitlines() == wanted


def test_thousands_of_ranks_meet(tmp_path: Path) -> None:
    sources = ("core/meeting/meeting.cc", "core/base/status.cc")
    program = compiled(tmp_path, "wide_meetings", *sources)
    for ranks in (1, 63, 64, 65, 1025, MAX_WORLD_RANKS):
        run_to_end(program, str(ranks))


def test_a_device_sees_an_error_after_other_processes_can(tmp_path: Path) -> None:
    sources = ("core/runs/failed_runs.cc", "core/runs/launches.cc", "core/base/status.cc")
    program = compiled(tmp_path, "failed_runs", *sources, flags=("-pthread",))
    run_to_end(program)


@pytest.mark.slow
def test_rows_of_groups_and_bytes_of_tiles_are_where_they_belong(tmp_path: Path) -> None:
    # The warp's own cuda_runtime.h comes first.
    flags = ("-O1", "-Wno-unknown-pragmas", f"-I{HERE / 'warp'}")
    program = compiled(tmp_path, "gemm_indices", flags=flags)
    assert run_to_end(program).stdout.endswith("0 of 21 wrong\n")


# The part of libcuda.so.1 that the CUDA runtime calls before it refuses an old driver.
_OLD_DRIVER = 'extern "C" int cuDriverGetVersion(int* version) { *version = 11080; return 0; }\n'


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc's headers and runtime")
def test_an_old_driver_is_named_with_the_version_it_must_support(tmp_path: Path) -> None:
    def run(*command: object, **environment: str) -> str:
        return run_to_end(*command, cwd=tmp_path, **environment).stdout

    (tmp_path / "driver.cc").write_text(_OLD_DRIVER)
    run("nvcc", "-shared", "-Xcompiler=-fPIC", "-cudart=none", "-o=libcuda.so.1", "driver.cc")
    sources = (
        HERE / "cuda_driver.cc",
        CSRC / "cuda/device/driver.cc",
        CSRC / "core/base/status.cc",
    )
    run("nvcc", "-std=c++17", f"-I{CSRC}", *sources, "-o=program")
    said = run("./program", LD_LIBRARY_PATH=str(tmp_path))
    assert "EP_RUNTIME/RuntimeUnavailableError: the NVIDIA driver must support CUDA 1" in said
    assert ", got a driver for CUDA 11.8; install " in said
