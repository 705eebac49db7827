"""`ep-runtime completion SHELL`: prints a shell script that completes our commands' words.

The script is made from the commands' own parsers. For commands in other packages it asks their
parsers when options are completed. It also asks the daemon for names of objects; if no daemon
answers there are none.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.commands import describe, events

SHELLS = ("bash", "zsh", "fish")
_ASKED = "ep-runtime {name} --help 2> /dev/null | grep -oE -- '--[a-z][a-z-]*[a-z]'"

# Commands with an object's name as first word, and the list that has these names.
_NAMES = {
    **{view.kind: view.kind for view in describe.VIEWS.values()},
    "events": "groups",
    "reclaim": "groups",
    "top": "groups",
    "load": "groups",
    "skew": "groups",
    "fence": "sessions",
}

# Names may be other users' text, so they are read line by line and quoted, because `compgen -W`
# would expand them and run commands in them.
_SCRIPT = """\
_ep_runtime_words() {{
  local word
  for word; do
    printf -v word %q "$word"
    [[ $word != "$cur"* ]] || COMPREPLY+=("$word")
  done
}}
_ep_runtime_lines() {{
  local line
  while IFS= read -r line; do _ep_runtime_words "$line"; done
}}
_ep_runtime() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]-}} list=
  local before=${{COMP_WORDS[COMP_CWORD-1]}} kind=${{COMP_WORDS[2]-}}
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    _ep_runtime_words {commands}
    return
  fi
  case "$command $before" in
{values}
  esac
  case "$cur" in
    -*) ;;
    *)
      case "$command" in
        describe)
          if [ "$COMP_CWORD" -eq 2 ]; then
            _ep_runtime_words {kinds}
            return
          fi
          case "${{kind%s}}" in {listed}) list=${{kind%s}}s ;; esac
          ;;
{names}
      esac
      ;;
  esac
  if [ -n "$list" ]; then
    _ep_runtime_lines < <(ep-runtime "$list" -o name 2> /dev/null)
    return
  fi
  case "$command" in
{options}
  esac
}}
complete -o default -F _ep_runtime ep-runtime"""


# zsh reads bash's script; zsh's own completion may be on already.
_ZSH = """\
(( $+functions[compdef] )) || {{ autoload -U +X compinit && compinit }}
autoload -U +X bashcompinit && bashcompinit
{bash}"""

# fish uses the output of a command in parentheses unexpanded, line by line, but it expands text
# next to the parentheses.
_FISH = """\
function __ep_runtime_in
  set -l words (commandline -opc)
  test (count $words) -gt 1; and test "$words[2]" = $argv[1]
end
function __ep_runtime_described
  set -l words (commandline -opc)
  if test (count $words) -gt 2
    set -l kind (string replace -r -- 's?$' s $words[3])
    contains -- $kind {lists}; and ep-runtime $kind -o name 2> /dev/null
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
    """Returns the script for bash."""
    values, options = [], []
    for name in cli.COMMANDS:
        if name in cli.APART:
            options.append(f"    {name}) _ep_runtime_lines < <({_ASKED.format(name=name)}) ;;")
            continue
        flags, chosen = _options(name)
        options.append(f"    {name}) _ep_runtime_words {_quoted(flags)} ;;")
        for flag, words in chosen:
            values.append(f'    "{name} {flag}") _ep_runtime_words {_quoted(words)}; return ;;')
    return _SCRIPT.format(
        commands=_quoted(cli.COMMANDS),
        kinds=_quoted(describe.KINDS),
        values="\n".join(values),
        options="\n".join(options),
        listed="|".join(describe.VIEWS),
        names="\n".join(f"        {name}) list={named} ;;" for name, named in _NAMES.items()),
    )


def fish() -> str:
    """Returns the script for fish."""
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
        words = {flag: shlex.quote(_quoted(words)) for flag, words in chosen}
        for flag in flags:
            kind = "-l" if flag.startswith("--") else "-s"
            more = f" -x -a {words[flag]}" if flag in words else ""
            lines.append(f"{command} {kind} {flag.lstrip('-')}{more}")
        if name == "describe":
            lines.append(f"{command} -f -a '(__ep_runtime_described)'")
        elif name in _NAMES:
            lines.append(f"{command} -f -a '(ep-runtime {_NAMES[name]} -o name 2> /dev/null)'")
    return _FISH.format(
        kinds=" ".join(describe.KINDS),
        lists=_quoted(view.kind for view in describe.VIEWS.values()),
        lines="\n".join(lines),
    )


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _options(name: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns a command's options, and the words that may follow some of these options."""
    actions = cli.make_parser(name)._actions
    flags = [flag for action in actions for flag in action.option_strings]
    return flags, [
        (flag, words)
        for action in actions
        for flag in action.option_strings
        if (words := _words(name, action))
    ]


def _words(name: str, action: argparse.Action) -> list[str]:
    if action.choices:
        return [*map(str, action.choices)]
    if action.dest == "sort_by":
        lists = {view.kind: view.columns for view in describe.VIEWS.values()}
        return [column.title for column in lists.get(name, events.COLUMNS)]
    return []
