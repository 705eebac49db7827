"""Suggests known names for a mistyped one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ep_runtime.allowed_names import quoted, shown

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
