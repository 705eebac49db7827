"""`python -m ep_runtime_bench.control.first_call`: one fresh client, its stages timed.

Prints one JSON object: "stages", of milliseconds, and on GPUs "nccl", what communicators cost.
`bench connect` runs it against a warm daemon.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from ep_runtime_bench.base.options import TRANSPORTS, ConnectSizes, Transport
from ep_runtime_bench.control import beside_cost


class Stages:
    """Milliseconds between marks."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        now = time.perf_counter()
        self.milliseconds[stage] = (now - self._last) * 1e3
        self._last = now

    def leave_out(self) -> None:
        """What was done since the last mark is no stage."""
        self._last = time.perf_counter()


def measure(
    address: str, devices: int, transport: Transport, sizes: ConnectSizes
) -> dict[str, dict[str, Any]]:
    """Runs one dispatch from nothing: the stages' milliseconds, and the costs of communicators."""
    stages = Stages()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import ep_runtime as ep
    from ep_runtime_client.jobs.members import Member, start_jax
    from ep_runtime_client.sessions import session  # noqa: F401 - loaded when first used

    stages.mark("import")
    platform = "gpu" if transport == "nvlink" else "cpu"
    start_jax(devices, Member(), platform)
    with ep.connect(address) as connected:
        stages.mark("connect")
        mesh = Mesh(np.array(jax.devices(platform)[:devices]), ("ep",))
        rows = NamedSharding(mesh, PartitionSpec("ep"))
        count = sizes.tokens * devices
        x = jax.device_put(np.ones((count, sizes.hidden), jnp.dtype(sizes.dtype)), rows)
        topk_idx = jax.device_put(sizes.topk_idx(count), rows)
        jax.block_until_ready((x, topk_idx))
        stages.mark("jax_backend")
        before = beside_cost.used_mib() if platform == "gpu" else []
        stages.leave_out()
        group = connected.create_group(
            "bench",
            mesh,
            ep_axis="ep",
            num_experts=sizes.num_experts,
            hidden_size=sizes.hidden,
            max_tokens_per_rank=sizes.tokens,
            max_top_k=sizes.top_k,
            max_token_dtype=sizes.dtype,
            alignment=sizes.alignment,
            transport=transport,
        )
        stages.mark("create_group")
        layer = group.register_layer("layer", top_k=sizes.top_k)
        stages.mark("register_layer")

        def forward(x: Any, topk_idx: Any) -> Any:
            return ep.dispatch(layer, x, topk_idx).tokens

        lowered = jax.jit(forward).lower(x, topk_idx)
        stages.mark("trace")
        compiled = lowered.compile()
        stages.mark("compile")
        jax.block_until_ready(compiled(x, topk_idx))
        stages.mark("first_call")
        nccl = beside_cost.costs(group, before) if platform == "gpu" else {}
        stages.leave_out()
    stages.mark("close")
    return {"stages": stages.milliseconds, "nccl": nccl}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--transport", choices=TRANSPORTS, default="memfd")
    parser.add_argument("--sizes", type=json.loads, required=True)
    args = parser.parse_args()
    found = measure(args.address, args.devices, args.transport, ConnectSizes(**args.sizes))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
