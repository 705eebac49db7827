"""Reads and sets environment variables; no other file uses `os.environ`.

No variable may change how a program is traced or compiled, because processes of a job may have
different environments. Such a setting must be a group's setting or an argument.

| variable | default | meaning |
|---|---|---|
| EP_RUNTIME_ADDRESS | unset | address for `connect()` without one; an error if no daemon answers |
| EP_RUNTIME_JOB | unset | name of the job, the namespace of a user's group names |
| EP_RUNTIME_DEBUG | 0 | 1: native libraries check indices and fill undefined rows with 0xFF (NaN) |
| EP_RUNTIME_KEEP_MEMORY | 1 | 0: return freed memory to the system instead of reusing it |
| EP_RUNTIME_BOARD | 1 | 0: GPUs write nothing to the board, so `status` and `top` omit them |
| EP_RUNTIME_NCCL | 1 | 0: GPU groups with transport "nvlink" get no NCCL communicators |
| EP_RUNTIME_NCCL_LIBRARY | unset | path of libnccl.so.2 if JAX has not loaded one |
| NCCL_LAUNCH_ORDER_IMPLICIT | unset | NCCL's own; `doctor` asks for 1 if there are several GPUs |
| JAX_PLATFORMS | unset | JAX's own; `demo` looks for GPUs only if it contains cuda or is unset |
| CUDA_VISIBLE_DEVICES | unset | CUDA's own; a daemon started with it serves only these GPUs |
| SLURM_JOB_ID | unset | the job's name if EP_RUNTIME_JOB is not set |
| RUNTIME_DIRECTORY | unset | directory of the daemon's sockets, set by systemd |
| XDG_RUNTIME_DIR | unset | parent of that directory for users other than root |
| NOTIFY_SOCKET | unset | socket on which the daemon tells systemd that it is ready |
| LISTEN_PID | unset | process for which systemd kept descriptors |
| LISTEN_FDS | unset | number of descriptors that systemd kept for the daemon |
| LISTEN_FDNAMES | unset | names of these descriptors |
| WATCHDOG_PID | unset | process that systemd's watchdog observes |
| WATCHDOG_USEC | unset | microseconds of silence after which the watchdog acts |
| NO_COLOR | unset | any text: no colours on the command line |
| GLIBC_TUNABLES | unset | glibc's own; malloc settings here or in MALLOC_* replace the runtime's |
| GRPC_VERBOSITY | NONE | gRPC's own lines on the daemon's stderr, next to its log |
| XLA_FLAGS | unset | XLA's own; `distributed.initialize` adds flags that let collectives end |
| XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE | unset | JAX's; `distributed.initialize` sets 1 |
| XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT | unset | JAX's own; `distributed.initialize` sets 1 |
| TF_CPP_MIN_LOG_LEVEL | 1 | XLA's own; `ep-runtime coordination` logs no INFO lines by default |
| PJRT_NPROC | unset | thread count of XLA:CPU; `connect()` raises it if necessary |
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ep_runtime.errors import InvalidArgumentError, PermissionDeniedError

# sun_path holds 107 bytes, and "/admin.sock" takes 11 of them.
MAX_DIRECTORY_BYTES = 96

_PRIVATE_PREFIX = "ep-runtime-"

# Last words of secrets' names. Values below _MIN_SECRET are not redacted, because ordinary words
# may contain them.
_SECRET_ENDS = (
    *("token", "secret", "password", "passwd", "passphrase"),
    *("key", "apikey", "credential", "credentials", "auth", "authorization", "cookie"),
)
_MIN_SECRET = 6

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def _text(name: str) -> str | None:
    """Returns a variable's value, or None if it is unset or empty."""
    return os.environ.get(name) or None


def address() -> str | None:
    """Returns EP_RUNTIME_ADDRESS, or None."""
    return _text("EP_RUNTIME_ADDRESS")


def job() -> str | None:
    """Returns the job's name: EP_RUNTIME_JOB, else SLURM_JOB_ID, else None."""
    return _text("EP_RUNTIME_JOB") or _text("SLURM_JOB_ID")


def _switch(name: str, default: str) -> bool:
    """Returns whether a variable is on. Raises InvalidArgumentError if neither on nor off."""
    value = os.environ.get(name, default).strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise InvalidArgumentError(f"{name} must be 0 or 1, got {value!r}", argument=name)


def debug() -> bool:
    """Returns whether EP_RUNTIME_DEBUG is on. Raises InvalidArgumentError unless 0 or 1."""
    return _switch("EP_RUNTIME_DEBUG", "0")


def keep_memory() -> bool:
    """Returns whether EP_RUNTIME_KEEP_MEMORY is on. Raises InvalidArgumentError unless 0 or 1."""
    return _switch("EP_RUNTIME_KEEP_MEMORY", "1")


