"""`ep-runtime completion SHELL`: a script by which the shell completes what is typed.

The script is made from the commands' own parsers; those that are packages of their own are asked
when their options are completed. Names of objects are asked of the daemon likewise, and are none
where no daemon answers.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.commands import describe, events

SHELLS = ("bash", "zsh", "fish")
_ASKED = "ep-runtime {name} --help 2> /dev/null | grep -oE -- '--[a-z][a-z-]*[a-z]'"

# Commands whose first word is an object's name, and the list that has the names.
_NAMES = {
    **{view.kind: view.kind for view in describe.VIEWS.values()},
    "events": "groups",
    "reclaim": "groups",
    "top": "groups",
    "load": "groups",
    "skew": "groups",
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


# zsh reads the script of bash; its own completion may be on already.
_ZSH = """\
(( $+functions[compdef] )) || {{ autoload -U +X compinit && compinit }}
autoload -U +X bashcompinit && bashcompinit
{bash}"""

_FISH = """\
function __ep_runtime_in
  set -l words (commandline -opc)
  test (count $words) -gt 1; and test $words[2] = $argv[1]
end
function __ep_runtime_described
  set -l words (commandline -opc)
  if test (count $words) -gt 2
    ep-runtime (string replace -r 's?$' s $words[3]) -o name 2> /dev/null
  else
    string split ' ' '{kinds}'
  end
end
complete -c ep-runtime -n 'test (count (commandline -opc)) -eq 1' -f
{lines}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=SHELLS,
        metavar="SHELL",
        help="bash, zsh or fish: `source <(ep-runtime completion bash)`; in fish "
        "`ep-runtime completion fish | source`",
    )


def run(args: argparse.Namespace) -> int:
    made = {"bash": script, "zsh": lambda: _ZSH.format(bash=script()), "fish": fish}
    render.out(made[args.shell]())
    return cli.OK


def script() -> str:
    """The script of bash."""
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


def fish() -> str:
    """The script of fish."""
    lines = []
    for name, about in cli.COMMANDS.items():
        command = "complete -c ep-runtime"
        first = "test (count (commandline -opc)) -eq 1"
        lines.append(f"{command} -n '{first}' -a {name} -d {shlex.quote(about)}")
        command += f" -n '__ep_runtime_in {name}'"
        if name in cli.APART:
            lines.append(f'{command} -a "({_ASKED.format(name=name)})"')
            continue
        flags, chosen = _options(name)
        words = dict(chosen)
        for flag in flags:
            kind = "-l" if flag.startswith("--") else "-s"
            more = f" -x -a '{words[flag]}'" if flag in words else ""
            lines.append(f"{command} {kind} {flag.lstrip('-')}{more}")
        if name == "describe":
            lines.append(f"{command} -f -a '(__ep_runtime_described)'")
        elif name in _NAMES:
            lines.append(f"{command} -f -a '(ep-runtime {_NAMES[name]} -o name 2> /dev/null)'")
    return _FISH.format(kinds=" ".join(describe.KINDS), lines="\n".join(lines))


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
