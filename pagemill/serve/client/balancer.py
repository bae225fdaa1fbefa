"""Which of several engines gets a request: the one that has its prefix in the cache, unless it is too busy.

Knows nothing about how engines are reached; it learns from its own choices only.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagemill.messages.engine_io import EngineCoreRequest

CHUNK_TOKENS = 64
"""Prompts are compared in steps of so many tokens."""
MAX_CHUNKS = 512
"""Of one prompt; what lies further is not looked at."""
MAX_PREFIXES = 65_536
"""Prefixes remembered, least recently used first out."""
MAX_EXTRA_LOAD = 8
"""Requests by which an engine with the prefix may be busier than the least busy one..."""
MAX_LOAD_RATIO = 1.5
"""...or by which factor."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, in requests."""

    num_running: int = 0
    num_waiting: int = 0

    @property
    def score(self) -> int:
        """Waiting requests weigh more: they say that the engine is full."""
        return self.num_running + 4 * self.num_waiting


class Balancer(ABC):
    """Chooses the engine of each request."""

    @abstractmethod
    def choose(self, request: EngineCoreRequest, loads: Mapping[int, EngineLoad]) -> int:
        """One of the keys of `loads`, which are the engines that can take a request; there is one at least."""

    def forget(self, engine: int) -> None:  # noqa: B027 - for those that remember nothing
        """An engine lost its cache."""


class RoundRobin(Balancer):
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, EngineLoad]) -> int:
        """The engine after the one that was chosen last."""
        engines = sorted(loads)
        self._next += 1
        return engines[(self._next - 1) % len(engines)]


class LeastLoaded(Balancer):
    """The engine with the shortest queue."""

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, EngineLoad]) -> int:
        """The one with the lowest score; the first of equals."""
        return least_loaded(loads)


class PrefixAffinity(Balancer):
    """The engine that was given the longest part of this prompt's beginning before, as long as that does not make it
    much busier than the least busy one; otherwise that one."""

    def __init__(self) -> None:
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, EngineLoad]) -> int:
        """The engine; the prompt is remembered as being there."""
        chunks = list(_prefix_hashes(request.prompt_token_ids, request.cache_salt))
        idle = least_loaded(loads)
        chosen = self._holder(chunks, loads)
        if chosen is None or _much_busier(loads[chosen], loads[idle]):
            chosen = idle
        for key in chunks:
            self._engine_of[key] = chosen
            self._engine_of.move_to_end(key)
        while len(self._engine_of) > MAX_PREFIXES:
            self._engine_of.popitem(last=False)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget what is on an engine."""
        for key in [key for key, holder in self._engine_of.items() if holder == engine]:
            del self._engine_of[key]

    def _holder(self, chunks: Sequence[int], loads: Mapping[int, EngineLoad]) -> int | None:
        for key in reversed(chunks):
            engine = self._engine_of.get(key)
            if engine is not None and engine in loads:
                return engine
        return None


def least_loaded(loads: Mapping[int, EngineLoad]) -> int:
    """The engine with the lowest score; the lowest index of equals."""
    return min(loads, key=lambda engine: (loads[engine].score, engine))


def _much_busier(load: EngineLoad, least: EngineLoad) -> bool:
    return load.score > least.score + MAX_EXTRA_LOAD and load.score > MAX_LOAD_RATIO * least.score


def _prefix_hashes(token_ids: Sequence[int], salt: str | None) -> Iterator[int]:
    """One number per prefix of whole chunks. A collision costs a worse choice and nothing else."""
    key = hash(salt)
    for start in range(0, min(len(token_ids), CHUNK_TOKENS * MAX_CHUNKS) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = hash((key, tuple(token_ids[start : start + CHUNK_TOKENS])))
        yield key


BALANCERS: dict[str, type[Balancer]] = {
    "prefix": PrefixAffinity,
    "queue": LeastLoaded,
    "round_robin": RoundRobin,
}
