"""Checks names that other users read, and shows any name safely.

Whoever operates a daemon sees, completes and pastes names that its users chose. So what is new must
consist of characters that neither a shell nor an option parser reads. A name that an older version
allowed stays valid; people see it quoted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from ep_runtime.errors import InvalidArgumentError

MAX_NAME_BYTES = 120
MAX_LABELS = 32
MAX_LABEL_BYTES = 256

# Letters and marks that no terminal draws.
_UNSEEN = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef"
)
_MARK = "\u0300"  # stands for every mark; a pile of them is drawn over other lines
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
_ALSO = {
    "layer": ", [n] of a stack and ['key'] of a path",
    "job": ", [IPv6] in front",
}


def _matches(pattern: str, name: str) -> bool:
    if not name.isascii():
        name = "".join(_MARK if _is_mark(char) else char for char in name)
    return re.fullmatch(pattern, name) is not None


def _is_mark(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Mc") and not re.match(f"[{_UNSEEN}]", char)


def check_name(kind: str, name: str) -> None:
    """Raises InvalidArgumentError unless `name` is printable text, non-empty and short enough."""
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{kind} name must be text, got {name!r}", argument="name")
    if not 1 <= len(name.encode(errors="replace")) <= MAX_NAME_BYTES or not name.isprintable():
        raise InvalidArgumentError(
            f"{kind} name must be 1 to {MAX_NAME_BYTES} bytes of printable text, "
            f"got {name[:MAX_NAME_BYTES]!r}",
            argument="name",
        )


def check_new_name(kind: str, name: str) -> None:
    """Raises InvalidArgumentError for a name that no new object may have.

    Args:
        kind: "group", "layer" (or stack), or "job".
        name: what it is to be called.
    """
    check_name(kind, name)
    if not _matches(_PATTERNS[kind], name):
        raise InvalidArgumentError(
            f"{kind} name must be {_CHARACTERS}{_ALSO.get(kind, '')}, and not begin with : @ + -, "
            f"got {name!r}; take another name",
            argument="name",
        )


def check_new_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgumentError for labels that no new session may have."""
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
    """The name as people see it: quoted where it is none that could be made now."""
    return name if _matches(_SHOWN, name) else quoted(name)


def quoted(name: str) -> str:
    """The name as one word of a shell line that runs nothing, in bash, zsh and fish.

    bash and zsh read it as the name; fish refuses the line where the name has a quote, a backslash
    or a character that does not print.
    """
    if name.isprintable() and not {"'", "\\"} & {*name}:
        return f"'{name}'"
    # fish ends '...' at \\', so nothing in it may be a backslash before a quote.
    return "$'" + "".join(_escaped(char) for char in name) + "'"


def _escaped(char: str) -> str:
    if char in "'\\":
        return f"\\x{ord(char):02x}"
    return char if char.isprintable() else char.encode("unicode_escape").decode()
