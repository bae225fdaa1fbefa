"""Reading a queue that other threads fill."""

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def waiting_items(queue: SimpleQueue[T]) -> Iterator[T]:
    """Remove and yield the items of a queue until it is empty; never blocks."""
    while True:
        try:
            item = queue.get_nowait()
        except Empty:
            return
        yield item
