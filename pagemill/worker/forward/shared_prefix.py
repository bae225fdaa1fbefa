"""`SharedPrefix`: how many tokens all requests of a decode batch have in the same blocks. Knows no tensors."""

from collections.abc import Sequence

import numpy as np

from pagemill.messages.step import Int32Array
from pagemill.worker.batch.block_tables import BlockTable
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups


class SharedPrefix:
    """Looks where attention would be computed otherwise for it: for cascade attention, which reads such a prefix once
    for all requests."""

    def __init__(self, tables: Sequence[BlockTable], groups: AttentionGroups) -> None:
        self._tables = tables
        self._groups = groups

    def tokens(self, batch: InputBatch) -> tuple[int, ...]:
        """Of each KV group, 0 where nobody makes use of it; () where nobody does in any. All of these tokens were
        computed before this step."""
        most, count = self.used(int(batch.positions.min()), len(batch.slots)), len(batch.slots)
        found = [0] * len(most)
        for index, tokens in enumerate(most):
            table = self._tables[index]
            same = table.block_size * equal_columns(table.blocks, batch.slots, tokens // table.block_size)
            found[index] = same if tokens and self._groups.cascades(index, same, count) else 0
        return tuple(found) if any(found) else ()

    def used(self, tokens: int, num_requests: int) -> tuple[int, ...]:
        """As `tokens`, if the requests had so many in common."""
        found = [0] * len(self._tables)
        for index in self._groups.indices:
            if self._groups.cascades(index, tokens, num_requests):
                found[index] = tokens
        return tuple(found) if any(found) else ()


def equal_columns(blocks: Int32Array, rows: Int32Array, width: int) -> int:
    """The first columns of blocks [S, B], `width` at most, in which the `rows` are equal: how many. Looks at twice as
    many each time, for most are found to differ early."""
    begin, step = 0, 1
    while begin < width:
        end = min(begin + step, width)
        equal = (blocks[rows, begin:end] == blocks[rows[0], begin:end]).all(0)
        if not equal.all():
            return begin + int(np.argmin(equal))
        begin, step = end, 2 * step
    return width
