"""Paged attention in which a token has the same bits whatever is computed beside it, decoded or as part of a prompt.

A token's keys are divided at multiples of a length that depends on how many it sees, and on nothing else: segments. The
softmax of a segment runs in turns of BLOCK_N keys from its first on, and segments are folded in order. A decoding
request has programs for its segments, of which the last to arrive folds them; a tile of a prompt's queries goes through
all segments and folds each at its end. Tiles begin at multiples of their size, and so do the lengths at which segments
grow, so that the rows of a tile have the same segments.

A row's weights are added up by one warp: a decoding program has one, and a warp of a tile has 16 rows.
"""

import triton
import triton.language as tl

from pagemill.model.kernels.triton.arrival import arrives_last
from pagemill.model.kernels.triton.attention import LOG2_E, attend_all, attend_turn, begin_kernel
from pagemill.model.kernels.triton.attention_plan import give_items

MOST_SEGMENTS = tl.constexpr(16)
"""Of a token; those of more keys are longer."""


@triton.jit
def segment_keys(length, SHORTEST: tl.constexpr):
    """Keys of a segment of a token that sees `length` keys: a power of two, at least SHORTEST."""
    size = SHORTEST
    for _ in tl.static_range(14):
        size = tl.where(size * MOST_SEGMENTS < length, size * 2, size)
    return size


