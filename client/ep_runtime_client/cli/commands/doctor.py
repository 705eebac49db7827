"""`ep-runtime doctor`: checks this machine and the daemon, and gives advice."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ep_runtime
from ep_runtime import env
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
)
from ep_runtime.text import iec
from ep_runtime_client import cli
from ep_runtime_client.base import jax_internals, jax_state
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import attention, reading, watching
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column
from ep_runtime_client.daemons.addresses import SocketDirectory

_COLUMNS = (
    Column("check", "CHECK", priority=IDENTITY, about="what was checked"),
    Column("state", "STATE", priority=STATE, about="OK, WARN (works, but with a loss) or FAIL"),
    Column("found", "FOUND", "prose", priority=STATE, about="what was found"),
    Column("advice", "ADVICE", "prose", priority=STATE, about="what to do"),
)

# A group of 64 ranks maps 65 descriptors at once, and JAX opens its own.
_MIN_OPEN_FILES = 1024
_MIN_SHARED_BYTES = 1 << 30

# Supported versions of JAX for each version of Python.
JAX_OF = {
    (3, 11): ((0, 10),),
    (3, 12): ((0, 10), (0, 11), (0, 12)),
    (3, 13): ((0, 10), (0, 11), (0, 12)),
    (3, 14): ((0, 10), (0, 11), (0, 12)),
}


class Finding(NamedTuple):
    """One check's result: OK, WARN (works, with a loss) or FAIL (does not work)."""

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
    """Runs all checks, in order."""
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
    status = _status(args)
    return [
        *(check() for check in checks),
        *_several_gpus(),
        *_hardware(status),
        _directory(args),
        _daemon(args, status),
        *_silent(status),
    ]


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
    """Checks whether this Python and its JAX are supported together."""
    if sys.platform != "linux":
        return Finding("python", "FAIL", sys.platform, "the runtime needs Linux")
    python, jaxlib = sys.version_info[:2], jax_state.jaxlib_version()
    found = f"{platform.python_version()} with jaxlib {'.'.join(map(str, jaxlib))}"
    if jaxlib in JAX_OF.get(python, ()):
        return Finding("python", "OK", found)
    pairs = "; ".join(
        f"Python {'.'.join(map(str, each))} with JAX {', '.join(f'{a}.{b}' for a, b in versions)}"
        for each, versions in JAX_OF.items()
    )
    return Finding("python", "WARN", f"{found}: this pair is not supported", f"take {pairs}")


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
    """Checks JAX, which it imports without starting a backend."""
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
    """Checks the NCCL that a client finds; a daemon on this machine finds the same one."""
    from ep_runtime import native, nccl

    if not native.library_path("cuda").exists():
        return Finding("nccl", "OK", "not needed: this package was built without CUDA")
    try:
        version = nccl.library().version()
    except (EpRuntimeError, OSError) as error:
        advice = 'install the extra cuda12 or cuda13; transport="nccl" needs it'
        return Finding("nccl", "WARN", str(error).splitlines()[0], advice)
    found = f"NCCL {nccl.version_text(version)} of {nccl.find_library()}"
    for header, code in _nccl_headers(Path(nccl.find_library())):
        if code != version:
            advice = f"install the nccl.h of NCCL {nccl.version_text(version)}, or remove that one"
            other = f"; {header} is of {nccl.version_text(code)}, for who compiles against it"
            return Finding("nccl", "WARN", found + other, advice)
    return Finding("nccl", "OK", found)


def _nccl_headers(library: Path) -> Iterator[tuple[Path, int]]:
    """Finds each nccl.h that a compiler may use, and the version in it."""
    for folder in (library.parent.parent / "include", Path("/usr/include")):
        try:
            text = (folder / "nccl.h").read_text(errors="replace")
        except OSError:
            continue
        if code := re.search(r"#define\s+NCCL_VERSION_CODE\s+(\d+)", text):
            yield folder / "nccl.h", int(code[1])