def tells_progress() -> bool:
    """Returns whether EP_RUNTIME_BOARD is on. Raises InvalidArgumentError unless 0 or 1."""
    return _switch("EP_RUNTIME_BOARD", "1")


def wants_nccl() -> bool:
    """Returns whether EP_RUNTIME_NCCL is on. Raises InvalidArgumentError unless 0 or 1."""
    return _switch("EP_RUNTIME_NCCL", "1")


def nccl_library() -> str | None:
    """Returns EP_RUNTIME_NCCL_LIBRARY, or None."""
    return _text("EP_RUNTIME_NCCL_LIBRARY")


def nccl_orders_launches() -> bool:
    """Returns whether NCCL_LAUNCH_ORDER_IMPLICIT, which NCCL reads, is 1."""
    return _text("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"


def jax_platforms() -> list[str]:
    """Returns the names in JAX_PLATFORMS; empty if JAX chooses."""
    return [name.strip() for name in (_text("JAX_PLATFORMS") or "").split(",") if name.strip()]


def malloc_is_set() -> bool:
    """Returns whether the user has set glibc's allocator options."""
    tunables = _text("GLIBC_TUNABLES") or ""
    names = ("MMAP_MAX_", "MMAP_THRESHOLD_", "TRIM_THRESHOLD_", "TOP_PAD_")
    return "glibc.malloc." in tunables or any(_text(f"MALLOC_{name}") for name in names)


def no_color() -> bool:
    """Returns whether NO_COLOR is set to any text."""
    return _text("NO_COLOR") is not None


def secret_values() -> list[str]:
    """Returns values of variables with secret names, so that they can be redacted."""
    found = [value for name, value in os.environ.items() if is_secret_name(name)]
    return sorted((value for value in found if len(value) >= _MIN_SECRET), key=len, reverse=True)


def is_secret_name(name: str) -> bool:
    """Returns whether a name, such as WANDB_API_KEY or auth-token, looks like a secret's name."""
    return re.split(r"[^a-z0-9]+", name.lower())[-1] in _SECRET_ENDS


def notify_socket() -> str | None:
    """Returns NOTIFY_SOCKET, or None if systemd did not start us."""
    return _text("NOTIFY_SOCKET")


def stored_fds() -> tuple[int, list[str]]:
    """Returns LISTEN_FDS and LISTEN_FDNAMES if they are for this process, else (0, [])."""
    count = _text("LISTEN_FDS")
    if _text("LISTEN_PID") != str(os.getpid()) or count is None or not count.isdecimal():
        return 0, []
    return int(count), (_text("LISTEN_FDNAMES") or "").split(":")


def watchdog_s() -> float | None:
    """Returns WATCHDOG_USEC in seconds if it is for this process, else None."""
    microseconds = _text("WATCHDOG_USEC")
    ours = _text("WATCHDOG_PID") in (None, str(os.getpid()))
    if not ours or microseconds is None or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None


def check_directory(path: str | os.PathLike[str]) -> Path:
    """Makes a socket directory's path absolute, and checks its length.

    Raises:
        InvalidArgumentError: the path is too long for Linux to have a socket in it.
    """
    absolute = Path(os.path.abspath(path))
    size = len(os.fsencode(absolute))
    if size > MAX_DIRECTORY_BYTES:
        raise InvalidArgumentError(
            f"directory must be at most {MAX_DIRECTORY_BYTES} bytes long so that Linux takes the "
            f"names of the sockets in it, got {size} bytes: {absolute}",
            argument="dir",
        )
    return absolute


def runtime_directory() -> Path:
    """Returns the socket directory of the node's default daemon; creates nothing.

    The first of: $RUNTIME_DIRECTORY; /run/ep-runtime for root; $XDG_RUNTIME_DIR/ep-runtime; a
    directory per user in the temporary directory, which `make_directory` creates with mode 0700.

    Raises:
        InvalidArgumentError: the name is too long for a socket.
    """
    given = _text("RUNTIME_DIRECTORY")
    if given is not None:
        return check_directory(given.split(":")[0])  # systemd separates several by ":"
    if os.geteuid() == 0:
        return Path("/run/ep-runtime")
    parent = _text("XDG_RUNTIME_DIR")
    if parent is not None:
        return check_directory(Path(parent) / "ep-runtime")
    return check_directory(Path(_temporary()) / f"ep-runtime-{os.geteuid()}")


def make_directory(path: str | os.PathLike[str], *, mode: int = 0o700) -> Path:
    """Creates the socket directory, or checks an existing one.

    Raises:
        InvalidArgumentError: the name is too long for a socket.
        PermissionDeniedError: the path is another user's, or not a directory. In another user's
            directory, such as one with a guessable name in /tmp, that user could serve our clients.
    """
    directory = check_directory(path)
    for missing in reversed([directory, *directory.parents]):
        if not missing.exists():
            # Check the parents too, because other users must not be able to write there.
            missing.mkdir(mode=mode, exist_ok=True)
    found = os.lstat(directory)
    owned = found.st_uid == os.geteuid()
    if not os.path.isdir(directory) or os.path.islink(directory) or not owned:
        raise PermissionDeniedError(
            f"{directory} must be a directory of uid {os.geteuid()}, "
            f"it belongs to uid {found.st_uid}",
            path=str(directory),
            uid=found.st_uid,
        )
    return directory


def private_directory() -> Path:
    """Creates a directory of mode 0700 with a short name, for an embedded daemon."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=_private_parent()))


def private_directories() -> list[Path]:
    """Returns the existing directories of this user that `private_directory` created."""
    found = []
    for path in sorted(_private_parent().glob(f"{_PRIVATE_PREFIX}*")):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.geteuid() and path.is_dir():
                found.append(path)
    return found


def _private_parent() -> Path:
    parent = _temporary()
    too_long = len(os.fsencode(parent)) > MAX_DIRECTORY_BYTES - 30
    return Path("/tmp") if too_long else Path(parent)


def _temporary() -> str:
    import tempfile  # imported late, because it is slow to load and most commands do not need it

    return tempfile.gettempdir()


def inherited() -> dict[str, str]:
    """Returns a copy of our environment, for a child process that works for this one."""
    return dict(os.environ)


_DAEMON_KEEPS = (
    # To find the packages, libcuda and libnccl; HOME also has NCCL's settings.
    *("PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "GRPC_VERBOSITY"),
    # Settings of the node, not of the first process: MPS, through which processes share a GPU,
    # and the interface at which other nodes reach the process that makes NCCL's unique ids.
    *("CUDA_MPS_PIPE_DIRECTORY", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_CONF_FILE"),
)
_DAEMON_KEEPS_PREFIXES = ("EP_RUNTIME_", "PYTHON")


def daemon_environment() -> dict[str, str]:
    """Returns the environment for a daemon that we start, and for a daemon's child processes.

    Leaves out this process's rank, GPU, profiler and secrets, because the daemon serves later
    processes too.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _DAEMON_KEEPS or name.startswith(_DAEMON_KEEPS_PREFIXES)
    }
    if "PYTHONPATH" in kept:  # make paths absolute, because the daemon runs in another directory
        entries = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, entries))
    # CUDA shows only one MIG instance to a process, so the daemon must use this one.
    if (visible_devices() or "").startswith("MIG-"):
        kept["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    # Keeps setproctitle from overwriting /proc/PID/environ, which helps debugging.
    return {**kept, "SPT_NOENV": "1"}


def visible_devices() -> str | None:
    """Returns CUDA_VISIBLE_DEVICES, or None if unset; an empty value hides all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def quiet_grpc() -> None:
    """Sets GRPC_VERBOSITY to NONE unless it is set; call this before importing gRPC.

    Otherwise gRPC's core writes a line for each malformed frame, without a limit.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def quiet_xla() -> None:
    """Sets TF_CPP_MIN_LOG_LEVEL to 1 unless it is set, as JAX does; call before jaxlib loads."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def raise_pjrt_nproc(least: int) -> int:
    """Sets PJRT_NPROC to `least` if XLA:CPU would have fewer threads.

    XLA:CPU reads the variable only when its backend starts. Returns the number of threads that
    XLA:CPU would have without this call.
    """
    current = _text("PJRT_NPROC")
    given = int(current) if current is not None and current.isdecimal() else 0
    threads = given or os.cpu_count() or 1
    if threads < least:
        os.environ["PJRT_NPROC"] = str(least)
    return threads


def let_collectives_end() -> None:
    """Makes collectives with an ended process raise an error, instead of ending our process or
    waiting for half an hour.

    On CPUs, XLA would merge all-reduces into one operation, which goes on with the next array after
    one has failed. That one then waits for the timeout, because gloo's connection still has bytes
    of the failed one. XLA reads these variables only when its backend starts. Keeps values that the
    user has set.
    """
    flags = _text("XLA_FLAGS") or ""
    wanted = {
        "xla_gpu_nccl_terminate_on_error": "false",
        "xla_gpu_nccl_async_execution": "true",
        "xla_gpu_nccl_blocking_communicators": "false",
        "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
        "xla_cpu_collective_timeout_seconds": "30",
    }
    missing = [f"--{name}={value}" for name, value in wanted.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *missing])
    os.environ.setdefault("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "1")
    os.environ.setdefault("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "1")
