"""Failing calls of the native library end in time, on every rank, with the error's name."""

from __future__ import annotations

import contextlib
import gc
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daemon_fixtures import wait_until
from native_group import FINGERPRINT, PLAN_NAMES, NativeGroup
from round_trips import (
    HIDDEN,
    TOKENS,
    TOP_K,
    expect,
    inputs,
    open_group,
    opened,
    round_trip,
)

from ep_runtime import board, board_abi, board_records, errors, native

SOON_S = 20.0  # far below 60 s, the limit of calls here


def failure_of(run, *args):
    """Returns our error from a launch that must fail soon."""
    started = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(run(*args))
    assert time.monotonic() - started < SOON_S
    error = errors.parse(str(caught.value))
    assert error is not None, caught.value
    return error


def without_rank(group, missing, then=lambda out: out):
    """A program in which one rank skips its call and continues with the code after it."""

    def program(idx, x):
        here = jax.lax.axis_index("ep") != missing
        return then(jax.lax.cond(here, lambda: round_trip(group, idx, x), lambda: x))

    return group.sharded(program)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("retain_ns=1", "the group's settings have no op_timeout_ns"),
        ("op_timeout_ns=1e9", "op_timeout_ns must be an integer, got '1e9'"),
        ("my_op_timeout_ns=1\nop_timeout_ns=7", "the group's settings have no on_overflow"),
    ],
)
def test_a_setting_that_the_library_cannot_read_is_named(monkeypatch, given, text):
    monkeypatch.setattr(native, "_settings", lambda spec, job="": given)
    with pytest.raises(errors.InvalidArgumentError, match=text), open_group():
        pass


def test_a_program_compiled_again_after_its_error_runs_and_has_a_lane():
    settings = {"lanes": 1, "on_overflow": "error", "recv_capacity_per_rank": 40}
    with opened(**settings) as (group, _, idx, x):
        bad = group.put(np.zeros((8, TOKENS, TOP_K), np.int32))
        for _ in range(3):
            run = group.sharded(lambda idx, x: round_trip(group, idx, x))
            error = failure_of(run, bad, x)
            assert isinstance(error, errors.CapacityOverflowError)
            assert error.fields == {"layer": "moe[0]", "rank": 0, "demand": 128, "capacity": 40}
            again = group.sharded(lambda idx, x: round_trip(group, idx, x))
            expect(again(idx, x), x)
        where = group.layout
        for offset in (where.domains_offset, where.world_offset):
            control = board_abi.ControlStruct.from_buffer(group.board, offset)
            assert (control.open_meetings, control.ready_head) == (0, 0)
            del control
        assert "CapacityOverflowError" in native.library().check_group(group.number)
        assert native.library().check_group(group.number) is None


def test_an_overflow_in_one_domain_fails_all_domains():
    settings = {"num_experts": 16, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
    with NativeGroup(
        {"dp": 2, "ep": 4}, on_overflow="error", recv_capacity_per_rank=31, **settings
    ) as group:
        idx = np.broadcast_to(np.arange(TOP_K, dtype=np.int32), (8, TOKENS, TOP_K)).copy()
        idx[:4] = -1
        idx[4:, :, 0] = np.arange(TOKENS) * 2 % 12
        idx[4:, :, 1] = 13  # rank 3 of domain 1: 32 rows
        run = group.sharded(lambda idx: jax.lax.psum(group.prepare(idx)[8], ("dp", "ep")))
        error = failure_of(run, group.put(idx))
        assert isinstance(error, errors.CapacityOverflowError)
        assert error.fields["rank"] == 7
        assert (error.fields["demand"], error.fields["capacity"]) == (32, 31)


def test_the_lowest_rank_over_capacity_is_named():
    with open_group(on_overflow="error", recv_capacity_per_rank=40) as group:
        _, x = inputs(group)
        both = np.broadcast_to(np.int32([10, 5]), (8, TOKENS, TOP_K)).copy()  # ranks 5 and 2
        run = group.sharded(lambda idx, x: round_trip(group, idx, x))
        for _ in range(5):
            assert failure_of(run, group.put(both), x).fields["rank"] == 2


def test_closed_groups_and_removed_layers_are_stale():
    group = open_group(generation=17)
    idx, x = inputs(group)
    run = group.sharded(lambda idx, x: round_trip(group, idx, x))
    expect(run(idx, x), x)
    native.library().remove_layers(group.number, [group.layer_id])
    assert isinstance(failure_of(run, idx, x), errors.StaleHandleError)
    group.add_layers()
    expect(run(idx, x), x)
    group.close()
    error = failure_of(run, idx, x)
    assert isinstance(error, errors.StaleHandleError)
    assert error.fields["layer"] == "moe[0]"
    assert error.fields["generation"] == 17


def test_a_program_of_another_spec_is_stale():
    with opened() as (group, _, idx, x):
        run = group.sharded(lambda idx, x: round_trip(group, idx, x, fingerprint=FINGERPRINT + 1))
        error = failure_of(run, idx, x)
        assert isinstance(error, errors.StaleHandleError)
        assert "fingerprint" in str(error)
        stacked = group.sharded(lambda idx, x: round_trip(group, idx, x, index=3))
        assert "not registered" in str(failure_of(stacked, idx, x))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (board_abi.PoisonReason.CLOSED, errors.StaleHandleError),
        (board_abi.PoisonReason.RECLAIMED, errors.StaleHandleError),
        (board_abi.PoisonReason.FENCED, errors.SessionFencedError),
        (board_abi.PoisonReason.PEER_LOST, errors.PeerLostError),
    ],
)
def test_poison_ends_calls_that_wait(reason, kind):
    with opened(generation=5) as (group, _, idx, x):
        run = without_rank(group, 3, lambda out: (out, jax.lax.psum(out, "ep")))
        out, total = run(idx, x)
        waiting = {0, 1, 2, 4, 5, 6, 7}

        def who_waits():
            ranks = enumerate(board_records.read_ranks(group.board, group.layout))
            return {rank for rank, seen in ranks if seen.waiting_for == 3}

        wait_until(lambda: who_waits() == waiting, "seven ranks wait for the eighth")
        record = board_records.read_ranks(group.board, group.layout)[0]
        assert record.state is board_abi.RankState.MEETING
        assert record.op is board_abi.OpCode.PREPARE
        assert record.layer_id == group.layer_id
        board.poison(group.board, 4, reason, rank=3)  # an older generation: not ours
        started = time.monotonic()
        board.poison(group.board, 5, reason, rank=3, by=board.By(1234, 77, " on host a: why"))
        # The program ends without an error and without results: rank 3 waits for the others in the
        # sum.
        values, given = np.array(jax.block_until_ready(out)), np.asarray(x)
        np.testing.assert_array_equal(values[3], given[3])
        np.testing.assert_array_equal(values[[*waiting]], np.full_like(given[:7], np.nan))
        np.testing.assert_array_equal(total, np.full_like(given, np.nan))
        error = errors.parse(group.check())
        told = str(error)
        assert ("by uid 1234 (pid 77) with" in told) == (kind is not errors.PeerLostError)
        assert (" on host a: why" in told) == (kind is not errors.PeerLostError)
        assert time.monotonic() - started < 2
        assert type(error) is kind
        assert error.fields["generation"] == 5
        later = group.sharded(lambda idx, x: round_trip(group, idx, x))
        assert type(failure_of(later, idx, x)) is kind


