"""The tensors that the network reads on a device, at addresses that stay: captured graphs know no others.

Knows their sizes, not when they are written.
"""

import torch
from torch import Tensor

from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.worker.batch.device_tables import DeviceBlockTable


class DeviceBatch:
    """Room for T tokens and R requests; `tables`, one per KV group, say how many blocks a row may have."""

    def __init__(
        self, max_tokens: int, max_requests: int, tables: tuple[DeviceBlockTable, ...], device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_tokens, self.max_requests = max_tokens, max_requests
        self.tables = tables
        self.token_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slots = zeros(max_requests, dtype=torch.int32)
        """[R] of a decode batch."""
        self.next_positions = zeros(max_requests, dtype=torch.int64)
        """[R] where each row of a decode batch goes on; moved by the device."""
        self.seq_lens = zeros(max_requests, dtype=torch.int32)
        self.query_start = zeros(max_requests + 1, dtype=torch.int32)
        self.decode_query_start = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self.slot_mapping = [zeros(max_tokens, dtype=torch.int64) for _ in tables]
        self.block_rows = [zeros(max_requests, table.blocks.shape[1], dtype=torch.int32) for table in tables]

    def padding_common(self, num_tokens: int, group: int) -> CommonAttentionMetadata:
        """One request of padding; `query_start` and `seq_lens` are written already."""
        table = self.tables[group]
        width = -(-num_tokens // table.block_size)
        blocks = torch.zeros(1, width, dtype=torch.int32, device=self.seq_lens.device)
        return CommonAttentionMetadata(
            query_start=self.query_start[:2],
            seq_lens=self.seq_lens[:1],
            block_table=blocks,
            slot_mapping=self.slot_mapping[group][:num_tokens],
            num_requests=1,
            num_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
            block_size=table.block_size,
        )

    def decode_common(self, group: int, num_rows: int) -> CommonAttentionMetadata:
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
        )
