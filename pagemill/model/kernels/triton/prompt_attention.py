"""Paged attention of prompts on Hopper GPUs: programs that stay, of which one warp fetches blocks of keys and values
with the copy engine (TMA), and two warpgroups multiply 64 rows each by wgmma. Written in Gluon, Triton's lower level,
where who does what is said, and not found by the compiler.

While the tensor cores multiply the values of the keys before, the softmax of the next ones is computed, as in
FlashAttention-3 (Shah et al., 2024). Keys are taken from the last to the first: those that need masks come first.

A tile's rows are the query heads of one key head times some tokens, as in attention.py.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagemill.model.kernels.triton.attention import begin_kernel, first_seen
from pagemill.model.kernels.triton.gluon_launch import let_next_start, wait_for_inputs

ROWS = 128
"""Of a tile: query heads of a key head x tokens."""
RECORD = tl.constexpr(8)
"""Numbers that say what a tile is: its first token in the batch, how many it has, the position of the first, its keys
from a block's beginning to an end, the request, and the request's number of tokens."""
SWIZZLED = 64
"""Elements of two bytes that shared memory keeps side by side."""
LANES = tl.constexpr(256)
"""Tiles that a program of sort_prompts looks at together, and requests that one of plan_last_tiles does."""
LOG2_E = gl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_requests"])
def plan_prompts(
    records, counter, query_start, seq_lens, first_tile, tile_request, num_requests,
    TILE_TOKENS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program per tile of attention_plan.plan_items: its record, [tiles, RECORD] int32. The counter becomes 0."""
    begin_kernel(PDL)
    item = tl.program_id(0)
    if item == 0:
        tl.store(counter, 0)
    request = tl.minimum(tl.load(tile_request + item), num_requests - 1)
    tile = (item - tl.load(first_tile + request)) * TILE_TOKENS
    token_begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - token_begin
    seq_len = tl.load(seq_lens + request)
    if item >= tl.load(first_tile + num_requests):
        return
    position = seq_len - query_len + tile
    count = tl.minimum(query_len - tile, TILE_TOKENS)
    first = first_seen(position, WINDOW, CHUNK) // PAGE * PAGE
    _store_record(records + item * RECORD, token_begin + tile, count, position, first, request, seq_len)


@triton.jit
def _store_record(place, token, count, position, first, request, seq_len):
    tl.store(place, token)
    tl.store(place + 1, count)
    tl.store(place + 2, position)
    tl.store(place + 3, first)
    tl.store(place + 4, position + count)
    tl.store(place + 5, request)
    tl.store(place + 6, seq_len)


