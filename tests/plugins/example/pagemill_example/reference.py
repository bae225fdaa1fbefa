"""As a plug-in of the reference engine's group: a function without arguments, called only when it is named."""

import sys


def register() -> None:
    """Leaves a trace on stderr."""
    print("the reference's example was called", file=sys.stderr)
