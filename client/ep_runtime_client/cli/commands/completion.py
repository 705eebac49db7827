"""`ep-runtime completion SHELL`: a script by which the shell completes what is typed.

The script is made from the commands' own parsers; those that are packages of their own are asked
when their options are completed. Names of objects are asked of the daemon likewise, and are none
where no daemon answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.commands import describe, events

SHELLS = ("bash", "zsh")
_ASKED = "ep-runtime {name} --help 2> /dev/null | grep -oE -- '--[a-z][a-z-]*[a-z]'"

# Commands whose first word is an object's name, and the list that has the names.
_NAMES = {
    **{view.kind: view.kind for view in describe.VIEWS.values()},
    "events": "groups",
    "reclaim": "groups",
    "fence": "sessions",
}

_SCRIPT = """\
_ep_runtime() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]-}} words= list=
  local before=${{COMP_WORDS[COMP_CWORD-1]}} kind=${{COMP_WORDS[2]-}}
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$cur"))
    return
  fi
  case "$command $before" in
{values}
  esac
  case "$command" in
{options}
  esac
  case "$cur" in
    -*) ;;
    *)
      if [ "$command" = describe ]; then
        words="{kinds}"
        [ "$COMP_CWORD" -eq 2 ] || list="${{kind%s}}s"
      fi
      [ -z "$list" ] || words=$(ep-runtime "$list" -o name 2> /dev/null)
      ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _ep_runtime ep-runtime"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=SHELLS,
        metavar="SHELL",
        help="bash or zsh: `source <(ep-runtime completion bash)`",
    )


def run(args: argparse.Namespace) -> int:
    if args.shell == "zsh":
        render.out("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    render.out(script())
    return cli.OK


def script() -> str:
    """The script of bash; zsh reads it too."""
    values, options = [], []
    for name in cli.COMMANDS:
        if name in cli.APART:
            options.append(f"    {name}) words=$({_ASKED.format(name=name)}) ;;")
            continue
        flags, chosen = _options(name)
        names = f" list={_NAMES[name]} ;;" if name in _NAMES else " ;;"
        options.append(f'    {name}) words="{" ".join(flags)}"{names}')
        for flag, words in chosen:
            reply = f'COMPREPLY=($(compgen -W "{words}" -- "$cur")); return ;;'
            values.append(f'    "{name} {flag}") {reply}')
    return _SCRIPT.format(
        commands=" ".join(cli.COMMANDS),
        kinds=" ".join(describe.KINDS),
        values="\n".join(values),
        options="\n".join(options),
    )


def _options(name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """A command's options, and the words that may follow some."""
    actions = cli.make_parser(name)._actions
    flags = [flag for action in actions for flag in action.option_strings]
    return flags, [
        (flag, words)
        for action in actions
        for flag in action.option_strings
        for words in _words(name, action)
    ]


def _words(name: str, action: argparse.Action) -> Iterator[str]:
    if action.choices:
        yield " ".join(map(str, action.choices))
    elif action.dest == "sort_by":
        lists = {view.kind: view.columns for view in describe.VIEWS.values()}
        columns = lists.get(name, events.COLUMNS)
        yield " ".join(column.title for column in columns)
