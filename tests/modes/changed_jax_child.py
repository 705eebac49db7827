"""`python changed_jax_child.py FAULT`: runs `ep.moe` after a change of what JAX keeps private.

FAULT: "name" (one is gone), "lowering" (it keeps callbacks elsewhere) or "none". Its last line is
one JSON value: digests of the results, warnings, and the words of `ep.explain` and `doctor`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from typing import Any

os.environ.setdefault("PJRT_NPROC", "32")

import fakes
import jax
import jax.numpy as jnp
import numpy as np
from jax._src import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

_ELSEWHERE: list[Any] = []


def change(fault: str) -> None:
    rule: Any = custom_partitioning
    lowering = rule._custom_partitioning_lowering_rule

    def keeping_elsewhere(ctx: Any, *values: Any, **params: Any) -> Any:
        results = lowering(ctx, *values, **params)
        _ELSEWHERE.append(ctx.module_context.keepalives.pop())
        return results

    if fault == "name":
        del rule._custom_partitioning_partition
    elif fault == "lowering":
        rule._custom_partitioning_lowering_rule = keeping_elsewhere


def digests(values: Any) -> list[str]:
    return [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in jax.tree.leaves(values)]


def results() -> dict[str, Any]:
    import ep_runtime as ep
    from ep_runtime_client.cli.commands import doctor

    said: dict[str, Any] = {}
    for partitioning in ("auto", "rule"):
        group = fakes.local_group(
            axes={"fsdp": 2, "ep": 2},
            name=partitioning,
            outer_axes="fsdp",
            transport="memfd",
            partitioning=partitioning,
            num_experts=4,
        )
        layer = group.register_layer("moe", top_k=2)
        rng = np.random.default_rng(0)

        def draw(spec: Any, *shape: int, rng: Any = rng, mesh: Any = group.mesh) -> jax.Array:
            values = rng.standard_normal(shape).astype(np.float32)
            return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

        tokens = draw((("fsdp", "ep"),), 64, 16)
        params = ep.MoEParams(
            draw((), 16, 4),
            draw(("ep", "fsdp"), 4, 16, 2, 32),
            draw(("ep", None, "fsdp"), 4, 32, 16),
        )

        def loss(x: jax.Array, params: Any, layer: Any = layer) -> jax.Array:
            return jnp.sin(ep.moe(layer, x, params)[0]).sum()

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        said[partitioning] = digests(step(tokens, params))
        said["explained"] = str(ep.explain(step, tokens, params))
        group.close()
    return said | {"doctor": doctor._jax()._asdict()}


def main(fault: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ep_runtime").addHandler(handler)
    change(fault)
    print(json.dumps(results() | {"warnings": warnings}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
