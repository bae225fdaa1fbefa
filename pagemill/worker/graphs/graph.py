"""What captures and replays device work, as far as wrappers need it. Knows no device."""

from typing import Protocol

from torch import Tensor


class Graph(Protocol):
    """Device work that is recorded once and replayed any number of times, on the same addresses."""

    def begin(self) -> None:
        """Record from here on; nothing that is launched runs."""

    def end(self) -> None:
        """The recording is complete."""

    def abort(self) -> None:
        """Give up a recording in which an error was raised."""

    def replay(self) -> None:
        """Run what was recorded."""


class GraphMaker(Protocol):
    """Makes graphs that share one memory pool: they are replayed in any order, never two at once."""

    def graph(self) -> Graph:
        """An empty graph."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory without owning it, so that graphs captured later may use it too: a graph's result is good
        until the next graph is replayed."""
