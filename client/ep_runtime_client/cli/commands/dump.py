"""`ep-runtime dump`: writes one archive for a bug report, and leaves possible secrets out."""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import io
import json
import operator
import os
import platform
import re
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ep_runtime import env, files
from ep_runtime.errors import EpRuntimeError, InvalidArgumentError
from ep_runtime.text import iec
from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.commands import doctor
from ep_runtime_client.cli.daemon import reading

FOLDER = "ep-runtime-dump"
_TIMEOUT_S = 30.0
_EVENT_KEYS = ("sequence", "time", "kind", "session_id", "group", "message", "fields")

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

# Lists of every node, by Source's methods. `ranks` and `handles` come from the boards.
_LISTS = ("sessions", "groups", "layers", "handles", "ranks", "tallies", "buffers", "events")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help=f"file to make; default {FOLDER}-HOST-TIME.tar.gz here",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    now = datetime.datetime.now(datetime.UTC)
    host = platform.node().partition(".")[0] or "host"
    path = args.file or Path(f"{FOLDER}-{host}-{now:%Y%m%dT%H%M%S}.tar.gz")
    missing: dict[str, str] = {}
    parts = {
        "machine": machine(args),
        "journal": _kept(missing, "journal", lambda: journal(args)),
        **_of_daemon(args, missing),
    }
    redaction = Redaction()
    parts = {name: redaction.of(part) for name, part in parts.items() if part is not None}
    about = {
        "created": now.isoformat(timespec="seconds"),
        "parts": sorted(parts),
        "missing": redaction.of(missing),
        "redacted": redaction.count,
    }
    size_bytes = write(path, {"about": about, **parts})
    _tell(args, path, size_bytes, about)
    return cli.PARTIAL if missing else cli.OK


def _kept(missing: dict[str, str], name: str, read: Callable[[], Any]) -> Any:
    """Returns the result of `read`; if it fails, notes why and returns None, so that the dump
    continues."""
    try:
        return read()
    except (EpRuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        missing[name] = str(error)
        return None


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Collects `doctor`'s results (driver, GPUs, NCCL, limits), and each package's version."""
    from ep_runtime_client.cli.machine import nvml

    packages = {
        str(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()
    }
    return {
        "system": dict(platform.uname()._asdict(), node=platform.node()),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "doctor": [finding._asdict() for finding in doctor.findings(args)],
        "gpus": nvml.told({}),
    }


def journal(args: argparse.Namespace) -> dict[str, Any]:
    """Describes the journal in numbers, and the sizes of files in its directory; no content."""
    from ep_runtime_client.daemons import addresses, command_line

    directory = addresses.daemon_place(args.address).directory
    command = command_line.python_command(
        "ep_runtime_server.journal.summary", [str(directory / "journal")]
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise InvalidArgumentError((done.stderr.strip() or "no journal").splitlines()[-1])
    files = {
        entry.name: {"bytes": entry.stat().st_size, "mode": f"{entry.stat().st_mode & 0o7777:o}"}
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name)
        if entry.is_file(follow_symlinks=False)
    }
    return {"directory": str(directory), "files": files, **json.loads(done.stdout)}


def _of_daemon(args: argparse.Namespace, missing: dict[str, str]) -> dict[str, Any]:
    """Reads status and lists; if no daemon answers, the events that the last daemon left."""
    from ep_runtime_client.cli.daemon import nodes, source

    parts: dict[str, Any] = {}
    try:
        with source.open_source(args.address, timeout_s=args.timeout) as daemon:
            parts["status"] = _kept(missing, "status", daemon.status)
            for name in _LISTS:
                read = operator.methodcaller(name)
                found = _kept(missing, name, functools.partial(nodes.everywhere, daemon, read))
                if found is not None:
                    parts[name] = {"items": found.rows, "unreachable": found.missing}
                    missing |= {f"{name} of {one['node']}": one["error"] for one in found.missing}
    except EpRuntimeError as error:
        missing["status"] = str(error)
        parts["events"] = _kept(missing, "events", lambda: left_events(args))
    return parts


def left_events(args: argparse.Namespace) -> dict[str, Any]:
    """Returns events from the file that a daemon leaves for its successor."""
    from ep_runtime_client.daemons import addresses

    path = addresses.daemon_place(args.address).directory / "events"
    items = []
    for line in files.read_end(path).splitlines():
        try:
            items.append(dict(zip(_EVENT_KEYS, json.loads(line), strict=True)))
        except (ValueError, TypeError):  # a torn line, or not an event
            continue
    return {"items": items, "unreachable": []}


def write(path: Path, parts: dict[str, Any]) -> int:
    """Writes the archive, which only its owner can read; returns its size in bytes.

    Raises:
        InvalidArgumentError: the file exists, or cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}", argument="FILE") from error
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, part in parts.items():
            text = json.dumps(render.document(name, part), indent=1, ensure_ascii=True)
            member = tarfile.TarInfo(f"{FOLDER}/{name}.json")
            member.size, member.mode, member.mtime = len(text), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path.stat().st_size


def _tell(args: argparse.Namespace, path: Path, size_bytes: int, about: dict[str, Any]) -> None:
    if args.output == "json":
        render.write_json("dump", {"path": str(path), "bytes": size_bytes, **about})
        return
    for name, why in about["missing"].items():
        render.err(f"without {name}: {why}")
    parts = ", ".join(about["parts"])
    render.write_text(f"{path}: {iec(size_bytes)}, {parts}")
    render.write_text(
        "Names of hosts, jobs and users are in it, labels too; look through it before you send it."
    )


class Redaction:
    """Removes possible secrets from values, because others read a dump; counts them."""

    def __init__(self) -> None:
        self._values = env.secret_values()
        self.count = 0

    def of(self, value: Any) -> Any:
        """Returns the value, JSON of any depth, with REDACTED in place of secrets."""
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
        """Returns the text without keys, tokens, passwords and values of secret variables."""
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
