"""Tests the layout of windows and boards, and the daemon's reads and writes on a board."""

import ctypes
import dataclasses
import mmap

import pytest

from ep_runtime import board, board_abi, board_records
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import STATE, GroupSpec, make_group_spec


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
    where = board.board_layout(spec)
    buf = mmap.mmap(-1, where.board_bytes)
    board.format_board(buf, where, generation)
    return buf


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (board_abi.BoardHeaderStruct, 320),
        (board_abi.RankRecordStruct, 128),
        (board_abi.HandleRecordStruct, 64),
        (board_abi.ControlStruct, 64),
        (board_abi.LaneStruct, 64),
        (board_abi.MeetingSlotStruct, 128),
    ],
)
def test_structs_are_whole_lines(kind, size):
    assert ctypes.sizeof(kind) == size


def test_a_window_holds_rows_entries_and_counts_of_every_lane():
    spec = spec_of()
    rows = 4 * (6 * 16 * 2)  # each source's part is a multiple of 64 here
    entries = 4 * 128  # 6 tokens x 2 slots x 8 bytes = 96, on lines of 64
    counts = 4 * 64  # numbers of 4 experts, and of all 2 * 4 pairs of ranks
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
    assert (header.num_here, header.num_domains, header.lanes) == (8, 2, 2)
    assert header.window_bytes == board.window_bytes(spec)
    assert header.poison_reason is board_abi.PoisonReason.NONE


def test_poison_only_grows_and_keeps_its_first_reason():
    buf = formatted(spec_of())
    board.poison(buf, 7, board_abi.PoisonReason.PEER_LOST, rank=3)
    board.poison(buf, 7, board_abi.PoisonReason.CLOSED)
    header = board.read_header(buf)
    assert header.poison_generation == 7
    assert header.poison_reason is board_abi.PoisonReason.PEER_LOST
    assert header.poison_rank == 3


def test_fresh_records_are_idle():
    buf, where = formatted(spec_of()), board.board_layout(spec_of())
    ranks = board_records.read_ranks(buf, where)
    assert len(ranks) == 8
    assert all(r.state is board_abi.RankState.IDLE and r.waiting_for == -1 for r in ranks)
    (handle,) = board_records.read_handles(buf, where, [board_abi.MAX_HANDLES - 1])
    assert handle.state is board_abi.HandleState.IDLE
    assert handle.lane == -1


def test_rounds_are_in_the_last_word_of_a_handle():
    buf, where = formatted(spec_of()), board.board_layout(spec_of())
    assert board_records.read_extra_chunks(buf, where, board_abi.MAX_HANDLES) == {}
    at = where.handles_offset
    for index, count in ((0, 2), (5, 1 << 63), (board_abi.MAX_HANDLES - 1, 7)):
        word = ctypes.c_uint64.from_buffer(buf, at + 64 * index + 56)
        word.value = count
    assert board_records.read_extra_chunks(buf, where, board_abi.MAX_HANDLES - 1) == {
        0: 2,
        5: 1 << 63,
    }
    before, handle, after = board_records.read_handles(buf, where, [4, 5, 6])
    assert (before.rounds, handle.rounds, after.rounds) == (0, 1 << 63, 0)


def on_devices(**changes) -> GroupSpec:
    return dataclasses.replace(spec_of(**changes), transport="nvlink")


def test_rows_of_ranks_on_devices_lie_apart_and_add_up():
    spec = on_devices()
    where = board.board_layout(spec)
    table = board_abi.MAX_HANDLES * ctypes.sizeof(board_abi.DeviceRowsStruct)
    assert where.device_rows_offset % board_abi.PAGE_BYTES == table % board_abi.PAGE_BYTES == 0
    assert where.board_bytes == where.device_rows_offset + spec.world_size * table
    assert (where.world_offset, where.num_domains) == (0, 0)  # calls meet in their windows
    buf = formatted(spec)
    for rank in (0, 3, 7):
        at = where.device_rows_offset + rank * table + 5 * ctypes.sizeof(board_abi.DeviceRowsStruct)
        record = board_abi.DeviceRowsStruct.from_buffer(buf, at)
        record.rows, record.dropped_rows = 100 + rank, rank
    before, handle, after = board_records.read_handles(buf, where, [4, 5, 6])
    assert (handle.rows, handle.dropped_rows) == (310, 10)
    assert before.rows == after.rows == 0