def _several_gpus() -> list[Finding]:
    """Checks NCCL's needs for several GPUs of one machine; no finding with fewer."""
    from ep_runtime_client.cli.machine import gpus

    count = gpus.usable()
    if count < 2:
        return []
    ordered = Finding("nccl order", "OK", "NCCL_LAUNCH_ORDER_IMPLICIT=1")
    if not env.nccl_orders_launches():
        ordered = Finding(
            "nccl order",
            "WARN",
            f"{count} GPUs, and NCCL_LAUNCH_ORDER_IMPLICIT is not 1",
            "set it to 1 for a process that uses several: communicators of JAX and of groups may "
            "wait for each other without it",
        )
    return [ordered, _shared_memory()]


def _shared_memory(folder: str = "/dev/shm") -> Finding:
    """Checks shared memory, which holds NCCL's buffers between processes of a node."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        text = f"{folder}: {error.strerror}"
        return Finding("shared memory", "WARN", text, f"mount a tmpfs at {folder}, for NCCL")
    free_bytes = found.f_bavail * found.f_frsize
    text = f"{iec(free_bytes)} free in {folder}"
    if free_bytes < _MIN_SHARED_BYTES:
        advice = (
            "NCCL keeps buffers there: remove old files, or mount 1 GiB or more "
            "(docker run --shm-size=1g, an emptyDir of medium Memory)"
        )
        return Finding("shared memory", "WARN", text, advice)
    return Finding("shared memory", "OK", text)


def _status(args: argparse.Namespace) -> dict[str, Any] | EpRuntimeError:
    """Returns the daemon's status, or the error if there is none."""
    from ep_runtime_client.cli.daemon import source

    try:
        with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
            return daemon.status()
    except EpRuntimeError as error:
        return error


def _silent(status: dict[str, Any] | EpRuntimeError) -> list[Finding]:
    """Lists the processes without a heartbeat, one line each."""
    if isinstance(status, EpRuntimeError):
        return []
    return [
        Finding(
            "processes",
            "WARN",
            attention.silence(process),
            "if it does not go on, "
            f"`ep-runtime fence {process['session_id']}` lets the others of its groups end",
        )
        for process in status["silent_processes"]
    ]


def _hardware(status: dict[str, Any] | EpRuntimeError) -> list[Finding]:
    from ep_runtime_client.cli.machine import gpus, nvml

    held = {} if isinstance(status, EpRuntimeError) else nvml.held_by_gpu(status)
    return [Finding(name, *line) for name, line in gpus.hardware(held).items()]


def _directory(args: argparse.Namespace) -> Finding:
    """Returns the directory of the daemon that answers, or in which one would start."""
    from ep_runtime_client.daemons import addresses

    try:
        place = addresses.daemon_place(args.address)
    except RuntimeUnavailableError:  # $EP_RUNTIME_ADDRESS names no daemon to ask
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


def _daemon(args: argparse.Namespace, status: dict[str, Any] | EpRuntimeError) -> Finding:
    from ep_runtime import wire
    from ep_runtime_client.daemons import addresses

    if isinstance(status, RuntimeUnavailableError):
        return _no_daemon(args.address)
    if isinstance(status, PermissionDeniedError):
        return Finding("daemon", "WARN", str(status), "ask as the daemon's user")
    if isinstance(status, EpRuntimeError):
        return Finding("daemon", "FAIL", str(status), "look at the daemon's log")
    found = (
        f"{status['state']} at {addresses.daemon_place(args.address).address}, "
        f"version {status['server_version']}"
    )
    if not wire.work_together(status["server_version"], ep_runtime.__version__):
        advice = f"this client has version {ep_runtime.__version__}; restart the daemon with it"
        return Finding("daemon", "WARN", found, advice)
    if status["state"] != "SERVING":
        return Finding("daemon", "FAIL", found, _until_it_serves(status))
    if advice := "; ".join(attention.certificates(status)):
        return Finding("daemon", "WARN", found, advice)
    return Finding("daemon", "OK", found)


def _until_it_serves(status: dict[str, Any]) -> str:
    drain = status["drain"]
    if drain is None:
        return "`ep-runtime status` says what it waits for"
    if drain["ends_in_s"] is None:
        return f"drained {drain['by']}: `ep-runtime undrain` admits sessions and groups again"
    return f"it ends, drained {drain['by']}: start another one then"


def _no_daemon(address: str | None) -> Finding:
    """Tells what jobs do without a daemon: a job with a named directory uses no other daemon."""
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
