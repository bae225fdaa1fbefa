"""Order: who waits in front of whom, and who gives way when memory is short. Knows nothing about why."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from pagemill.engine.request import Request
from pagemill.errors import ConfigError


class WaitingQueue(ABC):
    """Requests that do not run, in the order in which they shall. Every operation is O(1) or O(log n)."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a request that arrived."""

    @abstractmethod
    def push_back(self, request: Request) -> None:
        """Return a request that ran: it goes before all that have not."""

    @abstractmethod
    def peek(self) -> Request:
        """The first. The queue must not be empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""

    @abstractmethod
    def __len__(self) -> int:
        """Requests in the queue."""

    @abstractmethod
    def victims(self, running: Iterable[Request]) -> list[Request]:
        """Running requests such that the one to give way first is the last."""


class FcfsQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def victims(self, running: Iterable[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.sequence)


class PriorityQueue(WaitingQueue):
    """Lower priority value first, then earlier arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._live: dict[str, Request] = {}

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (_rank(request), request))
        self._live[request.request_id] = request

    def push_back(self, request: Request) -> None:
        self.push(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
        while self._heap and self._live.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._live)

    def victims(self, running: Iterable[Request]) -> list[Request]:
        return sorted(running, key=_rank)


def _rank(request: Request) -> tuple[int, float, int]:
    return request.priority, request.arrival_time, request.sequence


QUEUES: dict[str, type[WaitingQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}


def make_queue(policy: str) -> WaitingQueue:
    """The empty queue of a policy. Raises ConfigError for an unknown one."""
    if policy not in QUEUES:
        raise ConfigError(f"scheduling_policy={policy!r} is not one of {', '.join(QUEUES)}")
    return QUEUES[policy]()
