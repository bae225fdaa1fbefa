"""`SizedCache`: the values that were used last, up to a size of them all together."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """Used from one thread at a time."""

    def __init__(self, max_size: int, size_of: Callable[[K, V], int] = lambda key, value: 1) -> None:
        """`size_of`: what an entry counts as, always the same; one by default, so that `max_size` is their number."""
        self.size = 0
        """Of all entries."""
        self._max_size = max_size
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """What is there for a key, which is used now."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> V:
        """Keep a value, and forget those that were not used for longest where they are too many. Returns it."""
        if key in self._values:
            self.size -= self._size_of(key, self._values.pop(key))
        self._values[key] = value
        self.size += self._size_of(key, value)
        while self.size > self._max_size:
            self.size -= self._size_of(*self._values.popitem(last=False))
        return value
