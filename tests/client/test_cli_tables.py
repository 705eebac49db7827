"""Tests tables at any width, JSON and units: folding a cell loses no text."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest

from ep_runtime.text import duration, iec
from ep_runtime_client.cli import render, tables
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

COLUMNS = (
    Column("name", "NAME", priority=IDENTITY),
    Column("state", "STATE", priority=STATE),
    Column("job", "JOB"),
    Column("bytes", "BYTES", "bytes"),
    Column("pids", "PIDS", "list", priority=3),
)
ROW = {"name": "n" * 30, "state": "READY", "job": "j" * 30, "bytes": 12 << 30, "pids": [1, 2, 3]}


def titles(width: int | None, *, whole: bool = False) -> list[list[str]]:
    row = tables.cells(COLUMNS, ROW, wide=False)
    blocks = tables.place(COLUMNS, [row], width, whole=whole)
    return [[one.column.title for one in block] for block in blocks]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (None, "NAME STATE JOB BYTES PIDS"),
        (90, "NAME STATE JOB BYTES PIDS"),
        (78, "NAME STATE JOB PIDS"),  # BYTES comes after JOB and has no room
        (60, "NAME STATE BYTES PIDS"),  # JOB has no room
        (45, "NAME STATE PIDS"),
        (20, "NAME STATE"),
    ],
)
def test_what_there_is_room_for_is_shown_by_priority(width: int | None, shown: str) -> None:
    assert titles(width) == [shown.split()]


def test_a_whole_table_goes_on_in_blocks_with_the_identity() -> None:
    assert titles(60, whole=True) == [
        ["NAME", "STATE"],
        ["NAME", "JOB"],
        ["NAME", "BYTES", "PIDS"],
    ]


def test_titles_of_several_words_fold_where_there_is_no_room() -> None:
    columns = (Column("op", "OP"), Column("ms", "MEDIAN MS", "count"))
    (block,) = tables.place(columns, [["dispatch", "1.5"]], 16, whole=True)
    assert tables.heading(block) == ["          MEDIAN", "OP            MS"]
    assert tables.draw(block, ["dispatch", "1.5"]) == ["dispatch     1.5"]


def columns_of(block: tables.Block, lines: list[str]) -> list[str]:
    """Returns the text of each column, its lines joined without spaces."""
    found = []
    start = 0
    for one in block:
        part = "".join(line[start : start + one.width].strip() for line in lines)
        found.append(part.replace(" ", ""))
        start += one.width + 2
    return found


def test_no_width_loses_a_character() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        row = {
            **ROW,
            "name": "".join(numbers.choices("abc /-,", k=numbers.randint(1, 60))) + "x",
            "pids": [numbers.randint(1, 10**6) for _ in range(numbers.randint(0, 40))],
        }
        cells = tables.cells(COLUMNS, row, wide=True)
        width = numbers.randint(20, 120)
        for block in tables.place(COLUMNS, [cells], width, whole=True):
            lines = tables.draw(block, cells)
            assert max(map(len, [*lines, *tables.heading(block)])) <= width
            wanted = [cells[one.index].replace(" ", "") for one in block]
            assert columns_of(block, lines) == wanted


def test_wide_characters_take_two_columns() -> None:
    assert tables.cell_len("専門家") == 6
    assert tables.fold("専門家", 4) == ["専門", "家"]


def test_times_are_local_and_in_full_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC-5")  # POSIX: five hours ahead
    time.tzset()
    text = "2026-02-02T02:40:00.250+00:00"
    assert tables.local_time(text, whole=False) == "2026-02-02 07:40:00"
    assert tables.local_time(text, whole=True) == "2026-02-02 07:40:00.250+05:00"
    last = "9999-12-31T23:59:00.000+00:00"
    assert tables.local_time(last, whole=True) == last  # here it is in no possible year
    monkeypatch.undo()
    time.tzset()


_COLUMNS = (
    Column("name", "NAME"),
    Column("bytes", "BYTES", "bytes"),
    Column("pids", "PID"),
    Column("hidden", "HIDDEN", wide=True),
)
_ROWS = [
    {"name": "moe", "bytes": 3 << 20, "pids": [4, 5], "hidden": None},
    {"name": "[bold]", "bytes": 12, "pids": [], "hidden": "x"},
]


def test_a_table_is_plain_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    render.write_table(_COLUMNS, _ROWS, wide=False, empty="none")
    assert capsys.readouterr().out.splitlines() == [
        "NAME      BYTES  PID",
        "moe     3.0 MiB  4,5",
        "[bold]     12 B  -",
    ]


def test_wide_adds_columns_and_a_missing_value_is_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.write_table(_COLUMNS, _ROWS, wide=True, empty="none")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "BYTES", "PID", "HIDDEN"]
    assert lines[1].split()[-1] == "-"


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    render.write_table(_COLUMNS, [], wide=False, empty="no groups")
    assert capsys.readouterr().out == "no groups\n"


def test_json_starts_with_version_and_kind(capsys: pytest.CaptureFixture[str]) -> None:
    render.write_json("groups", {"items": _ROWS})
    text = capsys.readouterr().out
    document = json.loads(text)
    assert list(document) == ["schema_version", "kind", "items"]
    assert document["schema_version"] == render.SCHEMA_VERSION
    assert document["items"] == _ROWS
    render.write_json("groups", {"items": _ROWS}, compact=True)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 53, "8192.0 TiB"),
    ],
)
def test_iec(count: int, text: str) -> None:
    assert iec(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (59.9, "59.9s"),
        (60, "1m0s"),
        (312, "5m12s"),
        (7265, "2h1m"),
        (90000, "1d1h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


ORDERS = "a\x1b[2Jb\r\x9b1m\u202e\nc"


@pytest.mark.parametrize("tty", [False, True])
def test_text_of_others_orders_the_terminal_nothing(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tty: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    rows = [{"labels": {ORDERS: ORDERS}, "pids": [ORDERS], "name": ORDERS}]
    columns = [Column(key, key.upper()) for key in ("labels", "pids", "name")]
    render.write_table(columns, rows, wide=True, empty="")
    render.write_pairs([("name", ORDERS)])
    render.err(ORDERS)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not [order for order in ("\x1b[2J", "\r", "\x9b", "\u202e") if order in text]
    assert r"a\x1b[2Jb\r\x9b1m\u202e c" in said.out


def test_json_of_others_orders_the_terminal_nothing_and_stays_what_it_is(capsys: Any) -> None:
    render.write_json("sessions", {"labels": {ORDERS: ORDERS + "\x7f\U000e0001"}})
    text = capsys.readouterr().out
    assert all(char == "\n" or char.isprintable() for char in text)
    assert json.loads(text)["labels"] == {ORDERS: ORDERS + "\x7f\U000e0001"}
