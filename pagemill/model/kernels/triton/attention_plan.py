"""The work of one step's attention, divided on the device: which program takes which part of which request.

Knows lengths only. The grid of a captured graph is fixed while lengths are not, so the division is data: a list of
items, of which the kernels' surplus programs find themselves beyond the end.
"""

import triton
import triton.language as tl

from pagemill.model.kernels.triton.attention import begin_kernel, first_seen

KEYS_PER_MERGE = tl.constexpr(4)
"""Keys that a program reads while one part more is merged: with more, a long request's shares are too small."""


@triton.jit
def give_items(first_item, item_request, counts, requests, me, num_requests):
    """Write where the items of request `me` begin, and its name on each of them."""
    first = tl.sum(tl.where(requests < me, counts, 0), 0)
    mine = tl.sum(tl.where(requests == me, counts, 0), 0)
    tl.store(first_item + me, first)
    if me == num_requests - 1:
        tl.store(first_item + num_requests, first + mine)
    lanes = tl.arange(0, 64)
    for start in tl.range(0, mine, 64):
        tl.store(item_request + first + start + lanes, lanes * 0 + me, start + lanes < mine)


@triton.jit(do_not_specialize=["num_requests", "budget", "slots", "prefix"])
def plan_items(
    query_start, seq_lens, split_first, split_request, tile_first, tile_request, num_requests, budget, slots,
    min_share, most_parts, prefix,
    DECODE_TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program per request. Requests of at most DECODE_TOKENS tokens have their keys split, so evenly that all of them
    together are at most num_requests + budget items; not where they are about equally long and fill the `slots` of the
    device nearly a whole number of times. The queries of the others are cut into tiles. Keys before `prefix` are
    somebody else's."""
    begin_kernel(PDL)
    me = tl.program_id(0)
    requests = tl.arange(0, BLOCK_R)
    real = requests < num_requests
    begin = tl.load(query_start + requests, real, other=0)
    query_len = tl.load(query_start + requests + 1, real, other=0) - begin
    seq_len = tl.load(seq_lens + requests, real, other=0)
    decodes = (query_len > 0) & (query_len <= DECODE_TOKENS)
    span = tl.maximum(seq_len - tl.maximum(first_seen(seq_len - query_len, WINDOW, CHUNK), prefix), 0)
    span = tl.where(decodes, span, 0)
    count = tl.maximum(tl.sum(decodes.to(tl.int32), 0), 1)
    longest = tl.max(span, 0)
    # To read a share and then merge all of them takes share * read + longest / share * merge.
    best = tl.sqrt(longest.to(tl.float32) * KEYS_PER_MERGE).to(tl.int32)
    share = tl.maximum(tl.maximum(min_share, best), tl.cdiv(tl.sum(span, 0), budget))
    even = longest * 4 <= tl.cdiv(tl.sum(span, 0), count) * 5
    full = count * 10 >= tl.cdiv(count, slots) * slots * 9
    share = tl.where(even & full, tl.maximum(share, longest), share)
    share = tl.maximum(share, tl.cdiv(longest, most_parts))
    # Shares are whole turns of the kernel's loop: fewer of them may do.
    share = tl.cdiv(tl.cdiv(span, tl.maximum(tl.cdiv(span, share), 1)), BLOCK_N) * BLOCK_N
    splits = tl.where(decodes, tl.maximum(tl.cdiv(span, tl.maximum(share, 1)), 1), 0)
    give_items(split_first, split_request, splits, requests, me, num_requests)
    tiles = tl.where(query_len > DECODE_TOKENS, tl.cdiv(query_len, TILE_TOKENS), 0)
    give_items(tile_first, tile_request, tiles, requests, me, num_requests)
