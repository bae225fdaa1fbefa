"""Prompts over latent vectors on Hopper GPUs, with keys of 64 + 128 elements and values of 128 for each head: the
kernel of prompt_attention.py, whose warps do the same here, for keys and values that are no longer in pages.

The rotary part of a key is the same for all heads, and is read from the latent vectors; the rest lies with the values.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagemill.model.kernels.gpu_facts import heads_in_l2, num_processors
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gluon_launch import let_next_start, wait_for_inputs
from pagemill.model.kernels.triton.mla_prompts import RECORD, Carried, Tiles
from pagemill.model.kernels.triton.prompt_attention import (
    LOG2_E,
    SWIZZLED,
    clean,
    draw,
    place_of,
    softmax_turn,
    tell,
    told,
)

TURNED = gl.constexpr(64)
PLAIN = gl.constexpr(128)
VALUE = gl.constexpr(128)
"""Elements of a key's rotary part, of the rest of it, and of a value."""
KEYS = gl.constexpr(128)
"""Of a turn."""
STAGES = gl.constexpr(2)
"""Turns whose keys and values shared memory holds."""


@gluon.jit
def _fetch(
    latent_map, expanded_map, query_map, memory, barriers, items, counter, records, num_tiles, heads, heads_at_once,
    first_head, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: queries, keys and values of every tile of this program, as shared memory becomes free."""
    wait_for_inputs(PDL)
    key_turned, key_plain, values, query_turned, query_plain = memory
    full, empty, query_full, item_full = barriers
    turn = gl.to_tensor(0)
    number = gl.to_tensor(0)
    item = draw(counter, num_tiles * heads)
    tell(items, 0, item)
    mbarrier.arrive(item_full.index(0))
    while item < num_tiles * heads:
        tile, head = place_of(item, num_tiles, heads_at_once)
        record = records + tile * RECORD
        token = gl.load(record)
        count = gl.cdiv(gl.load(record + 3), KEYS)
        base = gl.load(record + 4)
        # Who is done with the last keys of a tile is done with its queries.
        mbarrier.wait(empty.index((turn - 1) % STAGES * 2), (turn - 1) // STAGES & 1, pred=turn > 0)
        mbarrier.expect(query_full, 128 * (TURNED + PLAIN) * 2)
        column = (first_head + head) * (TURNED + PLAIN)
        for half in gl.static_range(2):
            row = token + half * 64
            tma.async_copy_global_to_shared(query_map, [row, column], query_full, query_turned.index(half))
            for part in gl.static_range(2):
                place = column + 64 + part * 64
                tma.async_copy_global_to_shared(query_map, [row, place], query_full, query_plain.index(half * 2 + part))
        column = head * (PLAIN + VALUE)
        for back in range(count):
            row = base + (count - 1 - back) * KEYS
            slot = turn % STAGES
            parity = (turn // STAGES & 1) ^ 1
            there = full.index(slot * 2)
            mbarrier.wait(empty.index(slot * 2), parity)
            mbarrier.expect(there, KEYS * (TURNED + PLAIN) * 2)
            tma.async_copy_global_to_shared(latent_map, [row, 0], there, key_turned.index(slot))
            for part in gl.static_range(2):
                target = key_plain.index(slot * 2 + part)
                tma.async_copy_global_to_shared(expanded_map, [row, column + part * 64], there, target)
            there = full.index(slot * 2 + 1)
            mbarrier.wait(empty.index(slot * 2 + 1), parity)
            mbarrier.expect(there, KEYS * VALUE * 2)
            for part in gl.static_range(2):
                target = values.index(slot * 2 + part)
                tma.async_copy_global_to_shared(expanded_map, [row, column + 128 + part * 64], there, target)
            turn += 1
        number += 1
        item = draw(counter, num_tiles * heads)
        # Told before its queries can be fetched: what the record says is read meanwhile.
        tell(items, number % 2, item)
        mbarrier.arrive(item_full.index(number % 2))


@gluon.jit
def _scores(query_turned, query_plain, key_turned, key_plain, slot, scores_in: gl.constexpr):
    """Asks for the products [64, KEYS] of both parts of queries and keys."""
    nothing = gl.zeros([64, KEYS], gl.float32, scores_in)
    scores = hopper.warpgroup_mma(
        query_turned, key_turned.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    return hopper.warpgroup_mma(query_plain, key_plain.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _turn(
    acc, top, total, weights, turn, left, masked, query_turned, query_plain, key_turned, key_plain, values, full, empty,
    start, positions, end, factor, scores_in: gl.constexpr, weights_in: gl.constexpr, sums_in: gl.constexpr,
):  # fmt: skip
    """As in prompt_attention.py: scores of the keys from `start` on, and meanwhile the values of the turn before."""
    slot = turn % STAGES
    before = (turn - 1) % STAGES
    scores = _scores(query_turned, query_plain, key_turned, key_plain, slot, scores_in)
    mbarrier.wait(full.index(before * 2 + 1), (turn - 1) // STAGES & 1)
    sums = hopper.warpgroup_mma(weights, values.index(before), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty.index(slot * 2))
    new, top, total, decay = softmax_turn(
        scores, top, total, masked, start, positions, end, factor, 1.0, KEYS, 0, 0, False, scores_in
    )
    next_weights = gl.convert_layout(new.to(weights.dtype), weights_in)
    # Asked here, this also keeps the assembler from waiting for the sums first, and then computing the weights.
    mbarrier.wait(full.index((turn + 1) % STAGES * 2), (turn + 1) // STAGES & 1, pred=left > 0)
    acc, _, weights = hopper.warpgroup_mma_wait(0, deps=[sums, weights, next_weights])
    mbarrier.arrive(empty.index(before * 2 + 1))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, sums_in))[:, None]
    return acc, top, total, weights, turn + 1


@gluon.jit
def _first_turn(
    top, total, turn, query_turned, query_plain, key_turned, key_plain, value_chunks, full, empty, start, positions,
    end, num_keys, factor, scores_in: gl.constexpr, weights_in: gl.constexpr,
):  # fmt: skip
    """Scores of a tile's last keys, from `start` on."""
    slot = turn % STAGES
    mbarrier.wait(full.index(slot * 2), turn // STAGES & 1)
    scores = _scores(query_turned, query_plain, key_turned, key_plain, slot, scores_in)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty.index(slot * 2))
    new, top, total, decay = softmax_turn(
        scores, top, total, True, start, positions, end, factor, 1.0, KEYS, 0, 0, False, scores_in
    )
    if start + KEYS > num_keys:
        mbarrier.wait(full.index(slot * 2 + 1), turn // STAGES & 1)
        clean(value_chunks, slot, start, end, VALUE, KEYS, KEYS)
    return gl.convert_layout(new.to(value_chunks.dtype), weights_in), top, total, decay


@gluon.jit
def _last_turn(acc, weights, turn, values, full, empty):
    """The values of a tile's first keys; all sums, [64, VALUE]."""
    before = (turn - 1) % STAGES
    mbarrier.wait(full.index(before * 2 + 1), (turn - 1) // STAGES & 1)
    sums = hopper.warpgroup_mma(weights, values.index(before), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index(before * 2 + 1))
    return acc


@gluon.jit
def _sums_at(carried_sums, token, heads, head, WHICH: gl.constexpr, scores_in: gl.constexpr):
    """(rows of a tile, where a row's maximum is carried; its sum of powers follows)."""
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_in))
    return rows, carried_sums + ((token + rows) * heads + head) * 2


@gluon.jit
def _values_at(carried, token, heads, head, WHICH: gl.constexpr, sums_in: gl.constexpr):
    """(rows of a tile, where their sums of values are carried)."""
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, sums_in))
    dims = gl.arange(0, VALUE, gl.SliceLayout(0, sums_in))
    return rows, carried + ((token + rows) * heads + head).to(gl.int64)[:, None] * VALUE + dims[None, :]


