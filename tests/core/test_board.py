"""Geometry of windows and boards, and the daemon's reads and writes on a board."""

import ctypes
import dataclasses
import mmap

import pytest

from ep_runtime import board, board_records
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec, make_group_spec


def spec_of(**changes) -> GroupSpec:
    values = {
        "name": "g",
        "mesh_axes": (("dp", 2), ("ep", 4)),
        "ep_axis": "ep",
        "outer_axes": "dp",
        "num_experts": 8,
        "hidden_size": 16,
        "max_tokens_per_rank": 6,
        "max_top_k": 2,
    }
    return make_group_spec(**(values | changes))


def formatted(spec: GroupSpec, generation: int = 7) -> mmap.mmap:
    buf = mmap.mmap(-1, board.board_bytes(spec))
    board.format_board(buf, spec, generation)
    return buf


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (board.BoardHeaderStruct, 256),
        (board.RankRecordStruct, 128),
        (board.HandleRecordStruct, 64),
        (board.ControlStruct, 64),
        (board.LaneStruct, 64),
        (board.MeetingSlotStruct, 256),
    ],
)
def test_structs_are_whole_lines(kind, size):
    assert ctypes.sizeof(kind) == size


def test_a_window_holds_rows_entries_and_counts_of_every_lane():
    spec = spec_of()
    rows = 4 * (6 * 16 * 2)  # each source's part is a multiple of 64 here
    entries = 4 * 128  # 6 tokens x 2 slots x 8 bytes = 96, on lines of 64
    counts = 4 * 64  # of 4 experts and, for all ranks, of 2 * 4 pairs of ranks
    assert board.lane_bytes(spec) == -(-(rows + entries + counts) // 4096) * 4096
    assert board.window_bytes(spec) == 2 * board.lane_bytes(spec)


def test_half_the_tokens_as_fp32_fit_where_all_fit_as_two_bytes():
    for tokens in (1, 3, 5):
        wide = spec_of(max_tokens_per_rank=tokens, hidden_size=4096)
        assert board.lane_bytes(wide) >= 4 * ((tokens + 1) // 2) * 4096 * 4


def test_the_header_says_what_was_formatted():
    spec = spec_of()
    header = board.read_header(formatted(spec))
    assert (header.generation, header.world_size, header.ep_size) == (7, 8, 4)
    assert (header.num_domains, header.lanes) == (2, 2)
    assert header.window_bytes == board.window_bytes(spec)
    assert header.poison_reason is board.PoisonReason.NONE


def test_poison_only_grows_and_keeps_its_first_reason():
    buf = formatted(spec_of())
    board.poison(buf, 7, board.PoisonReason.PEER_LOST, rank=3)
    board.poison(buf, 7, board.PoisonReason.CLOSED)
    header = board.read_header(buf)
    assert header.poison_generation == 7
    assert header.poison_reason is board.PoisonReason.PEER_LOST
    assert header.poison_rank == 3


def test_fresh_records_are_idle():
    buf = formatted(spec_of())
    ranks = board_records.read_ranks(buf, spec_of())
    assert len(ranks) == 8
    assert all(r.state is board.RankState.IDLE and r.waiting_for == -1 for r in ranks)
    (handle,) = board_records.read_handles(buf, spec_of(), [board.MAX_HANDLES - 1])
    assert handle.state is board.HandleState.IDLE
    assert handle.lane == -1


def test_rounds_are_in_the_last_word_of_a_handle():
    spec = spec_of()
    buf = formatted(spec)
    assert board_records.read_extra_chunks(buf, spec, board.MAX_HANDLES) == {}
    at = board.board_layout(spec).handles_offset
    for index, count in ((0, 2), (5, 1 << 63), (board.MAX_HANDLES - 1, 7)):
        word = ctypes.c_uint64.from_buffer(buf, at + 64 * index + 56)
        word.value = count
    assert board_records.read_extra_chunks(buf, spec, board.MAX_HANDLES - 1) == {0: 2, 5: 1 << 63}
    before, handle, after = board_records.read_handles(buf, spec, [4, 5, 6])
    assert (before.rounds, handle.rounds, after.rounds) == (0, 1 << 63, 0)


def on_devices(**changes) -> GroupSpec:
    return dataclasses.replace(spec_of(**changes), transport="nvlink")


def test_rows_of_ranks_on_devices_lie_apart_and_add_up():
    spec = on_devices()
    where = board.board_layout(spec)
    table = board.MAX_HANDLES * ctypes.sizeof(board.DeviceRowsStruct)
    assert where.device_rows_offset % board.PAGE_BYTES == table % board.PAGE_BYTES == 0
    assert where.board_bytes == where.device_rows_offset + spec.world_size * table
    assert where.device_rows_offset == board.board_bytes(spec_of())
    buf = formatted(spec)
    for rank in (0, 3, 7):
        at = where.device_rows_offset + rank * table + 5 * ctypes.sizeof(board.DeviceRowsStruct)
        record = board.DeviceRowsStruct.from_buffer(buf, at)
        record.rows, record.dropped_rows = 100 + rank, rank
    before, handle, after = board_records.read_handles(buf, spec, [4, 5, 6])
    assert (handle.rows, handle.dropped_rows) == (310, 10)
    assert before.rows == after.rows == 0


def test_a_board_carries_the_time_for_devices():
    buf = formatted(on_devices())
    board.tell_time(buf, 1 << 40)
    assert board.BoardHeaderStruct.from_buffer(buf).now_ns == 1 << 40


def test_wrong_buffers_and_indices_are_refused():
    spec = spec_of()
    with pytest.raises(InvalidArgumentError, match="buf must hold"):
        board.format_board(mmap.mmap(-1, 4096), spec, 1)
    with pytest.raises(InvalidArgumentError, match="version"):
        board.read_header(mmap.mmap(-1, 4096))
    with pytest.raises(InvalidArgumentError, match="handle index"):
        board_records.read_handles(formatted(spec), spec, [board.MAX_HANDLES])
    with pytest.raises(InvalidArgumentError, match="1024"):
        board.board_bytes(spec_of(mesh_axes=(("dp", 512), ("ep", 4))))
