"""Slot -> block ids, one table per KV group, and where each token's key and value go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.messages.step import Int32Array
from pagemill.utils.math import ceil_div


class BlockTable:
    """The table of one KV group. Rows are append-only while a request lives; unused entries are 0."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = np.zeros((num_slots, ceil_div(max_model_len, block_size)), np.int32)
        """[S, blocks] block ids in order of position."""
        self.num_blocks = np.zeros(num_slots, np.int32)

    def reset(self, slot: int, block_ids: Sequence[int]) -> None:
        """Begin a request's row."""
        self.blocks[slot] = 0
        self.num_blocks[slot] = 0
        self.append(slot, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row."""
        start = int(self.num_blocks[slot])
        count = len(block_ids)
        if count == 1:  # a request that decodes; an element is written several times faster than a slice
            self.blocks[slot, start] = block_ids[0]
        else:
            self.blocks[slot, start : start + count] = block_ids
        self.num_blocks[slot] = start + count

    def rows(self, slots: Int32Array, max_seq_len: int) -> Int32Array:
        """[R, blocks that max_seq_len tokens fill] the rows of a step."""
        return self.blocks[slots, : ceil_div(max_seq_len, self.block_size)]

    def slot_mapping(self, token_slots: Int32Array, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[T] block id * block_size + offset of each token, from its request slot and position."""
        block_ids = self.blocks[token_slots, positions // self.block_size].astype(np.int64)
        return block_ids * self.block_size + positions % self.block_size


class SlotTable(NamedTuple):
    """The block table of one KV group, and the attention layers that use it."""

    blocks: Int32Array
    """[S, blocks], stays where it is."""
    block_size: int
    layers: Sequence[str]


@dataclass(frozen=True)
class BlockTables:
    """The tables of all KV groups."""

    groups: tuple[BlockTable, ...]

    def reset(self, slot: int, block_ids: tuple[list[int], ...]) -> None:
        """Begin a request's rows, one list per group."""
        for table, ids in zip(self.groups, block_ids, strict=True):
            table.reset(slot, ids)

    def append(self, slot: int, block_ids: tuple[list[int], ...]) -> None:
        """Add blocks to a request's rows, one list per group."""
        for table, ids in zip(self.groups, block_ids, strict=True):
            table.append(slot, ids)
