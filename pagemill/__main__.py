"""`python -m pagemill`: the command line without its console script."""

import sys

from pagemill.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
