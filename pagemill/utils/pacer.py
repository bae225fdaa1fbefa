"""`Pacer`: turns of the event loop for others, while one has a lot to do."""

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.003
"""How long one request may keep the event loop before others have their turn."""


class Pacer:
    """Lets others have their turn on the event loop while one request has a lot to do."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._began = time.monotonic()

    async def pause(self) -> None:
        """Wait for the others, if the present turn has lasted for a slice."""
        if time.monotonic() - self._began >= self._slice_s:
            await asyncio.sleep(0)
            self._began = time.monotonic()


async def in_slices(items: Iterable[T]) -> list[T]:
    """All items. Others have their turn between two of them, whenever making them took longer than a slice."""
    pacer = Pacer()
    found = []
    for item in items:
        found.append(item)
        await pacer.pause()
    return found
