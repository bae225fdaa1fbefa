"""Paged attention in Triton: one kernel for decode (the keys of a request split over programs, of which the last may
merge the results) and prefill (tiles of queries), and the merge in a kernel of its own. Knows nothing about steps;
plans come from attention_plan.py.

Online softmax in base 2 after Dao, FlashAttention-2 (2023); the split over keys after Dao et al., Flash-Decoding
(2023).
A program's rows are the query heads of one key head times some tokens, so that each key is read once per group.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.arrival import arrives_last

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin_kernel(PDL: tl.constexpr):
    """With dependent launch: the next kernel may start, and what earlier ones wrote is there. Every program must call
    it, or the next kernel's wait would not cover those before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that the token at `position` sees."""
    first = tl.maximum(position * 0, 0)
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(position, 0) // CHUNK * CHUNK
    return first


@triton.jit
def _tanh(x):
    """By exp, which every target has; exact at both ends."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def attend_turn(
    acc, top, total, query, start, live_end, position, slope, row_table, keys, values, scale, cap, factor,
    stride_block, stride_token,
    PAGE: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N keys from `start` on, as `_attend` takes them."""
    columns, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    positions = start + columns
    if MASKED:
        live = positions < live_end
        page = tl.load(row_table + positions // PAGE, mask=live, other=0).to(tl.int64)
    else:
        page = tl.load(row_table + positions // PAGE).to(tl.int64)
    offsets = (page * stride_block + (positions % PAGE) * stride_token)[:, None] + dims[None, :]
    if MASKED:
        # Beyond the sequence lies what others left, maybe NaN, and 0 * NaN is NaN.
        mask = live[:, None] & (dims < HEAD)[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        value = tl.load(values + offsets, mask=mask, other=0.0)
    elif HEAD != BLOCK_D:
        key = tl.load(keys + offsets, mask=(dims < HEAD)[None, :], other=0.0)
        value = tl.load(values + offsets, mask=(dims < HEAD)[None, :], other=0.0)
    else:
        key = tl.load(keys + offsets)
        value = tl.load(values + offsets)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
    if HAS_CAP:
        scores = cap * LOG2_E * _tanh(scores * scale / cap)
    if HAS_ALIBI:
        if not HAS_CAP:
            scores = scores * (scale * LOG2_E)
        scores += (slope * LOG2_E)[:, None] * (positions[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = live[None, :] & (positions[None, :] <= position[:, None])
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (positions[None, :] >= first_seen(position, WINDOW, CHUNK)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    # A row that has seen nothing yet keeps -inf, and must not compute -inf - -inf.
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    # Which products and sums are fused is not left to the compiler: kernels that call this might not get the same.
    weights = tl.math.exp2(tl.fma(scores, factor, -base[:, None]))
    decay = tl.math.exp2(top - base)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc=acc * decay[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def _attend(
    acc, top, total, query, begin, end, live_end, position, slope, row_table, keys, values, scale, cap, factor,
    stride_block, stride_token,
    PAGE: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys of [begin, end) into the running softmax: `acc` [M, D], `top` (maximum, base 2) and `total` [M].
    Unless MASKED, every row sees all of them, and their number is a multiple of BLOCK_N."""
    for start in tl.range(begin, end, BLOCK_N):
        acc, top, total = attend_turn(
            acc, top, total, query, start, live_end, position, slope, row_table, keys, values, scale, cap, factor,
            stride_block, stride_token,
            PAGE, HEAD, BLOCK_D, BLOCK_N, WINDOW, CHUNK, HAS_CAP, HAS_ALIBI, MASKED,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def attend_all(
    acc, top, total, query, begin, end, first_position, position, slope, row_table, keys, values, scale, cap, factor,
    stride_block, stride_token,
    PAGE: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """`_attend` to [begin, end): without masks as far as the row at `first_position`, the first, sees all."""
    masked_begin = begin
    if WINDOW == 0 and CHUNK == 0:
        masked_begin += tl.maximum(tl.minimum(first_position + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
        acc, top, total = _attend(
            acc, top, total, query, begin, masked_begin, end, position, slope, row_table, keys, values, scale, cap,
            factor, stride_block, stride_token,
            PAGE, HEAD, BLOCK_D, BLOCK_N, WINDOW, CHUNK, HAS_CAP, HAS_ALIBI, False,
        )  # fmt: skip
    return _attend(
        acc, top, total, query, masked_begin, end, end, position, slope, row_table, keys, values, scale, cap,
        factor, stride_block, stride_token,
        PAGE, HEAD, BLOCK_D, BLOCK_N, WINDOW, CHUNK, HAS_CAP, HAS_ALIBI, True,
    )  # fmt: skip


@triton.jit
def _place_of_item(
    item, first_item, item_request, query_start, seq_lens, num_requests, prefix,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What an item is: its request, that one's first token in the batch, number of new tokens and of older ones; the
    item's first token in the request, its keys from begin to end, and (count, index) among the request's items."""
    # Beyond the last item stands what an earlier step wrote.
    request = tl.minimum(tl.load(item_request + item), num_requests - 1)
    first = tl.load(first_item + request)
    past = tl.load(first_item + request + 1)
    token_begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - token_begin
    seq_len = tl.load(seq_lens + request)
    context, count, index = seq_len - query_len, past - first, item - first
    # The last tiles have the most keys: they begin first.
    tile = 0 if SPLIT else (count - 1 - index) * TILE_TOKENS
    begin = tl.maximum(first_seen(context + tile, WINDOW, CHUNK), prefix)
    end = tl.minimum(context + tile + TILE_TOKENS, seq_len)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, count), BLOCK_N) * BLOCK_N
        begin = begin + index * share
        end = tl.minimum(begin + share, end)
    return request, token_begin, query_len, context, tile, begin, end, count, index


@triton.jit
def _place_in_prefix(item, num_tokens, prefix, splits, TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """As `_place_of_item` where all tokens of the batch are the queries and a prefix that all share the keys: an item
    is a tile of tokens and one of the `splits` parts of the prefix."""
    index = item % splits
    share = tl.cdiv(tl.cdiv(prefix, splits), BLOCK_N) * BLOCK_N
    begin = index * share
    end = tl.minimum(begin + share, prefix)
    tile = item // splits * TILE_TOKENS
    return item * 0, item * 0, num_tokens, prefix, tile, begin, end, splits, index


@triton.jit
def _num_items(first_item, num_rows, prefix_splits, TILE_TOKENS: tl.constexpr, CASCADE: tl.constexpr):
    """How many there are: `num_rows` requests have them, or with CASCADE 2 so many tokens. Asked when an item knows its
    place, so that no load waits for the answer."""
    return tl.cdiv(num_rows, TILE_TOKENS) * prefix_splits if CASCADE == 2 else tl.load(first_item + num_rows)


@triton.jit
def _place(
    item, first_item, item_request, query_start, seq_lens, num_rows, prefix, prefix_splits,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    CASCADE: tl.constexpr,
):  # fmt: skip
    """One of the two."""
    if CASCADE == 2:
        place = _place_in_prefix(item, num_rows, prefix, prefix_splits, TILE_TOKENS, BLOCK_N)
    else:
        place = _place_of_item(
            item, first_item, item_request, query_start, seq_lens, num_rows, prefix, TILE_TOKENS, BLOCK_N, WINDOW,
            CHUNK, SPLIT,
        )  # fmt: skip
    return place


@triton.jit
def _merged(
    partial_out, partial_lse, first, past, kv_head, rows, valid, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """[M, D]: what the items [first, past) found, in their order. From the L2 cache: others wrote it meanwhile."""
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([rows.shape[0], BLOCK_D], tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    top = total - float("inf")
    for start in tl.range(first, past, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            item = start + index
            mask = valid & (item < past)
            row = (item.to(tl.int64) * tl.num_programs(0) + kv_head) * ROWS + rows
            lse = tl.load(partial_lse + row, mask, other=float("-inf"), cache_modifier=".cg")
            places = partial_out + row[:, None] * BLOCK_D + dims[None, :]
            found = tl.load(places, mask[:, None], other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, lse)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight, decay = tl.math.exp2(lse - base), tl.math.exp2(top - base)
            acc = acc * decay[:, None] + found * weight[:, None]
            total = total * decay + weight
            top = higher
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _put_aside(
    partial_out, partial_lse, arrived, result, top, total, rows, valid, mask, kv_head, item, request, count, index,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CASCADE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Keep what an item found, [M, D] and the logarithm of the sum of its weights, base 2, unless it is the only one.
    With MERGE 1 the last item of a request and key head to arrive merges them. What goes out, and which of `mask`."""
    row = (item.to(tl.int64) * tl.num_programs(0) + kv_head) * ROWS + rows
    aside = valid & (count + CASCADE > 1)
    lse = tl.where(total > 0.0, top + tl.math.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(partial_lse + row, lse, aside)
    tl.store(partial_out + row[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], result, aside[:, None])
    done = count + CASCADE == 1
    if MERGE == 1 and count > 1:
        place = arrived + request * tl.num_programs(0) + kv_head
        if arrives_last(place, count - 1):
            tl.store(place, 0)
            at_once: tl.constexpr = 4 if BLOCK_D <= 128 else 2
            first = item - index
            result = _merged(
                partial_out, partial_lse, first, first + count, kv_head, rows, valid, ROWS, BLOCK_D, at_once
            )
            done = count > 1
    return result, mask & done


@triton.jit
def _merged_wide(
    partial_out, partial_lse, first, past, kv_head, rows, valid, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """[rows, D]: the weighted mean of what the items [first, past) found, AT_ONCE of them in one turn. From the L2
    cache: others wrote it meanwhile."""
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([rows.shape[0], BLOCK_D], tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    top = total - float("inf")
    for start in tl.range(first, past, AT_ONCE):
        items = start + tl.arange(0, AT_ONCE)
        known = (items < past)[:, None] & valid[None, :]
        row = ((items * tl.num_programs(0) + kv_head) * ROWS)[:, None] + rows[None, :]
        lse = tl.load(partial_lse + row, known, other=float("-inf"), cache_modifier=".cg")
        places = partial_out + row.to(tl.int64)[:, :, None] * BLOCK_D + dims[None, None, :]
        found = tl.load(places, known[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, decay = tl.math.exp2(lse - base[None, :]), tl.math.exp2(top - base)
        acc = acc * decay[:, None] + tl.sum(found * weights[:, :, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = higher
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _merge_alone(
    out, partial_out, partial_lse, arrived, token_begin, query_len, kv_head, item, request, count, index,
    stride_token, stride_head,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The last item of a request and key head to arrive merges all of them, in tiles of no other rows."""
    place = arrived + request * tl.num_programs(0) + kv_head
    if arrives_last(place, count - 1):
        tl.store(place, 0)
        rows, dims = tl.arange(0, MERGE_ROWS), tl.arange(0, BLOCK_D)
        valid = (rows < ROWS) & (rows < query_len * GROUP)
        first = item - index
        found = _merged_wide(
            partial_out, partial_lse, first, first + count, kv_head, rows, valid, ROWS, BLOCK_D, AT_ONCE
        )
        at = (token_begin + rows // GROUP).to(tl.int64) * stride_token + (kv_head * GROUP + rows % GROUP) * stride_head
        mask = valid[:, None] & (dims < HEAD)[None, :]
        tl.store(out + at[:, None] + dims[None, :], found.to(out.dtype.element_ty), mask)


@triton.jit
def _before_keys(
    sinks, slopes, heads, valid, index,
    HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, SPLIT: tl.constexpr, CASCADE: tl.constexpr,
):  # fmt: skip
    """Of each row its ALiBi slope, and the maximum and sum of weights before the first key: what the sink gives."""
    slope, total = tl.zeros(heads.shape, tl.float32), tl.zeros(heads.shape, tl.float32)
    top = total - float("inf")
    if HAS_ALIBI:
        slope = tl.load(slopes + heads, valid, other=0.0).to(tl.float32)
    if HAS_SINKS:
        has_sink = valid & (index == (0 if CASCADE < 2 else -1)) if SPLIT else valid
        top = tl.load(sinks + heads, has_sink, other=float("-inf")).to(tl.float32) * LOG2_E
        total = tl.where(has_sink, 1.0, total)
    return slope, top, total


# Numbers that differ from step to step: a step must not wait for another compiled variant.
@triton.jit(do_not_specialize=["num_requests", "prefix", "prefix_splits", "table_stride"])
def paged_attention(
    out, partial_out, partial_lse, arrived, query, keys, values, block_table, query_start, seq_lens, first_item,
    item_request, sinks, slopes, key_scale, value_scale, num_requests, scale, cap, prefix, prefix_splits,
    query_stride_token, query_stride_head, out_stride_token, out_stride_head, table_stride, stride_block, stride_token,
    stride_head,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, CASCADE: tl.constexpr,
    MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, item). With SPLIT an item is a part of a request's keys, and its results go to the partial
    buffers unless it is the only one; with MERGE the last to arrive then merges them, so many in one turn if
    that is more than 1. Without SPLIT it is a tile of a request's queries. `prefix` keys, which all requests share, are
    left out where CASCADE is 1, and are all there is where it is 2; then results always go to the buffers.

    out, query [T, H, D]; keys, values: the halves of the cache [N, PAGE, Hkv, D]; block_table [R, blocks];
    first_item [R + 1], item_request [items]; sinks, slopes [H]; key_scale, value_scale [1]; arrived [R, Hkv] int32, 0
    before and after; partial_out [items, Hkv, ROWS, BLOCK_D], partial_lse [items, Hkv, ROWS], float32, base 2.
    """
    begin_kernel(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    request, token_begin, query_len, context, tile, begin, end, count, index = _place(
        item, first_item, item_request, query_start, seq_lens, num_requests, prefix, prefix_splits,
        BLOCK_M // GROUP, BLOCK_N, WINDOW, CHUNK, SPLIT, CASCADE,
    )  # fmt: skip
    if item >= _num_items(first_item, num_requests, prefix_splits, BLOCK_M // GROUP, CASCADE):
        return
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, heads = tile + rows // GROUP, kv_head * GROUP + rows % GROUP
    valid = (tokens < query_len) & (rows < BLOCK_M // GROUP * GROUP)
    mask = valid[:, None] & (dims < HEAD)[None, :]
    at = (token_begin + tokens).to(tl.int64)[:, None]
    loaded = tl.load(query + at * query_stride_token + heads[:, None] * query_stride_head + dims[None, :], mask, 0.0)
    if SCALED:
        scale = scale * tl.load(key_scale)
    factor = 1.0 if HAS_CAP or HAS_ALIBI else scale * LOG2_E
    slope, top, total = _before_keys(sinks, slopes, heads, valid, index, HAS_SINKS, HAS_ALIBI, SPLIT, CASCADE)
    acc, top, total = attend_all(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32), top, total, loaded, begin, end, context + tile, context + tokens,
        slope, block_table + request.to(tl.int64) * table_stride, keys + kv_head * stride_head,
        values + kv_head * stride_head, scale, cap, factor, stride_block, stride_token,
        PAGE, HEAD, BLOCK_D, BLOCK_N, WINDOW, CHUNK, HAS_CAP, HAS_ALIBI,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SCALED:
        result = result * tl.load(value_scale)
    if SPLIT:
        result, mask = _put_aside(
            partial_out, partial_lse, arrived, result, top, total, rows, valid, mask, kv_head, item, request, count,
            index, ROWS, BLOCK_D, CASCADE, MERGE,
        )  # fmt: skip
        if MERGE > 1 and count > 1:
            _merge_alone(
                out, partial_out, partial_lse, arrived, token_begin, query_len, kv_head, item, request, count, index,
                out_stride_token, out_stride_head, GROUP, HEAD, BLOCK_D, ROWS, MERGE_ROWS, MERGE,
            )  # fmt: skip
    places = at * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask)


@triton.jit
def _fold(
    acc, top, total, partial_out, partial_lse, first, past, kv_head, row,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Take one row of the items [first, past) into the weighted mean: `acc` [D], `top`, `total`."""
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(first, past, BLOCK_S):
        items = start + tl.arange(0, BLOCK_S)
        places = (items.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        lse = tl.load(partial_lse + places, items < past, other=float("-inf"))
        found = tl.load(partial_out + places[:, None] * BLOCK_D + dims[None, :], (items < past)[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(lse - base)
        decay = tl.math.exp2(top - base)
        acc = acc * decay + tl.sum(found * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["prefix_splits"])
def merge_splits(
    out, partial_out, partial_lse, prefix_out, prefix_lse, query_start, first_item, out_stride_token, out_stride_head,
    prefix_splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PREFIX_ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_S: tl.constexpr, CASCADE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, part of its rows): for each row of a key head the weighted mean of what the request's items
    found, and with CASCADE of what those of the shared prefix found for the same token."""
    begin_kernel(PDL)
    request = tl.program_id(0)
    first = tl.load(first_item + request)
    past = tl.load(first_item + request + 1)
    token_begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - token_begin
    if past - first + CASCADE <= 1:
        return
    dims = tl.arange(0, BLOCK_D)
    for number in tl.range(tl.program_id(1), query_len * GROUP * KV_HEADS, tl.num_programs(1)):
        row, kv_head = number // KV_HEADS, number % KV_HEADS
        token = token_begin + row // GROUP
        acc = tl.zeros([BLOCK_D], tl.float32)
        top = token * 0.0 - float("inf")
        total = token * 0.0
        acc, top, total = _fold(
            acc, top, total, partial_out, partial_lse, first, past, kv_head, row, ROWS, KV_HEADS, BLOCK_D, BLOCK_S
        )
        if CASCADE:
            tile_tokens: tl.constexpr = PREFIX_ROWS // GROUP
            items = token // tile_tokens * prefix_splits
            tile_row = token % tile_tokens * GROUP + row % GROUP
            acc, top, total = _fold(
                acc, top, total, prefix_out, prefix_lse, items, items + prefix_splits, kv_head, tile_row, PREFIX_ROWS,
                KV_HEADS, BLOCK_D, BLOCK_S,
            )  # fmt: skip
        result = acc / tl.where(total > 0.0, total, 1.0)
        place = token.to(tl.int64) * out_stride_token + (kv_head * GROUP + row % GROUP) * out_stride_head
        tl.store(out + place + dims, result.to(out.dtype.element_ty), dims < HEAD)