def test_closing_a_group_ends_calls_that_wait():
    group = open_group()
    idx, x = inputs(group)
    out = without_rank(group, 3)(idx, x)
    told = board_records.read_ranks
    wait_until(lambda: told(group.board, group.layout)[0].waiting_for == 3, "rank 0 waits")
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started < 2
    assert isinstance(failure_of(lambda: out), errors.StaleHandleError)


def test_a_missing_rank_is_named_after_the_time_out_and_later_calls_work():
    with opened(op_timeout_s=0.5) as (group, run, idx, x):
        error = failure_of(without_rank(group, 3), idx, x)
        assert isinstance(error, errors.OpTimeoutError)
        assert error.fields["rank"] == 3
        assert error.fields["layer"] == "moe[0]"
        assert error.fields["op"] == "prepare"
        assert error.fields["waited_s"] >= 0.5
        for _ in range(3):
            expect(run(idx, x), x)


@pytest.mark.parametrize("wrong", [-1, 8, 99])
def test_an_error_of_one_rank_releases_its_peers(wrong):
    with opened() as (group, run, idx, x):

        def program(idx, x):
            me = jax.lax.axis_index("ep")
            return round_trip(group, idx, x, rank=jnp.where(me == 5, wrong, me))

        error = failure_of(group.sharded(program), idx, x)
        assert isinstance(error, errors.InvalidArgumentError)
        assert "rank must be in [0, 8)" in str(error)
        expect(run(idx, x), x)


