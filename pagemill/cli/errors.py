"""Errors that only a command line can make. Everything else raises the classes of pagemill.errors."""

from pagemill.errors import PagemillError


class UsageError(PagemillError):
    """The command line asks for something that cannot be; exit code 2."""


class ServerError(PagemillError):
    """The server cannot be reached, refused the request, or broke off its answer."""
