"""Programs of transport "nccl", lowered for GPUs: rows cross in our calls, never in XLA's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime import device_layout
from ep_runtime_bench import plan
from ep_runtime_bench.base.options import PLAIN
from ep_runtime_bench.movement import device_ops
from ep_runtime_client.moe import bodies
from ep_runtime_client.ops.calls.call import world_rank
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.movement.prepare import make_call
from ep_runtime_client.ops.transports import windows as transports_windows

RANKS, TOKENS, HIDDEN = 8, 16, 32


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports_windows, "ensure_registered", lambda platform: None)


def over_nodes(make_group: Callable[..., Any], node_size: int, **settings: Any) -> Any:
    """Makes a group of transport "nccl" on nodes of that many ranks."""
    return make_group(
        transport="nccl",
        node_size=node_size,
        num_experts=16,
        max_tokens_per_rank=TOKENS,
        **{"hidden_size": HIDDEN, "max_top_k": 12} | settings,
    )


def for_gpus(step: Callable[..., Any], *operands: Any) -> str:
    """Returns StableHLO for GPUs."""
    exported = jax.export.export(
        jax.jit(step), platforms=["cuda"], disabled_checks=ep.export_checks()
    )
    return str(exported(*operands).mlir_module())


def lowered(
    make_group: Callable[..., Any],
    node_size: int,
    *,
    top_k: int = 2,
    gradient: bool = False,
    dtype: Any = jnp.float32,
    **settings: Any,
) -> str:
    """Returns StableHLO for GPUs of dispatch and combine over nodes of `node_size` ranks."""
    group = over_nodes(make_group, node_size, alignment=4, **settings)
    layer = group.register_layer("moe", top_k=top_k)

    def forward(tokens: Any, idx: Any, weights: Any) -> Any:
        sent = ep.dispatch(layer, tokens, idx, weights)
        return ep.combine(layer, sent, sent.tokens, weights=sent.weights)

    def step(tokens: Any, idx: Any, weights: Any) -> Any:
        if not gradient:
            return forward(tokens, idx, weights)
        return jax.grad(lambda *x: forward(x[0], idx, x[1]).sum(), argnums=(0, 1))(tokens, weights)

    rows = NamedSharding(group.mesh, PartitionSpec("ep"))
    count = RANKS * TOKENS
    operands = [
        jax.ShapeDtypeStruct(shape, kind, sharding=rows)
        for shape, kind in (
            ((count, HIDDEN), dtype),
            ((count, top_k), jnp.int32),
            ((count, top_k), jnp.float32),
        )
    ]
    return for_gpus(step, *operands)


def lowered_block(
    make_group: Callable[..., Any],
    node_size: int,
    top_k: int,
    *,
    dtype: Any = jnp.float32,
    recipe: Any = None,
    **settings: Any,
) -> str:
    """Returns StableHLO for GPUs of a block with gradients, which are block calls there."""
    group = over_nodes(make_group, node_size, **settings)
    layer, hidden = group.register_layer("moe", top_k=top_k), group.spec.hidden_size

    def loss(x: Any, params: Any) -> Any:
        return ep.moe(layer, x, params, recipe=recipe)[0].sum()

    def array(spec: Any, *dims: int) -> Any:
        sharding = NamedSharding(group.mesh, spec)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    experts = PartitionSpec("ep")
    params = ep.MoEParams(
        array(PartitionSpec(), hidden, 16),
        array(experts, 16, hidden, 2, 64),
        array(experts, 16, 64, hidden),
    )
    step = jax.value_and_grad(loss, argnums=(0, 1))
    return for_gpus(step, array(experts, RANKS * TOKENS, hidden), params)


def calls(text: str) -> Counter[str]:
    return Counter(re.findall(r"@(ep_\w+_v1)", text))


def own_calls_alone(text: str) -> bool:
    return not re.search(r"stablehlo\.(all_to_all|all_gather|collective_permute)", text)


@pytest.mark.parametrize("node_size", [1, 2])
def test_rows_and_counts_cross_over_our_communicators(
    make_group: Callable[..., Any], node_size: int
) -> None:
    """A token needs few of the nodes: once a call, the host reads how many rows cross."""
    text = lowered(make_group, node_size)
    found = calls(text)
    assert found["ep_nccl_all_gather_v1"] == 1
    assert found["ep_nccl_exchange_v1"] == (1 if node_size == 1 else 2)
    assert found["ep_nccl_counted_v1"] == 2
    assert {"ep_dispatch_v1", "ep_combine_v1"} <= set(found)
    # JAX 0.11 also writes cumsum as a loop, after all its callers; XLA replaces it.
    spelled = r"func\.func private @chlo\.scan\.impl.*?\n  }"
    rest = re.sub(spelled, "", text.split("ep_nccl_counted_v1", 1)[1], flags=re.DOTALL)
    assert "stablehlo.while" not in rest
    assert own_calls_alone(text)
    rails = re.findall(r"node_size = (\d+) : i64, rail = (\d) : i64", text)
    assert (str(node_size), "1") in rails


def test_where_all_rows_cross_prepare_is_one_call(make_group: Callable[..., Any]) -> None:
    text = lowered(make_group, 4, top_k=12, gradient=True)
    found = calls(text)
    assert found["ep_nccl_prepare_v1"] == 1
    # Out: rows with weights, and gradients of sums. Back: those of both. Nothing reads the sums.
    assert (found["ep_nccl_all_gather_v1"], found["ep_nccl_exchange_v1"]) == (2, 1)
    assert {"ep_dispatch_v1", "ep_combine_bwd_v1"} <= set(found)
    assert own_calls_alone(text)


def test_where_nodes_are_one_rank_each_every_op_is_one_call(make_group: Callable[..., Any]) -> None:
    text = lowered(make_group, 1, top_k=12, gradient=True, combine_precision="fast")
    ours = ("prepare", "dispatch", "dispatch_bwd", "combine_bwd")  # nothing reads the sums
    assert calls(text) == Counter(f"ep_nccl_{op}_v1" for op in ours)
    assert own_calls_alone(text)


@pytest.mark.parametrize("top_k", [2, 12], ids=["counted", "all"])
@pytest.mark.parametrize("node_size", [1, 2])
def test_sums_of_8_bits_cross_as_data_and_scales(
    make_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, node_size: int, top_k: int
) -> None:
    """They cross in one exchange with other arrays. No program packs them into separate bytes."""
    monkeypatch.setattr(serve, "available", lambda: True)
    text = lowered(make_group, node_size, top_k=top_k, dtype=jnp.bfloat16, combine_precision="fp8")
    found, others = (
        calls(lowered(make_group, node_size, top_k=top_k, dtype=jnp.bfloat16, **settings))
        for settings in ({"combine_precision": "fp8"}, {})
    )
    if (node_size, top_k) == (1, 12):
        assert found == others  # that call contains the kernels
        assert f"tensor<{RANKS}x{TOKENS}x{HIDDEN}xui8>" in text
    else:
        assert found - others == Counter(["ep_quantize_tiles_v1", "ep_sum_scaled_rows_v1"])
    assert own_calls_alone(text)


def test_sums_that_cross_unrounded_are_made_by_windows(make_group: Callable[..., Any]) -> None:
    found = calls(lowered(make_group, 1, top_k=12, dtype=jnp.bfloat16, combine_precision="exact"))
    names = ("ep_nccl_prepare_v1", "ep_nccl_dispatch_v1", "ep_combine_v1", "ep_nccl_exchange_v1")
    assert found == Counter(names)


def test_gradients_cross_over_them_too(make_group: Callable[..., Any]) -> None:
    found = calls(lowered(make_group, 1, gradient=True))
    assert {"ep_dispatch_bwd_v1", "ep_combine_bwd_v1"} <= set(found)
    assert found["ep_nccl_counted_v1"] == 3  # rows out, gradients out and back


@pytest.mark.parametrize("node_size", [1, 4])
def test_a_block_is_one_call_between_two_exchanges(
    make_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, node_size: int
) -> None:
    """So are its gradients; ranks of a node exchange which of them has the most rows."""
    monkeypatch.setattr(bodies, "unsupported", lambda asked: "")
    text = lowered_block(make_group, node_size, top_k=12)
    names = ["ep_nccl_prepare_v1", "ep_nccl_all_gather_v1", "ep_nccl_exchange_v1", "ep_block_v1"]
    backward = ["ep_nccl_all_gather_v1", "ep_nccl_exchange_v1", "ep_block_bwd_v1"]
    inside = ["ep_nccl_exchange_v1"] if node_size > 1 else []
    assert calls(text) == Counter([*names, *backward, *inside])
    assert own_calls_alone(text)


def test_a_block_whose_rows_are_counted_reads_counts_once_an_exchange(
    make_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "unsupported", lambda asked: "")
    found = calls(lowered_block(make_group, 2, top_k=2))
    assert (found["ep_nccl_counted_v1"], found["ep_block_v1"], found["ep_block_bwd_v1"]) == (
        4,
        1,
        1,
    )


def test_plans_of_lanes_without_room_for_all_count_pairs_of_ranks(
    make_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block calls count pairs too. Combine does not, because it takes one node's
    tokens at a time.
    """
    monkeypatch.setattr(device_layout, "LEAST_SOURCES", 1)
    monkeypatch.setattr(device_layout, "packs", device_layout.packs.__wrapped__)
    monkeypatch.setattr(bodies, "unsupported", lambda asked: "")
    settings: dict[str, Any] = {"max_top_k": 2}

    def counts_of(text: str) -> dict[str, str]:
        found = re.findall(r"@(ep_\w+_v1)\(.*?: \(.*?tensor<2x(4|8|40)xi32>.*\) ->", text)
        return {name: columns for name, columns in found if "nccl" not in name}

    assert counts_of(lowered(make_group, 2, gradient=True, **settings)) == {
        "ep_dispatch_v1": "8",
        "ep_combine_bwd_v1": "8",
        "ep_dispatch_bwd_v1": "4",
    }
    assert counts_of(lowered(make_group, 2, **settings))["ep_combine_v1"] == "4"
    found = counts_of(lowered_block(make_group, 2, 2, **settings))
    assert found == {"ep_block_v1": "8", "ep_block_bwd_v1": "8"}


