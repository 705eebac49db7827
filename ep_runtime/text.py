"""Makes others' text safe for terminals: removes control sequences."""

from __future__ import annotations

from ep_runtime.errors import InvalidArgumentError


def printable(text: str) -> str:
    """The text with escapes, as in Python, for everything but what prints and new lines."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def check_printable(argument: str, text: str, max_bytes: int) -> None:
    """Raises InvalidArgumentError unless the text prints and is short enough."""
    if not text.isprintable() or len(text.encode()) > max_bytes:
        raise InvalidArgumentError(
            f"{argument} must be printable text of at most {max_bytes} bytes, got {text[:80]!r}",
            argument=argument,
        )
