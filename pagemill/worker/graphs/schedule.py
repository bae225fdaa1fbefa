"""`CaptureSchedule`: when each graph is captured. Knows keys and counts; captures nothing itself."""

from collections.abc import Iterable, Sequence

from pagemill.config.graph_mode import GraphMode
from pagemill.worker.graphs.dispatcher import CHEAP_TOKENS, GraphKey, is_round

FEW = 24
"""Graphs of a kind of which none is left for later."""
LEAST_PROMPT = 16
"""Tokens of a step that is more than decoding, below which there are few such steps."""
LONG_STEP = 512
"""Requests of a decode step beyond which launching its kernels hides behind running them; half as many tokens where
prompts are computed."""


class CaptureSchedule:
    """Graphs are captured before the first request, or while there is nothing to do: never in a step that somebody
    waits for. So some are missing for a while, and those first that steps have asked for."""

    def __init__(self, keys: Iterable[GraphKey], *, lazy: bool) -> None:
        """`keys`: the largest first."""
        self._pending: dict[GraphKey, None] = dict.fromkeys(keys)
        self._wanted: dict[GraphKey, None] = {}
        self._lazy = lazy

    def at_start(self) -> list[GraphKey]:
        """Graphs to capture before there are requests, the largest first, which fixes the size of the memory pool: all;
        when lazy those to which the others can be padded at little cost."""
        keys = list(self._pending)
        if not self._lazy:
            return keys
        kinds: dict[tuple[object, ...], list[GraphKey]] = {}
        for mode, key in keys:
            whole = key.num_requests is not None
            kinds.setdefault((mode, key.query_len, whole, key.has_lora), []).append((mode, key))
        first = {item for kind in kinds.values() for item in _first_of(kind, keys)}
        return [item for item in keys if item in first]

    def next_idle(self) -> GraphKey | None:
        """The graph to capture while there is nothing to do: those that a step did without; then decode steps, other
        whole steps, pieces, of each small before large."""
        if self._wanted:
            return next(iter(self._wanted))
        return min(self._pending, key=_when_idle) if self._pending else None

    def miss(self, item: GraphKey) -> None:
        """A step did without the graph."""
        if item in self._pending:
            self._wanted[item] = None

    def done(self, item: GraphKey) -> None:
        """The graph is captured, or not wanted any more."""
        self._pending.pop(item, None)
        self._wanted.pop(item, None)

    def __contains__(self, item: GraphKey) -> bool:
        """Whether the graph is still to be captured."""
        return item in self._pending

    def __len__(self) -> int:
        """Graphs that are not captured yet."""
        return len(self._pending)


def _first_of(kind: Sequence[GraphKey], all_keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Of the graphs of one kind, the largest first, those that are captured first."""
    mode, largest = kind[0]
    if mode is GraphMode.PIECEWISE:
        # Where larger steps are replayed in pieces only, launching their kernels hides behind running them.
        if any(other is GraphMode.FULL and not key.uniform for other, key in all_keys):
            return []
        return [item for item in kind if item is kind[0] or is_round(item[1].num_tokens, 1)]
    if largest.query_len > 1:
        return [item for item in kind if item is kind[0] or is_round(item[1].num_requests or 0, 1)]
    if largest.uniform:
        return [item for item in kind if len(kind) <= FEW or item is kind[0] or _is_decode_size(item[1].num_tokens)]
    return [item for item in kind if item is kind[0] or _is_mixed_size(item, kind)]


def _is_decode_size(num_tokens: int) -> bool:
    if num_tokens <= CHEAP_TOKENS // 2:
        return is_round(num_tokens, 1)
    return num_tokens <= LONG_STEP and is_round(num_tokens, 2 if num_tokens <= CHEAP_TOKENS else 3)


def _is_mixed_size(item: GraphKey, kind: Sequence[GraphKey]) -> bool:
    """Few requests with few tokens, many with many, a single one with any number."""
    _, key = item
    size = key.num_tokens
    requests = key.num_requests or 0
    most = max(other.num_requests or 0 for _, other in kind)
    fits = requests == 1 or (size >= CHEAP_TOKENS // 2 if requests in (size, most) else size <= CHEAP_TOKENS)
    return fits and LEAST_PROMPT <= size <= LONG_STEP // 2 and is_round(size, 1 if size <= CHEAP_TOKENS else 2)


def _when_idle(item: GraphKey) -> tuple[bool, bool, int, int]:
    """Least first."""
    mode, key = item
    return mode is not GraphMode.FULL, not key.uniform, key.num_tokens, key.num_requests or 0
