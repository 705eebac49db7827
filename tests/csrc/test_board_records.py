"""What calls of the native library write to the board."""

from __future__ import annotations

import jax
import numpy as np
from round_trips import inputs, open_group, round_trip

from ep_runtime import board, board_records


def test_the_board_counts_calls_rows_and_drops():
    with open_group(recv_capacity_per_rank=10, in_flight=2) as group:
        idx, x = inputs(group)
        run = group.sharded(lambda idx, x: round_trip(group, idx, x, handle=1))
        jax.block_until_ready(run(idx, x))
        counts = np.bincount(np.asarray(idx).ravel() // 2, minlength=8)
        kept = np.minimum(counts, 10)
        first, second = board_records.read_handles(group.board, group.spec, [0, 1])
        assert (first.calls, first.lane) == (0, -1)
        assert second.calls == 3
        assert second.last_op is board.OpCode.COMBINE
        assert second.state is board.HandleState.IDLE
        assert second.rows == kept.sum()
        assert second.dropped_rows == (counts - kept).sum() > 0
        ranks = board_records.read_ranks(group.board, group.spec)
        assert [r.rows for r in ranks] == kept.tolist()
        assert [r.dropped_rows for r in ranks] == (counts - kept).tolist()
        assert all(r.state is board.RankState.IDLE and r.calls == 3 for r in ranks)
        assert all(r.waiting_for == -1 and r.epoch == second.epoch for r in ranks)
