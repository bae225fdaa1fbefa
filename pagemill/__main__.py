"""The process of the `pagemill` command, by its console script or as `python -m pagemill`: its start and its end."""

import atexit
import os
import sys
from typing import NoReturn

from pagemill.cli.main import EXIT_ERROR, main

EXIT_UNWRITTEN = 120
"""Python's own, for output that could not be written."""


def run() -> NoReturn:
    """Run the command of this process and end with its exit code.

    What was registered for the exit runs and what was printed arrives; then the process is gone. Everything of ours is
    closed by then, and taking the interpreter and its libraries apart would take half a second more, for nothing.
    """
    code = EXIT_ERROR
    atexit.register(lambda: _end(code))  # what is registered first runs last
    code = main()
    sys.exit(code)


def _end(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or EXIT_UNWRITTEN
    os._exit(code)


if __name__ == "__main__":
    run()
