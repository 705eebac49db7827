"""Checks names that users choose, and shows names safely to other users.

Operators of a daemon see, complete and paste names of its users. So new names may only have
characters that are special neither to a shell nor to an option parser. Other names that an older
version allowed stay valid, and are shown quoted.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping

from ep_runtime.errors import InvalidArgumentError

MAX_NAME_BYTES = 120
MAX_LABELS = 32
MAX_LABEL_BYTES = 256
# Letters and marks that terminals do not draw.
_UNSEEN = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef"
)
_MARK = "\u0300"  # stands for any mark; many marks on one letter are drawn over other lines
_CHAR = rf"(?:[^\W{_UNSEEN}]{_MARK}{{0,3}}|[.:/@+-])"
_START = "(?![:@+-])"
_PLAIN = rf"{_START}{_CHAR}+"
_PATTERNS = {
    "group": _PLAIN,
    "layer": rf"{_START}(?:{_CHAR}|\[[0-9]{{1,7}}\]|\['{_CHAR}+'\])+",
    "job": rf"{_PLAIN}|\[[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?\]{_CHAR}*",
}
_LABEL_VALUE = f"{_CHAR}*"
_SHOWN = "|".join((*_PATTERNS.values(), _LABEL_VALUE))
_CHARACTERS = "letters, digits and . _ / : @ + -"
_ALSO = {"layer": ", [n] of a stack and ['key'] of a path", "job": ", [IPv6] in front"}


def _matches(pattern: str, name: str) -> bool:
    if not name.isascii():
        name = "".join(_MARK if _is_mark(char) else char for char in name)
    return re.fullmatch(pattern, name) is not None


def _is_mark(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Mc") and not re.match(f"[{_UNSEEN}]", char)


def check_name(kind: str, name: str) -> None:
    """Raises InvalidArgumentError unless `name` is non-empty printable text, not too long."""
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{kind} name must be text, got {name!r}", argument="name")
    if not 1 <= len(name.encode(errors="replace")) <= MAX_NAME_BYTES or not name.isprintable():
        raise InvalidArgumentError(
            f"{kind} name must be 1 to {MAX_NAME_BYTES} bytes of printable text, "
            f"got {name[:MAX_NAME_BYTES]!r}",
            argument="name",
        )


def check_new_name(kind: str, name: str) -> None:
    """Raises InvalidArgumentError if a new object may not have this name.

    Args:
        kind: "group", "layer" (or stack), or "job".
        name: the new object's name.
    """
    check_name(kind, name)
    if not _matches(_PATTERNS[kind], name):
        raise InvalidArgumentError(
            f"{kind} name must be {_CHARACTERS}{_ALSO.get(kind, '')}, and not begin with : @ + -, "
            f"got {name!r}; take another name",
            argument="name",
        )


def check_new_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgumentError if a new session may not have these labels."""
    if len(labels) > MAX_LABELS:
        raise InvalidArgumentError(
            f"labels must be at most {MAX_LABELS}, got {len(labels)}", argument="labels"
        )
    for key, value in labels.items():
        fits = len((key + value).encode(errors="replace")) <= MAX_LABEL_BYTES
        if not (fits and _matches(_PLAIN, key) and _matches(_LABEL_VALUE, value)):
            raise InvalidArgumentError(
                f"labels must be {_CHARACTERS}, a key not begin with : @ + -, and both be at most "
                f"{MAX_LABEL_BYTES} bytes, got {key[:80]!r}: {value[:80]!r}",
                argument="labels",
            )


def shown(name: str) -> str:
    """Returns a name for people: quoted if `check_new_name` would refuse it."""
    return name if _matches(_SHOWN, name) else quoted(name)


def quoted(name: str) -> str:
    """Quotes a name as one safe word for bash, zsh and fish.

    bash and zsh read the word as the name. fish refuses it if the name has a quote, a backslash or
    a character that does not print.
    """
    if name.isprintable() and not {"'", "\\"} & {*name}:
        return f"'{name}'"
    # In fish, \\' is an escaped backslash and the end of '...', so escape both characters.
    return "$'" + "".join(_escaped(char) for char in name) + "'"


def _escaped(char: str) -> str:
    if char in "'\\":
        return f"\\x{ord(char):02x}"
    return char if char.isprintable() else char.encode("unicode_escape").decode()


_MOST_LISTED = 20
_MOST_COMPARED = 1000  # takes about 10 ms


def hint(typed: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` if a known name is similar, else an empty text."""
    import difflib

    by_lower = {name.lower(): name for name in itertools.islice(known, _MOST_COMPARED)}
    close = difflib.get_close_matches(typed.lower(), by_lower, n=1)
    return f"; did you mean {quoted(by_lower[close[0]])}?" if close else ""


def listed(known: Iterable[str]) -> str:
    """Lists names for an error's text; at most _MOST_LISTED of them."""
    names = [shown(name) for name in sorted(set(known))]
    return ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
