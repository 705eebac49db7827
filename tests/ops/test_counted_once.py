"""The board counts rows and drops of one call a step, however often a program repeats it."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import pytest

import ep_runtime as ep
from ep_runtime import board, board_records
from ep_runtime_client.programs.remat import remat_policy

HIDDEN, INNER, EXPERTS, TOKENS, LAYERS = 16, 8, 2, 16, 2
Block = Callable[..., jax.Array]


@pytest.fixture
def group(make_group: fakes.MakeGroup) -> fakes.LocalGroup:
    """Makes a group of two ranks that drops rows over its capacity."""
    sizes = {"num_experts": EXPERTS, "max_top_k": 1, "max_tokens_per_rank": TOKENS // 2}
    return make_group(axes={"ep": 2}, transport="memfd", capacity_factor=1.0, alignment=1, **sizes)


def once(block: Block) -> Block:
    return lambda x: block(x, 0)


def scanned(block: Block) -> Block:
    return lambda x: jax.lax.scan(lambda x, i: (block(x, i), None), x, jnp.arange(LAYERS))[0]


def in_turn(block: Block) -> Block:
    return lambda x: block(block(x, 0), 1)


PLANNED = remat_policy(save=("ep_plan",))
PROGRAMS: dict[str, Callable[[Block], Block]] = {
    "plain": once,
    "checkpoint": lambda block: jax.checkpoint(once(block)),
    "plans kept": lambda block: jax.checkpoint(once(block), policy=PLANNED),
    "layers of one checkpoint": lambda block: jax.checkpoint(in_turn(block)),
    "scan": scanned,
    "scan of checkpoints": lambda block: scanned(jax.checkpoint(block)),
    "checkpoints of checkpoints": lambda block: jax.checkpoint(scanned(jax.checkpoint(block))),
}


def on_board(group: fakes.LocalGroup) -> tuple[int, int, int, int]:
    """Returns (rows in prepare's tally, its tokens, rows received, dropped rows)."""
    mapped: Any = group.board
    assert isinstance(mapped, mmap.mmap)
    buf, where = memoryview(mapped), board.board_layout(group.spec)
    loads = [board_records.read_load(buf, where, rank, range(LAYERS)) for rank in range(2)]
    found = [load for load in loads if load is not None]
    handles = [x for x in board_records.read_handles(buf, where, range(LAYERS)) if x]
    return (
        sum(sum(load.rows) for load in found),
        sum(load.tokens for load in found),
        sum(handle.rows for handle in handles),
        sum(handle.dropped_rows for handle in handles),
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_counts_once(group: fakes.LocalGroup, program: str) -> None:
    stack = group.register_layer_stack("stack", LAYERS, top_k=1)
    params = ep.init_moe_params(jax.random.key(0), stack[0], INNER)
    params = dataclasses.replace(params, router_bias=jnp.array([1.0, 0.0]))
    x = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN))

    def block(x: jax.Array, i: Any) -> jax.Array:
        return x + jnp.tanh(ep.moe(stack[i], x, params, router=ep.Router(use_pre_softmax=True))[0])

    run = PROGRAMS[program](block)
    jax.block_until_ready(jax.jit(run)(x))
    forward = on_board(group)
    layers = 1 if forward[1] == TOKENS else LAYERS
    assert forward[1] == layers * TOKENS
    assert forward[0] == forward[2] == layers * TOKENS - forward[3]
    assert forward[3] > 0
    jax.block_until_ready(jax.jit(jax.value_and_grad(lambda x: jnp.sin(run(x)).sum()))(x))
    assert on_board(group) == tuple(2 * count for count in forward)


def test_dispatch_and_combine_apart_count_once(group: fakes.LocalGroup) -> None:
    layer = group.register_layer_stack("stack", LAYERS, top_k=1)[1]
    x, idx = jnp.ones((TOKENS, HIDDEN)), jnp.zeros((TOKENS, 1), jnp.int32)

    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        sent = ep.dispatch(layer, x, idx)
        return jnp.sin(ep.combine(layer, sent, jnp.tanh(sent.tokens)))

    jax.block_until_ready(jax.jit(jax.value_and_grad(lambda x: jnp.square(block(x)).sum()))(x))
    kept = group.spec.recv_capacity_per_rank
    assert on_board(group) == (kept, TOKENS, kept, TOKENS - kept)
