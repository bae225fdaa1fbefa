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
        count = len(batch.slots)
        computed = int(batch.positions.min())
        most = self.used([computed] * len(self._tables), count)
        return self.used([self._same(*each, batch) for each in zip(self._tables, most, strict=False)], count)

    def used(self, tokens: Sequence[int], num_requests: int) -> tuple[int, ...]:
        """As `tokens`, if the requests had so many in common in each KV group."""
        cascades = self._groups.cascades
        found = tuple(each if cascades(index, each, num_requests) else 0 for index, each in enumerate(tokens))
        return found if any(found) else ()

    @staticmethod
    def _same(table: BlockTable, most: int, batch: InputBatch) -> int:
        return table.block_size * equal_columns(table.blocks, batch.slots, most // table.block_size)


def equal_columns(blocks: Int32Array, rows: Int32Array, width: int) -> int:
    """The first columns of blocks [S, B], `width` at most, in which the `rows` are equal: how many. Looks at twice as
    many each time, for most are found to differ early."""
    begin = 0
    step = 1
    while begin < width:
        end = min(begin + step, width)
        equal = (blocks[rows, begin:end] == blocks[rows[0], begin:end]).all(0)
        if not equal.all():
            return begin + int(np.argmin(equal))
        begin = end
        step = 2 * step
    return width
