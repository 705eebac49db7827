"""Tables, JSON, units."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ep_runtime import units
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import Column

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
    assert units.iec(count) == text


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
    assert units.duration(seconds) == text


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