@gluon.jit
def _carried(
    carried, carried_sums, begun, token, count, heads, head, CARRIES: gl.constexpr, WHICH: gl.constexpr,
    scores_in: gl.constexpr, sums_in: gl.constexpr,
):  # fmt: skip
    """Sums, maxima (base 2) and sums of powers that 64 rows begin with; `token`: from the first that is carried."""
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores_in))
    top = total - float("inf")
    acc = gl.zeros([64, VALUE], gl.float32, sums_in)
    if CARRIES:
        rows, places = _sums_at(carried_sums, token, heads, head, WHICH, scores_in)
        mask = (rows < count) & (begun > 0)
        top = gl.load(places, mask, other=float("-inf"))
        total = gl.load(places + 1, mask, other=0.0)
        rows, places = _values_at(carried, token, heads, head, WHICH, sums_in)
        mask = (rows < count) & (begun > 0)
        acc = gl.load(places, mask[:, None], other=0.0)
    return acc, top, total


@gluon.jit
def _carry(
    carried, carried_sums, acc, top, total, token, count, heads, head, WHICH: gl.constexpr,
    scores_in: gl.constexpr, sums_in: gl.constexpr,
):  # fmt: skip
    """Leave 64 rows to who goes on with them."""
    rows, places = _sums_at(carried_sums, token, heads, head, WHICH, scores_in)
    gl.store(places, top, rows < count)
    gl.store(places + 1, total, rows < count)
    rows, places = _values_at(carried, token, heads, head, WHICH, sums_in)
    gl.store(places, acc, (rows < count)[:, None])


