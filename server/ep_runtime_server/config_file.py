"""Reads and writes the file of `serve --config FILE`; its keys are the parser's flags."""

from __future__ import annotations

import argparse
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from ep_runtime import allowed_names, files
from ep_runtime.errors import InvalidArgumentError

# Flags for one process only; a config file may not set them.
_FLAGS_ALONE = ("help", "config", "print-config", "parent-pidfd", "ready-fd")


def keys(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the flags that a file may set, by key."""
    named = {action.option_strings[-1].removeprefix("--"): action for action in parser._actions}
    return {key: action for key, action in named.items() if key not in _FLAGS_ALONE}


def read(parser: argparse.ArgumentParser, path: Path) -> None:
    """Makes the file's values the parser's defaults: flags override them, or add to lists.

    Raises:
        InvalidArgumentError: a key is unknown or has a wrong value; the message names the key.
    """
    try:
        content = tomllib.loads(files.read(path).decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _wrong(f"cannot read {path}: {reason}") from error
    known = keys(parser)
    for key, value in content.items():
        if key not in known:
            raise _wrong(f"{path} has no use for {key!r}{allowed_names.hint(key, known)}")
        try:
            parser.set_defaults(**{known[key].dest: _value(known[key], value)})
        except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
            raise _wrong(f"{key} in {path}: {error}") from error


def _wrong(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"--config: {text}", argument="--config")


def _value(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError(f"must be true or false, got {value!r}")
        return value
    if not isinstance(action.default, list):
        return _scalar(action, value)
    if not isinstance(value, list):
        raise TypeError(f"must be a list, got {value!r}")
    return [_scalar(action, item) for item in value]


def _scalar(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"must be a number or a text, got {value!r}")
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"must be one of {', '.join(action.choices)}, got {value!r}")
    kind = action.type if callable(action.type) else str
    return kind(str(value))


def text_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """Returns the text of a file that sets `arguments`; keys without a value are comments."""
    lines: list[str] = []
    for key, action in keys(parser).items():
        if action.help == argparse.SUPPRESS:
            continue
        lines += textwrap.wrap(action.help or key, 98, initial_indent="# ", subsequent_indent="# ")
        value = getattr(arguments, action.dest)
        lines += [f"# {key} =" if value in (None, []) else f"{key} = {json.dumps(value)}", ""]
    return "\n".join(lines)


def changes(
    parser: argparse.ArgumentParser, before: argparse.Namespace, after: argparse.Namespace
) -> list[str]:
    """Returns the keys whose values differ between `before` and `after`."""
    return [
        key
        for key, action in keys(parser).items()
        if getattr(before, action.dest) != getattr(after, action.dest)
    ]
