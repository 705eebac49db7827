"""Implements `ep-runtime serve`: parses flags, makes the configuration, and runs the daemon."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import setproctitle

from ep_runtime import env
from ep_runtime.errors import EpRuntimeError, InvalidArgumentError
from ep_runtime_server import config, config_file
from ep_runtime_server.base import failpoints, limits, log_lines, open_files, systemd
from ep_runtime_server.callers import quotas
from ep_runtime_server.memory.host_memory import available_bytes
from ep_runtime_server.nodes import config as cluster_config

if TYPE_CHECKING:
    from ep_runtime_server.daemon import Daemon

PROCESS_TITLE = "ep-runtimed"

# Exit codes of the command line: 0 ok, 1 usage, 2 no daemon (for `serve`: could not start).
EXIT_USAGE = 1
EXIT_CANNOT_SERVE = 2


class ServeParser(argparse.ArgumentParser):
    """An argument parser that ends with EXIT_USAGE on wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of `ep-runtime serve`, whose help the command line shows too."""
    parser = ServeParser(prog="ep-runtime serve", description="Runs the daemon in the foreground.")
    add = parser.add_argument
    add(
        "--config",
        metavar="FILE",
        help='TOML file with a key for every flag here, as max-host-bytes = "64G"; flags win. '
        "SIGHUP reads it again",
    )
    add(
        "--print-config",
        action="store_true",
        help="check the flags and the file, write them as such a file, and end",
    )
    add(
        "--dir", help="directory of the sockets; default $RUNTIME_DIRECTORY, else one of the user's"
    )
    add(
        "--allow-uid",
        type=int,
        action="append",
        default=[],
        metavar="UID",
        help="serve this user too",
    )
    add(
        "--allow-gid",
        type=int,
        action="append",
        default=[],
        metavar="GID",
        help="serve its members too",
    )
    add(
        "--max-host-bytes",
        metavar="SIZE",
        help="limit of windows on the host (default: half of MemAvailable)",
    )
    add("--max-bytes-per-gpu", metavar="SIZE", help="limit of windows on one GPU (default: none)")
    _add_user_limits(parser)
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe lines that are logged",
    )
    add(
        "--drain-s",
        type=float,
        default=limits.DEFAULT_DRAIN_S,
        help="after SIGTERM, wait at most S seconds for sessions to end",
    )
    add(
        "--recovery-s",
        type=float,
        default=limits.DEFAULT_RECOVERY_S,
        metavar="S",
        help="after a restart, wait S seconds for processes that used the daemon before it",
    )
    add("--idle-exit-s", type=float, metavar="S", help="end after S seconds without a session")
    cluster_config.add_arguments(parser)
    _add_metrics(parser)
    add("--parent-pidfd", type=int, metavar="FD", help="end when the process of this pidfd is gone")
    add(
        "--ready-fd",
        type=int,
        metavar="FD",
        help="write one JSON line to this descriptor when the daemon serves",
    )
    add("--testing", action="append", default=[], help=argparse.SUPPRESS)
    return parser


def _add_user_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits of one user").add_argument
    for name in ("sessions", "groups", "layers", "fds"):
        default = getattr(quotas.UserLimits(), name)
        told = (
            "half of the limit for all users; all of it if no other user is served"
            if name == "fds"
            else default
        )
        add(
            f"--max-{name}-per-uid",
            type=_count,
            metavar="N",
            help=f"{name} of one user (default: {told})",
        )
    add(
        "--max-host-bytes-per-uid",
        metavar="SIZE",
        help="windows on the host (default: half of --max-host-bytes; all of it if no other "
        "user is served)",
    )
    add(
        "--max-gpu-bytes-per-uid",
        metavar="SIZE",
        help="windows on one GPU (default: half of --max-bytes-per-gpu; all of it if no other "
        "user is served)",
    )
    add("--max-journal-bytes-per-uid", metavar="SIZE", help="journal records (default 64M)")
    add(
        "--max-retain-s",
        type=float,
        default=quotas.DEFAULT_RETAIN_S,
        metavar="S",
        help="largest retain_s of a group (default a day)",
    )


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("metrics for Prometheus").add_argument
    add(
        "--metrics",
        metavar="ADDRESS",
        help="serve http://ADDRESS/metrics; HOST:PORT, or PORT on loopback; 0 picks a free port",
    )
    add(
        "--metrics-detail",
        action="store_true",
        help="also serve series of every rank, and of every expert of every layer",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return int(text)


def _user_limits(
    arguments: argparse.Namespace, max_host_bytes: int, *, others: bool, cluster: bool
) -> quotas.UserLimits:
    """Computes a user's limits: half of each total, or nearly all of it for a single user."""
    all_fds = open_files.for_users(cluster=cluster)
    given = {
        "sessions": arguments.max_sessions_per_uid,
        "groups": arguments.max_groups_per_uid,
        "layers": arguments.max_layers_per_uid,
        "fds": arguments.max_fds_per_uid or (all_fds // 2 if others else all_fds),
        "all_fds": all_fds,
        "host_bytes": _size(arguments.max_host_bytes_per_uid)
        or (max_host_bytes // 2 if others else max_host_bytes),
        "gpu_bytes": _size(arguments.max_gpu_bytes_per_uid),
        "journal_bytes": _size(arguments.max_journal_bytes_per_uid),
    }
    if not 0 <= arguments.max_retain_s < 1 << 31:
        raise InvalidArgumentError(
            f"--max-retain-s must be 0 to {1 << 31} s, got {arguments.max_retain_s}",
            argument="--max-retain-s",
        )
    stated = {name: value for name, value in given.items() if value}
    return quotas.UserLimits(**stated, retain_s=arguments.max_retain_s, shared=others)


def _size(text: str | None) -> int | None:
    return config.parse_bytes(text) if text else None


def _check_testing(switches: Sequence[str]) -> frozenset[str]:
    for switch in switches:
        if switch not in limits.TESTING_SWITCHES:
            failpoints.parse(switch)
    return frozenset(switches)


def make_config(arguments: argparse.Namespace) -> config.ServerConfig:
    """Makes the configuration of parsed flags. Raises InvalidArgumentError for a wrong value."""
    max_host_bytes = _size(arguments.max_host_bytes) or available_bytes() // 2
    others = bool(arguments.allow_uid or arguments.allow_gid)
    cluster = cluster_config.make_cluster_config(arguments)
    return config.ServerConfig(
        directory=env.check_directory(arguments.dir) if arguments.dir else env.runtime_directory(),
        allow_uids=frozenset(arguments.allow_uid),
        allow_gids=frozenset(arguments.allow_gid),
        max_host_bytes=max_host_bytes,
        max_bytes_per_gpu=_size(arguments.max_bytes_per_gpu),
        per_user=_user_limits(
            arguments, max_host_bytes, others=others, cluster=cluster is not None
        ),
        log_level=arguments.log_level,
        drain_s=arguments.drain_s,
        idle_exit_s=arguments.idle_exit_s,
        parent_pidfd=arguments.parent_pidfd,
        ready_fd=arguments.ready_fd,
        recovery_s=arguments.recovery_s,
        testing=_check_testing(arguments.testing),
        cluster=cluster,
        metrics=config.parse_metrics(arguments.metrics) if arguments.metrics else None,
        metrics_detail=arguments.metrics_detail,
    )


def _tell_ready(settings: config.ServerConfig, daemon: Daemon) -> None:
    systemd.notify(env.notify_socket(), "READY=1", f"STATUS=serving {settings.directory}")
    if settings.ready_fd is not None:
        facts: dict[str, object] = {"directory": str(settings.directory), "pid": os.getpid()}
        if daemon.runtime.cluster is not None:
            facts["cluster"] = daemon.runtime.cluster.address
        if daemon.metrics is not None:
            facts["metrics"] = str(daemon.metrics.address)
        os.write(settings.ready_fd, f"{json.dumps(facts)}\n".encode())
        os.close(settings.ready_fd)


def _take_signals_back() -> None:
    """Restores the signals that the daemon's parent blocked or ignored.

    The daemon needs SIGTERM to end, and SIGCHLD to notice that its child processes ended.
    """
    shells = {signal.SIGHUP, signal.SIGQUIT}  # a shell ignores them for `nohup ep-runtime serve &`
    pythons = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - shells - pythons:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parses flags and a config file, which flags override. Raises InvalidArgumentError."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.config:
        config_file.read(parser, Path(arguments.config))
        arguments = parser.parse_args(argv)
    return parser, arguments


class _Reloading:
    """Handles SIGHUP: reads the config file again, and applies settings that may change."""

    def __init__(self, argv: Sequence[str] | None, arguments: argparse.Namespace) -> None:
        self._argv = argv
        self._arguments = arguments

    def reload(self, daemon: Daemon) -> None:
        """Applies changed settings, and logs which ones changed and which need a restart."""
        try:
            parser, arguments = _parse(self._argv)
            settings = make_config(arguments)
        except EpRuntimeError as error:
            daemon.runtime.events.add("server.config_refused", f"{error}", level=logging.ERROR)
            return
        except SystemExit:  # raised by argparse, which already printed the reason
            return
        changed = config_file.changes(parser, self._arguments, arguments)
        left = daemon.runtime.reconfigure(settings, changed)
        if "log-level" in changed:
            logging.getLogger().setLevel(settings.log_level.upper())
        done = [key for key in changed if key not in left]
        for key in done:  # the next reload reports the other keys again
            name = key.replace("-", "_")
            setattr(self._arguments, name, getattr(arguments, name))
        told = f"{arguments.config}: changed {', '.join(done) or 'nothing'}"
        if left:
            told += f"; wants a restart: {', '.join(left)}"
        level = logging.WARNING if left else logging.INFO
        daemon.runtime.events.add("server.config_read", told, level=level)


async def serve(
    settings: config.ServerConfig, log: log_lines.LogWriter, reloading: _Reloading | None = None
) -> None:
    """Runs a daemon until an order or a signal ends it. Raises what Daemon.start raises."""
    from ep_runtime_server.daemon import Daemon  # imported late, because --help does not need it

    daemon = Daemon(settings, stored_fds=systemd.stored_fds(*env.stored_fds()))
    await daemon.start()
    daemon.runtime.events.lost_lines = log.take_lost
    daemon.handle_signals()
    if reloading is not None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reloading.reload, daemon)
    asyncio.get_running_loop().set_exception_handler(daemon.runtime.supervisor.in_callback)
    try:
        _tell_ready(settings, daemon)
        await daemon.run_until_stopped()
    finally:
        systemd.notify(env.notify_socket(), "STOPPING=1")
        await daemon.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ep-runtime serve`, and returns its exit code."""
    try:
        parser, arguments = _parse(argv)
        if arguments.print_config:
            make_config(arguments)
            sys.stdout.write(config_file.text_of(parser, arguments))
            return 0
    except EpRuntimeError as error:
        sys.stderr.write(f"ep-runtime serve: {error}\n")
        return EXIT_USAGE
    _take_signals_back()  # before any thread starts: threads inherit the mask
    log = log_lines.start_logging(arguments.log_level)
    open_files.raise_most_open()
    try:
        settings = make_config(arguments)
    except EpRuntimeError as error:
        sys.stderr.write(f"ep-runtime serve: {error}\n")
        return EXIT_USAGE
    setproctitle.setproctitle(PROCESS_TITLE)
    # Before any socket is bound: gRPC sockets take their mode from the umask.
    os.umask(0o077)
    try:
        asyncio.run(serve(settings, log, _Reloading(argv, arguments) if arguments.config else None))
    except EpRuntimeError as error:
        sys.stderr.write(f"ep-runtime serve: {error}\n")
        return EXIT_CANNOT_SERVE
    finally:
        log.end()
        gc.collect()  # frees a TLS server now; at exit gRPC would need 2 s
    return 0
