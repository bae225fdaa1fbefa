"""`python -m pagemill.vllm`: command lines that were written for vLLM.

`python -m pagemill.vllm serve ...` and the other subcommands are those of `pagemill`. `python -m pagemill.vllm SCRIPT
...` and `python -m pagemill.vllm -m MODULE ...` run a program in which `import vllm` finds pagemill.
"""

import runpy
import sys
from pathlib import Path
from typing import NoReturn

from pagemill.__main__ import run as run_command

API_SERVERS = {
    "vllm.entrypoints.openai.api_server": ("serve",),
    "vllm.entrypoints.api_server": ("serve",),
    "vllm.entrypoints.cli.main": (),
}
"""Modules of vLLM that are command lines: of a server, of the one with /generate, and of all subcommands."""


def command_of(argv: list[str]) -> list[str] | None:
    """The command line of `pagemill` that these words mean; None when they name a program to run."""
    if argv[:1] == ["-m"] and len(argv) > 1:
        if argv[1] not in API_SERVERS:
            return None
        return [*API_SERVERS[argv[1]], *argv[2:]]
    return None if argv and Path(argv[0]).suffix == ".py" else argv


def main() -> None:
    """Run what this process was started for. Returns when a program ends; a command ends the process."""
    argv = sys.argv[1:]
    command = command_of(argv)
    if command is not None:
        _run_command(command)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


def _run_command(command: list[str]) -> NoReturn:
    sys.argv = ["pagemill", *command]
    run_command()


if __name__ == "__main__":
    main()
