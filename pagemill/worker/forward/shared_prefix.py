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
        found = [0] * len(self._tables)
        for index in self._groups.indices:
            tokens = self._of(self._tables[index], batch)
            if tokens and self._groups.cascades(index, tokens, len(batch.slots)):
                found[index] = tokens
        return tuple(found) if any(found) else ()

    @staticmethod
    def _of(table: BlockTable, batch: InputBatch) -> int:
        width = int(batch.positions.min()) // table.block_size
        return table.block_size * equal_columns(table.blocks, batch.slots, width)


def equal_columns(blocks: Int32Array, rows: Int32Array, width: int) -> int:
    """The first columns of blocks [S, B], `width` at most, in which the `rows` are equal: how many."""
    if not width or not (blocks[rows, 0] == blocks[rows[0], 0]).all():
        return 0
    equal = (blocks[rows, :width] == blocks[rows[0], :width]).all(0)
    return width if equal.all() else int(np.argmin(equal))
