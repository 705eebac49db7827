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
from ep_runtime_bench.compile import model
from ep_runtime_client.ops.gemm import ops as gemm_ops

LAYERS = 3


def test_equal_layers_are_partitioned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def counted(op: type[Any]) -> None:
        resolve = op.resolve

        def counting(self: Any, *args: Any) -> Any:
            asked[op.__name__] += (
                args[3] is not None
            )  # how results are wanted: the partitioner asks
            return resolve(self, *args)

        monkeypatch.setattr(op, "resolve", counting)

    for op in (gemm_ops.GemmForward, gemm_ops.GemmBackward):
        counted(op)
    compiled = _train_step().compile()
    assert asked == {"GemmForward": 2, "GemmBackward": 2}  # wi and wo
    # Every layer has its own name in profiles all the same.
    names = compiled.as_text() or ""
    found = set(re.findall(r"ep_experts/layer(\d+)[/)]", names))
    assert found == {str(number) for number in range(LAYERS)}


def _train_step() -> Any:
    """A step of a model whose weights lie over fsdp too, lowered."""
    group = fakes.local_group(
        axes={"fsdp": 2, "ep": 2},
        name="equal",
        outer_axes="fsdp",
        transport="xla",
        num_experts=4,
        hidden_size=model.HIDDEN,
        max_tokens_per_rank=model.SEQ,
        max_top_k=2,
        max_token_dtype="float32",
    )
    layers = [group.register_layer(f"layer{number}", top_k=2) for number in range(LAYERS)]
    spec = ep.LayerSpec("layer", top_k=2, num_experts=4, hidden_size=model.HIDDEN)
    weights = model.blocks(LAYERS, spec, group.mesh)
    rows = NamedSharding(group.mesh, PartitionSpec(model.token_axes(group.mesh)))
    x = jax.ShapeDtypeStruct((4, model.SEQ, model.HIDDEN), jnp.float32, sharding=rows)
    moes = [model.runtime_moe(layer) for layer in layers]
    return jax.jit(lambda layers, x: model.train_step(moes, layers, x)).lower(weights, x)
