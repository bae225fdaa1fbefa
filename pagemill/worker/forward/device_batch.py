"""The tensors that the network reads on a device, at addresses that stay: captured graphs know no others.

Knows their sizes, not when they are written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.attention.interface import CommonAttentionMetadata, StepOnHost
from pagemill.model.kernels import batching
from pagemill.model.kernels.batching_reference import TableRows
from pagemill.worker.batch.device_tables import DeviceBlockTable
from pagemill.worker.batch.input_batch import Int64Array
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedShape, MixedTensors


class DeviceBatch:
    """Room for T tokens and R requests; `tables`, one per KV group, say how many blocks a row may have. `max_rows`:
    that are sampled from, where steps verify drafts; 0: none does."""

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        tables: tuple[DeviceBlockTable, ...],
        device: torch.device,
        max_rows: int = 0,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.max_rows = max_rows
        self.tables = tables
        self.max_seq_len = min(table.blocks.shape[1] * table.block_size for table in tables)
        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slots = zeros(max_requests, dtype=torch.int32)
        """[R] of a decode batch."""
        self.next_positions = zeros(max_requests, dtype=torch.int64)
        """[R] where each row of a decode batch goes on; moved by the device."""
        self.seq_lens = torch.ones(max_requests, dtype=torch.int32, device=device)
        """[R]. Never 0, even where nothing was written yet: plans that the host makes read it."""
        self.decode_query_start = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self.slot_mapping = [zeros(max_tokens, dtype=torch.int64) for _ in tables]
        self.mixed = zeros(MixedShape(max_tokens, max_requests, max_rows).num_elements, dtype=torch.int32)
        """Any batch, as `MixedShape` packs it."""
        self.block_rows = [zeros(max_requests, table.blocks.shape[1], dtype=torch.int32) for table in tables]

    def table_rows(self, group: int, num_rows: int) -> TableRows:
        """What a decode batch has of a group's table."""
        table = self.tables[group]
        rows = self.block_rows[group][:num_rows]
        mapping = self.slot_mapping[group][:num_rows]
        return TableRows(table.device_blocks, table.block_size, rows, mapping)

    def mapping(self, group: int, num_tokens: int) -> tuple[Tensor, int, Tensor]:
        """Table, block size and slot mapping of a group."""
        table = self.tables[group]
        return table.device_blocks, table.block_size, self.slot_mapping[group][:num_tokens]

    def place_tokens(self, tensors: MixedTensors, last_tokens: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[T] token ids and [T] positions of any batch, written here with the slot mappings of `groups`; `last_tokens`:
        of slots."""
        count = len(tensors.tokens.slots)
        token_ids = self.token_ids[:count]
        positions = self.positions[:count]
        mappings = [self.mapping(group, count) for group in groups]
        batching.place_tokens(tensors.tokens, last_tokens, token_ids, positions, mappings)
        return token_ids, positions

    def mixed_common(self, tensors: MixedTensors, bounds: BatchBounds, group: int) -> CommonAttentionMetadata:
        """Any batch; its slot mapping is written already, that of its padding too."""
        table = self.tables[group]
        longest = bounds.max_seq_len or table.blocks.shape[1] * table.block_size
        width = -(-longest // table.block_size)
        return CommonAttentionMetadata(
            query_start=tensors.query_start,
            seq_lens=tensors.seq_lens,
            block_table=table.device_blocks[:, :width].index_select(0, tensors.slots),
            slot_mapping=self.slot_mapping[group][: len(tensors.tokens.slots)],
            num_requests=len(tensors.slots),
            num_tokens=bounds.num_tokens,
            max_query_len=bounds.max_query_len,
            max_seq_len=longest,
            block_size=table.block_size,
            common_prefix_len=bounds.shared[group] if bounds.shared else 0,
            min_query_len=bounds.min_query_len,
            decode_len=bounds.decode_len,
            batch_lens=bounds.lens,
            asks_for_ends=bounds.asks_for_ends,
        )

    def decode_on_host(self, num_rows: int, positions: Int64Array, group: int) -> StepOnHost:
        """A decode batch of so many rows before its replay; `positions`: of those that are no padding."""
        table = self.tables[group]
        seq_lens = torch.ones(num_rows, dtype=torch.int64)
        seq_lens[: len(positions)] += torch.from_numpy(positions)
        return StepOnHost(seq_lens, self.slots[:num_rows], table.device_blocks, table.block_size)

    def decode_common(self, replayed: bool, num_rows: int, group: int) -> CommonAttentionMetadata:
        """A decode batch of so many rows, padding included, as captured graphs see it: of any length."""
        table = self.tables[group]
        return CommonAttentionMetadata(
            query_start=self.decode_query_start[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_table=self.block_rows[group][:num_rows],
            slot_mapping=self.slot_mapping[group][:num_rows],
            num_requests=num_rows,
            num_tokens=num_rows,
            max_query_len=1,
            max_seq_len=table.blocks.shape[1] * table.block_size,
            block_size=table.block_size,
            replayed=replayed,
        )
