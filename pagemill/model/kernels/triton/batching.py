"""What the device does around a decode step, a kernel for each part: gather rows from the slots, keep what was sampled.

Knows no model and no request. Letters: S slots (the last one stands for padding), R rows, C blocks of a row.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch

_BLOCK = 256


@triton.jit
def _begin_decode(
    slots, next_positions, last_tokens, token_ids, positions, seq_lens, R, pad_slot,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < R
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + rows, mask, 0)
    position = tl.load(next_positions + rows, mask, 0)
    tl.store(token_ids + rows, tl.load(last_tokens + slot, mask, 0), mask)
    tl.store(positions + rows, position, mask)
    tl.store(seq_lens + rows, (position + 1).to(tl.int32), mask)
    tl.store(next_positions + rows, position + (slot != pad_slot).to(tl.int64), mask)


def begin_decode(
    slots: Tensor, next_positions: Tensor, last_tokens: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor
) -> None:
    """One token for each row: its slot's last, at its next position, which moves on. Rows of padding stay where they
    are.

    slots [R] int32; next_positions [R] int64, changed; last_tokens [S] int64. Written: token_ids [R] int64, positions
    [R] int64, seq_lens [R] int32. All contiguous.
    """
    num_rows = len(slots)
    _begin_decode[(triton.cdiv(num_rows, _BLOCK),)](
        slots, next_positions, last_tokens, token_ids, positions, seq_lens, num_rows, len(last_tokens) - 1,
        BLOCK=_BLOCK, PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip


@triton.jit
def _gather_tables(
    slots, positions, table, rows, slot_mapping, table_stride, rows_stride, C, pad_slot,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    source = table + slot.to(tl.int64) * table_stride
    tl.store(rows + row.to(tl.int64) * rows_stride + cols, tl.load(source + cols, cols < C, 0), cols < C)
    if tl.program_id(1) == 0:
        position = tl.load(positions + row)
        place = tl.load(source + position // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + row, tl.where(slot == pad_slot, -1, place))


def gather_tables(
    slots: Tensor, positions: Tensor, table: Tensor, block_size: int, rows: Tensor, slot_mapping: Tensor
) -> None:
    """The block table of a decode batch, and where each row's key and value go.

    slots [R] int32; positions [R] int64; table [S, C] int32. Written: rows [R, C] int32, slot_mapping [R] int64 (block
    id * block_size + offset; -1 for padding).
    """
    num_rows, width = rows.shape
    _gather_tables[(num_rows, triton.cdiv(width, 1024))](
        slots, positions, table, rows, slot_mapping, table.stride(0), rows.stride(0), width, len(table) - 1,
        BLOCK_SIZE=block_size, BLOCK=1024, PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip


@triton.jit
def _end_step(
    slots, sampled, last_tokens, results, turn, R, row_size, num_turns, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(turn)
    for start in range(0, R, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < R
        token = tl.load(sampled + rows, mask, 0)
        tl.store(last_tokens + tl.load(slots + rows, mask, 0), token.to(tl.int64), mask)
        tl.store(results + now * row_size + rows, token.to(tl.int32), mask)
    # The one program that there is: all its threads have read the turn before one moves it on.
    tl.debug_barrier()
    tl.store(turn, (now + 1) % num_turns)


def end_step(slots: Tensor, sampled: Tensor, last_tokens: Tensor, results: Tensor, turn: Tensor) -> None:
    """Keep sampled tokens for the next step, and in the next row of `results` for the host.

    slots [R] int32; sampled [R], any integers. Changed: last_tokens [S] int64, results [K, most rows] int32, turn [1]
    int64: the row, which moves on. Of several rows of padding any one's token is kept.
    """
    _end_step[(1,)](
        slots, sampled, last_tokens, results, turn, len(slots), results.shape[1], len(results),
        BLOCK=1024, PDL=launch.dependent(), **launch.options(8),
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
        _gather_pair[(len(indices),)](
            *results, first, second, indices, first.stride(0), size, BLOCK=launch.power_of_two(size),
            PDL=launch.dependent(), **launch.options(1),
        )  # fmt: skip
    return results
