"""Makes text from other users safe for terminals."""

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
