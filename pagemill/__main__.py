"""The process of the `pagemill` command, by its console script or as `python -m pagemill`: its start and its end."""

import atexit
import os
import sys
from typing import NoReturn

from pagemill.cli.main import main


def run() -> NoReturn:
    """Run the command of this process and end with its exit code.

    What was registered for the exit runs and what was printed arrives; then the process is gone. Everything of ours is
    closed by then, and taking the interpreter and its libraries apart would take half a second more, for nothing.
    """
    code = 1

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # nobody reads it any more, or it is closed
                continue
        os._exit(code)

    atexit.register(end)  # what is registered first runs last
    code = main()
    sys.exit(code)


if __name__ == "__main__":
    run()
