"""Tests the native library's table, and that C++ and Python agree on every shared size."""

import ctypes
import mmap
import os

import pytest
from raw_client import make_spec as spec_of

from ep_runtime import board, board_abi, board_records, native, native_abi
from ep_runtime.errors import (
    InvalidArgumentError,
    RuntimeUnavailableError,
    SpecMismatchError,
    StaleHandleError,
    VersionSkewError,
)
from ep_runtime.specs import GroupSpec


def memfd(size: int) -> int:
    fd = os.memfd_create("ep-test")
    os.truncate(fd, size)
    return fd


@pytest.fixture
def files():
    """Makes formatted board and window fds for a spec; closes them at the end."""
    opened = []

    def make(spec: GroupSpec, generation: int = 1) -> tuple[int, list[int]]:
        board_fd = memfd(board.board_bytes(spec))
        windows = [memfd(board.window_bytes(spec)) for _ in range(spec.world_size)]
        opened.extend([board_fd, *windows])
        with mmap.mmap(board_fd, board.board_bytes(spec)) as view:
            board.format_board(view, board.board_layout(spec), generation)
        return board_fd, windows

    yield make
    for fd in opened:
        os.close(fd)


STRUCTS = {**native_abi.STRUCTS, **board_abi.STRUCTS}


def changed(struct: type[ctypes.Structure], fields: list[tuple]) -> type[ctypes.Structure]:
    return type(struct.__name__, (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_that_differs_in_any_field_is_refused_by_its_name(name):
    library, fields = native.library(), STRUCTS[name]._fields_
    for i in range(len(fields)):
        following = (i + 1) % len(fields)
        swapped = list(fields)
        swapped[i], swapped[following] = swapped[following], swapped[i]
        renamed = [*fields[:i], ("other", *fields[i][1:]), *fields[i + 1 :]]
        without = [*fields[:i], *fields[i + 1 :]]
        for theirs in (swapped, renamed, without):
            if [field[0] for field in theirs] == [field[0] for field in fields]:
                continue  # only one field
            with pytest.raises(VersionSkewError, match=rf"{name}[.\w]* is .* there and .* here"):
                library.check_structs({**STRUCTS, name: changed(STRUCTS[name], theirs)})


def test_a_struct_and_a_function_of_other_kinds_are_refused():
    library = native.library()
    layer = [
        (n, ctypes.c_uint64 if n == "top_k" else k) for n, k in native_abi.LayerStruct._fields_
    ]
    with pytest.raises(
        VersionSkewError, match=r"EpLayer\.top_k is 24 8 i64 there and 24 8 u64 here"
    ):
        library.check_structs({**STRUCTS, "EpLayer": changed(native_abi.LayerStruct, layer)})
    one_less = ctypes.CFUNCTYPE(None, ctypes.c_int64)
    table = [(n, one_less if n == "close_group" else k) for n, k in native_abi.TableStruct._fields_]
    with pytest.raises(
        VersionSkewError, match=r"close_group is .* v\(i64,i64\) there .* v\(i64\) h"
    ):
        library.check_structs({**STRUCTS, "EpTable": changed(native_abi.TableStruct, table)})


def test_a_struct_or_constant_that_one_side_lacks_is_refused(monkeypatch):
    library = native.library()
    library.check_structs(STRUCTS)
    with pytest.raises(VersionSkewError, match="EpLayer is 56 there and missing here"):
        library.check_structs({k: v for k, v in STRUCTS.items() if k != "EpLayer"})
    with pytest.raises(VersionSkewError, match="More is missing there and 16 here"):
        library.check_structs({**STRUCTS, "More": native_abi.TextStruct})
    monkeypatch.setitem(board_abi.CONSTANTS, "kBoardVersion", board_abi.VERSION + 1)
    with pytest.raises(VersionSkewError, match=r"kBoardVersion is \d+ there and \d+ here; build"):
        native.NativeLibrary()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
@pytest.mark.parametrize("hidden", [1, 100, 512])
def test_window_bytes_agree_with_the_library(dtype, tokens, hidden):
    spec = spec_of(max_token_dtype=dtype, max_tokens_per_rank=tokens, hidden_size=hidden, lanes=3)
    assert native.library().window_bytes(spec) == board.window_bytes(spec)


@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_windows_of_a_node_hold_what_a_rail_sends(node_size):
    sizes = {"num_experts": 16, "hidden_size": 100, "max_tokens_per_rank": 33}
    spec = spec_of(mesh_axes=(("dp", 2), ("ep", 8)), node_size=node_size, **sizes)
    assert native.library().window_bytes(spec) == board.window_bytes(spec)
    as_one = spec_of(
        mesh_axes=(("ep", node_size),),
        **(sizes | {"num_experts": 2 * node_size, "max_tokens_per_rank": 33 * 8 // node_size}),
    )
    assert board.window_bytes(spec) == board.window_bytes(as_one)
    assert board.board_layout(spec).domain_bytes == board.board_layout(as_one).domain_bytes


@pytest.mark.parametrize(("ranks", "lanes"), [(1, 0), (1, 1), (8, 2), (64, 1), (65, 1), (8192, 4)])
def test_control_bytes_agree_with_the_library(ranks, lanes):
    assert native.library().control_bytes(ranks, lanes) == board.control_bytes(ranks, lanes)


def test_every_op_has_a_versioned_target():
    targets = native.library().targets()
    assert [t.name for t in targets] == [
        "ep_prepare_v1",
        "ep_dispatch_v1",
        "ep_combine_v1",
        "ep_dispatch_bwd_v1",
        "ep_combine_bwd_v1",
    ]
    assert all(t.instantiate_ptr and t.execute_ptr for t in targets)
    assert all(native.library().state_type())


def test_a_missing_library_says_where_it_should_be(tmp_path):
    with pytest.raises(RuntimeUnavailableError, match=r"nothing\.so"):
        native.NativeLibrary(tmp_path / "nothing.so")


def test_a_group_opens_and_closes(files):
    spec = spec_of()
    board_fd, windows = files(spec, generation=3)
    group = native.library().open_group(
        spec, generation=3, board_fd=board_fd, window_fds=windows, debug=False
    )
    layer = native_abi.LayerStruct(
        id=5, name=b"moe", fingerprint=9, top_k=2, alignment=1, in_flight=1, handle_base=0
    )
    native.library().add_layers(group, [layer])
    native.library().poison_staging(group, 0xAB)
    assert os.pread(windows[1], 4, 100) == b"\xab" * 4
    assert native.library().check_group(group) is None
    native.library().remove_layers(group, [5])
    native.library().close_group(group)
    with pytest.raises(StaleHandleError, match="no open group"):
        native.library().add_layers(group, [layer])


def test_a_board_of_another_group_is_refused(files):
    spec = spec_of()
    board_fd, windows = files(spec, generation=3)
    opened = native.library().open_group
    with pytest.raises(StaleHandleError, match="generation 3, asked for 4"):
        opened(spec, generation=4, board_fd=board_fd, window_fds=windows, debug=False)
    with pytest.raises(SpecMismatchError, match="windows of"):
        opened(
            spec_of(hidden_size=512),
            generation=3,
            board_fd=board_fd,
            window_fds=windows,
            debug=False,
        )
    with pytest.raises(InvalidArgumentError, match="one fd per world rank, 2, got 1"):
        opened(spec, generation=3, board_fd=board_fd, window_fds=windows[:1], debug=False)
    empty_window = memfd(0)
    with pytest.raises(InvalidArgumentError, match="window must hold"):
        opened(
            spec,
            generation=3,
            board_fd=board_fd,
            window_fds=[windows[0], empty_window],
            debug=False,
        )
    os.close(empty_window)
    empty = memfd(board.board_bytes(spec))
    with pytest.raises(VersionSkewError, match="version 0"):
        opened(spec, generation=3, board_fd=empty, window_fds=windows, debug=False)
    os.close(empty)


def test_a_node_of_the_largest_mesh_opens_its_part():
    ranks, here = board_abi.MAX_WORLD_RANKS, range(4096, 4104)
    spec = spec_of(mesh_axes=(("ep", ranks),), num_experts=ranks, node_size=4)
    where = board.board_layout(spec, here)
    board_fd = memfd(where.board_bytes)
    windows = {rank: memfd(board.window_bytes(spec)) for rank in here}
    with mmap.mmap(board_fd, 0) as view:
        board.format_board(view, where, 1)
        options = {"generation": 1, "board_fd": board_fd, "debug": True}
        fds = [windows.get(rank, -1) for rank in range(ranks)]
        group = native.library().open_group(
            spec, window_fds=fds, local_ranks=[4098, 4099, 4101], **options
        )
        pids = [record.pid for record in board_records.read_ranks(view, where)]
        assert pids == [0, 0, os.getpid(), os.getpid(), 0, os.getpid(), 0, 0]
        native.library().close_group(group)
        assert board.left_ranks(board_fd) == [4098, 4099, 4101]
        with pytest.raises(InvalidArgumentError, match="has 8 ranks of this node, and rank 7 is"):
            native.library().open_group(
                spec, window_fds=[windows[4096]] * ranks, local_ranks=[7], **options
            )
        seats = (ctypes.c_uint32 * ranks).from_buffer(view, where.seats_offset)
        for rank, seat in ((4097, 9), (4097, 0), (4097, 3), (0, 1)):
            before, seats[rank] = seats[rank], seat
            with pytest.raises(InvalidArgumentError, match="board of group moe has"):
                native.library().open_group(spec, window_fds=fds, local_ranks=[4098], **options)
            seats[rank] = before
        del seats
    for fd in (board_fd, *windows.values()):
        os.close(fd)


def test_windows_of_other_nodes_may_be_missing_and_no_others(files):
    spec = spec_of(mesh_axes=(("ep", 4),), node_size=2)
    board_fd, windows = files(spec)
    opened = native.library().open_group
    options = {"generation": 1, "board_fd": board_fd, "debug": True}
    group = opened(spec, window_fds=[*windows[:2], -1, -1], local_ranks=[0, 1], **options)
    native.library().poison_staging(group, 0xAB)
    native.library().close_group(group)
    with pytest.raises(InvalidArgumentError, match="none of rank 1, which shares windows with r"):
        opened(spec, window_fds=[windows[0], -1, -1, -1], local_ranks=[0], **options)
    with pytest.raises(InvalidArgumentError, match="none of rank 2, which shares windows with r"):
        opened(spec, window_fds=[*windows[:2], -1, -1], local_ranks=[0, 1, 2, 3], **options)
    with pytest.raises(InvalidArgumentError, match="none of rank 2, which shares windows with r"):
        opened(
            spec_of(mesh_axes=(("ep", 4),)),
            window_fds=[*windows[:2], -1, -1],
            local_ranks=[0, 1],
            **options,
        )


def test_handles_beyond_the_board_are_refused(files):
    spec = spec_of()
    board_fd, windows = files(spec)
    group = native.library().open_group(
        spec, generation=1, board_fd=board_fd, window_fds=windows, debug=False
    )
    layer = native_abi.LayerStruct(
        id=6, name=b"far", fingerprint=9, top_k=2, alignment=1, in_flight=1, handle_base=16384
    )
    with pytest.raises(InvalidArgumentError, match="below 16384"):
        native.library().add_layers(group, [layer])
    native.library().close_group(group)
