"""Loggers for the whole package: one line per record, to stderr, level from the environment."""

import logging
import sys

from pagemill import envs
from pagemill.utils.prefixed_output import PrefixedOutput

_FORMAT = "%(levelname)-7s %(asctime)s {process}%(name)s: %(message)s"
_TIME = "%H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """A logger below `pagemill`; the first call installs the handler."""
    root = logging.getLogger("pagemill")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT.format(process=""), _TIME))
        root.addHandler(handler)
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)


def name_process(name: str) -> None:
    """Put the name of this process into every line from now on, logged or printed. Called once."""
    get_logger(__name__)
    for handler in logging.getLogger("pagemill").handlers:
        handler.setFormatter(logging.Formatter(_FORMAT.format(process=f"[{name}] "), _TIME))
    sys.stdout, sys.stderr = (PrefixedOutput(stream, f"[{name}] ") for stream in (sys.stdout, sys.stderr))
