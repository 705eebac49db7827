"""Users by name."""

from __future__ import annotations

import functools
import pwd


@functools.cache
def name(uid: int) -> str:
    """The user's name, or the number where this system knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
