"""Which columns a table has at which width, and that folding loses nothing."""

from __future__ import annotations

import random

import pytest

from ep_runtime_client.cli import tables
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
        (60, "NAME STATE BYTES PIDS"),  # JOB has none
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
    """The text of each column, its lines put together without spaces."""
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
    assert tables.local_time(last, whole=True) == last  # here it is of no year that there is
    monkeypatch.undo()
    time.tzset()
