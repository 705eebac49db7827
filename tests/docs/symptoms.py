"""Provokes what docs/troubleshooting.md tells of, as far as one process can: {name: what it said}.

Run as a program it prints JSON. What needs several processes is provoked by their tests.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

SIZES: dict[str, Any] = {
    "ep_axis": "ep",
    "num_experts": 8,
    "hidden_size": 64,
    "max_tokens_per_rank": 128,
    "max_top_k": 2,
    "max_token_dtype": "float32",
}


def said(call: Callable[[], object]) -> str:
    """The text of what the call raises."""
    try:
        call()
    except (ep.EpRuntimeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return str(ep.error_of(error) or error)
    raise AssertionError("nothing was raised")


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def dispatched(group: ep.Group, choice: list[int]) -> jax.Array:
    """A dispatch in which every token makes that choice."""
    layer = group.register_layer("block0", top_k=2)
    rows = NamedSharding(group.mesh, PartitionSpec("ep"))
    tokens = jax.device_put(jnp.ones((512, 64)), rows)
    idx = jax.device_put(jnp.tile(jnp.int32(choice), (512, 1)), rows)
    sent = jax.jit(lambda tokens, idx: ep.dispatch(layer, tokens, idx))(tokens, idx)
    return jax.block_until_ready(sent.num_recv)


def main() -> dict[str, str]:
    jax.config.update("jax_num_cpu_devices", 4)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as nowhere:
        found["no daemon"] = said(lambda: ep.connect(f"unix://{nowhere}", timeout_s=0.5))
    with ep.connect("embedded") as session:
        mesh = Mesh(np.array(jax.devices("cpu")), ("ep",))
        group = session.create_group("moe", mesh, **SIZES)
        layer = group.register_layer("block0", top_k=2)
        again = {**SIZES, "max_tokens_per_rank": 256}
        found["group again"] = said(lambda: session.create_group("moe", mesh, **again))
        found["layer again"] = said(lambda: group.register_layer("block0", top_k=1))
        traced = jax.jit(lambda: session.create_group("other", mesh, **SIZES).capacity_per_rank)
        found["traced"] = said(traced)
        huge = {**SIZES, "max_tokens_per_rank": 1 << 20, "hidden_size": 1 << 16}
        found["pool"] = said(lambda: session.create_group("huge", mesh, **huge))
        found["no nccl"] = said(lambda: session.create_group("n", mesh, transport="nccl", **SIZES))
        tight = {**SIZES, "capacity_factor": 1.0, "alignment": 8}
        strict = session.create_group("strict", mesh, on_overflow="error", **tight)
        found["overflow"] = said(lambda: dispatched(strict, [0, 1]))
        os.environ["EP_RUNTIME_DEBUG"] = "1"
        checked = session.create_group("checked", mesh, **SIZES)
        found["index"] = said(lambda: dispatched(checked, [0, 8]))
        group.close()
        tokens = jnp.ones((512, 64))
        idx = jnp.zeros((512, 2), jnp.int32)
        found["stale"] = said(lambda: ep.dispatch(layer, tokens, idx))
    log = logging.getLogger("ep_runtime")
    log.addHandler(lines := Lines())
    with ep.connect("none") as session:
        large = {**SIZES, "max_tokens_per_rank": 1 << 16, "hidden_size": 1 << 13}
        session.create_group("moe", mesh, **large)
    found["memory"] = lines.lines[-1]
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout, indent=1)