@pytest.mark.parametrize("recipe", plan.RECIPES)
@pytest.mark.parametrize("precision", ["fast", "exact", "fp8"])
def test_rows_of_a_block_cross_in_the_bytes_that_bench_plan_counts(
    make_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, precision: str, recipe: str
) -> None:
    monkeypatch.setattr(bodies, "unsupported", lambda asked: "")
    monkeypatch.setattr(serve, "available", lambda: True)
    settings = {"combine_precision": precision, "max_token_dtype": "bfloat16", "hidden_size": 512}
    way = {"dtype": jnp.bfloat16, "recipe": plan.RECIPES[recipe]}
    text = lowered_block(make_group, 2, 2, **way, **settings)
    packed = re.findall(rf"@ep_quantize_tiles_v1\(.*-> tensor<{TOKENS}x528xui8>", text)
    assert len(packed) == (3 if recipe == "fp8-block" else 0)  # a rank's own: x, x again and dy
    crossed = []
    for types in re.findall(r"@ep_nccl_counted_v1\(.*: \((.*)\) ->", text):
        # Blocks of four nodes' rows, or rows of a rank's own tokens, which two nodes need.
        lead = f"(?:4x{TOKENS}|{2 * TOKENS})"
        rows = re.findall(rf"tensor<{lead}x(\d+)x[a-z]+(\d+)>", types)
        crossed.append(sum(int(width) * int(bits) // 8 for width, bits in rows))
    layer = over_nodes(make_group, 2, **settings).register_layer("moe", top_k=2)
    lead = (RANKS * TOKENS,)
    call = make_call(layer, layer.group.mesh, lead, (), handle=0, capacity=None)
    passes = plan.network_bytes(plan.sizes_of(call, recipe)).values()
    assert crossed == [size for each in passes for size in each]


def test_programs_name_neither_ranks_nor_communicators(make_group: Callable[..., Any]) -> None:
    text = lowered(make_group, 2)
    (attributes,) = {
        tuple(sorted(re.findall(r"(\w+) = ", match)))
        for match in re.findall(r"@ep_nccl_\w+_v1\([^{]*\{[^}]*backend_config = \{([^}]*)\}", text)
    }
    assert attributes == ("fingerprint", "handle", "layer_id", "node_size", "rail")


def test_what_a_bench_times_of_it_traces(make_group: Callable[..., Any]) -> None:
    group = over_nodes(make_group, 1)
    layer = group.register_layer("moe", top_k=2)
    lead = (RANKS * TOKENS,)
    call = make_call(layer, group.mesh, lead, (PartitionSpec("ep"),), handle=0, capacity=None)
    timed = device_ops.our_ops(call) | {PLAIN: device_ops.plain_exchange(call)}
    slab = (RANKS, call.capacity)

    def array(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    idx = array(*lead, 2, dtype=jnp.int32)
    given = {
        "idx": idx,
        "x": array(*lead, HIDDEN),
        "weights": array(*lead, 2),
        "plan": tuple(jax.eval_shape(lambda i: ep.prepare(layer, i).arrays, idx)),
        "rows": array(*slab, HIDDEN),
        "blocks": array(RANKS * RANKS, 3, HIDDEN),
    }
    for name in ("prepare", "dispatch", "combine", "pair", PLAIN):

        def once(given: Any, name: str = name) -> Any:
            outcome = timed[name](world_rank(call.group), given)
            return jax.tree.map(lambda x: x.reshape(1, -1), outcome)

        rows = PartitionSpec("ep")
        mapped = jax.shard_map(
            once, mesh=group.mesh, in_specs=(rows,), out_specs=rows, check_vma=False
        )
        needed = {key: given[key] for key in device_ops.NEEDS[name]}
        found = jax.tree.leaves(jax.eval_shape(mapped, needed))
        assert found, name
