"""Empty operands of custom calls stay inside the shard_map of their call, in scanned layers too.

One that leaves it ends the process in XLA's partitioner: `bound` in `ops/kernels/ffi.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.kernels import platform
from ep_runtime_client.ops.transports import windows as transports_windows

RANKS, TOKENS, HIDDEN, WIDTH, EXPERTS = 2, 128, 128, 128, 8
RECIPES = {
    "none": None,
    "fp8": ep.recipes.TensorScaling(),
    "fp8-block": ep.recipes.BlockScaling(),
    "mxfp8": ep.recipes.MXFP8(),
}


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces what a process with GPUs would."""
    monkeypatch.setattr(platform, "installed", lambda: True)
    for module in (activation_plain, platform):
        monkeypatch.setattr(module, "register_for_gpus", lambda: (platform.PRODUCTS,))
    monkeypatch.setattr(transports_windows, "ensure_registered", lambda platform: None)


def scanned(make_group: Callable[..., Any], transport: str, recipe: str, weights_at: Any) -> Any:
    """The jaxpr of a scan over three rematerialized layers, and of its gradients."""
    group = make_group(
        axes={"ep": RANKS},
        transport=transport,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=2,
        max_token_dtype="bfloat16",
        alignment=128,
        partitioning="shard_map",
        **({"node_size": 1} if transport == "nccl" else {}),
    )
    stack = group.register_layer_stack("moe", 3, top_k=2)

    def loss(x: Any, params: Any) -> Any:
        def step(x: Any, each: Any) -> Any:
            index, own = each
            y, _ = ep.moe(stack[index], x, own, recipe=RECIPES[recipe], weights_at=weights_at)
            return x + y, None

        kept = jax.checkpoint(step, policy=ep.remat_policy())
        return jax.lax.scan(kept, x, (jnp.arange(3), params))[0].sum()

    def array(spec: PartitionSpec, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(group.mesh, spec))

    experts = PartitionSpec(None, "ep")
    params = ep.MoEParams(
        array(PartitionSpec(), 3, HIDDEN, EXPERTS),
        array(experts, 3, EXPERTS, HIDDEN, 2, WIDTH),
        array(experts, 3, EXPERTS, WIDTH, HIDDEN),
    )
    x = array(PartitionSpec("ep"), RANKS * TOKENS, HIDDEN)
    return jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, params).jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("transport", ["nvlink", "nccl", "xla"])
@pytest.mark.parametrize(
    ("recipe", "weights_at"), [("none", "output"), ("fp8", "hidden"), ("mxfp8", "output")]
)
def test_no_empty_array_crosses_a_shard_map(
    make_group: Callable[..., Any], transport: str, recipe: str, weights_at: Any
) -> None:
    found = list(equations(scanned(make_group, transport, recipe, weights_at)))
    maps = [each for each in found if each.primitive.name == "shard_map"]
    calls = [each for each in found if each.primitive.name == "ffi_call"]
    assert len(maps) > 5
    assert any(0 in x.aval.shape for each in calls for x in each.invars)
    for each in maps:
        crossing = [x.aval for x in (*each.invars, *each.outvars) if 0 in x.aval.shape]
        assert not crossing, each.source_info
