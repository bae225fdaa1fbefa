"""Order: who waits in front of whom, and who gives way when memory is short. Knows nothing about why."""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from pagemill.config.choices import SchedulingPolicy
from pagemill.engine.request import Request

Key = Callable[[Request], tuple[Any, ...]]
COMPACT_FROM = 64
"""Entries of requests that left are kept while there are no more of them than this, or than others."""


class WaitingQueue:
    """Requests that do not run, in the order in which they shall. Every operation is O(log n), amortized.

    One that ran and had to give way takes its place in the order again: before all of those that it had preceded.
    """

    def __init__(self, key: Key) -> None:
        """`key`: the order, the same for all time, and another one for each request."""
        self._key = key
        self._heap: list[tuple[tuple[Any, ...], Request]] = []
        self._live: dict[str, Request] = {}

    def push(self, request: Request) -> None:
        """Add a request that arrived, or had to give way."""
        heapq.heappush(self._heap, (self._key(request), request))
        self._live[request.request_id] = request

    def peek(self) -> Request:
        """The first. The queue must not be empty."""
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        del self._live[request.request_id]
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        if len(self._heap) > COMPACT_FROM + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        """Requests in the queue."""
        return len(self._live)

    def victims(self, running: Iterable[Request]) -> list[Request]:
        """Running requests such that the one to give way first is the last."""
        return sorted(running, key=self._key)

    def last(self, running: Iterable[Request]) -> Request:
        """The one of the running requests, of which there is one at least, that gives way first."""
        return max(running, key=self._key)

    def precedes(self, request: Request, other: Request) -> bool:
        """Whether a request goes before another."""
        return self._key(request) < self._key(other)

    def _is_live(self, request: Request) -> bool:
        return self._live.get(request.request_id) is request


def _by_arrival(request: Request) -> tuple[int, int]:
    """First come, first served; but the first completion of every call comes before all that are not."""
    return request.rank, request.sequence


def _by_priority(request: Request) -> tuple[int, int, float, int]:
    """Lower priority value first, then as above, by the time of the front end."""
    return request.priority, request.rank, request.arrival_time, request.sequence


KEYS: dict[SchedulingPolicy, Key] = {
    SchedulingPolicy.FCFS: _by_arrival,
    SchedulingPolicy.PRIORITY: _by_priority,
}


def make_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """The empty queue of a policy."""
    return WaitingQueue(KEYS[policy])