@triton.jit(do_not_specialize=["num_requests"])
def plan_last_tiles(
    records, total, counter, query_start, seq_lens, num_requests,
    DECODE_TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program per request: the record of its last tile, if it has more than DECODE_TOKENS tokens, behind those of the
    requests before it; and to `total`, [1] int32, how many records there are. The counter becomes 0."""
    begin_kernel(PDL)
    me = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    before = tl.zeros([LANES], tl.int32)
    for part in tl.range(0, tl.cdiv(me, LANES)):
        others = part * LANES + lanes
        real = others < me
        begin = tl.load(query_start + others, real, other=0)
        end = tl.load(query_start + others + 1, real, other=0)
        before += (end - begin > DECODE_TOKENS).to(tl.int32)
    place = tl.sum(before, 0)
    token_begin = tl.load(query_start + me)
    query_len = tl.load(query_start + me + 1) - token_begin
    seq_len = tl.load(seq_lens + me)
    if query_len > DECODE_TOKENS:
        tile = (query_len - 1) // TILE_TOKENS * TILE_TOKENS
        position = seq_len - query_len + tile
        first = first_seen(position, WINDOW, CHUNK) // PAGE * PAGE
        _store_record(records + place * RECORD, token_begin + tile, query_len - tile, position, first, me, seq_len)
    if me == num_requests - 1:
        tl.store(total, place + (query_len > DECODE_TOKENS).to(tl.int32))
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_requests"])
def sort_prompts(sorted_records, records, first_tile, num_requests, PDL: tl.constexpr):
    """Program per tile: puts its record where it belongs among all, those of the most keys first."""
    begin_kernel(PDL)
    item = tl.program_id(0)
    num_items = tl.load(first_tile + num_requests)
    if item >= num_items:
        return
    lanes, numbers = tl.arange(0, LANES), tl.arange(0, RECORD)
    mine = tl.load(records + item * RECORD + 4) - tl.load(records + item * RECORD + 3)
    before = tl.zeros([LANES], tl.int32)
    for part in tl.range(0, tl.cdiv(num_items, LANES)):
        others = part * LANES + lanes
        real = others < num_items
        end = tl.load(records + others * RECORD + 4, real, other=0)
        keys = end - tl.load(records + others * RECORD + 3, real, other=0)
        before += ((keys > mine) | ((keys == mine) & (others < item) & real)).to(tl.int32)
    place = tl.sum(before, 0) * RECORD
    tl.store(sorted_records + place + numbers, tl.load(records + item * RECORD + numbers))


@gluon.jit
def draw(counter, num_items):
    """The next item of a launch; `num_items` or more: none is left. Every program asks until it is told so once, after
    which the counter stands where the next launch begins."""
    return gl.atomic_add(counter, 1, sem="relaxed") % (num_items + gl.num_programs(0))


@gluon.jit
def place_of(item, num_tiles, heads_at_once):
    """Tile and key head of an item: `heads_at_once` heads of every tile, then the next heads of every tile."""
    part = num_tiles * heads_at_once
    done = item // part
    rest = item - done * part
    return rest // heads_at_once, done * heads_at_once + rest % heads_at_once


@gluon.jit
def tell(items, buffer, item):
    """Leave the item for the warpgroups, who look once the buffer's queries are there."""
    items.index(buffer).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def told(items, buffer):
    return gl.sum(items.index(buffer).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _fetch_turn(
    kv_map, chunks, full, slot, table, first, last, column, block_rows, kind_row,
    HEAD: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """KEYS keys, or values, from piece `first` of a request on."""
    PIECES: gl.constexpr = KEYS // BOX
    PARTS: gl.constexpr = HEAD // 64
    mbarrier.expect(full.index(slot), KEYS * HEAD * 2)
    for piece in gl.static_range(PIECES):
        # Beyond the last key of the tile, its neighbors once more, which nobody sees.
        at = gl.minimum(first + piece, last) * BOX
        row = gl.load(table + at // PAGE) * block_rows + at % PAGE + kind_row
        for part in gl.static_range(PARTS):
            target = chunks.index((slot * PARTS + part) * PIECES + piece)
            tma.async_copy_global_to_shared(kv_map, [row, column + part * 64], full.index(slot), target)


@gluon.jit
def _fetch(
    kv_map, query_map, chunks, query_chunks, full, empty, query_full, query_empty, items, counter, records, block_table,
    num_tiles, heads_at_once, table_stride, block_rows, value_row,
    HKV: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: queries, keys and values of every tile of this program, as shared memory becomes free."""
    wait_for_inputs(PDL)
    PARTS: gl.constexpr = HEAD // 64
    turn = gl.to_tensor(0)
    number = gl.to_tensor(0)
    item = draw(counter, num_tiles * HKV)
    while item < num_tiles * HKV:
        tile, kv_head = place_of(item, num_tiles, heads_at_once)
        record = records + tile * RECORD
        token = gl.load(record)
        begin = gl.load(record + 3)
        end = gl.load(record + 4)
        table = block_table + gl.load(record + 5).to(gl.int64) * table_stride
        buffer = number % QUERIES
        mbarrier.wait(query_empty.index(buffer), (number // QUERIES & 1) ^ 1)
        tell(items, buffer, item)
        mbarrier.expect(query_full.index(buffer), 128 * HEAD * 2)
        for half in gl.static_range(2):
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    query_map, [token + half * (64 // GROUP), kv_head * GROUP, part * 64], query_full.index(buffer),
                    query_chunks.index((buffer * 2 + half) * PARTS + part),
                )  # fmt: skip
        last = (end - 1) // BOX
        count = gl.cdiv(end - begin, KEYS)
        for back in range(count):
            first = begin // BOX + (count - 1 - back) * (KEYS // BOX)
            parity = (turn // STAGES & 1) ^ 1
            for kind in gl.static_range(2):
                slot = turn % STAGES * 2 + kind
                mbarrier.wait(empty.index(slot), parity)
                _fetch_turn(
                    kv_map, chunks, full, slot, table, first, last, kv_head * HEAD, block_rows, kind * value_row,
                    HEAD, KEYS, PAGE, BOX,
                )  # fmt: skip
            turn += 1
        number += 1
        item = draw(counter, num_tiles * HKV)
    buffer = number % QUERIES
    mbarrier.wait(query_empty.index(buffer), (number // QUERIES & 1) ^ 1)
    tell(items, buffer, item)
    mbarrier.arrive(query_full.index(buffer))


@gluon.jit
def _masked(
    scores, start, positions, end, KEYS: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """-inf for keys, from `start` on, that rows at these positions do not see."""
    columns = (start + gl.arange(0, KEYS, gl.SliceLayout(0, layout)))[None, :]
    rows = positions[:, None]
    seen = (columns <= rows) & (columns < end)
    if WINDOW > 0:
        seen = seen & (columns > rows - WINDOW)
    if CHUNK > 0:
        seen = seen & (columns >= rows // CHUNK * CHUNK)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def softmax_turn(
    scores, top, total, masked, start, positions, end, factor, cap,
    KEYS: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """From scores [M, KEYS] float32: the weights, the new maxima (base 2) and sums, and by what older ones shrink."""
    if HAS_CAP:
        scaled = scores * (factor / LOG2_E / cap)
        scores = cap * LOG2_E * (1.0 - 2.0 / (gl.exp(2.0 * scaled) + 1.0))
        factor = 1.0
    if masked:
        scores = _masked(scores, start, positions, end, KEYS, WINDOW, CHUNK, layout)
    higher = gl.maximum(top, gl.max(scores, 1) * factor)
    # A row that has seen nothing yet keeps -inf, and must not compute -inf - -inf.
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * factor - base[:, None])
    decay = gl.exp2(top - base)
    return weights, higher, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def clean(chunks, slot, start, end, HEAD: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr):
    """Zero the values from `end` on: beyond a request's last token lies what others left, maybe NaN, and 0 * NaN is
    NaN. Both warpgroups do it, and write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for piece in range((end - 1 - start) // BOX, KEYS // BOX):
        rows = start + piece * BOX + gl.arange(0, BOX, gl.SliceLayout(1, layout))
        for part in gl.static_range(HEAD // 64):
            chunk = chunks.index((slot * (HEAD // 64) + part) * (KEYS // BOX) + piece)
            values = chunk.load(layout)
            chunk.store(gl.where((rows < end)[:, None], values, gl.zeros_like(values)))
    hopper.fence_async_shared()


@gluon.jit
def _turn(
    acc, top, total, weights, turn, left, masked, keys, query, full, empty, start, positions, end, factor, cap,
    KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, scores_in: gl.constexpr, weights_in: gl.constexpr,
    sums_in: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from `start` on, which are there, and meanwhile the values of the turn before, whose `weights`
    are given. `left`: turns after this one; `masked`: whether some row does not see some of the keys."""
    slot = turn % STAGES * 2
    before = (turn - 1) % STAGES * 2 + 1
    scores = hopper.warpgroup_mma(
        query, keys.index(slot).permute((1, 0)), gl.zeros([64, KEYS], gl.float32, scores_in), use_acc=False,
        is_async=True,
    )  # fmt: skip
    mbarrier.wait(full.index(before), (turn - 1) // STAGES & 1)
    sums = hopper.warpgroup_mma(weights, keys.index(before), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty.index(slot))
    new, top, total, decay = softmax_turn(
        scores, top, total, masked, start, positions, end, factor, cap, KEYS, WINDOW, CHUNK, HAS_CAP, scores_in
    )
    next_weights = gl.convert_layout(new.to(weights.dtype), weights_in)
    # Asked here, this also keeps the assembler from waiting for the sums first, and then computing the weights.
    mbarrier.wait(full.index((turn + 1) % STAGES * 2), (turn + 1) // STAGES & 1, pred=left > 0)
    acc, _, weights = hopper.warpgroup_mma_wait(0, deps=[sums, weights, next_weights])
    mbarrier.arrive(empty.index(before))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, sums_in))[:, None]
    return acc, top, total, weights, turn + 1


@gluon.jit
def _first_turn(
    top, total, turn, keys, chunks, query, full, empty, start, positions, end, seq_len, factor, cap,
    HEAD: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, scores_in: gl.constexpr, weights_in: gl.constexpr,
):  # fmt: skip
    """Scores of a tile's last keys, from `start` on."""
    slot = turn % STAGES * 2
    mbarrier.wait(full.index(slot), turn // STAGES & 1)
    scores = hopper.warpgroup_mma(
        query, keys.index(slot).permute((1, 0)), gl.zeros([64, KEYS], gl.float32, scores_in), use_acc=False,
        is_async=True,
    )  # fmt: skip
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty.index(slot))
    new, top, total, _ = softmax_turn(
        scores, top, total, True, start, positions, end, factor, cap, KEYS, WINDOW, CHUNK, HAS_CAP, scores_in
    )
    if gl.cdiv(end, BOX) * BOX > seq_len:
        mbarrier.wait(full.index(slot + 1), turn // STAGES & 1)
        clean(chunks, slot + 1, start, end, HEAD, KEYS, BOX)
    return gl.convert_layout(new.to(keys.dtype), weights_in), top, total


@gluon.jit
def _last_turn(
    acc, total, weights, turn, keys, full, empty, query_empty,
    STAGES: gl.constexpr, sums_in: gl.constexpr,
):  # fmt: skip
    """The values of a tile's first keys; the result, [M, D]."""
    before = (turn - 1) % STAGES * 2 + 1
    mbarrier.wait(full.index(before), (turn - 1) // STAGES & 1)
    sums = hopper.warpgroup_mma(weights, keys.index(before), acc, is_async=True)
    mbarrier.arrive(query_empty)
    acc = hopper.warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index(before))
    inverse = 1.0 / gl.where(total > 0.0, total, 1.0)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, sums_in))[:, None]


@gluon.jit
def _record(record):
    """Of RECORD, all but the request."""
    token = gl.load(record)
    num_tokens = gl.load(record + 1)
    position = gl.load(record + 2)
    begin = gl.load(record + 3)
    end = gl.load(record + 4)
    return token, num_tokens, position, begin, end, gl.load(record + 6)


@gluon.jit
def _store(
    out, result, token, num_tokens, head, out_stride_token, out_stride_head,
    GROUP: gl.constexpr, HEAD: gl.constexpr, WHICH: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile whose first token and head these are."""
    dims = gl.arange(0, HEAD, gl.SliceLayout(0, layout))[None, :]
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    at = (token + rows // GROUP).to(gl.int64)[:, None]
    places = out + at * out_stride_token + (head + rows % GROUP)[:, None] * out_stride_head + dims
    gl.store(places, result, mask=(rows // GROUP < num_tokens)[:, None])


@gluon.jit
def _attend(
    chunks, query_chunks, full, empty, query_full, query_empty, items, records, out, sinks, num_tiles, heads_at_once,
    factor, cap, out_stride_token, out_stride_head,
    HKV: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, WHICH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One of two warpgroups: 64 rows of every tile of this program."""
    wait_for_inputs(PDL)
    dtype: gl.constexpr = out.dtype.element_ty
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    weights_in: gl.constexpr = gl.DotOperandLayout(0, sums_in, 2)
    stores_in: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HEAD // 8), HEAD // 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    keys = chunks._reinterpret(dtype, [2 * STAGES, KEYS, HEAD], shared)
    queries = query_chunks._reinterpret(dtype, [2 * QUERIES, 64, HEAD], shared)
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_in))
    turn = gl.to_tensor(0)
    number = gl.to_tensor(0)
    mbarrier.wait(query_full.index(0), 0)
    item = told(items, 0)
    while item < num_tiles * HKV:
        tile, kv_head = place_of(item, num_tiles, heads_at_once)
        token, num_tokens, position, begin, end, seq_len = _record(records + tile * RECORD)
        head = kv_head * GROUP
        buffer = number % QUERIES
        query = queries.index(buffer * 2 + WHICH)
        positions = position + rows // GROUP
        count = gl.cdiv(end - begin, KEYS)
        plain = (position + 1 - begin) // KEYS
        if WINDOW > 0 or CHUNK > 0:
            plain = plain * 0
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores_in))
        top = total - float("inf")
        if HAS_SINKS:
            top = gl.load(sinks + head + rows % GROUP).to(gl.float32) * LOG2_E
            total = total + 1.0
        weights, top, total = _first_turn(
            top, total, turn, keys, chunks, query, full, empty, begin + (count - 1) * KEYS, positions, end, seq_len,
            factor, cap, HEAD, KEYS, BOX, STAGES, WINDOW, CHUNK, HAS_CAP, scores_in, weights_in,
        )  # fmt: skip
        acc = gl.zeros([64, HEAD], gl.float32, sums_in)
        turn += 1
        mbarrier.wait(full.index(turn % STAGES * 2), turn // STAGES & 1, pred=count > 1)
        for left in range(count - 2, -1, -1):
            acc, top, total, weights, turn = _turn(
                acc, top, total, weights, turn, left, left >= plain, keys, query, full, empty, begin + left * KEYS,
                positions, end, factor, cap, KEYS, STAGES, WINDOW, CHUNK, HAS_CAP, scores_in, weights_in, sums_in,
            )  # fmt: skip
        result = _last_turn(acc, total, weights, turn, keys, full, empty, query_empty.index(buffer), STAGES, sums_in)
        _store(
            out, gl.convert_layout(result.to(dtype), stores_in), token, num_tokens, head, out_stride_token,
            out_stride_head, GROUP, HEAD, WHICH, stores_in,
        )  # fmt: skip
        number += 1
        mbarrier.wait(query_full.index(number % QUERIES), number // QUERIES & 1)
        item = told(items, number % QUERIES)


# Numbers that differ from step to step: a step must not wait for another compiled variant.
@gluon.jit(do_not_specialize=["num_requests", "heads_at_once", "table_stride"])
def attend_to_prompts(
    kv_map, query_map, out, sinks, records, counter, block_table, first_tile, num_requests, heads_at_once, factor, cap,
    block_rows, value_row, table_stride, out_stride_token, out_stride_head,
    HKV: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs take one (tile, key head) after the other: `heads_at_once` heads of all tiles, those of the most keys
    first, and then the next heads, so that many programs read the same keys while the L2 cache has them: reading them
    from memory again takes power that multiplying lacks. `kv_map` sees the cache as rows of all heads of a token, in
    boxes of BOX x 64; a block is `block_rows` rows after the one before, its values `value_row` after its keys.

    out, query [T, H, D]; records [tiles, RECORD]; counter [1], 0 before the first launch of a plan; block_table [R,
    blocks]; first_tile [R + 1]; sinks [H]; factor: of scores, times log2(e).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    dtype: gl.constexpr = out.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    chunks = gl.allocate_shared_memory(dtype, [2 * STAGES * (HEAD // 64) * (KEYS // BOX), BOX, 64], shared)
    query_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    queries = gl.allocate_shared_memory(dtype, [2 * QUERIES * (HEAD // 64), 64 // GROUP, GROUP, 64], query_shared)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    query_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    query_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(QUERIES):
        mbarrier.init(query_full.index(buffer), count=1)
        mbarrier.init(query_empty.index(buffer), count=2)
    items = gl.allocate_shared_memory(gl.int32, [QUERIES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    num_tiles = gl.load(first_tile + num_requests)
    gl.warp_specialize(
        [
            (_attend, (
                chunks, queries, full, empty, query_full, query_empty, items, records, out, sinks, num_tiles,
                heads_at_once, factor, cap, out_stride_token, out_stride_head,
                HKV, GROUP, HEAD, KEYS, BOX, STAGES, QUERIES, WINDOW, CHUNK, HAS_CAP, HAS_SINKS, 0, PDL,
            )),
            (_attend, (
                chunks, queries, full, empty, query_full, query_empty, items, records, out, sinks, num_tiles,
                heads_at_once, factor, cap, out_stride_token, out_stride_head,
                HKV, GROUP, HEAD, KEYS, BOX, STAGES, QUERIES, WINDOW, CHUNK, HAS_CAP, HAS_SINKS, 1, PDL,
            )),
            (_fetch, (
                kv_map, query_map, chunks, queries, full, empty, query_full, query_empty, items, counter, records,
                block_table, num_tiles, heads_at_once, table_stride, block_rows, value_row,
                HKV, GROUP, HEAD, KEYS, PAGE, BOX, STAGES, QUERIES, PDL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def cache_map(kv_cache: torch.Tensor, box: int) -> TensorDescriptor:
    """Of a cache [N, 2, block, Hkv, D] with dense tokens: what the copy engine needs to fetch `box` x 64 elements."""
    width = kv_cache.stride(2)
    last_block = (kv_cache.shape[0] - 1) * kv_cache.stride(0) + kv_cache.stride(1)
    rows = last_block // width + kv_cache.shape[2]
    return TensorDescriptor(kv_cache, [rows, width], [width, 1], [box, SWIZZLED], gl.NVMMASharedLayout(128, 16, 2))


def query_map(query: torch.Tensor, group: int) -> TensorDescriptor:
    """Of queries [T, H, D]: what the copy engine needs to fetch 64 rows, heads of a key head x tokens, of 64
    elements."""
    layout = gl.NVMMASharedLayout(128, 16, 3)
    return TensorDescriptor(query, list(query.shape), list(query.stride()), [64 // group, group, SWIZZLED], layout)
