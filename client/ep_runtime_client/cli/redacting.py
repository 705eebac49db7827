"""Takes out of values what may be a secret: what leaves this machine is read by others."""

from __future__ import annotations

import re
from typing import Any

from ep_runtime import env

REDACTED = "(redacted)"

_PATTERNS = (
    # Certificates and keys.
    (re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL), ""),
    # Tokens of sessions and their digests.
    (re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{64,}(?![0-9A-Za-z])"), ""),
    # https://user:password@host
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), ""),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}"), r"\1 "),
)
_NAMED = re.compile(r"""([\w.-]+)(["']?\s*[=:]\s*["']?)([^\s"',;&]+)""")


class Redaction:
    """Knows this process's environment; what it took out is counted."""

    def __init__(self) -> None:
        self._values = env.secret_values()
        self.count = 0

    def of(self, value: Any) -> Any:
        """The value, JSON of any depth, with REDACTED in the place of secrets."""
        if isinstance(value, dict):
            return {self.of(key): self._under(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        return self.of_text(value) if isinstance(value, str) else value

    def _under(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and value and env.is_secret_name(key):
            self.count += 1
            return REDACTED
        return self.of(value)

    def of_text(self, text: str) -> str:
        """The text without keys, tokens, passwords and values of secret variables."""
        for secret in self._values:
            self.count += text.count(secret)
            text = text.replace(secret, REDACTED)
        for pattern, kept in _PATTERNS:
            text, found = pattern.subn(kept + REDACTED, text)
            self.count += found
        return _NAMED.sub(self._named, text)

    def _named(self, match: re.Match[str]) -> str:
        name, between, value = match.groups()
        if not env.is_secret_name(name) or value.startswith(REDACTED):
            return match[0]
        self.count += 1
        return f"{name}{between}{REDACTED}"
