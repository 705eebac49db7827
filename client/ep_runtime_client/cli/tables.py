"""Makes lines of text from tables: chooses the columns that fit a terminal, and their widths.

Columns of identity and state are always shown and never cut. The others are shown by priority, as
far as the terminal has room; `-o wide` shows all, in several blocks if one is too wide, each with
the identity columns. Long texts fold.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ep_runtime.allowed_names import shown
from ep_runtime.text import duration, iec, printable, si
from ep_runtime_client.cli import users

IDENTITY, STATE, USUAL = range(3)

_GAP = "  "
_LEAST_FOLDED = 24  # narrower text columns are hard to read
_LEAST_PROSE = 44  # the least before other columns are left out
_LEAST = 12  # for other columns, as a last resort
_MOST_ITEMS = 3  # items of a list shown without `-o wide`
_RIGHT = ("bytes", "count", "seconds", "share", "rate", "ratio")
_LISTS = ("list", "names")
_FOLDING = ("prose", *_LISTS)
# Keys of values without a column that are names, or lists of names.
_NAMED = ("name", "group", "job", "layer", "owner")
_NAMED_LISTS = ("groups", "labels")
_DEVICE = re.compile(r"(GPU-[0-9a-f]{8})-[0-9a-f-]+")


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: key of the row's dict.
        title: heading.
        kind: "text", "name" (a user's text, quoted if a shell could run it), "prose" (folds),
            "list" (folds; only the first few unless wide), "names" (a list of names, or labels),
            "bytes" (IEC units), "seconds" (an age), "count", "lane" (-1: none), "time" (local),
            "share" (0 to 1, as percent), "rate" (thousands as k), "ratio", "user" (by name if this
            system knows the number), "device" (the start of a GPU's UUID unless wide), "late" (late
            ranks: the one for which others have waited longest, and the number of further ones).
        wide: whether only `-o wide` shows it.
        priority: IDENTITY and STATE are always shown; of the others the smallest come first.
        about: its description for --help.
    """

    key: str
    title: str
    kind: str = "text"
    wide: bool = False
    priority: int = USUAL
    about: str = ""

    @property
    def folds(self) -> bool:
        return self.kind in _FOLDING


@dataclasses.dataclass(frozen=True)
class PlacedColumn:
    """A column with its width; `index` is its position in a row of cells."""

    column: Column
    index: int
    width: int


Cells = Sequence[Sequence[str]]
Block = tuple[PlacedColumn, ...]


def kind_of(key: str) -> str:
    """Chooses the kind of a value without a column, from the name of its key."""
    if key in _NAMED:
        return "name"
    if key in _NAMED_LISTS:
        return "names"
    if key == "uid":
        return "user"
    if key == "bytes" or key.endswith("_bytes"):
        return "bytes"
    if key.endswith("_s"):
        return "seconds"
    return "time" if key == "time" or key.endswith("_time") else "text"


def cells(columns: Sequence[Column], row: Mapping[str, Any], *, wide: bool) -> list[str]:
    """Returns the texts of one row."""
    return [cell(row.get(column.key), column.kind, wide=wide) for column in columns]


def cell(value: Any, kind: str, *, wide: bool = True) -> str:
    """Returns one value as a table shows it, in one line."""
    return printable(_cell(value, kind, wide).replace("\n", " "))


