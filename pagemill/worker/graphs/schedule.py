"""`CaptureSchedule`: when each graph is captured. Knows keys and counts; captures nothing itself."""

from collections.abc import Iterable

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor

GraphKey = tuple[GraphMode, BatchDescriptor]


class CaptureSchedule:
    """A graph is captured at the first step of its shape that comes after its warm-ups. The warm-ups are steps of that
    shape without a graph: kernels are compiled and libraries take their workspaces, which a capture must not do."""

    def __init__(self, keys: Iterable[GraphKey], *, num_warm_ups: int, lazy: bool) -> None:
        """`keys`: the largest first."""
        self._warm_ups: dict[GraphKey, int] = dict.fromkeys(keys, num_warm_ups)
        self._pending: dict[GraphKey, None] = dict.fromkeys(self._warm_ups)
        self._lazy = lazy

    def at_start(self) -> list[GraphKey]:
        """Graphs to capture before there are requests: all; when lazy, of each kind the largest, which fixes the size
        of the memory pool, and the graph of the smallest decode step."""
        keys = list(self._pending)
        if not self._lazy:
            return keys
        kinds: dict[tuple[object, ...], GraphKey] = {}
        for mode, key in keys:
            kinds.setdefault((mode, key.uniform, key.has_lora), (mode, key))
        first = list(kinds.values())
        decode = [item for item in keys if item[1].uniform and not item[1].has_lora]
        return list(dict.fromkeys([*first, *decode[-1:]]))

    def next_idle(self) -> GraphKey | None:
        """The graph to capture while there is nothing to do: decode steps, other whole steps, pieces; of
        each small before large."""
        if not self._pending:
            return None
        return min(self._pending, key=_when_idle)

    def admit(self, mode: GraphMode, key: BatchDescriptor) -> GraphMode:
        """What a step of this shape runs in: its mode, or NONE while it still warms up, which it then does."""
        remaining = self._warm_ups.get((mode, key), 0)
        if not remaining:
            self._pending.pop((mode, key), None)
            return mode
        self._warm_ups[mode, key] = remaining - 1
        return GraphMode.NONE

    def warm_ups_left(self, mode: GraphMode, key: BatchDescriptor) -> int:
        """Steps of this shape that have to run without a graph yet."""
        return self._warm_ups.get((mode, key), 0)

    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """The graph is not wanted any more."""
        self._pending.pop((mode, key), None)

    def __len__(self) -> int:
        """Graphs that are not captured yet."""
        return len(self._pending)


def _when_idle(item: GraphKey) -> tuple[bool, bool, int, int]:
    """Least first."""
    mode, key = item
    return mode is not GraphMode.FULL, not key.uniform, key.num_tokens, key.num_requests or 0
