"""`pagemill completion`: a script that lets bash or zsh complete commands, flags and their values.

The script is made of the flags as they are now; it is made again after an update.
"""

import argparse
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh")

_BASH = """\
# bash completion for pagemill; in ~/.bashrc: source <(pagemill completion bash)
_pagemill() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words="" command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "$command:$before" in
{values}    esac
    if [ -z "$words" ]; then
      case "$command" in
{flags}      esac
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pagemill pagemill
"""
_ZSH = """\
#compdef pagemill
# zsh completion for pagemill; in ~/.zshrc, behind compinit: source <(pagemill completion zsh)
_pagemill() {{
  local before="${{words[CURRENT-1]}}" command="${{words[2]}}"
  local -a found
  if (( CURRENT == 2 )); then
    found=({commands})
  else
    case "$command:$before" in
{values}    esac
    if (( ! ${{#found}} )); then
      case "$command" in
{flags}      esac
    fi
  fi
  compadd -- $found
  [[ "$PREFIX" == -* ]] || _files
}}
compdef _pagemill pagemill
"""


class CommandWords(NamedTuple):
    """What may stand behind one command."""

    words: list[str]
    """Flags, and choices of its positional arguments."""
    values: dict[str, list[str]]
    """Flag -> what it may be."""


def add_parser(subparsers: Any) -> None:
    """Add the command `completion` to the parser of commands."""
    parser = subparsers.add_parser(
        "completion", description="Print a script that completes commands and flags in a shell."
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(args: argparse.Namespace) -> int:
    """Print the script; 0."""
    from pagemill.cli.main import COMMANDS, Parser, module_of  # deferred: it imports this module, by name

    commands = {name: words_of(Parser, name, module_of(name)) for name in COMMANDS}
    print(script(args.shell, commands), end="")
    return 0


def words_of(parser_class: type[argparse.ArgumentParser], name: str, module: str) -> CommandWords:
    """What a command takes, from the parser that its module makes."""
    subparsers = parser_class(prog="pagemill").add_subparsers()
    importlib.import_module(module).add_parser(subparsers)
    parser = subparsers.choices[name]
    words: list[str] = []
    values: dict[str, list[str]] = {}
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            words += choices
        elif action.help != argparse.SUPPRESS:
            words += action.option_strings
            values |= {flag: choices for flag in action.option_strings if choices}
    return CommandWords(words, values)


def script(shell: str, commands: Mapping[str, CommandWords]) -> str:
    """The script for a shell."""
    template, assigned = (_BASH, 'words="{}"') if shell == "bash" else (_ZSH, "found=({})")
    return template.format(
        commands=" ".join(commands),
        values="".join(_cases(_values(commands), assigned)),
        flags="".join(_cases({name: " ".join(command.words) for name, command in commands.items()}, assigned, "  ")),
    )


def _values(commands: Mapping[str, CommandWords]) -> dict[str, str]:
    """`command:flag` of every flag that has choices -> the choices."""
    return {
        f"{name}:{flag}": " ".join(choices)
        for name, command in commands.items()
        for flag, choices in command.values.items()
    }


def _cases(found: Mapping[str, str], assigned: str, indent: str = "") -> Iterator[str]:
    for pattern, words in found.items():
        yield f"{indent}      {pattern}) {assigned.format(words)} ;;\n"
