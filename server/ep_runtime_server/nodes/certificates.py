"""Reads the files of --tls-cert, --tls-key and --tls-ca, and their ends; rereads changed files."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import re
import ssl
from collections.abc import Iterator

from ep_runtime import files
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog

WARNED_S = 30 * 24 * 3600.0
_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME = 0x17  # DER tag; else GeneralizedTime, with a four-digit year


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM texts of our certificate, its key, and the authority that all nodes trust.

    Args:
        paths: the paths of the three files.
    """

    paths: tuple[str, str, str]
    certificate: bytes
    key: bytes = dataclasses.field(repr=False)
    authority: bytes = b""

    def ends(self) -> Iterator[tuple[str, float]]:
        """Yields (path, Unix time) of our chain's earliest end and the authorities' latest."""
        yield self.paths[0], min(_ends(self.certificate))
        yield self.paths[2], max(_ends(self.authority))


def read_tls(certificate: str, key: str, authority: str) -> Tls:
    """Reads the files. Raises InvalidArgumentError if they are unreadable or do not match."""
    paths = certificate, key, authority
    flags = "--tls-cert", "--tls-key", "--tls-ca"
    tls = Tls(paths, *(_read_pem(flag, path) for flag, path in zip(flags, paths, strict=True)))
    for flag, path, text in (
        (flags[0], certificate, tls.certificate),
        (flags[2], authority, tls.authority),
    ):
        try:
            _ends(text)
        except (ValueError, IndexError) as error:
            raise InvalidArgumentError(
                f"{flag}: {path} is not a certificate: {error}", argument=flag
            ) from error
    _check_pair(certificate, key)
    return tls


def _read_pem(flag: str, path: str) -> bytes:
    try:
        text = files.read(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"{flag}: cannot read {path}: {error.strerror}", argument=flag
        ) from error
    wanted = b"PRIVATE KEY-----" if flag == "--tls-key" else b"-----BEGIN CERTIFICATE-----"
    if wanted not in text:
        raise InvalidArgumentError(
            f"{flag}: {path} must be a PEM file with a "
            f"{'key' if flag == '--tls-key' else 'certificate'}, got another file",
            argument=flag,
        )
    return text


def _check_pair(certificate: str, key: str) -> None:
    """Raises InvalidArgumentError unless the key belongs to the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # gRPC checks their strength
    try:
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is an OSError
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        why = (
            "they do not belong together: it is the key of another certificate"
            if mismatch
            else f"they are not a certificate and its key, or the key has a passphrase: {error}"
        )
        raise InvalidArgumentError(
            f"--tls-cert {certificate} and --tls-key {key}: {why}", argument="--tls-key"
        ) from error


def _ends(pem: bytes) -> list[float]:
    """Returns each certificate's `notAfter` as Unix time; `ssl` has no function for that."""
    found = _PEM.findall(pem.decode("ascii", errors="replace"))
    if not found:
        raise ValueError("it has no END line")
    return [_not_after(ssl.PEM_cert_to_DER_cert(text)) for text in found]


def _not_after(der: bytes) -> float:
    """Returns the Unix time of `notAfter` in a certificate.

    By RFC 5280, `validity` follows version, serial number, signature and issuer.
    """
    _, at, _ = _item(der, 0)
    _, at, _ = _item(der, at)
    tag, _, end = _item(der, at)
    for _ in range(4 if tag == 0xA0 else 3):  # the version is optional
        at = end
        _, start, end = _item(der, at)
    _, _, at = _item(der, start)  # notBefore
    tag, start, end = _item(der, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    ends = datetime.datetime.strptime(der[start:end].decode(), form)
    return ends.replace(tzinfo=datetime.UTC).timestamp()


def _item(der: bytes, at: int) -> tuple[int, int, int]:
    """Returns (tag, start, end) of the DER value that begins at `at`."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return der[at], start, start + length


class Certificates:
    """The certificate, key and authority that a daemon uses now. For the event loop's thread.

    Attributes:
        tls: the certificates read last.
        error: why the current files cannot be used; empty if they can.
    """

    def __init__(self, tls: Tls, clock: Clock, events: EventLog) -> None:
        self._clock = clock
        self._events = events
        self._seen = self._changing = _stamp(tls.paths)
        self._warned = ""
        self.tls = tls
        self.error = ""

    def left(self) -> list[tuple[str, float]]:
        """Returns (path, seconds until its end) of our certificate and of the authority."""
        now_s = self._clock.wall_s()
        return [(path, ends_s - now_s) for path, ends_s in self.tls.ends()]

    @property
    def ended(self) -> str:
        """Returns a text that names an ended certificate; empty if none has ended."""
        over = [path for path, left_s in self.left() if left_s <= 0]
        return f"our own certificate {over[0]} has ended" if over else ""

    def look(self) -> bool:
        """Reads the files again if they changed; returns whether it read new certificates.

        Reads changed files only once two calls have found them equal, because their writer is then
        done.
        """
        stamp = _stamp(self.tls.paths)
        changed = stamp != self._seen and stamp == self._changing and self._read_again()
        if stamp == self._changing:
            self._seen = stamp
        self._changing = stamp
        self._warn()
        return changed

    def _read_again(self) -> bool:
        try:
            self.tls = read_tls(*self.tls.paths)
        except InvalidArgumentError as error:
            self.error = f"{error}; the one that was read before is used"
            self._events.add("cluster.certificate_refused", self.error, level=logging.ERROR)
            return False
        self.error = ""
        path, left_s = self.left()[0]
        self._events.add(
            "cluster.certificate_read", f"{path} was read again; it ends {_in_days(left_s)}"
        )
        return True

    def _warn(self) -> None:
        """Adds one event when a certificate ends in less than WARNED_S."""
        near = [(path, left_s) for path, left_s in self.left() if left_s < WARNED_S]
        names = " ".join(path for path, _ in near)
        if names != self._warned and near:
            text = ", ".join(f"{path} ends {_in_days(left_s)}" for path, left_s in near)
            self._events.add("cluster.certificate_ends", text, level=logging.WARNING)
        self._warned = names


def _in_days(left_s: float) -> str:
    return f"in {left_s / 86400:.0f} days" if left_s > 0 else "now, or has ended"


def _stamp(paths: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Returns a stamp that changes if a file changes or a link points to another file."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            about = os.stat(path)
        except OSError:
            found.append((0,))
        else:
            found.append((about.st_ino, about.st_size, about.st_mtime_ns))
    return found
