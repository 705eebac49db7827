"""Draws random sizes of layers for tests that compare block calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ep_runtime import layout, workspace

_SCALINGS: tuple[workspace.Scaling, ...] = ("none", "tensor", "block")


def random_sizes(seed: int) -> Iterator[workspace.BlockSizes]:
    draw = random.Random(seed)
    for _ in range(300):
        ep_size, experts = draw.choice([1, 2, 4, 32]), draw.choice([1, 2, 8, 64])
        asked: dict[str, Any] = {
            "top_k": draw.randint(1, min(8, ep_size * experts)),
            "ep_size": ep_size,
            "alignment": draw.choice([1, 8, 128, 256]),
        }
        tokens = draw.choice([1, 3, 64, 1000, 8192])
        factor = draw.choice([None, None, 1.0, 3.0])
        yield workspace.BlockSizes(
            tokens=tokens,
            experts=experts,
            capacity=layout.recv_capacity(
                num_experts=ep_size * experts,
                max_tokens_per_rank=tokens,
                capacity_factor=factor,
                **asked,
            ),
            hidden_size=draw.choice([16, 2048]),
            mlp_dim=draw.choice([8, 1024]),
            gated=draw.random() < 0.5,
            element_bytes=draw.choice([1, 2, 4]),
            scaling=draw.choice(_SCALINGS),
            nodes=draw.choice([1, 1, 2]) if tokens % 2 == 0 else 1,
            spare=draw.choice([0, 0, experts // 2]),
            lane_rows=draw.choice([2**31 - 1, 16 + 2 * tokens, 16]),
            **asked,
        )


def random_setting(draw: random.Random) -> Any:
    return draw.choice(["auto", 1e-9, 0.5, 1.0, 1.25, 2.0, 40.0, workspace.MAX_FACTOR])
