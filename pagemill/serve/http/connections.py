"""`Connections`: those that a server has open, so that there are never more than it can serve.

Decides who gives way; how a connection is closed or refused is its own business.
"""

import time
from typing import Protocol

from pagemill.log import get_logger
from pagemill.serve.http.limits import HttpLimits

logger = get_logger(__name__)

MAX_LINGERING = 32
"""Refused connections that may wait for their clients to read why; further ones are just closed."""
LOG_EVERY_S = 10.0


class Connection(Protocol):
    """What is asked of each."""

    def give_way(self) -> None:
        """Close at once: another one needs the place, and no request is at work here."""

    def refuse_for_load(self) -> None:
        """Tell the client to come again later."""

    def check(self, now: float) -> None:
        """Close if the client took too long for something. Called about once a second."""


class Connections:
    """All of one server. `limits` apply to each."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.log = SparseLog()
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """Those without a complete request, longest first."""
        self._lingering: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """One came in. Where it is one too many, the one that has been idle for longest gives way to it; where none
        is, it is refused."""
        self._open.add(connection)
        if len(self._open) - len(self._lingering) > self.limits.max_connections and not self.make_room():
            self.log.note("refused a connection: there are %d, which is the limit", len(self._open) - 1)
            connection.refuse_for_load()
        else:
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Close the connection that has been idle for longest. False: there is none."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self._idle.pop(oldest)
        self._open.discard(oldest)  # closing it takes a moment, for which it does not count
        self._lingering.discard(oldest)
        oldest.give_way()
        return True

    def busy(self, connection: Connection) -> None:
        """A request is complete: this connection gives way to nobody."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Its last request is answered."""
        if connection in self._open:
            self._idle[connection] = None

    def linger(self, connection: Connection) -> bool:
        """It was refused, and waits for its client to read why. False: too many do."""
        self._idle.pop(connection, None)
        if len(self._lingering) >= MAX_LINGERING:
            return False
        self._lingering.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._lingering.discard(connection)

    def sweep(self, now: float) -> None:
        """Look for clients that took too long."""
        for connection in list(self._open):
            connection.check(now)


class SparseLog:
    """Warnings about what clients do, of which there may be any number: one every LOG_EVERY_S at most, with the number
    of those that were left out."""

    def __init__(self) -> None:
        self._num_silent = 0
        self._next = 0.0

    def note(self, message: str, *arguments: object) -> None:
        """Say it, or count it."""
        now = time.monotonic()
        if now < self._next:
            self._num_silent += 1
            return
        if self._num_silent:
            message = f"{message} (and %d more warnings like it)"
            arguments = (*arguments, self._num_silent)
        logger.warning(message, *arguments)
        self._next = now + LOG_EVERY_S
        self._num_silent = 0
