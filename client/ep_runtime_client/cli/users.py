"""Converts user ids to names and back."""

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
    """Parses an argparse value: a user id, given as a name or number."""
    if text.isdecimal():
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"this system knows no user {text!r}") from None
