"""`python -m pagemill.artifacts.fetch ALIAS`: put a model into the cache ahead of its first use.
Knows aliases only; hub ids are fetched when they are served."""

import sys

from pagemill.artifacts.aliases import ALIASES, fetch
from pagemill.errors import PagemillError


def main(arguments: list[str]) -> int:
    """Print the path of each model. Exit status: 0, 1 when a model cannot be had, 2 for wrong usage."""
    if not arguments:
        print(
            f"usage: python -m pagemill.artifacts.fetch ALIAS... (known: {', '.join(sorted(ALIASES))})", file=sys.stderr
        )
        return 2
    try:
        for alias in arguments:
            print(fetch(alias))
    except PagemillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
