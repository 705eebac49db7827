"""Seals requests on plain TCP, which prove without certificates that the sender has a secret.

The secret is never sent. An attacker who listens in place of a daemon can only repeat the requests
it receives, but cannot make new ones.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from typing import Any

from ep_runtime import files
from ep_runtime.errors import InvalidArgumentError, PermissionDeniedError

KEY = "ep-node-seal"
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
# Remembered nonces, so that no request is answered twice. The leases of older requests have ended
# by the time their nonces are dropped.
_MAX_NONCES = 20_000


class Seal:
    """Seals our requests, and checks the seals of others' requests."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: collections.OrderedDict[str, None] = collections.OrderedDict()

    def of(self, method: str, data: bytes) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that seals a call of `method` (its full name) with `data`."""
        nonce = secrets.token_hex(16)
        return ((KEY, f"{nonce}.{self._mac(method, nonce)}.{self._mac(method, nonce, data)}"),)

    def check_sender(self, method: str, metadata: Mapping[str, Any]) -> None:
        """Checks the seal of a call before its request is read. Raises PermissionDeniedError."""
        nonce, of_call, _ = _parts(metadata)
        if not hmac.compare_digest(of_call, self._mac(method, nonce)) or nonce in self._seen:
            raise _refused(method)
        self._seen[nonce] = None
        if len(self._seen) > _MAX_NONCES:
            self._seen.popitem(last=False)

    def check_request(self, method: str, metadata: Mapping[str, Any], data: bytes) -> None:
        """Checks that the seal is for this request's bytes. Raises PermissionDeniedError."""
        nonce, _, of_request = _parts(metadata)
        if not hmac.compare_digest(of_request, self._mac(method, nonce, data)):
            raise _refused(method)

    def _mac(self, method: str, nonce: str, data: bytes | None = None) -> str:
        text = f"{method} {nonce} ".encode()
        if data is not None:
            text += hashlib.sha256(data).digest()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def _parts(metadata: Mapping[str, Any]) -> tuple[str, str, str]:
    parts = str(metadata.get(KEY, "")).split(".")
    if len(parts) != 3 or not all(part.isascii() for part in parts):
        return "", "", ""
    return parts[0], parts[1], parts[2]


def _refused(method: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{method}: the caller does not have this cluster's secret; give every daemon the same "
        "--secret FILE",
        method=method,
    )


def read_secret(path: str) -> bytes:
    """Reads the secret from a file that only its owner can read.

    Raises:
        InvalidArgumentError: the file cannot be read, other users can read it, or its secret is
            too short or too long.
    """
    try:
        with open(files.open_regular(path), "rb") as file:
            about = os.fstat(file.fileno())
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise InvalidArgumentError(
            f"--secret: cannot read {path}: {error.strerror}", argument="--secret"
        ) from error
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidArgumentError(
            f"--secret: {path} has mode {about.st_mode & 0o777:04o} and belongs to uid "
            f"{about.st_uid}; only you may own and read it: chmod 0600 {path}",
            argument="--secret",
        )
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise InvalidArgumentError(
            f"--secret: {path} must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, "
            f"got {len(secret)}",
            argument="--secret",
        )
    return secret
