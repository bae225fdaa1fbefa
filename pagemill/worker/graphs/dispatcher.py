"""`Dispatcher`: which captured graph a batch runs in. Alone knows the keys; knows nothing about capture or tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor

SMALL_STEP = 512
"""Tokens up to which launching a step's kernels takes longer than running them."""
MIXED_REQUESTS = (1, 16, 128)
"""Requests of whole graphs of mixed batches. More sampled rows than needed cost time in the output head, more graphs
cost memory: with these the head reads its weight once, whatever the padding."""


@dataclass(frozen=True)
class BatchLimits:
    """What batches can look like."""

    max_num_requests: int
    uniform_query_len: int = 1
    """Tokens per request of a decode step: 1 + drafts."""
    lora: bool = False
    """Whether there are adapters; batches with and without one then have graphs of their own."""


class Dispatcher:
    """Keys for FULL and PIECEWISE, and the key of a batch: FULL before PIECEWISE before NONE.

    A decode graph has a capture size of tokens and as many requests as fit; other FULL graphs have a round one and one
    of a few numbers of requests; piecewise graphs do not depend on requests.
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
        sizes = sorted(set(capture_sizes))
        with_lora = (False, True) if limits.lora else (False,)
        self._decode = {lora: _by_num_tokens(self._decode_keys(sizes, lora)) for lora in with_lora}
        self._mixed = [
            {lora: _by_num_tokens(self._mixed_keys(sizes, count, lora)) for lora in with_lora}
            for count in self._mixed_requests()
        ]
        self._pieces = {lora: _by_num_tokens(self._piece_keys(sizes, lora)) for lora in with_lora}

    def dispatch(
        self, num_tokens: int, num_requests: int, uniform: bool, has_lora: bool = False, cascade: bool = False
    ) -> tuple[GraphMode, BatchDescriptor]:
        """The runtime mode of a batch, and its shape padded to that of the graph; as it is when there is none.

        A `uniform` batch has equally many tokens per request; it is a decode batch when that is the decode length.
        With `cascade` attention a batch is never FULL.
        """
        if not cascade:
            # Decode steps and others are different work, so that neither may run in a graph of the other.
            decodes = uniform and num_tokens == num_requests * self._query_len
            for tables in [self._decode] if decodes else self._mixed:
                key = _find(tables, has_lora, num_tokens)
                if key is not None and key.num_requests is not None and key.num_requests >= num_requests:
                    return GraphMode.FULL, key
        key = _find(self._pieces, has_lora, num_tokens)
        if key is not None:
            return GraphMode.PIECEWISE, key
        return GraphMode.NONE, BatchDescriptor(num_tokens, num_requests, uniform, has_lora)

    def graph_keys(self) -> list[tuple[GraphMode, BatchDescriptor]]:
        """Every graph there can be, the largest first, decode graphs before others of their size."""
        found: dict[tuple[GraphMode, BatchDescriptor], None] = {}
        for mode, tables in (
            (GraphMode.FULL, self._decode),
            *((GraphMode.FULL, tables) for tables in reversed(self._mixed)),
            (GraphMode.PIECEWISE, self._pieces),
        ):
            for table in tables.values():
                found.update(dict.fromkeys((mode, key) for key in table if key is not None))
        return sorted(found, key=lambda item: -item[1].num_tokens)

    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """Forget a graph that could not be captured: batches that would have it run in what comes next."""
        kinds = (self._decode, *self._mixed) if mode is GraphMode.FULL else (self._pieces,)
        for tables in kinds:
            for table in tables.values():
                table[:] = [None if entry == key else entry for entry in table]

    def _decode_keys(self, sizes: Sequence[int], lora: bool) -> list[BatchDescriptor]:
        if self.mode.decode is not GraphMode.FULL:
            return []
        length, most = self._query_len, self.limits.max_num_requests
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
        fitting = [size for size in sizes if 1 < size <= largest and (_is_round(size) or size == largest)]
        return [BatchDescriptor(size, min(size, num_requests), False, lora) for size in fitting]

    def _piece_keys(self, sizes: Sequence[int], lora: bool) -> list[BatchDescriptor]:
        if not self.mode.uses_pieces:
            return []
        return [BatchDescriptor(size, None, False, lora) for size in sizes]


def _is_round(size: int) -> bool:
    """Whether three binary digits say all of it: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ..."""
    last = max(0, size.bit_length() - 3)
    return size >> last << last == size


Table = list[BatchDescriptor | None]
"""Number of tokens -> the key that it is padded to."""


def _by_num_tokens(keys: Sequence[BatchDescriptor]) -> Table:
    """A step must not search: every number of tokens has its entry."""
    table: Table = [None]
    for key in keys:
        table += [key] * (key.num_tokens + 1 - len(table))
    return table


def _find(tables: dict[bool, Table], has_lora: bool, num_tokens: int) -> BatchDescriptor | None:
    table = tables.get(has_lora)
    return table[num_tokens] if table is not None and num_tokens < len(table) else None
