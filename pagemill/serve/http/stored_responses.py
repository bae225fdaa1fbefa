"""`StoredResponse`: an answer of the Responses API that is kept for its client, and the work for one that is generated
in the background. Does not know where it is kept."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import msgspec

from pagemill.serve.http.connection import EventSink
from pagemill.serve.http.errors import GenerationFailedError, api_error
from pagemill.serve.http.generation import Generation
from pagemill.serve.http.response_deltas import IN_PROGRESS, QUEUED, ResponseDeltas

NO_ROOM = "there is no room to store more of it"
NOTHING_MORE = b":\n\n"
"""A comment: a stream that has no events left has a beginning all the same."""


class _Answer(msgspec.Struct):
    output: msgspec.Raw


class StoredResponse:
    """Implements `Keepable`."""

    def __init__(self, name: str, items: bytes, answer: bytes, status: str, *, with_events: bool = False) -> None:
        """`items`: JSON of the list of all that was answered. `answer`: JSON, as it is now. `with_events`: they are
        kept too, for those who follow later."""
        self.id = name
        self.items = items
        self.answer = answer
        self.status = status
        self.has_events = with_events
        """Whether they can be followed."""
        self._events: list[bytes] = []
        """Each at the place of its sequence number."""
        self._events_bytes = 0
        self._is_followed = False
        self.is_closed = False
        """Whether nobody wants it any more."""
        self._task: asyncio.Task[None] | None = None
        self._end: Callable[[], bytes] = bytes
        """Makes the event of an end before its time."""
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """See `Keepable`. The last event is the answer once more."""
        return len(self.items) + len(self.answer) * (1 + self.has_events) + self._events_bytes

    @property
    def in_progress(self) -> bool:
        """See `Keepable`."""
        return self.status in (QUEUED, IN_PROGRESS)

    @property
    def is_background(self) -> bool:
        """Whether it is generated without anybody waiting."""
        return self._task is not None

    @property
    def context(self) -> bytes:
        """JSON of the list of what was answered, and the answer's own items."""
        return joined(self.items, bytes(msgspec.json.decode(self.answer, type=_Answer).output))

    def add(self, events: bytes) -> None:
        """What is new, where events are kept."""
        if self.has_events and self.in_progress:
            self._events_bytes += len(events)
        if self.has_events or self._is_followed:
            self._events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        if not self.has_events and not self.in_progress:
            self._events = []  # who follows has them
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget_events(self) -> None:
        """Keep none of them, but for who follows already."""
        self._is_followed = self.has_events
        self.has_events = False
        self._events_bytes = 0

    def set(self, answer: bytes, status: str) -> None:
        """What it has become."""
        self.answer = answer
        self.status = status

    def start(self, generation: Generation, deltas: ResponseDeltas, grown: Callable[[], bool]) -> None:
        """Generate it, in a task. `grown` is told of new events; False: there is no room for them, and it ends."""
        self._end = deltas.cancelled
        self._task = asyncio.create_task(self._run(generation, deltas, grown))

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Its events from the `first` on: those that were, then those that come, until there are no more."""
        events = self._events
        if first >= len(events) and not self.in_progress:
            yield NOTHING_MORE
            return
        while True:
            changed = self._changed
            while first < len(events):
                first += 1
                yield events[first - 1]
            if not self.in_progress:
                return
            if changed is self._changed:
                await changed.wait()

    async def close(self) -> None:
        """See `Keepable`."""
        self.is_closed = True
        await self.cancel()

    async def cancel(self) -> None:
        """End the work that is done for it, and wait until it has ended."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.in_progress:
            self.add(self._end())

    async def _run(self, generation: Generation, deltas: ResponseDeltas, grown: Callable[[], bool]) -> None:
        try:
            async with contextlib.aclosing(generation.stream(EventSink(None))) as parts:
                async for events in parts:
                    if self.status == QUEUED:
                        self.set(msgspec.json.encode(deltas.answer(IN_PROGRESS)), IN_PROGRESS)
                    self.add(events)
                    if self.has_events and self.in_progress and not grown():
                        raise GenerationFailedError(NO_ROOM)
        except Exception as error:  # before the first event, or of this loop; others are events
            self.add(deltas.failure(api_error(error)))


def joined(*lists: bytes) -> bytes:
    """One JSON list of the items of several."""
    inner = [items.strip()[1:-1].strip() for items in lists]
    return b"[" + b",".join([items for items in inner if items]) + b"]"
