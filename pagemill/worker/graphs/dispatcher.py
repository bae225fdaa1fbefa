"""`Dispatcher`: which captured graph a batch runs in. Alone knows the keys; knows nothing about capture or tensors."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor

SMALL_STEP = 512
"""Tokens up to which launching a step's kernels takes longer than running them."""
MIXED_REQUESTS = (1, 16, 128)
"""Requests of whole graphs of mixed batches. More sampled rows than needed cost time in the output head, more graphs
cost memory: with these the head reads its weight once, whatever the padding."""
CHEAP_TOKENS = 128
"""Up to which reading the weights takes longer than computing with them: padding costs little."""

GraphKey = tuple[GraphMode, BatchDescriptor]


@dataclass(frozen=True)
class BatchLimits:
    """What batches can look like."""

    max_num_requests: int
    uniform_query_len: int = 1
    """Tokens per request of a decode step: 1 + drafts."""
    verify_lens: tuple[int, ...] = ()
    """Most tokens per request of steps that verify drafts, for which there are graphs."""
    verify_tokens: int = 0
    """Most tokens of such a step."""
    lora: bool = False
    """Whether there are adapters; batches with and without one then have graphs of their own."""


class Dispatcher:
    """Keys for FULL and PIECEWISE, and the key of a batch: FULL before PIECEWISE before NONE.

    A decode graph has a capture size of tokens and as many requests as fit, one that verifies drafts a round number of
    requests; other FULL graphs have a round size and one of a few numbers of requests; piecewise graphs do not depend
    on requests.
    """

    def __init__(
        self, mode: GraphMode, capture_sizes: Iterable[int], limits: BatchLimits, *, small_step: int = 0
    ) -> None:
        """`mode` after downgrading (`downgrade`). `small_step`: tokens up to which FULL_AND_PIECEWISE replays mixed
        batches of few requests whole; 0 where it cannot."""
        self.mode = mode
        self.limits = limits
        self._small_step = small_step
        self._query_len = limits.uniform_query_len
        self._lens = {limits.uniform_query_len, *limits.verify_lens}
        sizes = sorted(set(capture_sizes))
        with_lora = (False, True) if limits.lora else (False,)
        self._kinds = [
            _Kind(GraphMode.FULL, self._query_len, {lora: self._decode_keys(sizes, lora) for lora in with_lora}),
            *(
                _Kind(GraphMode.FULL, length, {lora: self._verify_keys(length, lora) for lora in with_lora})
                for length in limits.verify_lens
            ),
            *(
                _Kind(GraphMode.FULL, 0, {lora: self._mixed_keys(sizes, count, lora) for lora in with_lora})
                for count in self._mixed_requests()
            ),
            _Kind(GraphMode.PIECEWISE, 0, {lora: self._piece_keys(sizes, lora) for lora in with_lora}),
        ]
        self._captured: set[GraphKey] = set()
        self._all = [kind.table(None) for kind in self._kinds]
        self._there = [kind.table(self._captured) for kind in self._kinds]

    def dispatch(
        self, num_tokens: int, num_requests: int, uniform: bool, has_lora: bool = False, cascade: bool = False
    ) -> GraphKey:
        """The runtime mode of a batch, and its shape padded to that of the graph, as if all were captured; as it is
        when there is none.

        A `uniform` batch has equally many tokens per request; it is a decode batch when that is the decode length, or
        one of those that verify drafts. With `cascade` attention a batch is never FULL.
        """
        query_len = self._query_len_of(num_tokens, num_requests, uniform)
        found = _first(self._all, num_tokens, num_requests, query_len, has_lora, cascade)
        return found or (GraphMode.NONE, BatchDescriptor(num_tokens, num_requests, uniform, has_lora))

    def is_captured(self, item: GraphKey) -> bool:
        """Whether the graph is there."""
        return item in self._captured

    def stand_in(
        self, num_tokens: int, num_requests: int, uniform: bool, has_lora: bool = False, cascade: bool = False
    ) -> GraphKey | None:
        """The captured graph that a batch runs in whose own is not there yet: a larger one, or one in pieces. None
        where there is none, or where padding costs more than launching the step's kernels one by one."""
        query_len = self._query_len_of(num_tokens, num_requests, uniform)
        found = _first(self._there, num_tokens, num_requests, query_len, has_lora, cascade)
        return found if found is not None and _pads_cheaply(num_tokens, found[1].num_tokens) else None

    def captured(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """The graph is there from now on."""
        if (mode, key) not in self._captured:
            self._captured.add((mode, key))
            self._there = [kind.table(self._captured) for kind in self._kinds]

    def graph_keys(self) -> list[GraphKey]:
        """Every graph there can be, the largest first, decode graphs before others of their size."""
        decode, *mixed, pieces = self._kinds
        found = dict.fromkeys(item for kind in (decode, *reversed(mixed), pieces) for item in kind.items())
        return sorted(found, key=lambda item: -item[1].num_tokens)

    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """Forget a graph that could not be captured: batches that would have it run in what comes next."""
        self._captured.discard((mode, key))
        for tables in (*self._all, *self._there):
            tables.drop(mode, key)

    def _query_len_of(self, num_tokens: int, num_requests: int, uniform: bool) -> int:
        """Tokens per request of a decode step; 0: it is something else."""
        length = num_tokens // num_requests if uniform and num_requests else 0
        return length if length in self._lens and length * num_requests == num_tokens else 0

    def _verify_keys(self, length: int, lora: bool) -> list[BatchDescriptor]:
        if self.mode.decode is not GraphMode.FULL:
            return []
        most = min(self.limits.max_num_requests, self.limits.verify_tokens // length)
        counts = [count for count in range(1, most + 1) if is_round(count, 2) or count == most]
        return [BatchDescriptor(count * length, count, True, lora) for count in counts]

    def _decode_keys(self, sizes: Sequence[int], lora: bool) -> list[BatchDescriptor]:
        if self.mode.decode is not GraphMode.FULL:
            return []
        length = self._query_len
        most = self.limits.max_num_requests
        counts = {-(-size // length) for size in sizes}
        # The largest decode batch has a graph of its own size, where graphs of that size are wanted at all.
        fitting = {min(count, most) for count in counts}
        return [BatchDescriptor(count * length, count, True, lora) for count in sorted(fitting)]

    def _mixed_requests(self) -> list[int]:
        """Ascending. FULL has room for every batch; FULL_AND_PIECEWISE leaves large ones to the pieces."""
        most = self.limits.max_num_requests
        if self.mode.mixed is GraphMode.FULL:
            return [*(count for count in MIXED_REQUESTS if count < most), most]
        if self.mode is GraphMode.FULL_AND_PIECEWISE and self._small_step:
            return sorted({min(count, most) for count in MIXED_REQUESTS})
        return []

    def _mixed_keys(self, sizes: Sequence[int], num_requests: int, lora: bool) -> list[BatchDescriptor]:
        """Of at most so many requests. There are several graphs of a size, and padding of a few tokens costs little
        where there are others: round sizes are enough. One token has no size of its own, for it is no decode step
        only where it is a part of a prompt."""
        largest = max(sizes, default=0) if self.mode.mixed is GraphMode.FULL else self._small_step
        fitting = [size for size in sizes if 1 < size <= largest and (is_round(size) or size == largest)]
        return [BatchDescriptor(size, min(size, num_requests), False, lora) for size in fitting]

    def _piece_keys(self, sizes: Sequence[int], lora: bool) -> list[BatchDescriptor]:
        if not self.mode.uses_pieces:
            return []
        return [BatchDescriptor(size, None, False, lora) for size in sizes]


def is_round(size: int, digits: int = 3) -> bool:
    """Whether so many binary digits say all of it; with three: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ..."""
    last = max(0, size.bit_length() - digits)
    return size >> last << last == size


def _pads_cheaply(num_tokens: int, padded: int) -> bool:
    """A small step, launched kernel by kernel, takes as long as one of SMALL_STEP tokens or longer."""
    return padded <= (2 * num_tokens if padded <= SMALL_STEP else num_tokens * 5 // 4)


_Keys = dict[bool, list[BatchDescriptor]]
"""Whether there are adapters -> keys, ascending."""
_Table = list[BatchDescriptor | None]
"""Number of tokens -> the key that it is padded to: a step must not search."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Graphs among which one is chosen by the number of tokens alone."""

    mode: GraphMode
    query_len: int
    """Of decode steps; 0: of others."""
    keys: _Keys

    def items(self) -> Iterator[GraphKey]:
        """All graphs of this kind."""
        return ((self.mode, key) for keys in self.keys.values() for key in keys)

    def table(self, chosen: Container[GraphKey] | None) -> "_Tables":
        """To look them up; only those that are `chosen`, where that is not None."""
        wanted = {
            lora: [key for key in keys if chosen is None or (self.mode, key) in chosen]
            for lora, keys in self.keys.items()
        }
        return _Tables(self, {lora: _by_num_tokens(keys) for lora, keys in wanted.items()})


@dataclass(frozen=True, slots=True)
class _Tables:
    kind: _Kind
    tables: dict[bool, _Table]

    def find(
        self, num_tokens: int, num_requests: int, query_len: int, has_lora: bool, cascade: bool
    ) -> GraphKey | None:
        """The graph of a batch, if it is one of this kind. Decode steps and others are different work, so that neither
        may run in a whole graph of the other."""
        mode = self.kind.mode
        if mode is GraphMode.FULL and (cascade or query_len != self.kind.query_len):
            return None
        table = self.tables.get(has_lora)
        key = table[num_tokens] if table is not None and num_tokens < len(table) else None
        if key is None or (key.num_requests is not None and key.num_requests < num_requests):
            return None
        return mode, key

    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """Forget a graph."""
        if mode is self.kind.mode:
            for table in self.tables.values():
                table[:] = [None if entry == key else entry for entry in table]


def _first(
    kinds: Iterable[_Tables], num_tokens: int, num_requests: int, query_len: int, has_lora: bool, cascade: bool
) -> GraphKey | None:
    for tables in kinds:
        found = tables.find(num_tokens, num_requests, query_len, has_lora, cascade)
        if found is not None:
            return found
    return None


def _by_num_tokens(keys: Sequence[BatchDescriptor]) -> _Table:
    table: _Table = [None]
    for key in keys:
        table += [key] * (key.num_tokens + 1 - len(table))
    return table
