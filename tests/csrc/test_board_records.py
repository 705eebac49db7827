"""Tests the records that calls of the native library write to the board."""

from __future__ import annotations

import time

import jax
import numpy as np
from round_trips import EXPERTS, TOKENS, opened, round_trip

from ep_runtime import board_abi, board_records


def test_the_board_counts_calls_rows_and_drops():
    with opened(recv_capacity_per_rank=10, in_flight=2) as (group, _, idx, x):
        run = group.sharded(lambda idx, x: round_trip(group, idx, x, handle=1))
        jax.block_until_ready(run(idx, x))
        counts = np.bincount(np.asarray(idx).ravel() // 2, minlength=8)
        kept = np.minimum(counts, 10)
        first, second = board_records.read_handles(group.board, group.layout, [0, 1])
        assert (first.calls, first.lane) == (0, -1)
        assert second.calls == 3
        assert second.last_op is board_abi.OpCode.COMBINE
        assert second.state is board_abi.HandleState.IDLE
        assert second.rows == kept.sum()
        assert second.dropped_rows == (counts - kept).sum() > 0
        ranks = board_records.read_ranks(group.board, group.layout)
        assert [r.rows for r in ranks] == kept.tolist()
        assert [r.dropped_rows for r in ranks] == (counts - kept).tolist()
        assert all(r.state is board_abi.RankState.IDLE and r.calls == 3 for r in ranks)
        assert all(r.waiting_for == -1 and r.epoch == second.epoch for r in ranks)


def test_the_board_tallies_calls_waits_and_experts():
    with opened(recv_capacity_per_rank=10, in_flight=2) as (group, _, idx, x):
        run = group.sharded(lambda idx, x: round_trip(group, idx, x, handle=1))
        for _ in range(3):
            jax.block_until_ready(run(idx, x))
        spec, rows = group.spec, np.zeros(EXPERTS, np.int64)
        charged = waited = 0
        for rank in range(8):
            ops = board_records.read_ops(group.board, group.layout, rank)
            assert [*ops] == [
                board_abi.OpCode.PREPARE,
                board_abi.OpCode.DISPATCH,
                board_abi.OpCode.COMBINE,
            ]
            for op in ops.values():
                assert op.calls == sum(op.times) == sum(op.waits) == 3
                assert 0 <= op.wait_ns < op.time_ns
                assert op.peers[rank] == board_records.PeerTally(rank, 0, op.peers[rank].wait_ns)
                assert sum(peer.wait_ns for peer in op.peers) == op.wait_ns
                charged += sum(peer.wait_ns for peer in op.peers)
                waited += op.wait_ns
            assert board_records.read_load(group.board, group.layout, rank, [0]) is None
            load = board_records.read_load(group.board, group.layout, rank, [0, 1])
            assert (load.calls, load.tokens) == (9, 3 * TOKENS)
            assert load.time_ns == sum(op.time_ns for op in ops.values())
            first = board_records.first_expert(spec, rank)
            rows[first : first + 2] = load.rows
        assert charged == waited > 0
        wanted = np.bincount(np.asarray(idx).ravel(), minlength=EXPERTS)
        assert rows.sum() == 3 * np.minimum(wanted.reshape(8, 2).sum(1), 10).sum()
        np.testing.assert_array_less(rows, 3 * wanted + 1)


def test_who_is_late_is_charged_with_the_waits_of_all():
    late, times, delay_s = 5, 4, 0.05
    with opened() as (group, _, idx, x):

        def wait(rank: np.ndarray, value: np.ndarray) -> np.ndarray:
            if rank == late:
                time.sleep(delay_s)
            return value

        def step(idx: jax.Array, x: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(idx.shape, idx.dtype)
            idx = jax.pure_callback(wait, shape, jax.lax.axis_index("ep"), idx)
            return round_trip(group, idx, x)

        run = group.sharded(step)
        for _ in range(times):
            jax.block_until_ready(run(idx, x))
        arrivals = np.zeros((8, 8))
        for rank in range(8):
            op = board_records.read_ops(group.board, group.layout, rank)[board_abi.OpCode.PREPARE]
            arrivals[rank] = [peer.arrival_ns for peer in op.peers]
            if rank != late:
                assert op.peers[late].wait_ns > times * delay_s * 1e9 / 2
                assert sum(op.waits[13:]) >= times / 2  # of 16 ms and more
        assert arrivals.sum(0).argmax() == late
        assert arrivals[late].sum() < arrivals[:, late].sum() / 8
