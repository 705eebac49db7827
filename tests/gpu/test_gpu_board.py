"""Kernels write to the board, and the command line lists the records."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from gpu.jobs import layouts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime.workspace import ROW_ALIGNMENT, BlockSizes, of_block
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.readers import tallies

TOKENS, CAPACITY, HIDDEN = 64, 100, 256
STEPS = 3


def routed(gpus: list[Any]) -> Any:
    """Returns topk_idx [T, 2], and how many slots each rank receives."""
    experts, ranks = 2 * len(gpus), len(gpus)
    rng = np.random.default_rng(0)
    idx = rng.integers(0, experts, (TOKENS * ranks, 2)).astype(np.int32)
    idx[: TOKENS * ranks // 4] = 0  # more than rank 0 has room for
    return idx, np.bincount(idx.ravel() // 2, minlength=ranks)


def run_steps(session: ep.Session, gpus: list[Any], idx: Any) -> ep.Group:
    """Runs STEPS round trips of the layer's second handle."""
    mesh = Mesh(np.array(gpus), ["ep"])
    group = session.create_group(
        "g",
        mesh,
        ep_axis="ep",
        num_experts=2 * len(gpus),
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        recv_capacity_per_rank=CAPACITY,
        max_top_k=2,
        alignment=1,
        transport=layouts.TRANSPORT,
        replace=True,
    )
    layer = group.register_layer("moe", top_k=2, in_flight=2)
    sharding = NamedSharding(mesh, PartitionSpec("ep"))

    @jax.jit
    def step(tokens: Any, topk_idx: Any) -> Any:
        sent = ep.dispatch(layer, tokens, topk_idx, handle=1)
        return ep.combine(layer, sent, sent.tokens)

    tokens = jax.device_put(np.ones((len(idx), HIDDEN), np.float32).astype("bfloat16"), sharding)
    topk_idx = jax.device_put(idx, sharding)
    for _ in range(STEPS):
        jax.block_until_ready(step(tokens, topk_idx))
    group.check()
    return group


def listed(session: ep.Session, kind: str) -> list[dict[str, Any]]:
    with source.open_source(session.address, timeout_s=10.0) as daemon:
        return getattr(daemon, kind)()


def test_calls_rows_and_drops_reach_the_board(session: ep.Session, gpus: list[Any]) -> None:
    idx, demand = routed(gpus)
    kept = np.minimum(demand, CAPACITY)
    run_steps(session, gpus, idx)
    unused, used = listed(session, "handles")
    assert (unused["calls"], unused["lane"], unused["rows"]) == (0, -1, 0)
    assert (used["calls"], used["epoch"]) == (3 * STEPS, 3 * STEPS)
    assert (used["state"], used["last_op"]) == ("IDLE", "COMBINE")
    assert used["rows"] == STEPS * kept.sum()
    assert used["dropped_rows"] == STEPS * (demand - kept).sum() > 0
    assert 0 <= used["age_s"] < 60
    ranks = listed(session, "ranks")
    assert len(ranks) == len(gpus)
    for rank in ranks:
        assert (rank["state"], rank["epoch"], rank["waiting_for"]) == ("IDLE", 3 * STEPS, -1)
        if layouts.TRIAL:
            continue  # idle CPU ranks no longer name
        assert (rank["op"], rank["layer"], rank["handle"]) == ("", "", -1)  # the op that has ended
        assert 0 <= rank["since_s"] < 60


def test_tallies_reach_the_board(session: ep.Session, gpus: list[Any]) -> None:
    idx, demand = routed(gpus)
    run_steps(session, gpus, idx)
    with source.open_source(session.address, timeout_s=10.0) as daemon:
        ranks = daemon.tallies("g")
    assert len(ranks) == len(gpus)
    told = STEPS - 1, STEPS  # a GPU's board lags by one call
    for rank, tally in enumerate(ranks):
        assert [op["op"] for op in tally["ops"]] == ["PREPARE", "DISPATCH", "COMBINE"]
        for op in tally["ops"]:
            assert told[0] <= op["calls"] <= told[1]
            assert 0 <= op["wait_ns"] <= op["time_ns"] < 60e9
            assert op["wait_ns"] == sum(peer["wait_ns"] for peer in op["peers"])
            assert [peer["world_rank"] for peer in op["peers"]] == [*range(len(gpus))]
        (layer,) = tally["layers"]
        assert layer["tokens"] == STEPS * TOKENS
        assert tally["calls"] - 1 <= layer["calls"] <= tally["calls"] == 3 * STEPS
        assert sum(layer["rows"]) == STEPS * min(demand[rank], CAPACITY)


