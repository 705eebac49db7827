"""Public ops, forward and gradient, where a user asks JAX to be strict about their own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.base import jax_internals

HIDDEN, INNER, EXPERTS, TOKENS, TOP_K = 16, 8, 4, 16, 2

MODES: dict[str, Callable[[], Any]] = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}
Op = tuple[Callable[..., Any], tuple[Any, ...]]


def draw(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


def on_one_device() -> dict[str, Op]:
    """Ops without a layer, each as a function of its differentiable operands."""
    logits, x, idx = draw(TOKENS, EXPERTS), draw(TOKENS, HIDDEN), jnp.arange(TOKENS * TOP_K)
    idx = idx.reshape(TOKENS, TOP_K) % EXPERTS
    weights, kernels, bias = draw(TOKENS, TOP_K), draw(EXPERTS, HIDDEN, INNER), draw(EXPERTS, INNER)
    sizes, order, loads = jnp.int32([3, 0, 5, 8]), jnp.int32([1, 0, 3, 2]), jnp.arange(EXPERTS)
    wide, of_blocks = draw(TOKENS, 128), jnp.int32([8, 8])
    chosen, tiles, one = logits > 0, draw(2, 128, 128), draw(EXPERTS)
    block = ep.recipes.BlockScaling()

    def permuted(x: Any, weights: Any) -> Any:
        p = ep.permute(x, idx, num_experts=EXPERTS, probs=weights, align_size=4)
        return ep.unpermute(p.tokens, p, merging_probs=weights)

    def of_map(x: Any) -> Any:
        p = ep.permute(x, routing_map=chosen, num_experts=EXPERTS, num_out_tokens=20)
        return ep.unpermute(p.tokens, p)

    router = ep.Router(num_groups=2, group_topk=1, group_score_topk=2)
    mask = jnp.asarray(np.arange(len(logits)) % 3 > 0)
    return {
        "route": (
            lambda x, b: ep.route(x, TOP_K, router=router, expert_bias=b, token_mask=mask),
            (logits, one),
        ),
        "top_k": (lambda x: ep.top_k(x, TOP_K)[0], (logits,)),
        "aux_loss": (lambda x: ep.aux_loss(ep.route(x, TOP_K), coeff=1.0), (logits,)),
        "z_loss": (lambda x: ep.z_loss(ep.route(x, 1), coeff=1.0, token_mask=mask), (logits,)),
        "update_expert_bias": (lambda b: ep.update_expert_bias(b, loads, 1e-3), (one,)),
        "pad_tokens": (lambda x: ep.pad_tokens(5, x, idx)[0], (x,)),
        "permute": (permuted, (x, weights)),
        "permute a map": (of_map, (x,)),
        "sort_chunks": (lambda x: ep.sort_chunks(x, sizes, order), (x,)),
        "dense": (lambda x, k, b: ep.dense(x, k, bias=b), (x, kernels[0], bias[0])),
        "grouped_gemm": (
            lambda x, k, b: ep.grouped_gemm(x, k, sizes, bias=b),
            (x, kernels, bias),
        ),
        "blocks": (
            lambda x, k: ep.grouped_gemm(x, k, of_blocks, recipe=block),
            (wide, tiles),
        ),
        "quantized": (
            lambda x: ep.grouped_quantize(x, of_blocks, block).dequantize(jnp.float32),
            (wide,),
        ),
    }


def of_layer(group: fakes.LocalGroup) -> dict[str, Op]:
    layer = group.register_layer("moe", top_k=TOP_K)

    def placed(x: Any, *axes: str) -> Any:
        return jax.device_put(x, NamedSharding(group.mesh, PartitionSpec(*axes)))

    made = ep.init_moe_params(jax.random.key(0), layer, INNER, use_bias=True).to_separate()
    whole = {name: placed(v, *([] if "router" in name else ["ep"])) for name, v in made.items()}
    params = ep.MoEParams.from_separate(**whole)
    idx = placed(jnp.arange(TOKENS * TOP_K).reshape(TOKENS, TOP_K) % EXPERTS, "ep")
    x, weights = placed(draw(TOKENS, HIDDEN), "ep"), placed(draw(TOKENS, TOP_K), "ep")

    # Programs take arrays as arguments: JAX reads closed-over sharded ones on the host.
    def moved(x: Any, idx: Any, weights: Any) -> Any:
        dispatched = ep.dispatch(layer, x, idx, weights)
        return ep.combine(layer, dispatched, dispatched.tokens, weights=dispatched.weights)

    def block(x: Any, params: Any) -> Any:
        y, aux, stats = ep.moe(layer, x, params, aux_loss_coeff=0.1, return_stats=True)
        return y, aux, stats.routing.probs

    return {"dispatch and combine": (moved, (x, idx, weights)), "moe": (block, (x, params))}


def loss(op: Callable[..., Any], args: tuple[Any, ...]) -> jax.Array:
    leaves = jax.tree.leaves(op(*args))
    return sum(jnp.sin(x).sum() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


def run_all(ops: dict[str, Op], mode: str) -> None:
    with MODES[mode]():
        for op, args in ops.values():
            if mode == "transfer_guard":
                jax.block_until_ready(jax.jit(lambda *args, op=op: op(*args))(*args))
            else:
                jax.make_jaxpr(jax.grad(lambda args, op=op: loss(op, args), allow_int=True))(args)


@pytest.mark.parametrize("mode", MODES)
def test_ops_on_one_device(mode: str) -> None:
    run_all(on_one_device(), mode)


@pytest.mark.parametrize("mode", MODES)
def test_ops_of_a_layer(make_group: fakes.MakeGroup, mode: str) -> None:
    run_all(of_layer(make_group(transport="memfd", axes={"ep": 2}, num_experts=EXPERTS)), mode)


def test_eager_blocks_transfer_nothing_of_the_users(make_group: fakes.MakeGroup) -> None:
    ops = of_layer(make_group(transport="memfd", axes={"ep": 2}, num_experts=EXPERTS))
    layer = make_group(transport="memfd", axes={"ep": 2}, num_experts=EXPERTS).register_layer(
        "moe", top_k=TOP_K
    )
    moved, operands = ops["dispatch and combine"]
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(ep.moe(layer, *ops["moe"][1]))
        jax.block_until_ready(moved(*operands))


def test_a_rule_traces_under_the_contexts_of_its_program(
    make_group: fakes.MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA asks on its own thread, where `jax.enable_x64` set nothing: f64 rows became f32."""
    seen: set[tuple[Any, ...]] = set()
    answer = jax_internals.answer

    def asked(*args: Any) -> Any:
        options: Any = jax.config
        names = ("enable_x64", "default_matmul_precision", "debug_infs", "numpy_rank_promotion")
        seen.add(tuple(getattr(options, f"jax_{name}") for name in names))
        return answer(*args)

    monkeypatch.setattr(jax_internals, "answer", asked)
    group = make_group(
        transport="memfd",
        axes={"ep": 2},
        num_experts=EXPERTS,
        max_token_dtype="float64",
        partitioning="rule",
    )
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("float32"),
        jax.debug_infs(True),
        jax.numpy_rank_promotion("raise"),
    ):
        op, args = of_layer(group)["moe"]
        args = jax.tree.map(lambda x: x.astype(jnp.float64), args)
        y, grads = jax.jit(jax.value_and_grad(lambda args: loss(op, args)))(args)
        assert {x.dtype for x in jax.tree.leaves((y, grads))} == {np.dtype(np.float64)}
    assert seen == {(True, "float32", True, "allow")}


