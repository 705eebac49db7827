"""Sizes of block calls: those of the native library are those of `ep_runtime.workspace`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

from block_sizes import random_setting, random_sizes
from child_programs import run_to_end
from host_programs import compiled

from ep_runtime import workspace
from ep_runtime.workspace import BlockSizes, Workspace


def line(sizes: BlockSizes, found: Workspace) -> str:
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
