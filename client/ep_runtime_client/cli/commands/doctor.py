"""`ep-runtime doctor`: checks this machine and the daemon, and says what to fix."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable
from typing import NamedTuple

import ep_runtime
from ep_runtime import env
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
)
from ep_runtime_client import cli
from ep_runtime_client.base import jax_internals, jax_state
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading, watching
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column
from ep_runtime_client.daemons.socket_directory import SocketDirectory

_COLUMNS = (
    Column("check", "CHECK", priority=IDENTITY, about="what was checked"),
    Column("state", "STATE", priority=STATE, about="OK, WARN (works, but with a loss) or FAIL"),
    Column("found", "FOUND", "prose", priority=STATE, about="what was found"),
    Column("advice", "ADVICE", "prose", priority=STATE, about="what to do"),
)

# A group of 64 ranks maps 65 descriptors at once, and JAX opens its own.
_MIN_OPEN_FILES = 1024


class Finding(NamedTuple):
    """One checked thing: OK, WARN (works, with a loss) or FAIL (does not work)."""

    check: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_output_arguments(parser)
    reading.add_daemon_arguments(parser)
    reading.explain(parser, {"columns": _COLUMNS})


def run(args: argparse.Namespace) -> int:
    return watching.repeat(args, lambda: _once(args))


def findings(args: argparse.Namespace) -> list[Finding]:
    """All that is checked, in order."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _kernel,
        _memfd,
        _open_files,
        _packages,
        _jax,
        _native_library,
        _gpus,
        _nccl,
    ]
    return [*(check() for check in checks), *_hardware(args), _directory(args), _daemon(args)]


def _once(args: argparse.Namespace) -> int:
    found = findings(args)
    failed = any(finding.state == "FAIL" for finding in found)
    rows = [finding._asdict() for finding in found]
    if args.output == "json":
        render.write_json(
            "doctor", {"healthy": not failed, "items": rows}, compact=bool(args.watch)
        )
    else:
        render.write_table(_COLUMNS, rows, wide=True, empty="")
    return cli.PARTIAL if failed else cli.OK


def _python() -> Finding:
    found = f"{platform.python_version()} on {sys.platform}"
    if sys.platform != "linux":
        return Finding("python", "FAIL", found, "the runtime needs Linux")
    return Finding("python", "OK", found)


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if numbers < (5, 6):
        return Finding("kernel", "FAIL", release, "Linux 5.6 or newer has pidfds between processes")
    if numbers < (6, 5):
        return Finding("kernel", "WARN", release, "before 6.5 a pid is checked by its start time")
    return Finding("kernel", "OK", release)


def _memfd() -> Finding:
    try:
        fd = os.memfd_create("ep-runtime-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding("memfd", "FAIL", str(error), "allow memfd_create in the container's profile")
    os.close(fd)
    return Finding("memfd", "OK", "sealable")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} of {hard}"
    if soft < _MIN_OPEN_FILES:
        return Finding("open files", "WARN", found, f"ulimit -n {_MIN_OPEN_FILES} or more")
    return Finding("open files", "OK", found)


