"""Computes `top`, `load` and `skew` from two reads of the boards, and the screen of `top`."""

from __future__ import annotations

import copy
import os
from typing import Any

import fixed_daemon as fixed
import pytest

from ep_runtime_client.cli import tables
from ep_runtime_client.cli.commands import load
from ep_runtime_client.cli.ranks import board_samples, rows, screen
from ep_runtime_client.readers import figures, tallies
from ep_runtime_client.readers.admin_service import plain


def tally(rank: int, read_s: float, waits_ms: dict[int, int], **now: Any) -> dict[str, Any]:
    """One of four ranks, which has waited that long for peers in dispatch of layer "a"."""
    total_ns = 1_000_000 * sum(waits_ms.values())
    peers = [
        {"world_rank": peer, "arrival_ns": 0, "wait_ns": 1_000_000 * waits_ms.get(peer, 0)}
        for peer in range(4)
    ]
    sums = {"calls": 1, "time_ns": 2 * total_ns, "wait_ns": total_ns}
    at_rest = {"state": "IDLE", "op": "DISPATCH", "layer": "a", "waiting_for": -1, "since_s": None}
    return {
        "uid": 0,
        "job": "job",
        "group": "g",
        "node": "",
        "generation": 1,
        "world_rank": rank,
        "read_s": read_s,
        "now": {**at_rest, **now},
        "rows": 0,
        "dropped_rows": 0,
        "first_expert": 2 * rank,
        "ops": [{"op": "DISPATCH", "peers": peers, **sums}],
        "layers": [{"layer": "a", "tokens": 5, "rows": [rank, 1], **sums}],
    }


def look(*found: dict[str, Any]) -> tallies.BoardSample:
    return tallies.BoardSample({("g", row["world_rank"]): row for row in found}, [], [])


def between(now: dict[int, dict[int, int]], **states: dict[str, Any]) -> list[tallies.Interval]:
    """One second in which each rank waited for its peers that many milliseconds."""
    before = look(*(tally(rank, 10.0, {}) for rank in range(4)))
    after = [tally(r, 11.0, now.get(r, {}), **states.get(f"rank{r}", {})) for r in range(4)]
    return tallies.between(before, look(*after))


def test_who_held_up_the_others_is_slow() -> None:
    slow = tallies.slow_rank(between({rank: {2: 50} for rank in (0, 1, 3)}))
    assert slow is not None
    assert (slow.world_rank, slow.op, slow.layer) == (2, "DISPATCH", "a")
    assert slow.share == pytest.approx(0.05)


@pytest.mark.parametrize(
    "waits",
    [
        {rank: {2: 10} for rank in (0, 1, 3)},  # too short a wait
        {0: {1: 50}, 1: {2: 50}, 2: {3: 50}, 3: {0: 50}},  # every rank waits for another one
        {0: {2: 90, 3: 60}, 1: {2: 90, 3: 60}},  # two slow ranks
        {},
    ],
)
def test_short_or_scattered_waits_name_nobody(waits: dict[int, dict[int, int]]) -> None:
    assert tallies.slow_rank(between(waits)) is None


def test_a_wait_that_goes_on_counts_for_the_end_of_its_chain() -> None:
    waits = {"state": "WAITING", "since_s": 0.8}
    found = between(
        {}, rank0={**waits, "waiting_for": 1}, rank1={**waits, "waiting_for": 2}, rank3=waits
    )
    assert tallies.held_up(found) == {2: pytest.approx(1.6 / 3)}
    slow = tallies.slow_rank(found)
    assert slow is not None
    assert (slow.world_rank, slow.layer) == (2, "a")


def test_a_wait_is_counted_once_when_it_ends() -> None:
    """The part of a wait that an earlier look reported is subtracted when the wait ends."""
    waits = {"state": "WAITING", "waiting_for": 2, "since_s": 3.0}
    before = look(tally(0, 10.0, {}, **waits))
    (one,) = tallies.between(before, look(tally(0, 11.0, {2: 3500})))
    assert one.wait_s == pytest.approx(0.5)
    assert one.layers["a"].wait_s == pytest.approx(0.5)


def test_a_group_that_formed_anew_begins_anew() -> None:
    before, after = look(tally(0, 10.0, {1: 500})), look(tally(0, 11.0, {}))
    after.ranks["h", 0] = after.ranks.pop(("g", 0))
    assert tallies.between(before, after) == []


def test_how_even_loads_are() -> None:
    assert (tallies.max_mean([2, 2, 2]), tallies.jain([2, 2, 2])) == (1.0, 1.0)
    assert (tallies.max_mean([6, 0, 0]), tallies.jain([6, 0, 0])) == (3.0, pytest.approx(1 / 3))
    assert (tallies.max_mean([0, 0]), tallies.jain([0, 0])) == (None, None)
    sums = [tally(rank, 1.0, {}) for rank in range(4)]
    assert tallies.layer_rows(sums, "a") == {0: 0, 1: 1, 2: 1, 3: 1, 4: 2, 5: 1, 6: 3, 7: 1}


