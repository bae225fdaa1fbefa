"""Loggers for the whole package: one line per record, to stderr, level from the environment."""

import logging
import sys

from pagemill import envs
from pagemill.utils.prefixed_output import PrefixedOutput

_FORMAT = "%(levelname)-7s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """A logger below `pagemill`; the first call installs the handler."""
    root = logging.getLogger("pagemill")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)


def name_process(name: str) -> None:
    """Begin every line that this process writes to stdout and stderr, logged or printed, with "(name) "."""
    sys.stdout, sys.stderr = (PrefixedOutput(stream, f"({name}) ") for stream in (sys.stdout, sys.stderr))
    for handler in logging.getLogger("pagemill").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