@triton.jit
def _fold(acc, top, total, new_acc, new_top, new_total):
    """Take a segment into what those before it gave: [M, D] sums of weighted values, [M] maxima (base 2) and sums of
    weights. Nothing is left to the compiler: it fuses products and sums as it likes, not everywhere alike."""
    higher = tl.maximum(top, new_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    decay, weight = tl.math.exp2(top - base), tl.math.exp2(new_top - base)
    acc = tl.fma(new_acc, tl.broadcast_to(weight[:, None], new_acc.shape), acc * decay[:, None])
    return acc, higher, tl.fma(new_total, weight, total * decay)


@triton.jit(do_not_specialize=["num_requests"])
def plan_tiles(
    query_start, seq_lens, first_tile, tile_request, num_requests,
    TILE_TOKENS: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program per request. The queries of requests of several tokens are cut into tiles that begin at positions that
    are multiples of TILE_TOKENS: first_tile [R + 1], tile_request [tiles]."""
    begin_kernel(PDL)
    me = tl.program_id(0)
    requests = tl.arange(0, BLOCK_R)
    real = requests < num_requests
    begin = tl.load(query_start + requests, real, other=0)
    query_len = tl.load(query_start + requests + 1, real, other=0) - begin
    seq_len = tl.load(seq_lens + requests, real, other=0)
    count = tl.cdiv(seq_len, TILE_TOKENS) - tl.maximum(seq_len - query_len, 0) // TILE_TOKENS
    give_items(first_tile, tile_request, tl.where(query_len > 1, count, 0), requests, me, num_requests)


@triton.jit
def _attend_and_fold(
    acc, top, total, sums, sums_top, sums_total, query, begin, end, live_end, position, row_table, keys, values, scale,
    cap, factor, segment, stride_block, stride_token,
    PAGE: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The keys of [begin, end) in turns, into the running segment (`acc`), which at its end goes into the `sums`."""
    for start in tl.range(begin, end, BLOCK_N):
        acc, top, total = attend_turn(
            acc, top, total, query, start, live_end, position, total, row_table, keys, values, scale, cap, factor,
            stride_block, stride_token,
            PAGE, HEAD, BLOCK_D, BLOCK_N, 0, 0, HAS_CAP, False, MASKED,
        )  # fmt: skip
        if (start + BLOCK_N) % segment == 0:
            sums, sums_top, sums_total = _fold(sums, sums_top, sums_total, acc, top, total)
            acc = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
            total = tl.zeros([query.shape[0]], tl.float32)
            top = total - float("inf")
    return acc, top, total, sums, sums_top, sums_total


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def attend_prompts(
    out, query, keys, values, block_table, query_start, seq_lens, first_tile, tile_request, num_requests, scale, cap,
    query_stride_token, query_stride_head, out_stride_token, out_stride_head, table_stride, stride_block, stride_token,
    stride_head,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr, PAGE: tl.constexpr, SHORTEST: tl.constexpr, HAS_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, tile of queries). Tensors as for attention.paged_attention."""
    begin_kernel(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    request = tl.minimum(tl.load(tile_request + item), num_requests - 1)
    past = tl.load(first_tile + request + 1)
    token_begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - token_begin
    seq_len = tl.load(seq_lens + request)
    if item >= tl.load(first_tile + num_requests):
        return
    context = seq_len - query_len
    # The last tiles have the most keys: they begin first.
    place = (context // TILE_TOKENS + past - 1 - item) * TILE_TOKENS
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    positions, heads = place + rows // GROUP, kv_head * GROUP + rows % GROUP
    valid = (positions >= context) & (positions < seq_len) & (rows < TILE_TOKENS * GROUP)
    mask = valid[:, None] & (dims < HEAD)[None, :]
    at = (token_begin + positions - context).to(tl.int64)[:, None]
    loaded = tl.load(query + at * query_stride_token + heads[:, None] * query_stride_head + dims[None, :], mask, 0.0)
    factor = 1.0 if HAS_CAP else scale * LOG2_E
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = total - float("inf")
    sums, sums_top, sums_total = acc, top, total
    segment = segment_keys(place + 1, SHORTEST)
    end = tl.minimum(place + TILE_TOKENS, seq_len)
    row_table = block_table + request.to(tl.int64) * table_stride
    keys += kv_head * stride_head
    values += kv_head * stride_head
    masked_begin = tl.minimum(place + 1, end) // BLOCK_N * BLOCK_N
    acc, top, total, sums, sums_top, sums_total = _attend_and_fold(
        acc, top, total, sums, sums_top, sums_total, loaded, 0, masked_begin, end, positions, row_table, keys, values,
        scale, cap, factor, segment, stride_block, stride_token,
        PAGE, HEAD, BLOCK_D, BLOCK_N, HAS_CAP, False,
    )  # fmt: skip
    acc, top, total, sums, sums_top, sums_total = _attend_and_fold(
        acc, top, total, sums, sums_top, sums_total, loaded, masked_begin, end, end, positions, row_table, keys, values,
        scale, cap, factor, segment, stride_block, stride_token,
        PAGE, HEAD, BLOCK_D, BLOCK_N, HAS_CAP, True,
    )  # fmt: skip
    sums, sums_top, sums_total = _fold(sums, sums_top, sums_total, acc, top, total)
    result = sums / tl.where(sums_total > 0.0, sums_total, 1.0)[:, None]
    places = at * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask)


@triton.jit
def _folded(part_sums, part_tops, part_totals, first, count, rows, valid, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Segments in order. From the L2 cache: others wrote them meanwhile."""
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([rows.shape[0]], tl.float32)
    sums = tl.zeros([rows.shape[0], BLOCK_D], tl.float32)
    top = total - float("inf")
    for part in tl.range(0, count):
        row = (first + part).to(tl.int64) * ROWS + rows
        new = tl.load(part_sums + row[:, None] * BLOCK_D + dims[None, :], valid[:, None], 0.0, cache_modifier=".cg")
        new_top = tl.load(part_tops + row, valid, float("-inf"), cache_modifier=".cg")
        new_total = tl.load(part_totals + row, valid, 0.0, cache_modifier=".cg")
        sums, top, total = _fold(sums, top, total, new, new_top, new_total)
    return sums, total


@triton.jit(do_not_specialize=["table_stride"])
def attend_decoding(
    out, part_sums, part_tops, part_totals, arrived, query, keys, values, block_table, query_start, seq_lens, scale,
    cap, query_stride_token, query_stride_head, out_stride_token, out_stride_head, table_stride, stride_block,
    stride_token, stride_head,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, SHORTEST: tl.constexpr, HAS_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, request, lane): every so many-th segment of a request of one token; the last of the request's
    programs to arrive folds all.

    part_sums [R, Hkv, MOST_SEGMENTS, GROUP, BLOCK_D], part_tops and part_totals the same without the last, float32;
    arrived [R, Hkv] int32, 0 before and after.
    """
    begin_kernel(PDL)
    kv_head, request, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - token
    seq_len = tl.load(seq_lens + request)
    segment = segment_keys(seq_len, SHORTEST)
    count = tl.cdiv(seq_len, segment)
    if (query_len != 1) | (lane >= count):
        return
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    valid = rows < GROUP
    mask = valid[:, None] & (dims < HEAD)[None, :]
    at = token.to(tl.int64)
    loaded = tl.load(query + at * query_stride_token + heads[:, None] * query_stride_head + dims[None, :], mask, 0.0)
    factor = 1.0 if HAS_CAP else scale * LOG2_E
    none = tl.zeros([BLOCK_M], tl.float32)
    sums, total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), none
    first = (request * tl.num_programs(0) + kv_head) * MOST_SEGMENTS
    for part in tl.range(lane, count, tl.num_programs(2)):
        begin = part * segment
        end = tl.minimum(begin + segment, seq_len)
        sums, top, total = attend_all(
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), none - float("inf"), none, loaded, begin, end, seq_len - 1,
            none.to(tl.int32) + seq_len - 1, none, block_table + request.to(tl.int64) * table_stride,
            keys + kv_head * stride_head, values + kv_head * stride_head, scale, cap, factor, stride_block,
            stride_token,
            PAGE, HEAD, BLOCK_D, BLOCK_N, 0, 0, HAS_CAP, False,
        )  # fmt: skip
        row = (first + part).to(tl.int64) * GROUP + rows
        aside = valid & (count > 1)
        tl.store(part_sums + row[:, None] * BLOCK_D + dims[None, :], sums, aside[:, None])
        tl.store(part_tops + row, top, aside)
        tl.store(part_totals + row, total, aside)
    done = count == 1
    if count > 1:
        place = arrived + request * tl.num_programs(0) + kv_head
        if arrives_last(place, tl.minimum(count, tl.num_programs(2)) - 1):
            tl.store(place, 0)
            sums, total = _folded(part_sums, part_tops, part_totals, first, count, rows, valid, GROUP, BLOCK_D)
            done = count > 1
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    places = at * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask & done)
