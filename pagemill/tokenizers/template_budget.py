"""`Budget`: what one rendering of a chat template may cost, in time, in memory, and in the size of any value.

A template is a program of unknown origin. Two rules bound it. No value is larger than `max_value`, counted as if every
value inside it were written out, so that no single operation on one takes long; and all that is made together is not
larger than MADE_VALUES such values. Whatever makes a value asks first, or says so at once. Knows nothing about Jinja.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

MAX_VALUE: Final = 4 << 20
"""Characters of a text; an item of a list or dict counts ITEM, and what is in it besides. More for contexts that hold
more: `max_value_of`."""
CHARS_PER_TOKEN: Final = 8
MADE_VALUES: Final = 24
MAX_TURNS: Final = 2_000_000
MAX_SECONDS: Final = 3.0
"""For MAX_VALUE; as much more as values may be larger."""
CLOCK_TURNS: Final = 64
"""How often the time is looked at, where nothing large is made."""
CLOCK_CHARS: Final = 64 << 10
MAX_INTEGER_BITS: Final = 4096
ITEM: Final = 8
_LEAVES: Final = (str, int, float, bool, type(None))


class TooMuchError(Exception):
    """The template takes too long, or makes too much."""


class Budget:
    """Of one rendering. What it was told of containers it remembers, which templates cannot change once they are
    made."""

    def __init__(self, max_value: int = MAX_VALUE) -> None:
        self.max_value = max_value
        self._max_seconds = MAX_SECONDS * max_value / MAX_VALUE
        self._deadline = time.monotonic() + self._max_seconds
        self._left = MADE_VALUES * max_value
        self._turns = MAX_TURNS
        self._sizes: dict[int, tuple[Any, int]] = {}
        """id -> (the container, so that the id stays its own; its size)."""

    def turn(self) -> None:
        """Once in every loop, call and comparison. Raises TooMuchError."""
        self._turns = turns = self._turns - 1
        if turns % CLOCK_TURNS == 0 or turns < 0:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Before something that may take long, and now and then. Raises TooMuchError."""
        if self._turns < 0 or time.monotonic() > self._deadline:
            raise TooMuchError(f"it runs for more than {self._max_seconds:g} s or {MAX_TURNS} steps")

    def spend(self, size: int) -> None:
        """Something of this size is going to be made; a negative one counts for nothing. Raises TooMuchError."""
        self._turns = turns = self._turns - 1
        if size > CLOCK_CHARS or turns % CLOCK_TURNS == 0 or turns < 0:
            self.look_at_clock()
            self.check(size)
        if size > 0:
            self._left -= size
        if self._left < 0:
            raise TooMuchError(f"all that it makes exceeds {MADE_VALUES * self.max_value} characters")

    def check(self, size: int) -> None:
        """Raises TooMuchError for the size of a value that is too large."""
        if size > self.max_value:
            raise TooMuchError(f"it makes a value of more than {self.max_value} characters")

    def made(self, value: Any) -> Any:
        """A value that was made, which is returned. Raises TooMuchError."""
        kind = type(value)
        if kind is str:
            self.spend(len(value))
        elif kind is bool or value is None:
            self.turn()
        elif isinstance(value, str):
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
        if type(value) is str or isinstance(value, (str, bytes)):
            return len(value)
        if type(value) is dict or isinstance(value, Mapping):
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
        items = []
        total = 0
        for value in values:
            self.turn()
            total += ITEM + self.size(value)
            self.check(total)
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
            self.check(total)
        self._sizes[id(container)] = (container, total)
        return total


def max_value_of(max_model_len: int) -> int:
    """Characters that a value may have where prompts have up to so many tokens."""
    return max(MAX_VALUE, CHARS_PER_TOKEN * max_model_len)


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
