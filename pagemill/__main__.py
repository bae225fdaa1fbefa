"""The process of the `pagemill` command, by its console script or as `python -m pagemill`: its start and its end."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from pagemill.cli.main import main

EXIT_UNWRITTEN = 120
"""Python's own, for output that could not be written."""


def run() -> NoReturn:
    """Run the command of this process and end with its exit code.

    Threads end, what was registered for the exit runs, and what was printed arrives, as at the end of any Python; then
    the process is gone. Everything of ours is closed by then, and taking the interpreter and its libraries apart would
    take half a second more, for nothing. After an error that nobody caught, Python ends in its own way.
    """
    code = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or EXIT_UNWRITTEN
    os._exit(code)


if __name__ == "__main__":
    run()