def test_rows_that_nobody_counts_by_expert_are_not_called_none() -> None:
    """A group that spans nodes: its handles count rows, but its boards do not count per expert."""
    sums = [tally(rank, 1.0, {}) for rank in range(4)]
    for one in sums:
        one["layers"][0].update(tokens=0, rows=[0, 0])
    found = load._layer(sums, "a", 40)
    assert (found["rows"], found["max_mean"], found["experts"]) == (40, None, [])
    assert load._layer(sums, "a", 0)["experts"] == [0] * 8
    before, after = tally(0, 1.0, {}), tally(0, 2.0, {})
    after["rows"] = 7
    (one,) = tallies.between(look(before), look(after))
    assert rows._tokens_s(one) is None


def test_copies_even_out_what_ranks_compute() -> None:
    """Ranks have 1, 2, 3 and 4 rows of their own experts; with copies they compute 2 and 3."""
    before = look(*(tally(rank, 1.0, {}) for rank in range(4)))
    for one in before.ranks.values():
        one["layers"][0]["rows"] = [0, 0]
    computed = [20, 20, 30, 30]
    after = [{**tally(rank, 2.0, {}), "rows": rows} for rank, rows in enumerate(computed)]
    for ranks in (after, tallies.between(before, look(*after))):
        assert figures.copies_of(ranks) == {
            "own_max_mean": pytest.approx(4 / 2.5),
            "computed_max_mean": pytest.approx(30 / 25),
            "moved_share": pytest.approx(0.1),
        }
    assert figures.copies_of([*before.ranks.values()]) is None


@pytest.mark.parametrize(
    ("loads", "width", "line"),
    [
        ([4, 4, 4, 4], 8, "▄▄▄▄"),
        ([0, 1, 8, 7], 8, " ▁█▇"),
        ([4, 4, 4, 4, 12, 4, 0, 0], 4, "▄▄█ "),
        ([0, 0, 0], 2, "  "),
    ],
)
def test_a_line_of_heat(loads: list[int], width: int, line: str) -> None:
    assert load.heat_line(loads, width) == line


def test_keys_choose_what_is_shown() -> None:
    daemon = fixed.FixedDaemon()
    shown = screen.Screen(
        seen := board_samples.BoardSamples(daemon, None, None, 0.01), rows.Links(100.0)
    )
    assert "no ranks yet" in shown.lines(80, 24)[1][0]
    seen.again()

    def text() -> str:
        return "\n".join(line for line, _ in shown.lines(100, 24))

    assert "red" in [style for _, style in shown.lines(100, 24)]
    assert "SLOW: rank 3" in text()
    ranks = [line.split()[1] for line in text().splitlines() if line.startswith(fixed.NODES[1])]
    assert ranks == ["0", "1", "2", "3"]
    shown.press("s")
    shown.press("r")
    ranks = [line.split()[1] for line in text().splitlines() if line.startswith(fixed.NODES[1])]
    assert ranks == ["3", "2", "1", "0"]
    shown.press("l")
    assert [style for _, style in shown.lines(100, 24)].count("reverse") == 1
    shown.press("down")
    shown.press("enter")
    assert f"layer {fixed.LAYER}" in text() or "layer decoder/block18/moe" in text()
    shown.press("back")
    assert "by LAYER" in text()
    shown.press("back")
    shown.press("g")
    assert "by NODE" in text()
    assert len(shown.lines(100, 4)) <= 4


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_screen_fits_the_terminal(width: int) -> None:
    shown = screen.Screen(
        seen := board_samples.BoardSamples(fixed.FixedDaemon(), None, None, 0.01), rows.Links()
    )
    seen.again()
    for key, names in [
        ("", (fixed.GROUP, fixed.JOB, fixed.NODES[1], "<<<", fixed.LAYER)),
        ("l", (fixed.LAYER, "decoder/block18/moe")),
        ("enter", (f"layer {fixed.LAYER}", "<<<")),
    ]:
        shown.press(key)
        lines = [line for line, _ in shown.lines(width, 24)]
        assert [line for line in lines if tables.cell_len(line) > width] == []
        assert [name for name in names if name not in "\n".join(lines)] == []


def test_keys_of_several_bytes() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"\x1b[A\x1bOBq\x1bx\r")
        keys = screen._Keys(read)
        assert [keys.next(1.0) for _ in range(6)] == ["up", "down", "q", "back", "x", "enter"]
        assert keys.next(0.0) == ""
    finally:
        os.close(read)
        os.close(write)


def test_a_tally_has_what_is_read_of_it() -> None:
    """Rows as ListTallies returns them."""
    told = plain(fixed._tallies().ranks[0])
    made = copy.deepcopy(tally(0, 1.0, {}))
    assert set(made) - {"node"} <= set(told)
    assert set(made["now"]) <= set(told["now"])
    for part in ("ops", "layers"):
        assert set(made[part][0]) == set(told[part][0])
