"""Suggests known names for a mistyped one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ep_runtime.allowed_names import quoted, shown

_MOST_LISTED = 20
_MOST_COMPARED = 1000  # some 10 ms


def hint(typed: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a known name is close, else nothing."""
    import difflib

    by_lower = {name.lower(): name for name in itertools.islice(known, _MOST_COMPARED)}
    close = difflib.get_close_matches(typed.lower(), by_lower, n=1)
    return f"; did you mean {quoted(by_lower[close[0]])}?" if close else ""


def listed(known: Iterable[str]) -> str:
    """The names for an error's text, not all of very many."""
    names = [shown(name) for name in sorted(set(known))]
    return ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
