"""Tests communicators over a fake libnccl: made together, watched, aborted, closed."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nccl_ranks
import numpy as np
import pytest
from harness import eventually
from nccl_builds import edge_library
from nccl_ranks import WAIT_S

from ep_runtime import nccl
from ep_runtime.errors import (
    EpRuntimeError,
    OpTimeoutError,
    PeerLostError,
    StaleHandleError,
)
from ep_runtime.native_abi import LayerStruct

RANKS = 4
_ids = itertools.count(1)
fake = nccl_ranks.fake


@pytest.fixture
def library(fake):
    return nccl.NcclLibrary(edge_library())


def unique_id() -> bytes:
    return next(_ids).to_bytes(8, "little").ljust(nccl.UNIQUE_ID_BYTES, b"\1")


def ranks_of(world_ranks=range(RANKS), ep_size=RANKS, op_timeout_s=WAIT_S) -> nccl.Ranks:
    ours = tuple(world_ranks)
    return nccl.Ranks("g", 5, ep_size, ours, ours, op_timeout_s)


class Edge:
    """One rank's part of one call, as a custom call's handler makes it."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(str(edge_library()))
        self._library.TestExchange.restype = ctypes.c_int64

    def exchange(self, group, run, device, blocks, *, node_size=0, rail=False, gathers=0):
        """Exchanges blocks [P, ...], or gathers P copies of one block [...]."""
        text = ctypes.create_string_buffer(4096)
        out = np.zeros((gathers, *blocks.shape) if gathers else blocks.shape, blocks.dtype)
        result = self._library.TestExchange(
            *(ctypes.c_int64(group.number), ctypes.c_uint64(run), device),
            *(ctypes.c_int64(node_size), int(rail), int(gathers > 0)),
            *(blocks.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p)),
            *(ctypes.c_int64(out[0].nbytes), text, ctypes.c_int64(len(text))),
        )
        if result == 0:
            return out
        return f"{'the run' if result == -1 else 'the call'}: {text.value.decode()}"

    def all(self, group, run, blocks, **how) -> list[Any]:
        """Runs every rank of `blocks` on its own thread; returns results or error texts."""
        call = functools.partial(self.exchange, group, run, **how)
        with ThreadPoolExecutor(len(blocks)) as pool:
            return [*pool.map(call, range(len(blocks)), blocks, timeout=WAIT_S)]


@pytest.fixture
def group(library):
    made = library.make_group(ranks_of(), [unique_id()])
    made.init(WAIT_S)
    yield made
    made.close()


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def blocks_of(count: int, ranks: int = RANKS) -> list[np.ndarray]:
    return [
        np.arange(count * 3, dtype=np.int32).reshape(count, 3) + 100 * rank for rank in range(ranks)
    ]


def test_the_version_is_the_loaded_librarys(library):
    assert library.version() == 22809
    assert nccl.version_text(22809) == "2.28.9"


def test_blocks_arrive_from_every_rank_of_the_domain(group):
    blocks = blocks_of(RANKS)
    found = Edge().all(group, 1, blocks)
    for rank, out in enumerate(found):
        np.testing.assert_array_equal(out, [blocks[peer][rank] for peer in range(RANKS)])


