"""What the device does around a step by itself: gather a decode batch from the slots, place tokens, keep what was
sampled. Plain torch, which also says what the Triton forms compute. Knows no model and no request.

Letters: S slots (the last one stands for padding), R rows of a batch, C blocks of a row, T tokens.
"""

import torch
from torch import Tensor


def begin_decode(
    slots: Tensor, next_positions: Tensor, last_tokens: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor
) -> None:
    """One token for each row: its slot's last, at its next position, which moves on. Rows of padding stay where they
    are.

    slots [R] int32; next_positions [R] int64, changed; last_tokens [S] int64. Written: token_ids [R] int64, positions
    [R] int64, seq_lens [R] int32.
    """
    token_ids.copy_(last_tokens.index_select(0, slots))
    positions.copy_(next_positions)
    seq_lens.copy_(next_positions + 1)
    next_positions.add_((slots != len(last_tokens) - 1).to(next_positions.dtype))


def gather_tables(
    slots: Tensor, positions: Tensor, table: Tensor, block_size: int, rows: Tensor, slot_mapping: Tensor
) -> None:
    """The block table of a decode batch, and where each row's key and value go.

    slots [R] int32; positions [R] int64; table [S, C] int32. Written: rows [R, C] int32, slot_mapping [R] int64 (block
    id * block_size + offset; -1 for padding).
    """
    rows.copy_(table.index_select(0, slots))
    blocks = rows.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
    places = blocks.long() * block_size + positions % block_size
    slot_mapping.copy_(places.masked_fill_(slots == len(table) - 1, -1))


def place_tokens(token_slots: Tensor, positions: Tensor, table: Tensor, block_size: int, slot_mapping: Tensor) -> None:
    """Where the key and value of each token of any batch go. token_slots [T] int32, positions [T] int64, table [S, C];
    written: slot_mapping [T] int64."""
    places = token_slots.long() * table.shape[1] + positions // block_size
    blocks = table.view(-1).index_select(0, places)
    slot_mapping.copy_(blocks.long() * block_size + positions % block_size)


def splice_tokens(token_slots: Tensor, known: Tensor, given: Tensor, last_tokens: Tensor, token_ids: Tensor) -> None:
    """Token ids of any batch: what the host gave where it knew, else the slot's last token.

    token_slots, known (0 or 1), given [T] int32; last_tokens [S] int64; written: token_ids [T] int64.
    """
    sampled = last_tokens.index_select(0, token_slots)
    token_ids.copy_(given.long().where(known != 0, sampled))


def end_step(slots: Tensor, sampled: Tensor, last_tokens: Tensor, results: Tensor, turn: Tensor) -> None:
    """Keep sampled tokens for the next step, and in the next row of `results` for the host.

    slots [R] int32; sampled [R], any integers. Changed: last_tokens [S] int64, results [K, most rows] int32, turn [1]
    int64: the row, which moves on.
    """
    last_tokens.index_copy_(0, slots.long(), sampled.long())
    places = turn * results.shape[1] + torch.arange(len(sampled), device=sampled.device)
    results.view(-1).index_copy_(0, places, sampled.to(results.dtype))
    turn.copy_((turn + 1) % len(results))


def write_places(table: Tensor, places: Tensor, values: Tensor) -> None:
    """table [S, C] int32: values [N] at the flat places [N], both int32."""
    table.view(-1).index_copy_(0, places.long(), values)
