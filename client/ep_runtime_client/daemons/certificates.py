"""Certificates for a lab: one authority, and one certificate per node with which daemons join.

Needs `cryptography` (the extra `certs`); daemons only read the files and do not need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import os
import re
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ep_runtime import files
from ep_runtime.errors import InvalidArgumentError

AUTHORITY = "ca"
MAX_DAYS = 1825
# Nodes may be added years later.
AUTHORITY_DAYS = 3650
# Clocks of two hosts may differ; a new certificate must be valid on both at once.
_CLOCK_SKEW = datetime.timedelta(minutes=10)
# A DNS name, which TLS compares with the node's name.
_NODE_NAME = re.compile(
    r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)


@dataclasses.dataclass(frozen=True)
class CertifiedNode:
    """Args:
    name: name that the daemon gives itself (`serve --node`).
    hosts: DNS names and IP addresses at which other nodes reach it.
    """

    name: str
    hosts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Signer:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclasses.dataclass(frozen=True)
class Paths:
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path

    def existing(self) -> list[Path]:
        return [path for path in (self.certificate, self.key) if os.path.lexists(path)]


def paths(directory: Path, name: str) -> Paths:
    return Paths(directory / f"{name}.pem", directory / f"{name}.key")


def parse_node(text: str) -> CertifiedNode:
    """Parses `NAME` or `NAME=HOST,HOST`.

    Raises:
        InvalidArgumentError: a name or host that a certificate cannot contain.
    """
    name, _, rest = text.partition("=")
    hosts = tuple(host for host in rest.split(",") if host)
    for word in (name, *hosts):
        if not _is_address(word) and not (_NODE_NAME.fullmatch(word) and len(word) <= 253):
            raise InvalidArgumentError(
                "NODE must be NAME or NAME=HOST,HOST of lower-case DNS names and IP addresses, "
                f"got {word!r} in {text!r}",
                argument="NODE",
            )
    if _is_address(name) or name == AUTHORITY:
        raise InvalidArgumentError(
            f"a node's name must be a DNS name other than {AUTHORITY!r}, got {name!r}",
            argument="NODE",
        )
    return CertifiedNode(name, hosts)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def make(
    directory: Path, nodes: list[CertifiedNode], *, days: int, force: bool
) -> dict[str, Paths]:
    """Writes an authority, if there is none, and a certificate with key for every node.

    If one file is rejected, none is written.

    Args:
        directory: created with mode 0700; keys get mode 0600.
        nodes: nodes with different names.
        days: lifetime of the nodes' certificates; a new authority lives AUTHORITY_DAYS.
        force: whether to replace nodes' existing files. The authority is never replaced, because
            that would invalidate all earlier certificates.

    Raises:
        InvalidArgumentError: a file exists, only half of an authority, or the directory is
            unreachable.
    """
    if not 1 <= days <= MAX_DAYS:
        raise InvalidArgumentError(f"days must be 1 to {MAX_DAYS}, got {days}", argument="days")
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"node names must differ, got {names}", argument="NODE")
    found = {node.name: paths(directory, node.name) for node in nodes}
    there = [path for one in found.values() for path in one.existing()]
    if there and not force:
        raise InvalidArgumentError(
            f"{there[0]} is there and is not overwritten; --force replaces nodes' files",
            argument="DIR",
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(directory, days)
        for node in nodes:
            _write_node(found[node.name], node, authority, days)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write into {directory}: {error.strerror}", argument="DIR"
        ) from error
    return {AUTHORITY: paths(directory, AUTHORITY), **found}


def _authority(directory: Path, days: int) -> _Signer:
    """Reads the directory's authority; makes one if there is none."""
    place = paths(directory, AUTHORITY)
    there = place.existing()
    if len(there) == 1:
        raise InvalidArgumentError(
            f"{there[0]} exists without its certificate or key; take another directory",
            argument="DIR",
        )
    if there:
        return _read_authority(place, days)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"ep-runtime lab {secrets.token_hex(4)}")]
    )
    certificate = (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair(place, certificate, key)
    return _Signer(certificate, key)


def _read_authority(place: Paths, days: int) -> _Signer:
    try:
        certificate = x509.load_pem_x509_certificate(files.read(place.certificate))
        key = serialization.load_pem_private_key(files.read(place.key), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"{place.certificate} and {place.key} are not a certificate and its key: {error}",
            argument="DIR",
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgumentError(
            f"{place.key} must be an EC key made by `ep-runtime certs`", argument="DIR"
        )
    ends = certificate.not_valid_after_utc
    if ends < datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days):
        raise InvalidArgumentError(
            f"{place.certificate} ends on {ends:%Y-%m-%d}, before the {days} days asked for; "
            "give fewer --days, or another directory",
            argument="days",
        )
    return _Signer(certificate, key)


def _write_node(place: Paths, node: CertifiedNode, authority: _Signer, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((node.name, *node.hosts)):
        if _is_address(host):
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        else:
            names.append(x509.DNSName(host))
    # A daemon is the server in some calls and the client in others.
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_key = authority.key.public_key()
    # RFC 5280 allows 64 characters in the common name; TLS reads only the alternative names.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node.name[:64])])
    certificate = (
        _builder(subject, authority.certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    _write_pair(place, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(
    place: Paths, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write(place.key, private, 0o600)
    _write(place.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Writes a whole file or none; no user that `mode` excludes can ever read it."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(fresh, flags, mode)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)  # overrides the umask
            file.write(data)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