def _cell(value: Any, kind: str, wide: bool) -> str:
    if value is None or value == "":
        return "-"
    if kind == "bytes":
        return iec(int(value))
    if kind == "seconds":
        return duration(float(value))
    if kind == "share":
        return f"{100 * float(value):.1f}%"
    if kind == "rate":
        return si(float(value))
    if kind == "ratio":
        return f"{float(value):.2f}"
    if kind == "lane":
        return str(value) if value >= 0 else "-"
    if kind == "time":
        return local_time(str(value), whole=wide)
    if kind == "late":
        return _late(value)
    if kind == "user" and isinstance(value, int):
        return users.name(value)
    if kind == "device" and not wide:
        return _DEVICE.sub(r"\1", str(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    one = _name if kind in ("name", "names") else str
    if isinstance(value, dict):
        return _listed([f"{one(key)}={one(item)}" for key, item in value.items()], kind, wide)
    if isinstance(value, list | tuple):
        return _listed([one(item) for item in value], kind, wide)
    return one(value)


def _name(value: Any) -> str:
    return shown(str(value))


def _late(ranks: list[dict[str, Any]]) -> str:
    if not ranks:
        return "-"
    first = max(ranks, key=lambda rank: rank["since_s"] or 0.0)
    return f"rank {first['world_rank']}" + (f" +{len(ranks) - 1}" if len(ranks) > 1 else "")


def _listed(items: list[str], kind: str, wide: bool) -> str:
    more = len(items) - _MOST_ITEMS
    if kind in _LISTS and not wide and more > 1:
        items = [*items[:_MOST_ITEMS], f"+{more}"]
    return ",".join(items) or "-"


def local_time(text: str, *, whole: bool) -> str:
    """Converts a daemon's ISO 8601 time to this machine's; adds the date if it is not today."""
    try:
        found = datetime.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        return text
    if whole:
        return found.isoformat(sep=" ", timespec="milliseconds")
    today = found.date() == datetime.datetime.now().astimezone().date()
    return found.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def place(columns: Sequence[Column], rows: Cells, width: int | None, *, whole: bool) -> list[Block]:
    """Places columns with their widths in one block, or in several if all are wanted (`whole`).

    Args:
        columns: columns of the rows.
        rows: texts of each row's cells.
        width: width of the terminal; None for as much as they need.
    """
    widest = [max((cell_len(row[i]) for row in rows), default=0) for i in range(len(columns))]
    titles = [cell_len(column.title) for column in columns]
    natural = _placed(columns, widest, titles)
    if width is None or _total(natural) <= width:
        return [tuple(natural)]
    words = [max(map(cell_len, column.title.split(" "))) for column in columns]
    natural = _placed(columns, widest, words)  # fold titles of several words first
    if not whole:
        return [_shrunk(_chosen(natural, width), width)]
    return [_shrunk(block, width) for block in _split(natural, width)]


def _placed(columns: Sequence[Column], *least: Sequence[int]) -> list[PlacedColumn]:
    return [
        PlacedColumn(column, i, max(widths))
        for i, (column, *widths) in enumerate(zip(columns, *least, strict=True))
    ]


def _total(block: Sequence[PlacedColumn], *, least: int | None = None) -> int:
    """Returns the block's width; with `least`, its width if folded as far as allowed."""
    widths = (placed.width if least is None else _least(placed, least) for placed in block)
    return sum(widths) + len(_GAP) * (len(block) - 1)


def _least(placed: PlacedColumn, prose: int = _LEAST_FOLDED) -> int:
    least = prose if placed.column.kind == "prose" else _LEAST_FOLDED
    return min(placed.width, least) if placed.column.folds else placed.width


def _chosen(placed: list[PlacedColumn], width: int) -> list[PlacedColumn]:
    """Returns the columns that fit, by priority and then from the left."""
    chosen: list[PlacedColumn] = []
    for one in sorted(placed, key=lambda one: one.column.priority):
        if one.column.priority <= STATE or _total([*chosen, one], least=_LEAST_PROSE) <= width:
            chosen.append(one)
    return sorted(chosen, key=lambda one: one.index)


def _split(placed: list[PlacedColumn], width: int) -> Iterator[list[PlacedColumn]]:
    """Splits columns into blocks, each with the identity columns; else with text columns."""
    kept = [one for one in placed if one.column.priority == IDENTITY]
    kept = kept or [one for one in placed if one.column.kind == "text"]
    block = list(kept)
    for one in [one for one in placed if one not in kept]:
        if len(block) > len(kept) and _total([*block, one], least=_LEAST_FOLDED) > width:
            yield block
            block = list(kept)
        block.append(one)
        block.sort(key=lambda each: each.index)
    yield block


def _shrunk(block: list[PlacedColumn], width: int) -> Block:
    """Narrows columns until they fit: first folding ones, then others, identity columns last."""
    floors: list[Callable[[PlacedColumn], int]] = [
        _least,
        lambda one: one.width if one.column.priority == IDENTITY else min(one.width, _LEAST),
        lambda one: 1,
    ]
    for floor in floors:
        while _total(block) > width:
            able = [one for one in block if one.width > floor(one)]
            if not able:
                break
            widest = max(able, key=lambda one: one.width)
            by = min(_total(block) - width, max(1, widest.width // 8))
            smaller = dataclasses.replace(widest, width=max(floor(widest), widest.width - by))
            block = [smaller if one is widest else one for one in block]
    return tuple(block)


def heading(block: Block) -> list[str]:
    """Returns the lines of titles; a folded title ends in the last line."""
    folded = [fold(one.column.title, one.width) for one in block]
    most = max(map(len, folded))
    return list(_lines(block, [[""] * (most - len(title)) + title for title in folded]))


def draw(block: Block, row: Sequence[str]) -> list[str]:
    """Returns the lines of one row; more than one if a text folds."""
    return list(_lines(block, [fold(row[one.index], one.width) for one in block]))


def _lines(block: Block, folded: Sequence[Sequence[str]]) -> Iterator[str]:
    for number in range(max(map(len, folded))):
        yield _line(block, [part[number] if number < len(part) else "" for part in folded])


def _line(block: Block, texts: Sequence[str]) -> str:
    padded = []
    for one, text in zip(block, texts, strict=True):
        room = " " * (one.width - cell_len(text))
        padded.append(room + text if one.column.kind in _RIGHT else text + room)
    return _GAP.join(padded).rstrip()


def fold(text: str, width: int) -> list[str]:
    """Folds text into lines of at most `width`, after spaces and commas if possible."""
    if cell_len(text) <= width:
        return [text]
    lines, line = [], ""
    for part in re.split(r"(?<=[ ,;])", text):
        if cell_len((line + part).rstrip()) <= width:
            line += part
            continue
        if line:
            lines.append(line.rstrip())
        line = part
        while cell_len(line.rstrip()) > width:
            count = _fitting(line, width)
            lines.append(line[:count])
            line = line[count:]
    return [*lines, line.rstrip()] if line.strip() else lines


def _fitting(text: str, width: int) -> int:
    """Counts the characters that fit, at least one; some characters take two columns."""
    used = 0
    for count, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return max(1, count)
    return len(text)


def cell_len(text: str) -> int:
    """Returns the number of terminal columns that the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len as of_rich

    return of_rich(text)
