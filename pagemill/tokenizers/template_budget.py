"""`Budget`: what one rendering of a chat template may cost, in time, in memory, and in the size of any value.

A template is a program of unknown origin. Two rules bound it. No value is larger than MAX_VALUE, counted as if every
value inside it were written out, so that no single operation on one takes long; and all that is made together is not
larger than MAX_MADE. Whatever makes a value asks first, or says so at once. Knows nothing about Jinja.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

MAX_VALUE: Final = 4 << 20
"""Characters of a text; an item of a list or dict counts ITEM, and what is in it besides."""
MAX_MADE: Final = 96 << 20
MAX_TURNS: Final = 2_000_000
MAX_SECONDS: Final = 3.0
MAX_INTEGER_BITS: Final = 4096
ITEM: Final = 8
_LEAVES: Final = (str, int, float, bool, type(None))


class TooMuchError(Exception):
    """The template takes too long, or makes too much."""


class Budget:
    """Of one rendering. What it was told of containers it remembers, which templates cannot change once they are
    made."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._left = MAX_MADE
        self._turns = MAX_TURNS
        self._sizes: dict[int, tuple[Any, int]] = {}
        """id -> (the container, so that the id stays its own; its size)."""

    def turn(self) -> None:
        """Once in every loop, call and comparison. Raises TooMuchError."""
        self._turns -= 1
        if self._turns < 0 or time.monotonic() > self._deadline:
            raise TooMuchError(f"it runs for more than {MAX_SECONDS:g} s or {MAX_TURNS} steps")

    def spend(self, size: int) -> None:
        """Something of this size is going to be made. Raises TooMuchError."""
        self.turn()
        if size > MAX_VALUE:
            raise TooMuchError(f"it makes a value of more than {MAX_VALUE} characters")
        self._left -= size
        if self._left < 0:
            raise TooMuchError(f"all that it makes exceeds {MAX_MADE} characters")

    def made(self, value: Any) -> Any:
        """A value that was made, which is returned. Raises TooMuchError."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, int):
            self.turn()
            if value.bit_length() > MAX_INTEGER_BITS:
                raise TooMuchError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")
        elif isinstance(value, (list, tuple, dict, set, frozenset, bytes)):
            self.size(value)
            self.spend(ITEM * len(value))
        else:
            self.turn()
        return value

    def size(self, value: Any) -> int:
        """Of a value, written out. Raises TooMuchError for one that is too large."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, Mapping):
            return self._of(value, itertools.chain.from_iterable(value.items()), len(value))
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._of(value, value, len(value))
        inside = getattr(value, "_Namespace__attrs", None)
        if inside is not None:  # a namespace, which does change, and may hold itself
            self.turn()
            return ITEM + sum(self.size(item) for item in inside.values())
        return ITEM

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """What an iterator gives, as a list that is no larger than a value may be. Raises TooMuchError."""
        items, total = [], 0
        for value in values:
            self.turn()
            total += ITEM + self.size(value)
            if total > MAX_VALUE:
                raise TooMuchError(f"it makes a list of more than {MAX_VALUE} characters")
            items.append(value)
        self.spend(ITEM * len(items))
        return items

    def _of(self, container: Any, items: Iterable[Any], count: int) -> int:
        known = self._sizes.get(id(container))
        if known is not None:
            return known[1]
        total = ITEM * count
        for item in items:
            kind = type(item)
            if kind is str:
                total += len(item)
            elif kind not in _LEAVES:
                total += self.size(item)
            if total > MAX_VALUE:
                raise TooMuchError(f"it makes a value of more than {MAX_VALUE} characters")
        self._sizes[id(container)] = (container, total)
        return total


_current: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def budget() -> Budget:
    """That of the rendering at hand; one of its own for what runs outside of any."""
    return _current.get() or Budget()


@contextmanager
def within(limits: Budget) -> Iterator[Budget]:
    """The body's `budget()`."""
    token = _current.set(limits)
    try:
        yield limits
    finally:
        _current.reset(token)
