"""Grammar checkers with one process for all engines that have the same vocabulary: it takes its time to start."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec

from pagemill.grammar.checking import GrammarChecker
from pagemill.grammar.vocabulary import TokenTable


class SharedChecker:
    """What an engine has in place of a `GrammarChecker` of its own; the process outlives it."""

    def __init__(self, checker: GrammarChecker) -> None:
        self.known = checker.known
        self.submit: Callable[[str], Future[str]] = checker.submit

    def close(self) -> None:
        """The process goes on: others use it."""


Factory = Callable[..., SharedChecker]


@contextmanager
def sharing_checkers() -> Iterator[Factory]:
    """What makes checkers; their processes end with the block."""
    made: dict[tuple[bytes, str], GrammarChecker] = {}

    def make(table: Callable[[], TokenTable], backend: str) -> SharedChecker:
        key = (msgspec.msgpack.encode(table()), backend)
        if key not in made:
            made[key] = GrammarChecker(table, backend=backend)
        return SharedChecker(made[key])

    try:
        yield make
    finally:
        for checker in made.values():
            checker.close()