def test_rails_are_ranks_of_the_same_place_on_each_node(group):
    blocks = blocks_of(2)
    found = Edge().all(group, 1, blocks, node_size=2, rail=True)
    for rank, out in enumerate(found):
        rail = [rank % 2, rank % 2 + 2]
        np.testing.assert_array_equal(out, [blocks[peer][rank // 2] for peer in rail])


def test_an_all_gather_brings_one_block_of_each_rank(group):
    blocks = [np.arange(5, dtype=np.int32) + 10 * rank for rank in range(RANKS)]
    for out in Edge().all(group, 1, blocks, gathers=RANKS):
        np.testing.assert_array_equal(out, blocks)


def test_nodes_exchange_among_themselves(group):
    blocks = blocks_of(2)
    found = Edge().all(group, 1, blocks, node_size=2)
    for rank, out in enumerate(found):
        first = rank // 2 * 2
        np.testing.assert_array_equal(out, [blocks[first][rank % 2], blocks[first + 1][rank % 2]])


@pytest.mark.parametrize(
    ("rank", "node_size", "rail", "want"),
    [
        (5, 0, 0, [0, 1, 8, 5]),
        (5, 4, 1, [1, 4, 2, 1]),
        (5, 4, 0, [4, 1, 4, 1]),
        (5, 1, 1, [0, 1, 8, 5]),
        (5, 1, 0, [5, 1, 1, 0]),
    ],
)
def test_peers_follow_from_the_node_size(rank, node_size, rail, want):
    out = (ctypes.c_int64 * 4)()
    library = ctypes.CDLL(str(edge_library()))
    library.TestPeers(*(ctypes.c_int64(n) for n in (rank, 8, node_size)), rail, out)
    assert list(out) == want


def test_each_domain_has_communicators_of_its_own(library, fake):
    made = library.make_group(ranks_of(ep_size=2), [unique_id(), unique_id()])
    made.init(WAIT_S)
    blocks = blocks_of(2)
    found = Edge().all(made, 1, blocks)
    for rank, out in enumerate(found):
        first = rank // 2 * 2
        np.testing.assert_array_equal(out, [blocks[first][rank % 2], blocks[first + 1][rank % 2]])
    made.close()
    assert fake.count("aborts") == fake.count("inits") == RANKS


def test_a_close_waits_for_what_peers_still_read_and_aborts_all_together(library, fake):
    fake.set("wait_for_all_aborts", 1)
    made = library.make_group(ranks_of(), [unique_id()])
    made.init(WAIT_S)
    made.close()
    assert fake.count("finalizes") == fake.count("aborts") == RANKS
    assert fake.count("hangs") == 0


@pytest.mark.slow
def test_a_finalize_that_never_ends_does_not_keep_a_close(library, fake):
    made = library.make_group(ranks_of(), [unique_id()])
    made.init(WAIT_S)
    fake.set("never_final", 1)
    started = time.monotonic()
    made.close()
    assert time.monotonic() - started < 8
    assert fake.count("aborts") == RANKS


def test_ranks_that_do_not_come_end_the_init_at_its_deadline(library, fake):
    made = library.make_group(ranks_of(range(RANKS - 1)), [unique_id()])
    with pytest.raises(OpTimeoutError, match=r"init of rank \d"):
        made.init(0.2)
    assert fake.count("aborts") == fake.count("inits") == RANKS - 1
    made.close()


def test_an_abort_ends_an_init_that_waits(library, fake):
    fake.set("never_ready", 1)
    made = library.make_group(ranks_of(), [unique_id()])
    errors: list[EpRuntimeError] = []

    def init() -> None:
        try:
            made.init(WAIT_S)
        except EpRuntimeError as error:
            errors.append(error)

    thread = in_thread(init)
    eventually(lambda: fake.count("inits") == RANKS, within_s=WAIT_S)
    made.abort(PeerLostError("the process of rank 3 is gone", rank=3))
    thread.join(WAIT_S)
    assert isinstance(errors[0], PeerLostError)
    assert errors[0].fields["rank"] == 3
    assert fake.count("aborts") == RANKS


def test_an_init_that_nccl_refuses_says_what_nccl_says(library, fake):
    fake.set("init_result", 6)
    made = library.make_group(ranks_of(), [unique_id()])
    with pytest.raises(EpRuntimeError, match="remote process exited"):
        made.init(WAIT_S)


def test_a_lost_peer_ends_calls_under_way_and_the_next_run(group, fake):
    fake.set("never_done", 1)
    found: list[Any] = []
    thread = in_thread(lambda: found.extend(Edge().all(group, 1, blocks_of(RANKS))))
    eventually(lambda: fake.count("inits") == RANKS, within_s=WAIT_S)
    group.abort(PeerLostError("the process of rank 2 is gone", rank=2))
    thread.join(WAIT_S)
    assert all("PeerLostError" in text for text in found), found
    assert fake.count("aborts") == RANKS
    late = Edge().exchange(group, 2, 0, blocks_of(RANKS)[0])
    assert "PeerLostError" in late
    assert "rank 2" in str(group.check())
    assert group.check() is None


def marks(none: bool = False) -> int:
    return int(ctypes.CDLL(str(edge_library())).TestMarks(int(none)))


def test_every_communicator_has_an_abort_mark_until_the_group_closes(library):
    before = marks()
    made = library.make_group(ranks_of(), [unique_id()])
    made.init(WAIT_S)
    assert marks() - before == RANKS
    marked = ctypes.CDLL(str(edge_library())).TestMarksSet
    so_far = marked()
    made.abort(PeerLostError("gone", rank=1))
    assert marked() - so_far == RANKS
    assert marks() - before == RANKS
    made.close()
    eventually(lambda: marks() == before, within_s=WAIT_S)


def test_a_communicator_without_its_mark_ends_the_init_of_all(library, fake):
    before = marks(none=True)
    try:
        made = library.make_group(ranks_of(), [unique_id()])
        with pytest.raises(EpRuntimeError, match="no mark"):
            made.init(WAIT_S)
        made.close()
        assert fake.count("inits") == fake.count("aborts")
    finally:
        marks(none=False)
    assert marks() == before


def test_the_first_call_of_a_run_decides_for_all_devices(group):
    blocks = blocks_of(RANKS)
    Edge().all(group, 1, blocks)
    group.abort(PeerLostError("gone", rank=1))
    assert Edge().exchange(group, 1, 0, blocks[0]).startswith("the call: EP_RUNTIME/PeerLostError")
    assert Edge().exchange(group, 2, 0, blocks[0]).startswith("the run: EP_RUNTIME/PeerLostError")


@pytest.mark.parametrize("finder", ["a call", "the watcher"])
def test_who_is_gone_is_said_where_nccl_only_knows_that_somebody_is(group, fake, finder):
    found: list[Any] = []
    calls: threading.Thread | None = None
    if finder == "a call":
        fake.set("never_done", 1)
        calls = in_thread(lambda: found.extend(Edge().all(group, 1, blocks_of(RANKS))))
        eventually(lambda: fake.count("inits") == RANKS, within_s=WAIT_S)
    fake.set("async_error", 6)
    assert group.await_failure(0.2) == ""  # nobody has reported the rank
    assert fake.count("aborts") == 0
    group.abort(PeerLostError("the process of rank 2 is gone", rank=2))
    if calls is not None:
        calls.join(WAIT_S)
        assert all("process of rank 2 is gone" in text for text in found), found
    assert "rank 2" in str(group.check())
    assert fake.count("aborts") == RANKS


def test_a_lost_peer_of_which_nobody_says_more_is_a_lost_peer(group, fake):
    fake.set("async_error", 6)
    eventually(lambda: fake.count("aborts") == RANKS, within_s=WAIT_S)
    assert "remote process exited" in str(group.check())
    late = Edge().exchange(group, 1, 0, blocks_of(RANKS)[0])
    assert "EP_RUNTIME/PeerLostError: NCCL" in late
    assert "remote process exited" in late


def test_a_silent_peer_ends_a_call_at_the_op_timeout(library, fake):
    made = library.make_group(ranks_of(op_timeout_s=0.3), [unique_id()])
    made.init(WAIT_S)
    text = Edge().exchange(made, 1, 0, blocks_of(RANKS)[0])
    assert "OpTimeoutError" in text
    eventually(lambda: fake.count("aborts") == RANKS, within_s=WAIT_S)
    made.close()


def test_a_call_that_needs_a_rank_that_left_ends_at_once(library, fake):
    made = library.make_group(ranks_of(), [unique_id()])
    made.init(WAIT_S)
    made.rank_left(3, PeerLostError("the process of rank 3 closed group 'g'", rank=3))
    # The other processes' rail continues, and so does the group.
    blocks, found = blocks_of(2), [None, None]

    def work(which):
        found[which] = Edge().exchange(
            made, 1, 2 * which, blocks[2 * which], node_size=2, rail=True
        )

    threads = [in_thread(lambda which=which: work(which)) for which in range(2)]
    for thread in threads:
        thread.join(WAIT_S)
    np.testing.assert_array_equal(found[0][1], blocks[2][0])
    assert made.await_failure(0.01) == ""
    started = time.monotonic()
    late = Edge().exchange(made, 2, 1, blocks[1], node_size=2, rail=True)
    assert "PeerLostError" in late
    assert "closed group 'g'" in late
    assert time.monotonic() - started < 2.0
    assert "rank 3" in made.await_failure(WAIT_S)
    eventually(lambda: fake.count("aborts") == RANKS, within_s=WAIT_S)
    made.close()
    assert made.await_failure(WAIT_S) is None


def test_who_awaits_a_failure_hears_of_it_and_of_the_close(library, fake):
    made = library.make_group(ranks_of(), [unique_id()])
    made.init(WAIT_S)
    heard: list[Any] = []
    thread = in_thread(lambda: heard.extend([made.await_failure(WAIT_S)]))
    fake.set("async_error", 6)
    thread.join(WAIT_S)
    assert "remote process exited" in heard[0]
    fake.set("async_error", 0)
    other = library.make_group(ranks_of(), [unique_id()])
    other.init(WAIT_S)
    thread = in_thread(lambda: heard.extend([other.await_failure(WAIT_S)]))
    other.close()
    thread.join(WAIT_S)
    assert heard[1] is None
    made.close()


def test_groups_form_again_and_again_with_new_ids(library, fake):
    for turn in range(10):
        made = library.make_group(ranks_of(), [unique_id()])
        made.init(WAIT_S)
        blocks = blocks_of(RANKS)
        found = Edge().all(made, turn, blocks)
        np.testing.assert_array_equal(found[0][1], blocks[1][0])
        made.abort(PeerLostError("gone", rank=turn % RANKS))
        made.close()
    assert fake.count("aborts") == fake.count("inits") == 10 * RANKS


def test_a_closed_group_is_not_found(group, library):
    group.close()
    with pytest.raises(StaleHandleError, match="no open group"):
        group.add_layers([LayerStruct(1, b"moe", 2)])


def test_an_id_for_each_domain_is_wanted(library):
    with pytest.raises(EpRuntimeError, match="one id per EP domain"):
        library.make_group(ranks_of(ep_size=2), [unique_id()])
    with pytest.raises(EpRuntimeError, match="128 bytes"):
        library.make_group(ranks_of(), [b"short"])
