"""Selects and sorts the rows of a list: NAME, -l and --sort-by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ep_runtime import allowed_names
from ep_runtime.allowed_names import shown
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli import tables, users

Row = Mapping[str, Any]

_CONDITION = re.compile(r"([^=!,]+)(!?=)(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition of -l, `key=value` or `key!=value`, on a row's label or else its field."""

    key: str
    value: str
    equal: bool

    def holds(self, row: Row, field: str | None) -> bool:
        labels = row.get("labels") or {}
        found = labels.get(self.key) if self.key in labels or field is None else row.get(field)
        texts = _texts(found)
        if field == "uid" and isinstance(found, int):
            texts.add(users.name(found).casefold())
        return (self.value.casefold() in texts) == self.equal


def conditions(texts: Iterable[str]) -> list[Condition]:
    """Parses the values of -l, each with one or more conditions between commas.

    Raises:
        InvalidArgumentError: a text is not a condition.
    """
    found = []
    for part in ",".join(texts).split(",") if texts else ():
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise InvalidArgumentError(
                f"-l takes KEY=VALUE or KEY!=VALUE, with commas between, got {part!r}",
                argument="-l",
            )
        found.append(Condition(match[1], match[3], match[2] == "="))
    return found


def _texts(value: Any) -> set[str]:
    """Returns the texts that match a value, or any item of a list."""
    if isinstance(value, list | tuple):
        return {str(item).casefold() for item in value}
    if isinstance(value, bool):
        return {str(value).casefold(), "yes" if value else "no"}
    return {"" if value is None else str(value).casefold()}


def filtered(
    rows: Sequence[dict[str, Any]],
    wanted: Sequence[Condition],
    columns: Sequence[tables.Column],
) -> list[dict[str, Any]]:
    """Returns the rows that meet every condition.

    Raises:
        InvalidArgumentError: a key is neither a field nor a label of any row.
    """
    labels = {key for row in rows for key in row.get("labels") or {}}
    fields = {one.key: field_of(one.key, rows, columns) for one in wanted}
    for key, field in fields.items():
        if field is None and key not in labels and rows:
            raise _unknown("-l", key, {*labels, *_fields(rows, columns)})
    return [row for row in rows if all(one.holds(row, fields[one.key]) for one in wanted)]


def ordered(
    rows: Sequence[dict[str, Any]], sort_by: str | None, columns: Sequence[tables.Column]
) -> list[dict[str, Any]]:
    """Sorts rows by a field, smallest first; with "-" before its name largest first. Rows without a
    value come last.

    Raises:
        InvalidArgumentError: there is no such field.
    """
    if sort_by is None:
        return list(rows)
    field = field_of(sort_by.removeprefix("-"), rows, columns)
    if field is None:
        known = _fields(rows, columns)
        raise _unknown("--sort-by", sort_by.removeprefix("-"), known)
    with_value = [row for row in rows if row.get(field) not in (None, "", [], {})]
    without = [row for row in rows if row.get(field) in (None, "", [], {})]
    with_value.sort(key=lambda row: _sortable(row[field]), reverse=sort_by.startswith("-"))
    return with_value + without


def field_of(name: str, rows: Sequence[Row], columns: Sequence[tables.Column]) -> str | None:
    """Returns the key of the field with that column title or key; None if there is none."""
    for column in columns:
        if name.casefold() in (column.title.casefold(), column.key):
            return column.key
    return name if any(name in row for row in rows) else None


def _fields(rows: Sequence[Row], columns: Sequence[tables.Column]) -> set[str]:
    return {column.title for column in columns} | {key for row in rows[:1] for key in row}


def _unknown(argument: str, name: str, known: set[str]) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{argument}: no field {name!r}{allowed_names.hint(name, known)}; there are: "
        f"{', '.join(map(shown, sorted(known)))}",
        argument=argument,
    )


def _sortable(value: Any) -> tuple[int, Any]:
    """Makes a sort key: numbers by size, texts in natural order (layer2 before layer10)."""
    if isinstance(value, int | float):
        return (0, value)
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    # Compare numbers of any length by their digits, because int() rejects very long ones.
    parts = re.split(r"([0-9]+)", text)
    digits = [(len(x), x) for x in (x.lstrip("0") for x in parts[1::2])]
    return (1, [*zip([x.casefold() for x in parts[::2]], [*digits, (0, "")], strict=True)])


def select(
    kind: str,
    keys: Sequence[str],
    rows: Sequence[dict[str, Any]],
    name: str | None,
    *,
    must: bool = True,
) -> list[dict[str, Any]]:
    """Returns the rows that have `name` under one of the keys; all rows without a name.

    Raises:
        InvalidArgumentError: no row has that name, and `must` is set; lists the names there are.
    """
    if name is None:
        return list(rows)
    found = [row for row in rows if name in (_joined(row, key) for key in keys)]
    if not found and must:
        known = {str(row.get(keys[0], "")) for row in rows}
        raise InvalidArgumentError(
            f"no {kind} named {name!r}; there "
            + (f"are: {allowed_names.listed(known)}" if known else "is none")
            + allowed_names.hint(name, known),
            argument="NAME",
        )
    return found


def _joined(row: Row, key: str) -> str:
    """Returns a key's value; for "job/name" both values with "/" between."""
    return "/".join(str(row.get(part, "")) for part in key.split("/"))


def of_one_owner(
    kind: str, rows: Sequence[dict[str, Any]], name: str, job: str | None, uid: int | None
) -> list[dict[str, Any]]:
    """Returns the named rows of that job and user; if neither is given, of the only owner.

    Raises:
        InvalidArgumentError: that job and user have none, or several jobs or users have the name.
    """
    found = [row for row in rows if job in (None, row["job"]) and uid in (None, row["uid"])]
    owners = sorted({(row["job"], users.name(row["uid"])) for row in found or rows})
    if found and len(owners) == 1:
        return found
    several = " and ".join(f"--job {shown(of)} --user {user}" for of, user in owners)
    fault = f"{len(owners)} jobs or users have" if found else "that job and user have no"
    raise InvalidArgumentError(
        f"{fault} {kind} {name!r}; choose by one of: {several}", argument="NAME"
    )