@gluon.jit
def _finish(
    out, acc, total, token, count, head, out_stride, WHICH: gl.constexpr, stores_in: gl.constexpr, sums_in: gl.constexpr
):  # fmt: skip
    """Store 64 rows of a tile whose first token this is."""
    inverse = 1.0 / gl.where(total > 0.0, total, 1.0)
    result = acc * gl.convert_layout(inverse, gl.SliceLayout(1, sums_in))[:, None]
    result = gl.convert_layout(result.to(out.dtype.element_ty), stores_in)
    dims = gl.arange(0, VALUE, gl.SliceLayout(0, stores_in))[None, :]
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, stores_in))
    places = out + (token + rows).to(gl.int64)[:, None] * out_stride + head * VALUE + dims
    gl.store(places, result, mask=(rows < count)[:, None])


@gluon.jit
def _leave(
    out, carried, carried_sums, acc, top, total, record, token, count, heads, first_head, head, carried_token,
    out_stride, CARRIES: gl.constexpr, WHICH: gl.constexpr, scores_in: gl.constexpr, sums_in: gl.constexpr,
    stores_in: gl.constexpr,
):  # fmt: skip
    """Carry 64 rows on where there are more keys for them, or store what they give."""
    if CARRIES:
        if gl.load(record + 7) > 0:
            _carry(
                carried, carried_sums, acc, top, total, token - carried_token, count, heads, head, WHICH, scores_in,
                sums_in,
            )  # fmt: skip
        else:
            _finish(out, acc, total, token, count, first_head + head, out_stride, WHICH, stores_in, sums_in)
    else:
        _finish(out, acc, total, token, count, first_head + head, out_stride, WHICH, stores_in, sums_in)


@gluon.jit
def _attend(
    memory, barriers, items, records, out, carried, carried_sums, num_tiles, factor, heads, heads_at_once, first_head,
    carried_token, out_stride, CARRIES: gl.constexpr, WHICH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One of two warpgroups: 64 rows of every tile of this program."""
    wait_for_inputs(PDL)
    key_turned, plain_chunks, value_chunks, queries, query_chunks = memory
    full, empty, query_full, item_full = barriers
    dtype: gl.constexpr = out.dtype.element_ty
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    weights_in: gl.constexpr = gl.DotOperandLayout(0, sums_in, 2)
    stores_in: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_plain = plain_chunks._reinterpret(dtype, [STAGES, KEYS, PLAIN], shared)
    values = value_chunks._reinterpret(dtype, [STAGES, KEYS, VALUE], shared)
    query_turned = queries.index(WHICH)
    query_plain = query_chunks._reinterpret(dtype, [2, 64, PLAIN], shared).index(WHICH)
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_in))
    turn = gl.to_tensor(0)
    number = gl.to_tensor(0)
    mbarrier.wait(item_full.index(0), 0)
    item = told(items, 0)
    while item < num_tiles * heads:
        tile, head = place_of(item, num_tiles, heads_at_once)
        record = records + tile * RECORD
        token, num_tokens, first = gl.load(record), gl.load(record + 1), gl.load(record + 2)
        end, num_keys = gl.load(record + 3), gl.load(record + 5)
        acc, top, total = _carried(
            carried, carried_sums, gl.load(record + 6), token - carried_token, num_tokens, heads, head, CARRIES, WHICH,
            scores_in, sums_in,
        )  # fmt: skip
        mbarrier.wait(query_full, number & 1)
        positions = first + rows
        count = gl.cdiv(end, KEYS)
        plain = (first + 1) // KEYS
        weights, top, total, decay = _first_turn(
            top, total, turn, query_turned, query_plain, key_turned, key_plain, value_chunks, full, empty,
            (count - 1) * KEYS, positions, end, num_keys, factor, scores_in, weights_in,
        )  # fmt: skip
        if CARRIES:
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, sums_in))[:, None]
        turn += 1
        mbarrier.wait(full.index(turn % STAGES * 2), turn // STAGES & 1, pred=count > 1)
        for left in range(count - 2, -1, -1):
            acc, top, total, weights, turn = _turn(
                acc, top, total, weights, turn, left, left >= plain, query_turned, query_plain, key_turned, key_plain,
                values, full, empty, left * KEYS, positions, end, factor, scores_in, weights_in, sums_in,
            )  # fmt: skip
        acc = _last_turn(acc, weights, turn, values, full, empty)
        _leave(
            out, carried, carried_sums, acc, top, total, record, token, num_tokens, heads, first_head, head,
            carried_token, out_stride, CARRIES, WHICH, scores_in, sums_in, stores_in,
        )  # fmt: skip
        number += 1
        mbarrier.wait(item_full.index(number % 2), number // 2 & 1)
        item = told(items, number % 2)


# Numbers that differ from step to step: a step must not wait for another compiled variant.
@gluon.jit(do_not_specialize=["num_tiles", "heads", "heads_at_once", "first_head", "carried_token"])
def attend_to_expanded(
    latent_map, expanded_map, query_map, out, carried, carried_sums, records, counter, num_tiles, factor, heads,
    heads_at_once, first_head, carried_token, out_stride, CARRIES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs take one (tile, head) after the other, in the order of prompt_attention.attend_to_prompts. As
    mla_prompts.attend_expanded; counter [1], 0 before the first launch of a plan."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    dtype: gl.constexpr = out.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_turned = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 64], shared)
    key_plain = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, 64], shared)
    values = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, 64], shared)
    query_turned = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    query_plain = gl.allocate_shared_memory(dtype, [4, 64, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    query_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full.index(0), count=1)
    items = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(item_full.index(buffer), count=1)
    memory = (key_turned, key_plain, values, query_turned, query_plain)
    barriers = (full, empty, query_full.index(0), item_full)
    gl.warp_specialize(
        [
            (_attend, (
                memory, barriers, items, records, out, carried, carried_sums, num_tiles, factor, heads, heads_at_once,
                first_head, carried_token, out_stride, CARRIES, 0, PDL,
            )),
            (_attend, (
                memory, barriers, items, records, out, carried, carried_sums, num_tiles, factor, heads, heads_at_once,
                first_head, carried_token, out_stride, CARRIES, 1, PDL,
            )),
            (_fetch, (
                latent_map, expanded_map, query_map, memory, barriers, items, counter, records, num_tiles, heads,
                heads_at_once, first_head, PDL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes(query: Tensor, sizes: tuple[int, int, int]) -> bool:
    """Whether the kernel computes heads of these sizes, rotary, plain and value, of such queries [T, H, D]: two bytes
    an element, dense heads."""
    dense = query.stride()[1:] == (query.shape[2], 1) and query.stride(0) % 8 == 0 and query.data_ptr() % 16 == 0
    return query.element_size() == 2 and dense and sizes == (TURNED.value, PLAIN.value, VALUE.value)


def attend(
    out: Tensor, query: Tensor, rows: Tensor, expanded: Tensor, tiles: Tiles, scale: float, first_head: int,
    carried: Carried | None,
) -> None:  # fmt: skip
    """Attention of prompts whose keys and values have been made, with the arguments of mla_prompts.attend."""
    heads, both = expanded.shape[1:]
    num_tiles = len(tiles.records)
    carries = carried is not None
    carried = carried or Carried(out, out, 0)
    wide = query.as_strided((len(query), query.shape[1] * query.shape[2]), (query.stride(0), 1))
    launch.on(attend_to_expanded, (min(num_processors(query.device), num_tiles * heads),))(
        _map(rows, KEYS.value), _map(expanded.flatten(1), KEYS.value), _map(wide, 64), out,
        carried.sums, carried.totals, tiles.records, tiles.counter, num_tiles, scale * LOG2_E.value, heads,
        heads_in_l2(heads, len(expanded) * both * expanded.element_size()), first_head, carried.first_token,
        out.stride(0), CARRIES=carries, PDL=launch.dependent(), **launch.options(4),
    )  # fmt: skip


def _map(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine needs to fetch so many rows of 64 elements."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, SWIZZLED], layout)