def test_two_devices_of_one_rank_are_refused():
    with opened() as (group, _, idx, x):

        def program(idx, x):
            return round_trip(group, idx, x, rank=jax.lax.axis_index("ep") // 2)

        assert "two devices" in str(failure_of(group.sharded(program), idx, x))


def test_calls_of_different_layers_never_mix():
    with opened(num_layers=8) as (group, _, idx, x):
        mixed = group.sharded(
            lambda idx, x: round_trip(group, idx, x, index=jax.lax.axis_index("ep") // 7)
        )
        error = failure_of(mixed, idx, x)
        assert isinstance(error, errors.SpecMismatchError)
        assert "two calls met" in str(error)
        good = group.sharded(lambda idx, x: round_trip(group, idx, x, index=1))
        expect(good(idx, x), x)


# For each array, the first index that is out of range, with 8 ranks and `capacity` rows.
ONE_TOO_MANY = {
    "dst_rank": lambda ranks, capacity: jnp.full_like(ranks, 8),
    "staged_row": lambda rows, capacity: jnp.full_like(rows, capacity),
    "group_sizes": lambda sizes, capacity: sizes.at[0].add(capacity + 1 - sizes.sum()),
}


@pytest.mark.parametrize("name", ONE_TOO_MANY)
def test_an_error_inside_a_call_releases_its_peers(name):
    array = PLAN_NAMES.index(name)
    with opened() as (group, run, idx, x):

        def program(idx, x):
            plan = list(group.prepare(idx))
            beyond = ONE_TOO_MANY[name](plan[array], len(plan[4]))
            plan[array] = jnp.where(jax.lax.axis_index("ep") == 5, beyond, plan[array])
            return group.dispatch(x, None, tuple(plan))[0]

        error = failure_of(group.sharded(program), idx, x)
        assert isinstance(error, errors.InvalidArgumentError)
        assert f"the plan's {name} is not" in str(error)
        for _ in range(3):
            expect(run(idx, x), x)


@pytest.mark.parametrize("array", range(9))
def test_plans_that_were_changed_never_reach_memory_beyond_the_buffers(array):
    with opened(capacity_factor=None) as (group, run, idx, x):
        for value in (-(2**31), -2, 2**31 - 1, 1000):

            def program(idx, x, value=value):
                plan = list(group.prepare(idx))
                plan[array] = jnp.full_like(plan[array], value)
                recv, _ = group.dispatch(x, None, tuple(plan))
                return recv, group.combine(recv, None, tuple(plan))

            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.block_until_ready(group.sharded(program)(idx, x))
        expect(run(idx, x), x)


def test_a_program_of_another_version_is_refused_by_its_call():
    with opened() as (group, _, idx, x):

        def more_operands(idx, x):
            rows, _ = group.dispatch(x, None, group.prepare(idx))
            return group.combine(rows, None, (*group.prepare(idx), x))

        def more_attributes(idx, _):
            return group.prepare(idx, depth=np.int64(1))

        for program, wanted in (
            (more_operands, "gives 14 operands and 1 results, this library takes 13 and 1"),
            (more_attributes, "gives the attribute depth, which this library does not know"),
        ):
            error = failure_of(group.sharded(program), idx, x)
            assert isinstance(error, errors.VersionSkewError)
            assert wanted in str(error)
            assert "build the native library again" in str(error)


def test_wrong_operands_are_named():
    with opened() as (group, _, idx, x):

        def message(program, *args):
            return str(failure_of(group.sharded(program), *args))

        assert "tokens of one rank must be at most" in message(
            lambda i: group.prepare(jnp.concatenate([i, i])), idx
        )
        assert "top_k must be 2, got 1" in message(lambda i: group.prepare(i[:, :1]), idx)
        assert "topk_idx must be S32, got F32" in message(
            lambda i: group.prepare(i.astype(jnp.float32)), idx
        )
        assert "recv_capacity_per_rank" in message(lambda i: group.prepare(i, 10**5), idx)
        assert "hidden_size must be 64, got 8" in message(
            lambda i, x: group.dispatch(x[:, :8], None, group.prepare(i)), idx, x
        )
        assert "expert_out must be float32" in message(
            lambda i, x: group.combine(
                group.dispatch(x, None, group.prepare(i))[0].astype(jnp.int32),
                None,
                group.prepare(i),
            ),
            idx,
            x,
        )
        assert "handle must be below in_flight=1" in message(
            lambda i: group.prepare(i, handle=1), idx
        )
        assert "of shape [8, 2], got [8, 1]" in message(
            lambda i, x: group.dispatch(x, jnp.ones((8, 1)), group.prepare(i)), idx, x
        )


def test_a_full_meeting_table_is_an_error_with_advice():
    with opened() as (group, run, idx, x):
        expect(run(idx, x), x)
        where = group.layout.domains_offset
        control = board_abi.ControlStruct.from_buffer(group.board, where)
        free, used = control.free_slot, control.used_slots
        control.free_slot, control.used_slots = 0, board_abi.MEETING_SLOTS
        assert "more than 4096 calls" in str(failure_of(run, idx, x))
        control.free_slot, control.used_slots = free, used
        expect(run(idx, x), x)
        del control


def test_calls_outlive_the_executable_they_belong_to():
    with opened() as (group, run, idx, x):
        outs = [run(idx, x) for _ in range(20)]
        del run
        jax.clear_caches()
        gc.collect()
        for out in outs:
            expect(out, x)


def test_a_forked_child_starts_with_nothing_and_the_parent_goes_on():
    with opened() as (group, run, idx, x):
        expect(run(idx, x), x)
        child = os.fork()
        if child == 0:
            try:
                native.library().add_layers(group.number, [])
            except errors.StaleHandleError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        expect(run(idx, x), x)


def test_ranks_of_other_processes_are_refused_here():
    with opened(local_ranks=[0, 1, 2, 3, 4, 5, 6]) as (_, run, idx, x):
        error = failure_of(run, idx, x)
        assert isinstance(error, errors.InvalidArgumentError)
        assert "rank 7 is driven by another process" in str(error)


@pytest.mark.parametrize("ranks", [[0, 8], [-1], [3, 3]])
def test_local_ranks_are_checked(ranks):
    with pytest.raises(errors.InvalidArgumentError, match="local_ranks must be distinct"):
        open_group(local_ranks=ranks)
