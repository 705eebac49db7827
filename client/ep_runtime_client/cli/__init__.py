"""`ep-runtime`: one program. Commands are in `commands/`; `demo` and `bench` are other packages.

A command's module has `add_arguments(parser)` and `run(args) -> exit code`, and so have the views
of `commands/lists.py`. Only the typed command's module is imported, no module imports JAX, and gRPC
is imported on the first call, so that output appears within 0.3 s.

Exit codes: 0 ok, 1 usage, 2 no daemon, 3 partial or unhealthy, 4 denied, 5 (of `status` and `skew`)
a rank is late or slow, or (of `status`) a process is silent.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ep_runtime import allowed_names, errors
from ep_runtime_client.cli import render, tables

OK, USAGE, NO_DAEMON, PARTIAL, DENIED, LATE = range(6)

COMMANDS = {
    "serve": "run a node's daemon in the foreground",
    "coordination": "run JAX's coordination service for a job that goes on after deaths",
    "demo": "train a small mixture-of-experts model here, to see the runtime at work",
    "bench": "measure dispatch, combine and the control plane",
    "doctor": "check this machine and its daemon, and say what to fix",
    "status": "show on one screen whether the daemon is healthy and who uses it",
    "sessions": "list the processes that use the daemon",
    "groups": "list expert-parallel groups, and the rank that each one waits for",
    "layers": "list registered layers",
    "handles": "list what each layer's handles did last, and when",
    "buffers": "list the memory that the daemon holds, and the processes that map it",
    "events": "list what happened lately, and who ordered it",
    "top": "show live what every rank does, and the rank that the others wait for",
    "load": "show how many rows each expert gets, and how even that is",
    "skew": "find the rank that comes late, and the ranks that wait for it",
    "describe": "show all about one session, group, layer, handle, buffer or node",
    "dump": "write one archive for a bug report: state, events, versions, no secrets",
    "drain": "refuse new sessions and groups; with --shutdown the daemon ends",
    "undrain": "take `drain` back: admit sessions and groups again",
    "fence": "cut one session off from the daemon",
    "reclaim": "free the memory of a group, or of all retained groups",
    "certs": "make certificates, so that the daemons of a lab's nodes trust each other",
    "completion": "print a script that completes commands, options and names in a shell",
    "version": "show the versions of client and daemon",
}

# Commands in other packages; like all commands, they are imported when typed.
_ELSEWHERE = {"demo": "ep_runtime_client.demo.cli", "bench": "ep_runtime_bench.cli"}
_LISTS = ("sessions", "groups", "layers", "handles", "buffers")
# Commands whose parsers are not in this package, or take long to import.
APART = ("serve", *_ELSEWHERE)
_ALIASES = {"--version": "version", "-V": "version"}


class Parser(argparse.ArgumentParser):
    """argparse with exit code 1 for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        render.err(f"{self.prog}: {message}{self._hint(message)}")
        self.exit(USAGE)

    def _hint(self, message: str) -> str:
        """Suggests a known option or value close to a mistyped one."""
        option = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if option:
            return allowed_names.hint(option[1], self._option_string_actions)
        word = re.match(r"argument .*: invalid choice: '(.*)' \(choose from (.*)\)", message)
        return allowed_names.hint(word[1], re.findall(r"[\w-]+", word[2])) if word else ""


def usage(width: int | None) -> str:
    """Lists the commands, for a terminal with `width` columns."""
    room = max(len(name) for name in COMMANDS) + 4
    lines = ["usage: ep-runtime COMMAND [options]", "", "commands:"]
    for name, text in COMMANDS.items():
        first, *more = tables.fold(text, max((width or 200) - room, 20))
        lines += [f"  {name:<{room - 4}}  {first}", *(" " * room + part for part in more)]
    lines += ["", "'ep-runtime COMMAND --help' explains a command's options and columns."]
    codes = "0 ok, 1 usage, 2 no daemon, 3 partial or unhealthy, 4 denied, 5 late or silent"
    lines += tables.fold(f"exit codes: {codes}", width or 200)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        render.err(usage(render.width(sys.stderr)))
        return USAGE
    if words[0] in ("-h", "--help", "help"):
        render.out(usage(render.width()))
        return OK
    name = _ALIASES.get(words[0], words[0])
    if name not in COMMANDS:
        close = allowed_names.hint(name, COMMANDS)
        render.err(f"ep-runtime: no command {name!r}; one of {', '.join(COMMANDS)}{close}")
        return USAGE
    if name == "serve":
        module("serve").run_words(words[1:])
    return _run(name, words[1:])


def module(name: str) -> Any:
    """Imports a command's module; returns it, or the view of a listing command."""
    if name in _LISTS:
        return importlib.import_module("ep_runtime_client.cli.commands.lists").VIEWS[name]
    return importlib.import_module(_ELSEWHERE.get(name, f"ep_runtime_client.cli.commands.{name}"))


def make_parser(name: str) -> Parser:
    """Makes the parser of a command's arguments. `serve` has none: the daemon parses them."""
    parser = Parser(prog=f"ep-runtime {name}", description=COMMANDS[name])
    module(name).add_arguments(parser)
    return parser


def _run(name: str, words: list[str]) -> int:
    if name == "status" and not {"--live", "--ready"}.isdisjoint(words):
        command = importlib.import_module("ep_runtime_client.cli.daemon.probe")
        parser = Parser(prog="ep-runtime status", description=COMMANDS[name])
        command.add_arguments(parser)
    else:
        command, parser = module(name), make_parser(name)
    try:
        return int(command.run(parser.parse_args(words)))
    except SystemExit as stop:  # argparse: 0 for --help, 1 for wrong usage
        return int(stop.code or 0)
    except errors.EpRuntimeError as error:
        render.err(f"ep-runtime {name}: {error}")
        return exit_code(error)
    except BrokenPipeError:
        # The reader of our output has closed it; make Python's flush at exit succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return OK


def exit_code(error: errors.EpRuntimeError) -> int:
    """Maps an error to the exit code of a command."""
    if isinstance(error, errors.InvalidArgumentError):
        return USAGE
    if isinstance(error, errors.RuntimeUnavailableError):
        return NO_DAEMON
    if isinstance(error, errors.PermissionDeniedError | errors.SessionFencedError):
        return DENIED
    return PARTIAL
