"""Formats values for people, and makes text from other users safe for terminals."""

from __future__ import annotations

from ep_runtime.errors import InvalidArgumentError


def printable(text: str) -> str:
    """Returns text with Python escapes for all characters that do not print, except newlines."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def check_printable(argument: str, text: str, max_bytes: int) -> None:
    """Raises InvalidArgumentError unless `text` is printable and has at most `max_bytes`."""
    if not text.isprintable() or len(text.encode()) > max_bytes:
        raise InvalidArgumentError(
            f"{argument} must be printable text of at most {max_bytes} bytes, got {text[:80]!r}",
            argument=argument,
        )


_AGES = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def iec(count: int) -> str:
    """Formats bytes in IEC units: 12.0 MiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Formats seconds in their two largest units: 3d4h, 5m12s, 4.2s."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f}s"
    whole = int(seconds)
    at = next(i for i, (_, size) in enumerate(_AGES) if whole >= size)
    (name, size), (next_name, next_size) = _AGES[at], _AGES[at + 1]
    return f"{whole // size}{name}{whole % size // next_size}{next_name}"


def si(value: float) -> str:
    """Formats a number in thousands: 950, 12.3k, 4.5M."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if not unit and value >= 10 else f"{value:.1f}{unit}"