def test_a_board_carries_the_time_for_devices():
    buf = formatted(on_devices())
    board.tell_time(buf, 1 << 40)
    assert board_abi.BoardHeaderStruct.from_buffer(buf).now_ns == 1 << 40


def test_wrong_buffers_and_indices_are_refused():
    spec, where = spec_of(), board.board_layout(spec_of())
    with pytest.raises(InvalidArgumentError, match="buf must hold"):
        board.format_board(mmap.mmap(-1, 4096), where, 1)
    with pytest.raises(InvalidArgumentError, match="version"):
        board.read_header(mmap.mmap(-1, 4096))
    with pytest.raises(InvalidArgumentError, match="handle index"):
        board_records.read_handles(formatted(spec), where, [board_abi.MAX_HANDLES])
    with pytest.raises(InvalidArgumentError, match="8192 devices, got 8196"):
        board.board_bytes(spec_of(mesh_axes=(("dp", 2049), ("ep", 4))))
    with pytest.raises(InvalidArgumentError, match=r"ranks must be in 0\.\.7, got 3 to 8"):
        board.board_bytes(spec, [8, 3])


def test_a_board_has_records_of_its_nodes_ranks_alone():
    spec = spec_of()
    where = board.board_layout(spec, [4, 5, 6, 7])
    buf = mmap.mmap(-1, where.board_bytes)
    board.format_board(buf, where, 7)
    header = board.read_header(buf)
    assert (header.world_size, header.num_here, header.num_domains) == (8, 4, 1)
    assert [where.seat(rank) for rank in range(-1, 9)] == [*[None] * 5, 0, 1, 2, 3, None]
    seats = (ctypes.c_uint32 * 8).from_buffer(buf, where.seats_offset)
    assert [*seats] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert where.world_offset == 0  # the other states cannot be reached here
    assert where.ranks_offset + 4 * 128 == where.handles_offset
    at = where.ranks_offset + 128 * 2
    board_abi.RankRecordStruct.from_buffer(buf, at).rows = 9
    of_node = board_records.read_ranks(buf, where)
    assert [record.rows for record in of_node] == [0, 0, 9, 0]
    assert [r and r.rows for r in board_records.read_ranks(buf, where, [0, 6])] == [None, 9]
    assert board_records.read_ops(buf, where, 0) == {}
    assert board_records.read_load(buf, where, 0, [0]) is None


def test_a_board_grows_with_its_nodes_ranks_and_by_a_word_for_each_other_rank():
    def size(ranks: int, transport: str = "nccl", on_node: int = 8) -> int:
        spec = spec_of(mesh_axes=(("ep", ranks),), outer_axes=(), num_experts=8 * ranks)
        spec = dataclasses.replace(spec, transport=transport, node_size=8)
        return board.board_bytes(spec, range(on_node))

    for transport in ("nccl", "memfd"):
        assert size(8192, transport) - size(1024, transport) == 4 * (8192 - 1024)
        assert size(1024, transport, 16) < 2 * size(1024, transport)
    table = board_abi.MAX_HANDLES * ctypes.sizeof(board_abi.DeviceRowsStruct)
    assert size(4096) < 8 * table + (3 << 20)


def test_a_copy_of_a_state_has_no_records_of_calls():
    spec = spec_of(mesh_axes=(("p", 4096),), ep_axis="p", outer_axes=(), num_experts=4096)
    where = board.board_layout(dataclasses.replace(spec, transport=STATE), range(8, 16))
    assert (where.tallies_offset, where.device_rows_offset, where.num_domains) == (0, 0, 0)
    assert where.board_bytes < 2 << 20
    buf = mmap.mmap(-1, where.board_bytes)
    board.format_board(buf, where, 1)
    assert board_records.read_ops(buf, where, 8) == {}
