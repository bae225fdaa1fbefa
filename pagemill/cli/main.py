"""Entry of the `pagemill` command: finds the subcommand, runs it, turns errors into one line and an exit code.

Knows the subcommands by name only; a module is imported when its command is called.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from pagemill import __version__, envs
from pagemill.cli.errors import UsageError
from pagemill.cli.help_parts import PREFIX, asked_part, help_on
from pagemill.config.flag_words import FlexibleArgumentParser, refused_among
from pagemill.errors import ConfigError, PagemillError
from pagemill.utils.gc_pause import gc_paused

COMMANDS = {
    "serve": "serve a model over HTTP, with a playground page",
    "chat": "talk with a model in the terminal",
    "complete": "continue a text",
    "bench": "measure throughput, latency, a running server or the scheduler",
    "run-batch": "answer every request of a file in OpenAI's batch format",
    "models": "list, fetch and remove the models of this machine",
    "connect": "print what a coding agent needs to use a running server",
    "info": "print versions, the machine and the known models",
    "collect-env": "print what info does and the environment, without secrets",
    "completion": "print a script with which bash or zsh completes commands",
}
"""Subcommand -> help; its module (`module_of`) has `add_parser(subparsers)` and `run(args) -> int`."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Parser(FlexibleArgumentParser):
    """A parser that answers wrong usage with one line instead of every flag there is."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of argparse; `--help=PART` prints a part of the help and ends the program."""
        part = asked_part(args or ()) if self._subparsers is None or (args or [""])[0].startswith(PREFIX) else None
        if part is not None:
            self._print_message(help_on(self, part), sys.stdout)
            self.exit()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(refused_among(message) or f"{message}; see '{self.prog} --help'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C.

    `argv` is the command line without the program's name; None means that of this process.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if _debugging():
            raise
        print(f"pagemill: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR


def _run(argv: list[str]) -> int:
    with gc_paused():
        parser, module = _build_parser(argv[0] if argv else "")
    args = parser.parse_args(argv)
    if module is None:
        parser.print_help()
        return 0
    code: int = module.run(args)
    sys.stdout.flush()
    return code


def module_of(command: str) -> str:
    """The module of a subcommand."""
    return f"pagemill.cli.{command.replace('-', '_')}"


def _build_parser(chosen: str) -> tuple[Parser, ModuleType | None]:
    """The parser with all commands by name and help, but only the chosen one's flags; and its module."""
    parser = Parser(prog="pagemill", description="An LLM inference and serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pagemill {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    module = None
    for name, summary in COMMANDS.items():
        if name == chosen:
            module = importlib.import_module(module_of(name))
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser, module


def _one_line(error: Exception) -> str:
    """The message of an expected error; for any other, what it was and how to learn more."""
    text = " ".join(str(error).split())
    if isinstance(error, PagemillError):
        return text
    return f"{type(error).__name__}: {text} (unexpected; PAGEMILL_LOGGING_LEVEL=DEBUG shows where)"


def _debugging() -> bool:
    try:
        return envs.log_level() == "DEBUG"
    except ConfigError:
        return False


def _reader_gone() -> int:
    """`pagemill ... | head` is no error; what is still buffered goes nowhere, or the interpreter would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE
