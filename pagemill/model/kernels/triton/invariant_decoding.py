"""`invariant_attention.attend_decoding` for few programs, on Hopper GPUs, with the same bits: four warps share a
segment, whose keys and values come some turns ahead. Written in Gluon.

Each warp multiplies the query by a quarter of a turn's keys. Then all have all scores, and each has the same weights,
sums them as one warp would, and multiplies them by a quarter of the values' elements.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from pagemill.model.kernels.triton.gluon_launch import let_next_start, wait_for_inputs

MOST_SEGMENTS = gl.constexpr(16)
"""As in invariant_attention.py."""
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
"""Warps side by side: of keys, or of values' elements."""
_WHOLE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Each warp has all."""


@gluon.jit
def _fold(acc, top, total, new_acc, new_top, new_total, known):
    """As invariant_attention._fold, where `known`. In the layout of `acc` and its slice."""
    higher = gl.maximum(top, new_top)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    decay = gl.exp2(top - base)
    weight = gl.exp2(new_top - base)
    wide, _ = gl.broadcast(weight[:, None], new_acc)
    folded = gl.fma(new_acc, wide, acc * decay[:, None])
    keep = gl.where(known, total * 0.0, total * 0.0 - 1.0) == 0.0
    acc = gl.where(keep[:, None], folded, acc)
    top = gl.where(keep, higher, top)
    return acc, top, gl.where(keep, gl.fma(new_total, weight, total * decay), total)


@gluon.constexpr_function
def _copies(block_d):
    """Of [64, block_d]: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // block_d, block_d // 8], [4, 1], [1, 0])


@gluon.jit
def _pages(row_table, start, end, BLOCK_D: gl.constexpr, PAGE: gl.constexpr):
    """Where the 64 positions from `start` on are: [64] of the table; beyond `end` 0."""
    positions = start + gl.arange(0, 64, layout=gl.SliceLayout(1, _copies(BLOCK_D)))
    return gl.load(row_table + positions // PAGE, positions < end, 0)


@gluon.jit
def _ask(
    keys, values, pages, start, end, rings, stage, stride_block, stride_token,
    HEAD: gl.constexpr, BLOCK_D: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The keys and values of 64 positions from `start` on; beyond `end` zeros."""
    positions = start + gl.arange(0, 64, layout=gl.SliceLayout(1, _copies(BLOCK_D)))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, _copies(BLOCK_D)))
    offsets = (pages.to(gl.int64) * stride_block + (positions % PAGE) * stride_token)[:, None] + dims[None, :]
    mask = (positions < end)[:, None] & (dims < HEAD)[None, :]
    async_copy.async_copy_global_to_shared(rings[0].index(stage), keys + offsets, mask)
    async_copy.async_copy_global_to_shared(rings[1].index(stage), values + offsets, mask)
    async_copy.commit_group()


@gluon.jit
def _attend(
    query, keys, values, row_table, begin, end, position, rings, factor, stride_block, stride_token,
    HEAD: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The softmax of a segment: sums [M, D] in _SCORES, maxima and sums of weights [M] in _WHOLE."""
    by_row: gl.constexpr = gl.SliceLayout(1, _WHOLE)
    total = gl.zeros([BLOCK_M], gl.float32, by_row)
    top = total - float("inf")
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, _SCORES)
    pages = ()
    for ahead in gl.static_range(STAGES):
        pages += (_pages(row_table, begin + ahead * 64, end, BLOCK_D, PAGE),)  # type: ignore[assignment]
    for ahead in gl.static_range(STAGES):
        _ask(keys, values, pages[ahead], begin + ahead * 64, end, rings, ahead, stride_block, stride_token,
             HEAD, BLOCK_D, PAGE)  # fmt: skip
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, _WHOLE))
    for start in range(begin, end, 64):
        stage = (start - begin) // 64 % STAGES
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()
        next_pages = _pages(row_table, start + STAGES * 64, end, BLOCK_D, PAGE)
        key = rings[0].index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, _SCORES, 2))
        rings[2].store(mma_v2(query, key, gl.zeros([BLOCK_M, 64], gl.float32, _SCORES)))
        value = rings[1].index(stage).load(gl.DotOperandLayout(1, _SCORES, 2))
        gl.thread_barrier()
        # All warps have read the keys and values, too.
        _ask(keys, values, next_pages, start + STAGES * 64, end, rings, stage, stride_block, stride_token,
             HEAD, BLOCK_D, PAGE)  # fmt: skip
        seen = start + columns <= position
        scores = gl.where(seen[None, :], rings[2].load(_WHOLE), float("-inf"))
        higher = gl.maximum(top, gl.max(scores, 1) * factor)
        base = gl.where(higher == float("-inf"), 0.0, higher)
        lower, _ = gl.broadcast(-base[:, None], scores)
        weights = gl.exp2(gl.fma(scores, gl.full_like(scores, factor), lower))
        decay = gl.exp2(top - base)
        total = gl.fma(total, decay, gl.sum(weights, 1))
        top = higher
        left = gl.convert_layout(weights.to(query.dtype), gl.DotOperandLayout(0, _SCORES, 2))
        acc = mma_v2(left, value, acc * gl.convert_layout(decay, gl.SliceLayout(1, _SCORES))[:, None])
    async_copy.wait_group(0)
    return acc, top, total


@gluon.jit
def _segment_keys(length, SHORTEST: gl.constexpr):
    """Keys of a segment of a token that sees `length` keys, as invariant_attention.segment_keys finds them."""
    size = gl.to_tensor(SHORTEST)
    for _ in gl.static_range(14):
        size = gl.where(size * MOST_SEGMENTS < length, size * 2, size)
    return size


@gluon.jit
def _keep(
    part_sums, part_tops, part_totals, sums, top, total, begin,
    GROUP: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """What a segment gave, for the program that folds all."""
    own_rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, _SCORES))
    own_dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, _SCORES))
    places = part_sums + (begin + own_rows)[:, None] * BLOCK_D + own_dims[None, :]
    gl.store(places, sums, (own_rows < GROUP)[:, None])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, _WHOLE))
    gl.store(part_tops + begin + rows, top, rows < GROUP)
    gl.store(part_totals + begin + rows, total, rows < GROUP)


@gluon.jit
def _query(query, kv_head, stride_head, GROUP: gl.constexpr, HEAD: gl.constexpr, BLOCK_D: gl.constexpr,
           BLOCK_M: gl.constexpr):  # fmt: skip
    """[BLOCK_M, BLOCK_D]: a token's query heads of a key head."""
    left: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    heads = kv_head * GROUP + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, left))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, left))
    mask = (heads < kv_head * GROUP + GROUP)[:, None] & (dims < HEAD)[None, :]
    return gl.load(query + heads[:, None] * stride_head + dims[None, :], mask, 0.0)


@gluon.jit
def _give_all(
    out, part_sums, part_tops, part_totals, first, count, out_stride_head,
    GROUP: gl.constexpr, HEAD: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """As invariant_attention._folded, with what four segments gave on the way at once."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    rows = gl.arange(0, BLOCK_M, layout=by_row)
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    total = gl.zeros([BLOCK_M], gl.float32, by_row)
    top = total - float("inf")
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout)
    for start in range(0, count, 4):
        found = ()
        for part in gl.static_range(4):
            row = (first + start + part).to(gl.int64) * GROUP + rows
            valid = (rows < GROUP) & (start + part < count)
            new = gl.load(part_sums + row[:, None] * BLOCK_D + dims[None, :], valid[:, None], 0.0, cache_modifier=".cg")
            new_top = gl.load(part_tops + row, valid, float("-inf"), cache_modifier=".cg")
            new_total = gl.load(part_totals + row, valid, 0.0, cache_modifier=".cg")
            found += ((new, new_top, new_total),)  # type: ignore[assignment]
        for part in gl.static_range(4):
            acc, top, total = _fold(
                acc, top, total, found[part][0], found[part][1], found[part][2], start + part < count
            )
    result = acc / gl.where(total > 0.0, total, 1.0)[:, None]
    mask = (rows < GROUP)[:, None] & (dims < HEAD)[None, :]
    gl.store(out + rows[:, None] * out_stride_head + dims[None, :], result.to(out.dtype.element_ty), mask)


@gluon.jit(do_not_specialize=["table_stride"])
def attend_few_decoding(
    out, part_sums, part_tops, part_totals, arrived, query, keys, values, block_table, query_start, seq_lens, scale,
    query_stride_token, query_stride_head, out_stride_token, out_stride_head, table_stride, stride_block,
    stride_token, stride_head,
    GROUP: gl.constexpr, HEAD: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, PAGE: gl.constexpr,
    SHORTEST: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As invariant_attention.attend_decoding, without soft caps."""
    let_next_start(PDL)
    dtype: gl.constexpr = query.dtype.element_ty
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    key_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, BLOCK_D], shared)
    value_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, BLOCK_D], shared)
    exchanged = gl.allocate_shared_memory(gl.float32, [BLOCK_M, 64], shared)
    rings = (key_ring, value_ring, exchanged)
    wait_for_inputs(PDL)
    kv_head = gl.program_id(0)
    request = gl.program_id(1)
    lane = gl.program_id(2)
    token = gl.load(query_start + request)
    query_len = gl.load(query_start + request + 1) - token
    seq_len = gl.load(seq_lens + request)
    segment = _segment_keys(seq_len, SHORTEST)
    count = gl.cdiv(seq_len, segment)
    if (query_len == 1) & (lane < count):
        of_token = query + token.to(gl.int64) * query_stride_token
        loaded = _query(of_token, kv_head, query_stride_head, GROUP, HEAD, BLOCK_D, BLOCK_M)
        row_table = block_table + request.to(gl.int64) * table_stride
        factor = scale * 1.4426950408889634
        own_rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, _SCORES))
        own_dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, _SCORES))
        first = (request * gl.num_programs(0) + kv_head) * MOST_SEGMENTS
        begin_out = token.to(gl.int64) * out_stride_token + kv_head * GROUP * out_stride_head
        for part in range(lane, count, gl.num_programs(2)):
            begin = part * segment
            end = gl.minimum(begin + segment, seq_len)
            sums, top, total = _attend(
                loaded, keys + kv_head * stride_head, values + kv_head * stride_head, row_table, begin, end,
                seq_len - 1, rings, factor, stride_block, stride_token, HEAD, BLOCK_D, BLOCK_M, PAGE, STAGES,
            )  # fmt: skip
            if count == 1:
                weight = gl.convert_layout(total, gl.SliceLayout(1, _SCORES))
                result = sums / gl.where(weight > 0.0, weight, 1.0)[:, None]
                own_places = begin_out + own_rows[:, None] * out_stride_head + own_dims[None, :]
                gl.store(out + own_places, result.to(dtype), (own_rows < GROUP)[:, None] & (own_dims < HEAD)[None, :])
            else:
                begin_part = (first + part).to(gl.int64) * GROUP
                _keep(part_sums, part_tops, part_totals, sums, top, total, begin_part, GROUP, BLOCK_D, BLOCK_M)
        if count > 1:
            # All threads have written before one of them tells so.
            gl.thread_barrier()
            counter = arrived + request * gl.num_programs(0) + kv_head
            last = gl.minimum(count, gl.num_programs(2)) - 1
            if gl.atomic_add(counter, 1, sem="acq_rel") == last:
                gl.store(counter, 0)
                _give_all(
                    out + begin_out, part_sums, part_tops, part_totals, first, count, out_stride_head,
                    GROUP, HEAD, BLOCK_D, BLOCK_M,
                )  # fmt: skip