def test_a_slow_rank_is_named(session: ep.Session, gpus: list[Any], several_gpus: int) -> None:
    """The last rank has more work before it dispatches."""
    last, mesh = len(gpus) - 1, Mesh(np.array(gpus), ["ep"])
    group = session.create_group(
        "slow",
        mesh,
        ep_axis="ep",
        num_experts=2 * len(gpus),
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=2,
        transport=layouts.TRANSPORT,
    )
    layer = group.register_layer("moe", top_k=2)

    def work(x: Any) -> Any:
        trips = jax.numpy.where(jax.lax.axis_index("ep") == last, 400, 1)
        square = x[:1, :128].T @ x[:1, :128]
        done = jax.lax.fori_loop(0, trips, lambda _, a: jax.numpy.clip(a @ a, -1, 1), square)
        return x + 0 * done[0, 0]

    @jax.jit
    def step(x: Any, topk_idx: Any) -> Any:
        spec = PartitionSpec("ep")
        x = jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec)(x)
        sent = ep.dispatch(layer, x, topk_idx)
        return ep.combine(layer, sent, sent.tokens)

    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    idx = jax.device_put(routed(gpus)[0], sharding)
    x = jax.device_put(np.ones((len(idx), HIDDEN), np.float32).astype("bfloat16"), sharding)
    jax.block_until_ready(step(x, idx))
    with source.open_source(session.address, timeout_s=10.0) as daemon:
        before = tallies.sample_boards(daemon, "slow", None)
        for _ in range(20):
            jax.block_until_ready(step(x, idx))
        found = tallies.between(before, tallies.sample_boards(daemon, "slow", None))
    group.check()
    slow = tallies.slow_rank(found)
    assert slow is not None, tallies.held_up(found)
    assert (slow.world_rank, slow.layer) == (last, "moe")


@pytest.mark.skipif(layouts.TRIAL, reason="CPU ranks always tell")
def test_nothing_is_told_where_that_is_switched_off(
    session: ep.Session, gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_RUNTIME_BOARD", "0")
    run_steps(session, gpus, routed(gpus)[0])
    assert all(handle["calls"] == 0 for handle in listed(session, "handles"))
    assert all(rank["epoch"] == 0 for rank in listed(session, "ranks"))
    with source.open_source(session.address, timeout_s=10.0) as daemon:
        assert not any(rank["ops"] or rank["layers"] for rank in daemon.tallies("g"))


def test_parts_beyond_one_of_a_block_call_reach_the_board(
    session: ep.Session, gpus: list[Any]
) -> None:
    ranks, tokens = len(gpus), 256
    mesh = Mesh(np.array(gpus), ["ep"])
    rng = np.random.default_rng(0)
    x = jax.device_put(
        rng.standard_normal((tokens * ranks, HIDDEN), np.float32).astype("bfloat16"),
        NamedSharding(mesh, PartitionSpec("ep")),
    )

    def outputs(name: str, workspace: float) -> Any:
        group = session.create_group(
            name,
            mesh,
            ep_axis="ep",
            num_experts=2 * ranks,
            hidden_size=HIDDEN,
            max_tokens_per_rank=tokens,
            max_top_k=2,
            alignment=8,
            transport=layouts.TRANSPORT,
            workspace=workspace,
        )
        layer = group.register_layer("moe", top_k=2)
        params = ep.init_moe_params(jax.random.key(0), layer, HIDDEN, param_dtype="bfloat16")
        run = jax.jit(lambda x, params: ep.moe(layer, x, params)[0])
        if layouts.TRANSPORT != "nvlink":
            pytest.skip("windows on GPUs alone have block calls")
        assert "cuda" in str(ep.explain(run, x, params))
        for _ in range(STEPS):
            y = jax.block_until_ready(run(x, params))
        group.check()
        spec = group.spec
        sizes = BlockSizes(
            tokens=tokens,
            top_k=2,
            ep_size=ranks,
            experts=2,
            capacity=spec.recv_capacity_per_rank,
            alignment=ROW_ALIGNMENT,
            hidden_size=HIDDEN,
            mlp_dim=HIDDEN,
        )
        (handle,) = [row for row in listed(session, "handles") if row["group"] == name]
        return np.asarray(y, np.float32), handle["rounds"], of_block(sizes, spec.workspace).parts

    whole, none, _ = outputs("whole", float(ranks))
    parted, rounds, parts = outputs("parts", 1e-6)
    assert (none, rounds) == (0, STEPS * (parts - 1))
    assert parts > 1
    np.testing.assert_array_equal(parted, whole)