def _packages() -> Finding:
    versions, missing = [], []
    for name in ("jax", "jaxlib", "numpy", "grpcio", "protobuf"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = "pip install " + " ".join(missing)
        return Finding("packages", "FAIL", f"missing: {', '.join(missing)}", advice)
    if jax_state.jaxlib_version() < (0, 12):
        advice = (
            "jaxlib 0.12 for psum_scatter of your own between processes on CPU: some values may be "
            "wrong before it (no op of ep_runtime uses it there)"
        )
        return Finding("packages", "WARN", ", ".join(versions), advice)
    return Finding("packages", "OK", ", ".join(versions))


def _jax() -> Finding:
    """Imports JAX, which starts no backend."""
    reason = jax_internals.unsupported_reason()
    if reason is not None:
        found = f"{reason}: {jax_internals.CONSEQUENCE}"
        return Finding("jax", "WARN", found, jax_internals.remedy())
    return Finding("jax", "OK", "partitioning rules work as they are used here")


def _native_library() -> Finding:
    from ep_runtime import native

    try:
        library = native.library()
    except (EpRuntimeError, OSError, ImportError) as error:
        text = str(error).splitlines()[0]
        return Finding("native library", "FAIL", text, "install the package again (pip install)")
    return Finding("native library", "OK", f"version {library.version}")


def _gpus() -> Finding:
    from ep_runtime_client.cli.machine import gpus

    return Finding("gpus", *gpus.check())


def _nccl() -> Finding:
    """NCCL as a client finds it; a daemon of this machine does likewise."""
    from ep_runtime import native, nccl

    if not native.library_path("cuda").exists():
        return Finding("nccl", "OK", "not needed: this package was built without CUDA")
    try:
        version = nccl.library().version()
    except (EpRuntimeError, OSError) as error:
        advice = 'install the extra cuda12 or cuda13; transport="nccl" needs it'
        return Finding("nccl", "WARN", str(error).splitlines()[0], advice)
    found = f"NCCL {nccl.version_text(version)} of {nccl.find_library()}"
    return Finding("nccl", "OK", found)


def _hardware(args: argparse.Namespace) -> list[Finding]:
    from ep_runtime_client.cli.daemon import source
    from ep_runtime_client.cli.machine import gpus, nvml

    try:
        with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
            held = nvml.held_by_gpu(daemon.status())
    except EpRuntimeError:
        held = {}  # what the daemon's own line says
    return [Finding(name, *line) for name, line in gpus.hardware(held).items()]


def _directory(args: argparse.Namespace) -> Finding:
    """The directory of the daemon that is asked; else the one in which a daemon would start."""
    from ep_runtime_client.daemons import addresses

    try:
        place = addresses.daemon_place(args.address)
    except RuntimeUnavailableError:  # $EP_RUNTIME_ADDRESS names none that could be asked
        place = SocketDirectory(env.runtime_directory())
    except EpRuntimeError as error:
        return Finding("directory", "FAIL", str(error), "set RUNTIME_DIRECTORY to a shorter one")
    own = "set the address, or RUNTIME_DIRECTORY, to a directory of your own"
    try:
        place.check()
    except (PermissionDeniedError, InvalidArgumentError) as error:
        return Finding("directory", "FAIL", str(error), own)
    directory = place.directory
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return Finding("directory", "WARN", f"{parent} is not writable", own)
    return Finding("directory", "OK", str(directory))


def _daemon(args: argparse.Namespace) -> Finding:
    from ep_runtime import wire
    from ep_runtime_client.cli.daemon import attention, source
    from ep_runtime_client.daemons import addresses

    try:
        with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
            status = daemon.status()
    except RuntimeUnavailableError:
        return _no_daemon(args.address)
    except PermissionDeniedError as error:
        return Finding("daemon", "WARN", str(error), "ask as the daemon's user")
    found = (
        f"{status['state']} at {addresses.daemon_place(args.address).address}, "
        f"version {status['server_version']}"
    )
    if not wire.work_together(status["server_version"], ep_runtime.__version__):
        advice = f"this client has version {ep_runtime.__version__}; restart the daemon with it"
        return Finding("daemon", "WARN", found, advice)
    if status["state"] != "SERVING":
        return Finding("daemon", "FAIL", found, "it ends soon; start another one")
    if advice := "; ".join(attention.certificates(status)):
        return Finding("daemon", "WARN", found, advice)
    return Finding("daemon", "OK", found)


def _no_daemon(address: str | None) -> Finding:
    """What jobs do without one: those of a named directory fail, and take no other daemon."""
    from ep_runtime_client.daemons import addresses

    named = address if address is not None else env.address()
    if named is not None and addresses.parse_address(named).kind != addresses.DIRECTORY:
        return Finding("daemon", "OK", f"none, and none has to run for {named!r}")
    place = addresses.daemon_place(address)
    found = f"none at {place.address}"
    if named is None:
        advice = "`ep-runtime serve` starts one; without, each process gets its own"
        return Finding("daemon", "WARN", found, advice)
    advice = f"`ep-runtime serve --dir {place.directory}`; jobs with that address take no other"
    return Finding("daemon", "FAIL", found, advice)
