"""Users by name."""

from __future__ import annotations

import argparse
import functools
import pwd


@functools.cache
def name(uid: int) -> str:
    """Returns the user's name, or the number if this system does not know one."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def number(text: str) -> int:
    """argparse type: a user's number, given by name or number."""
    if text.isdecimal():
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"this system knows no user {text!r}") from None
