"""What a model of many equal layers costs to compile: counted, as seconds say little."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe import op as block_ops

LAYERS = 3


def test_each_layer_is_partitioned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def counted(op: type[Any]) -> None:
        resolve = op.resolve

        def counting(self: Any, *args: Any) -> Any:
            asked[op.__name__] += (
                args[3] is not None
            )  # how results are wanted: the partitioner asks
            return resolve(self, *args)

        monkeypatch.setattr(op, "resolve", counting)

    for op in (block_ops.BlockForward, block_ops.BlockBackward):
        counted(op)
    compiled = _train_step().compile()
    assert asked == {"BlockForward": LAYERS, "BlockBackward": LAYERS}
    # Every layer has its own name in profiles all the same.
    names = compiled.as_text() or ""
    found = set(re.findall(r"ep_experts/layer(\d+)[/)]", names))
    assert found == {str(number) for number in range(LAYERS)}


def _train_step() -> Any:
    """A step of unrolled layers whose weights are sharded over fsdp too, lowered."""
    group = fakes.local_group(
        axes={"fsdp": 2, "ep": 2},
        name="equal",
        outer_axes="fsdp",
        transport="xla",
        num_experts=4,
        hidden_size=64,
        max_tokens_per_rank=32,
        max_top_k=2,
        max_token_dtype="float32",
    )
    layers = [group.register_layer(f"layer{number}", top_k=2) for number in range(LAYERS)]

    def shaped(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(group.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    experts = shaped((4, 64, 2, 64), "ep", "fsdp"), shaped((4, 64, 64), "ep", None, "fsdp")
    weights = [ep.MoEParams(shaped((64, 4)), *experts)] * LAYERS

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for layer, params in zip(layers, weights, strict=True):
            x = x + ep.moe(layer, x, params)[0]
        return (x * x).mean()

    x = shaped((4, 32, 64), ("fsdp", "ep"))
    return jax.jit(jax.grad(loss)).lower(weights, x)
