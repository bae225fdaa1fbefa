"""What `batching_reference` computes, in a launch each: a step must not wait for many small kernels. Knows no request.

A decode batch is one program per row; further KV groups take a launch each.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.batching_reference import SlotTokens, TableRows
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.argmax import argmax

_COLUMNS = 128
_TOKENS = 256
_FEW_ROWS = 32
_ROWS = 1024


@triton.jit
def _decode_row(
    slots, next_positions, last_tokens, token_ids, positions, seq_lens, table, rows, slot_mapping, pad_slot,
    num_columns, row_stride, PAGE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    if FIRST:
        position = tl.load(next_positions + row)
        tl.store(token_ids + row, tl.load(last_tokens + slot))
        tl.store(positions + row, position)
        tl.store(seq_lens + row, (position + 1).to(tl.int32))
        tl.store(next_positions + row, position + (slot != pad_slot).to(tl.int64))
    else:
        position = tl.load(positions + row)
    last = position // PAGE
    start_of_row = table + slot.to(tl.int64) * num_columns
    block = tl.load(start_of_row + last).to(tl.int64)
    place = tl.where(slot == pad_slot, -1, block * PAGE + position % PAGE)
    tl.store(slot_mapping + row, place)
    columns = tl.arange(0, BLOCK)
    for start in range(0, (last + 1).to(tl.int32), BLOCK):
        here = start + columns
        found = tl.load(start_of_row + here, here <= last, 0)
        tl.store(rows + row.to(tl.int64) * row_stride + here, found, here <= last)


# Counts differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize=["count"])
def _place(
    slots, known, given, given_positions, last_tokens, token_ids, positions, table, slot_mapping, num_tokens,
    pad_slot, num_columns, PAGE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token, inside, 0).to(tl.int64)
    position = tl.load(given_positions + token, inside, 0).to(tl.int64)
    if FIRST:
        is_known = tl.load(known + token, inside, 1) != 0
        sampled = tl.load(last_tokens + slot, inside & (is_known == 0), 0)
        told = tl.load(given + token, inside, 0).to(tl.int64)
        tl.store(token_ids + token, tl.where(is_known, told, sampled), inside)
        tl.store(positions + token, position, inside)
    block = tl.load(table + slot * num_columns + position // PAGE, inside, 0).to(tl.int64)
    place = tl.where(slot == pad_slot, -1, block * PAGE + position % PAGE)
    tl.store(slot_mapping + token, place, inside)


@triton.jit(do_not_specialize=["num_rows"])
def _end(
    slots, sampled, last_tokens, results, turn, num_rows, max_rows, num_turns, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program, for all read the turn before one moves it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(turn)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < num_rows
        slot = tl.load(slots + row, inside, 0)
        token = tl.load(sampled + row, inside, 0)
        tl.store(last_tokens + slot, tl.maximum(token, 0).to(tl.int64), inside)
        tl.store(results + now * max_rows + row, token.to(tl.int32), inside)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn, (now + 1) % num_turns)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _end_verification(
    slots, first_rows, drafts, sampled, last_tokens, results, turn, num_slots, num_rows, max_rows, num_turns,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program, as in `_end`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(turn)
    here = results + now * max_rows
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(here + row, tl.load(sampled + row, row < num_rows, 0).to(tl.int32), row < num_rows)
    for start in range(0, num_slots, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_slots
        first = tl.load(first_rows + place, inside, 0)
        row = first
        right = inside
        goes_on = tl.max(right.to(tl.int32), 0)
        while goes_on > 0:
            right = right & (tl.load(drafts + row, right, 0) == tl.load(sampled + row, right, -1).to(tl.int32))
            row += right.to(tl.int32)
            goes_on = tl.max(right.to(tl.int32), 0)
        token = tl.load(sampled + row, inside, 0)
        slot = tl.load(slots + place, inside, 0)
        tl.store(last_tokens + slot, tl.maximum(token, 0).to(tl.int64), inside)
        tl.store(here + num_rows + place, row - first + 1, inside)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn, (now + 1) % num_turns)


@triton.jit(do_not_specialize=["num_rows"])
def _keep_guesses(
    found, tokens_of, slots, last_tokens, drafts, num_rows, stride,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row, inside, 0)
    token = tl.load(found + row, inside, -1)
    if MAPPED:
        token = tl.load(tokens_of + token, token >= 0, -1)
    tl.store(last_tokens + slot, tl.maximum(token, 0), inside)
    tl.store(drafts + row * stride, token.to(tl.int32), inside)


@triton.jit(do_not_specialize=["count"])
def _write(table, places, values, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(places + index, inside, 0).to(tl.int64)
    tl.store(table + place, tl.load(values + index, inside, 0), inside)


def begin_decode(
    slots: Tensor,
    next_positions: Tensor,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    groups: Sequence[TableRows],
) -> None:
    """See batching_reference."""
    for index, group in enumerate(groups):
        launch.on(_decode_row, (len(slots),))(
            slots, next_positions, last_tokens, token_ids, positions, seq_lens, group.table, group.rows,
            group.slot_mapping, len(last_tokens) - 1, group.table.stride(0), group.rows.stride(0),
            PAGE=group.block_size, FIRST=index == 0, BLOCK=_COLUMNS, PDL=launch.dependent(), **launch.options(1),
        )  # fmt: skip


def place_tokens(
    tokens: SlotTokens,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    groups: Sequence[tuple[Tensor, int, Tensor]],
) -> None:
    """See batching_reference."""
    count = len(tokens.slots)
    for index, (table, block_size, slot_mapping) in enumerate(groups):
        launch.on(_place, (triton.cdiv(count, _TOKENS),))(
            tokens.slots, tokens.known, tokens.given, tokens.positions, last_tokens, token_ids, positions, table,
            slot_mapping, count, len(last_tokens) - 1, table.stride(0), PAGE=block_size, FIRST=index == 0,
            BLOCK=_TOKENS, PDL=launch.dependent(), **launch.options(),
        )  # fmt: skip


def end_step(slots: Tensor, sampled: Tensor, last_tokens: Tensor, results: Tensor, turn: Tensor) -> None:
    """See batching_reference."""
    launch.on(_end, (1,))(
        slots, sampled, last_tokens, results, turn, len(slots), results.shape[1], len(results),
        BLOCK=_FEW_ROWS if len(slots) <= _FEW_ROWS else _ROWS, PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip


def end_verification(
    slots: Tensor,
    first_rows: Tensor,
    drafts: Tensor,
    sampled: Tensor,
    last_tokens: Tensor,
    results: Tensor,
    turn: Tensor,
) -> None:
    """See batching_reference."""
    launch.on(_end_verification, (1,))(
        slots, first_rows, drafts, sampled, last_tokens, results, turn, len(slots), len(sampled), results.shape[1],
        len(results), BLOCK=_FEW_ROWS if len(sampled) <= _FEW_ROWS else _ROWS, PDL=launch.dependent(),
        **launch.options(),
    )  # fmt: skip


def keep_guesses(logits: Tensor, tokens_of: Tensor | None, slots: Tensor, last_tokens: Tensor, drafts: Tensor) -> None:
    """See batching_reference."""
    found = argmax(logits)
    launch.on(_keep_guesses, (triton.cdiv(len(slots), _FEW_ROWS),))(
        found, found if tokens_of is None else tokens_of, slots, last_tokens, drafts, len(slots), drafts.stride(0),
        MAPPED=tokens_of is not None, BLOCK=_FEW_ROWS, PDL=launch.dependent(), **launch.options(1),
    )  # fmt: skip


def write_places(table: Tensor, places: Tensor, values: Tensor) -> None:
    """See batching_reference."""
    launch.on(_write, (triton.cdiv(len(places), _TOKENS),))(
        table, places, values, len(places), BLOCK=_TOKENS, PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip


@triton.jit
def _gather_pair(first_out, second_out, first, second, indices, stride, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(indices + row) * stride + cols
    place = row.to(tl.int64) * N + cols
    tl.store(first_out + place, tl.load(first + source, cols < N, 0.0), cols < N)
    tl.store(second_out + place, tl.load(second + source, cols < N, 0.0), cols < N)


def gather_pair(first: Tensor, second: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(first[indices], second[indices]) of two tables [P, N] with the same strides; indices [T] int64."""
    size = first.shape[1]
    results = first.new_empty(len(indices), size), second.new_empty(len(indices), size)
    if len(indices):
        launch.on(_gather_pair, (len(indices),))(
            *results, first, second, indices, first.stride(0), size, BLOCK=launch.power_of_two(size),
            PDL=launch.dependent(), **launch.options(1),
        )  # fmt: skip
    return results
