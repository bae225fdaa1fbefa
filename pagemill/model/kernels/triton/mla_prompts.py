"""Prompts over latent vectors, with keys and values of their own for each head: the latent vectors of a request side by
side, and attention over what was made of them. Plain Triton, for all GPUs; mla_prompts_hopper.py is for Hopper GPUs.

A query or key is its rotary part, then its plain part. Knows nothing about steps: its tiles are records that the host
has written.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pagemill.model.kernels.gpu_facts import is_hopper
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.attention import LOG2_E, begin_kernel

RECORD = tl.constexpr(8)
"""Numbers that say what a tile is: its first token in the batch, how many it has, where the first one stands, counted
from the first key that is there, the keys it sees of those, the row of the first of them, how many are there, whether
the tile was begun before, over other keys, and whether it goes on afterwards."""
TILE = 128
"""Tokens."""
PIECE = tl.constexpr(32)
"""Latent vectors that a program brings together."""


@triton.jit(do_not_specialize=["table_stride"])
def gather_latents(
    rows, cache, block_table, pieces, table_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program per piece, [pieces, 4] int32: request, first position, count, and the first row of rows [S, SIZE]."""
    begin_kernel(PDL)
    piece = pieces + tl.program_id(0) * 4
    table = block_table + tl.load(piece).to(tl.int64) * table_stride
    lanes, columns = tl.arange(0, PIECE), tl.arange(0, BLOCK)
    real = lanes < tl.load(piece + 2)
    positions = tl.load(piece + 1) + lanes
    page = tl.load(table + positions // PAGE, real, other=0).to(tl.int64)
    sources = (page * PAGE + positions % PAGE)[:, None] * SIZE
    targets = (tl.load(piece + 3) + lanes).to(tl.int64)[:, None] * SIZE
    for start in tl.static_range(0, SIZE, BLOCK):
        at = (start + columns)[None, :]
        mask = real[:, None] & (at < SIZE)
        tl.store(rows + targets + at, tl.load(cache + sources + at, mask, other=0.0), mask)


@triton.jit
def _turn(
    acc, top, total, q_turned, q_plain, keys, values, start, positions, end, factor, keys_stride, expanded_stride,
    TURNED: tl.constexpr, PLAIN: tl.constexpr, VALUE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N keys, from `start` on: what was found of those before, and of these."""
    turned, plain, dims = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    columns = start + tl.arange(0, BLOCK_N)
    at = columns.to(tl.int64)[:, None]
    live = (columns < end)[:, None]
    k_turned = tl.load(keys + at * keys_stride + turned[None, :], live & (turned < TURNED)[None, :], 0.0)
    k_plain = tl.load(values + at * expanded_stride + plain[None, :], live & (plain < PLAIN)[None, :], 0.0)
    scores = tl.dot(q_turned, tl.trans(k_turned), input_precision="ieee")
    scores = tl.dot(q_plain, tl.trans(k_plain), scores, input_precision="ieee")
    seen = (columns[None, :] <= positions[:, None]) & (columns < end)[None, :]
    scores = tl.where(seen, scores * factor, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet keeps -inf, and must not compute -inf - -inf.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    powers = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(top - level)
    value = tl.load(values + PLAIN + at * expanded_stride + dims[None, :], live & (dims < VALUE)[None, :], 0.0)
    acc = tl.dot(powers.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total * shrink + tl.sum(powers, 1)


@triton.jit(do_not_specialize=["heads", "first_head", "carried_token"])
def attend_expanded(
    out, carried, carried_sums, query, turned_keys, expanded, records, factor, heads, first_head, carried_token,
    query_stride, out_stride, keys_stride, expanded_stride,
    TURNED: tl.constexpr, PLAIN: tl.constexpr, VALUE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CARRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_M tokens of a tile of ROWS, one of so many heads. out [T, H, VALUE], query [T, H, TURNED + PLAIN],
    of which the heads from first_head on are meant; turned_keys [S, >= TURNED]; expanded [S, heads, PLAIN + VALUE];
    records [tiles, RECORD]. Where a tile goes on over other keys, what is carried, of the tokens from carried_token on:
    sums [Q, heads, VALUE], and maxima (base 2) and sums of powers [Q, heads, 2], float32. factor: of scores, times
    log2(e)."""
    begin_kernel(PDL)
    PARTS: tl.constexpr = ROWS // BLOCK_M
    head = tl.program_id(1)
    record = records + tl.program_id(0) // PARTS * RECORD
    part = tl.program_id(0) % PARTS * BLOCK_M
    count = tl.load(record + 1)
    if part >= count:
        return
    token = tl.load(record)
    first = tl.load(record + 2)
    base = tl.load(record + 4).to(tl.int64)
    end = tl.minimum(tl.load(record + 3), first + tl.minimum(part + BLOCK_M, count))
    rows = part + tl.arange(0, BLOCK_M)
    turned, plain, dims = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    real = (rows < count)[:, None]
    places = query + (token + rows).to(tl.int64)[:, None] * query_stride + (first_head + head) * (TURNED + PLAIN)
    q_turned = tl.load(places + turned[None, :], real & (turned < TURNED)[None, :], 0.0)
    q_plain = tl.load(places + TURNED + plain[None, :], real & (plain < PLAIN)[None, :], 0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    kept = (token - carried_token + rows) * heads + head
    wide = real & (dims < VALUE)[None, :]
    if CARRIES:
        begun = (tl.load(record + 6) > 0) & (rows < count)
        top = tl.load(carried_sums + kept * 2, begun, other=float("-inf"))
        total = tl.load(carried_sums + kept * 2 + 1, begun, other=0.0)
        acc = tl.load(carried + kept.to(tl.int64)[:, None] * VALUE + dims[None, :], wide & begun[:, None], other=0.0)
    keys = turned_keys + base * keys_stride
    values = expanded + base * expanded_stride + head * (PLAIN + VALUE)
    for start in tl.range(0, end, BLOCK_N):
        acc, top, total = _turn(
            acc, top, total, q_turned, q_plain, keys, values, start, first + rows, end, factor, keys_stride,
            expanded_stride, TURNED, PLAIN, VALUE, BLOCK_T, BLOCK_P, BLOCK_V, BLOCK_N,
        )  # fmt: skip
    targets = out + (token + rows).to(tl.int64)[:, None] * out_stride + (first_head + head) * VALUE + dims[None, :]
    goes_on = False
    if CARRIES:
        goes_on = tl.load(record + 7) > 0
    if goes_on:
        tl.store(carried_sums + kept * 2, top, rows < count)
        tl.store(carried_sums + kept * 2 + 1, total, rows < count)
        tl.store(carried + kept.to(tl.int64)[:, None] * VALUE + dims[None, :], acc, wide)
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(targets, result.to(out.dtype.element_ty), wide)


def gather(rows: Tensor, cache: Tensor, block_table: Tensor, pieces: Tensor) -> None:
    """cache [num_blocks, block_size, D], contiguous -> rows [S, D], as pieces [n, 4] say."""
    size = cache.shape[2]
    launch.on(gather_latents, (len(pieces),))(
        rows, cache, block_table, pieces, block_table.stride(0),
        SIZE=size, BLOCK=min(256, launch.power_of_two(size)), PAGE=cache.shape[1], PDL=launch.dependent(),
        **launch.options(),
    )  # fmt: skip


def _block(element: int, hopper: bool) -> tuple[int, int]:
    """Tokens and keys that are computed together: fewer on GPUs whose shared memory may be as little as 99 KiB."""
    if hopper:
        return (TILE, 64) if element <= 2 else (64, 32)
    return (64, 32) if element <= 2 else (32, 16)


class Tiles(NamedTuple):
    """What is computed in a launch, and in those of other layers."""

    records: Tensor
    """[tiles, RECORD] int32, those of the most keys first."""
    counter: Tensor
    """[1] int32, 0 before the first launch: of the work, how much has been taken."""


class Carried:
    """What tiles carry from some keys to others."""

    def __init__(self, sums: Tensor, totals: Tensor, first_token: int) -> None:
        """[Q, heads, VALUE] and [Q, heads, 2], float32, of the tokens of the batch from the first one on."""
        self.sums = sums
        self.totals = totals
        self.first_token = first_token


def attend(
    out: Tensor, query: Tensor, rows: Tensor, expanded: Tensor, tiles: Tiles, scale: float, first_head: int,
    carried: Carried | None,
) -> None:  # fmt: skip
    """out [T, H, value], query [T, H, turned + plain], dense heads; rows [S, turned + latent]; expanded [S, heads,
    plain + value], the keys and values of some heads from first_head on."""
    heads, both = expanded.shape[1:]
    value = out.shape[2]
    plain = both - value
    turned = query.shape[2] - plain
    block_m, block_n = _block(query.element_size(), is_hopper(query.device))
    carries = carried is not None
    carried = carried or Carried(out, out, 0)
    launch.on(attend_expanded, (len(tiles.records) * (TILE // block_m), heads))(
        out, carried.sums, carried.totals, query, rows, expanded, tiles.records, scale * LOG2_E.value, heads,
        first_head, carried.first_token, query.stride(0), out.stride(0), rows.stride(0), expanded.stride(0),
        TURNED=turned, PLAIN=plain, VALUE=value, BLOCK_T=max(16, launch.power_of_two(turned)),
        BLOCK_P=max(16, launch.power_of_two(plain)), BLOCK_V=max(16, launch.power_of_two(value)), ROWS=TILE,
        BLOCK_M=block_m, BLOCK_N=block_n, CARRIES=carries, PDL=launch.dependent(), num_stages=2,
        **launch.options(8),
    )  # fmt: skip