def test_a_block_is_evaluated_while_a_program_is_traced(make_group: fakes.MakeGroup) -> None:
    op, args = of_layer(make_group(transport="memfd", axes={"ep": 2}, num_experts=EXPERTS))["moe"]
    seen = []

    def program(factor: Any) -> Any:
        for each in (op, jax.jit(op)):
            with jax.ensure_compile_time_eval():
                seen.append(np.asarray(each(*args)[0]))
        return factor * seen[0].sum()

    jax.make_jaxpr(program)(2.0)
    np.testing.assert_array_equal(*seen)


def test_a_vmap_that_batches_nothing_of_a_block(make_group: fakes.MakeGroup) -> None:
    group = make_group(transport="memfd", axes={"ep": 2}, num_experts=EXPERTS, partitioning="rule")
    op, args = of_layer(group)["moe"]
    whole = jax.jit(jax.grad(lambda x: loss(op, (x, args[1]))))
    wanted = whole(args[0])
    for each in (whole, jax.grad(lambda x: loss(op, (x, args[1])))):
        batched = jax.vmap(lambda factor, each=each: factor * each(args[0]))
        got = jax.jit(batched)(np.arange(3, dtype=np.float32))
        np.testing.assert_allclose(got[2], 2 * wanted, rtol=1e-5, atol=1e-6)
