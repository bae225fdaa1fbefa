"""What the kernels around a step compute, in plain torch: the definition that they are tested against.

Letters: S slots (the last one stands for padding), R rows of a batch, C blocks of a row, T tokens, K turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DRAFT = -2
"""No token, and not what stands for a token that could not be sampled."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """The block table of one KV group, and what a decode batch has of it."""

    table: Tensor
    """[S, C] int32."""
    block_size: int
    rows: Tensor
    """[R, C] int32; what lies beyond a row's last token is anything."""
    slot_mapping: Tensor
    """[R] int64, block id * block_size + offset; -1 for padding."""


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """Tokens of any batch as the host knows them, all [T] int32."""

    slots: Tensor
    known: Tensor
    """0: the token is the slot's last sampled one, whatever `given` says."""
    given: Tensor
    positions: Tensor


def begin_decode(
    slots: Tensor,
    next_positions: Tensor,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    groups: Sequence[TableRows],
) -> None:
    """One token for each row: its slot's last, at its next position, which moves on. Rows of padding stay where they
    are.

    slots [R] int32; next_positions [R] int64, changed; last_tokens [S] int64. Written: token_ids [R] int64, positions
    [R] int64, seq_lens [R] int32, and rows and slot mapping of the groups.
    """
    padding = slots == len(last_tokens) - 1
    token_ids.copy_(last_tokens.index_select(0, slots))
    positions.copy_(next_positions)
    seq_lens.copy_(next_positions + 1)
    next_positions.add_((~padding).to(next_positions.dtype))
    for group in groups:
        group.rows.copy_(group.table.index_select(0, slots))
        blocks = group.rows.gather(1, (positions // group.block_size).unsqueeze(1)).squeeze(1)
        places = blocks.long() * group.block_size + positions % group.block_size
        group.slot_mapping.copy_(places.masked_fill_(padding, -1))


def place_tokens(
    tokens: SlotTokens,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    groups: Sequence[tuple[Tensor, int, Tensor]],
) -> None:
    """The inputs of any batch. last_tokens [S] int64; written: token_ids, positions [T] int64, and the last of each
    group: table [S, C], block size, slot mapping [T] int64, -1 for tokens of the last slot, which is padding."""
    sampled = last_tokens.index_select(0, tokens.slots)
    token_ids.copy_(tokens.given.long().where(tokens.known != 0, sampled))
    positions.copy_(tokens.positions)
    for table, block_size, slot_mapping in groups:
        places = tokens.slots.long() * table.shape[1] + positions // block_size
        blocks = table.view(-1).index_select(0, places)
        found = blocks.long() * block_size + positions % block_size
        slot_mapping.copy_(found.masked_fill_(tokens.slots == len(last_tokens) - 1, -1))


def end_step(slots: Tensor, sampled: Tensor, last_tokens: Tensor, results: Tensor, turn: Tensor) -> None:
    """Keep sampled tokens for the next step, and in the next row of `results` for the host.

    slots [R] int32; sampled [R], any integers; -1 where there was no token to sample: `results` says so, and the slot
    goes on with token 0, because a step that is queued already may compute it. Changed: last_tokens [S] int64, results
    [K, most rows] int32, turn [1] int64: the row, which moves on.
    """
    last_tokens.index_copy_(0, slots.long(), sampled.long().clamp(min=0))
    places = turn * results.shape[1] + torch.arange(len(sampled), device=sampled.device)
    results.view(-1).index_copy_(0, places, sampled.to(results.dtype))
    turn.copy_((turn + 1) % len(results))


def end_verification(
    slots: Tensor,
    first_rows: Tensor,
    drafts: Tensor,
    sampled: Tensor,
    last_tokens: Tensor,
    results: Tensor,
    turn: Tensor,
) -> None:
    """As `end_step` for L rows of R slots, which have consecutive rows, one and one more for every draft. A slot gets
    the tokens of its rows up to the first that is not the row's draft; the last of these is what its next step
    computes.

    slots, first_rows [R] int32; drafts [L] int32, NO_DRAFT in the last row of a slot; sampled [L], any integers. The
    row of `results` gets the L tokens, and behind them how many of them each slot gets, [R].
    """
    rows = torch.arange(len(sampled), device=sampled.device)
    wrong = rows.where(sampled != drafts, len(sampled) - 1)
    # The first wrong row that is not before a slot's first.
    ends = wrong.flip(0).cummin(0).values.flip(0).index_select(0, first_rows)
    last_tokens.index_copy_(0, slots.long(), sampled.index_select(0, ends).long().clamp(min=0))
    found = torch.cat([sampled.to(results.dtype), (ends - first_rows + 1).to(results.dtype)])
    places = turn * results.shape[1] + torch.arange(len(found), device=sampled.device)
    results.view(-1).index_copy_(0, places, found)
    turn.copy_((turn + 1) % len(results))


def keep_guesses(logits: Tensor, tokens_of: Tensor | None, slots: Tensor, last_tokens: Tensor, drafts: Tensor) -> None:
    """Keep the most likely token of each row: as its slot's last, and as a draft; -1 for a row with a NaN, or whose
    largest is infinite, and token 0 as the slot's last.

    logits [R, V]; tokens_of [V] int64: which token each of them is, None: that of its index; slots [R] int32. Changed:
    last_tokens [S] int64, drafts [R] int32 of any stride.
    """
    best, tokens = logits.max(dim=-1)
    if tokens_of is not None:
        tokens = tokens_of.index_select(0, tokens)
    broken = ~best.isfinite()
    last_tokens.index_copy_(0, slots.long(), tokens.masked_fill(broken, 0))
    drafts.copy_(tokens.masked_fill(broken, -1))


def write_places(table: Tensor, places: Tensor, values: Tensor) -> None:
    """table [S, C] int32: values [N] at the flat places [N], both int32."""
    table.view(-1).index_copy_(0, places.long(), values)
