"""From the qkv projection to attention in one kernel: norms of query and key, rotary embedding, write to the KV cache.

Knows the cache only as blocks with strides. Rounds where the separate operations round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.limits import within

_FEW_TOKENS = 64
"""Up to here every KV head and its queries are a program of their own."""
_ELEMENTS = 4096
"""Of the queries of a program, at most."""
_REGISTERS = 80
"""Of a thread. Told nothing, the assembler makes do with 64, for which it reads the keys after the queries are done."""
_ROUNDS_EACH = {"enable_fp_fusion": False}
"""Options of a launch. With products and sums fused, one of the two products of a rotation is not rounded, and which
one depends on the size of the tile."""
_HEADS = 8
_WARP_ELEMENTS = 256
"""Of a tile, for each of its warps: a thread then has 8 elements of a head side by side, of which it makes a sum before
others add theirs. With fewer, how the sum is divided would depend on the size of the tile."""

HeadNorm = tuple[Tensor, float]
"""Weight [D] and eps of a norm on every head."""


@triton.jit
def _heads_of(row, first_head, COUNT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
              BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    """COUNT heads of a token, [BLOCK, ..]: both halves of what is turned, and the rest (nothing, where all is)."""
    heads = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    source = row + (first_head + heads) * D
    mask = (heads < COUNT) & (cols < HALF)
    first = tl.load(source + cols, mask, 0.0)
    second = tl.load(source + HALF + cols, mask, 0.0)
    rest = first
    if D > 2 * HALF:
        rest_cols = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(source + rest_cols, (heads < COUNT) & (rest_cols < D), 0.0)
    return first, second, rest


@triton.jit
def _weighted(x, inverse, weight, cols, END: tl.constexpr, ROUND_ONCE: tl.constexpr, dtype: tl.constexpr):
    """float32 x [heads, C] * inverse * the weight at cols [1, C], rounded to dtype."""
    x = x * inverse
    if not ROUND_ONCE:
        x = x.to(dtype).to(tl.float32)
    return (x * tl.load(weight + cols, cols < END, 0.0).to(tl.float32)).to(dtype)


@triton.jit
def _normed(first, second, rest, weight, eps, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
            BLOCK_REST: tl.constexpr, ROUND_ONCE: tl.constexpr):  # fmt: skip
    """The norm of each head, in the parts of `_heads_of`."""
    dtype: tl.constexpr = first.dtype
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if D > 2 * HALF:
        squares += tl.sum(rest * rest, 1)
    inverse = tl.math.rsqrt(squares / D + eps)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    first = _weighted(first, inverse, weight, cols, HALF, ROUND_ONCE, dtype)
    second = _weighted(second, inverse, weight + HALF, cols, HALF, ROUND_ONCE, dtype)
    if D > 2 * HALF:
        rest = _weighted(rest, inverse, weight, 2 * HALF + tl.arange(0, BLOCK_REST)[None, :], D, ROUND_ONCE, dtype)
    else:
        rest = first
    return first, second, rest


@triton.jit
def _table(table, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """float32 [1, half] of a token's cos or sin, for each half."""
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    first = tl.load(table + cols, cols < HALF, 0.0)
    second = tl.load(table + HALF + cols, cols < HALF, 0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _turned(x, partner, cos, sin, ROUND: tl.constexpr):
    """x * cos + partner * sin; ROUND: each product is rounded to x's type, as where the tables are of that type."""
    dtype: tl.constexpr = x.dtype
    straight, across = x.to(tl.float32) * cos, partner.to(tl.float32) * sin
    if ROUND:
        straight, across = straight.to(dtype).to(tl.float32), across.to(dtype).to(tl.float32)
    return (straight + across).to(dtype)


@triton.jit
def _to_cache(cache, tile, place, mask, scale, largest, SMALL: tl.constexpr):
    """Write a tile; a SMALL type holds it divided by `scale`."""
    if SMALL:
        wide = tile.to(tl.float32)
        if scale is not None:
            wide = wide / tl.load(scale)
        tile = within(wide, largest)
    tl.store(cache + place, tile.to(cache.dtype.element_ty), mask)


@triton.jit
def _attention_inputs(
    query, key, key_cache, value_cache, qkv, cos, sin, slots, q_weight, k_weight,
    qkv_stride, cos_stride, sin_stride, block_stride, slot_stride, head_stride, q_eps, k_eps, k_scale, v_scale, largest,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HKV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, NORM_ONCE: tl.constexpr,
    ROPE_ONCE: tl.constexpr, WRITE: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one of PARTS of a token's heads, queries with their keys and values. Reads all before it writes."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q: tl.constexpr = H // PARTS
    KV: tl.constexpr = HKV // PARTS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = qkv + token * qkv_stride
    q0, q1, q2 = _heads_of(row, part * Q, Q, D, HALF, BLOCK_H, BLOCK_HALF, BLOCK_REST)
    k0, k1, k2 = _heads_of(row, H + part * KV, KV, D, HALF, BLOCK_HKV, BLOCK_HALF, BLOCK_REST)
    kv_heads = tl.arange(0, BLOCK_HKV)[:, None]
    all_cols = tl.arange(0, BLOCK_D)[None, :]
    kv_mask = (kv_heads < KV) & (all_cols < D)
    kv_heads += part * KV
    if WRITE:
        value = tl.load(row + (H + HKV + kv_heads) * D + all_cols, kv_mask, 0.0)
        slot = tl.load(slots + token).to(tl.int64)
    cos0, cos1 = _table(cos + token * cos_stride, HALF, BLOCK_HALF)
    sin0, sin1 = _table(sin + token * sin_stride, HALF, BLOCK_HALF)
    if NORM:
        q0, q1, q2 = _normed(q0, q1, q2, q_weight, q_eps, D, HALF, BLOCK_HALF, BLOCK_REST, NORM_ONCE)
        k0, k1, k2 = _normed(k0, k1, k2, k_weight, k_eps, D, HALF, BLOCK_HALF, BLOCK_REST, NORM_ONCE)
    q0, q1 = _turned(q0, q1, cos0, -sin0, not ROPE_ONCE), _turned(q1, q0, cos1, sin1, not ROPE_ONCE)
    k0, k1 = _turned(k0, k1, cos0, -sin0, not ROPE_ONCE), _turned(k1, k0, cos1, sin1, not ROPE_ONCE)

    heads = tl.arange(0, BLOCK_H)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    rest_cols = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    places = query + token * (H * D) + (part * Q + heads) * D
    tl.store(places + cols, q0, (heads < Q) & (cols < HALF))
    tl.store(places + HALF + cols, q1, (heads < Q) & (cols < HALF))
    if D > 2 * HALF:
        tl.store(places + rest_cols, q2, (heads < Q) & (rest_cols < D))
    here = tl.arange(0, BLOCK_HKV)[:, None] < KV
    if WRITE:
        here = here & (slot >= 0)
        start = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + kv_heads * head_stride
        _to_cache(value_cache, value, start + all_cols, kv_mask & (slot >= 0), v_scale, largest, SMALL)
        target = key_cache
    else:
        start = token * (HKV * D) + kv_heads * D
        target = key
    _to_cache(target, k0, start + cols, here & (cols < HALF), k_scale, largest, SMALL)
    _to_cache(target, k1, start + HALF + cols, here & (cols < HALF), k_scale, largest, SMALL)
    if D > 2 * HALF:
        _to_cache(target, k2, start + rest_cols, here & (rest_cols < D), k_scale, largest, SMALL)


def attention_inputs(
    qkv: Tensor,
    num_heads: int,
    head_size: int,
    rope: tuple[Tensor, Tensor],
    norms: tuple[HeadNorm, HeadNorm] | None = None,
    target: KVTarget | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As reference.attention_inputs: the query [T, H, D], normed and turned; without a `target` the key and value too.

    qkv [T, (H + 2 * Hkv) * D], rows of any stride.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads = (qkv.shape[1] // head_size - num_heads) // 2
    cos, sin = rope
    query = torch.empty(num_tokens, num_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    key = value = None
    if target is None:
        key = torch.empty(num_tokens, num_kv_heads, head_size, dtype=qkv.dtype, device=qkv.device)
        value = qkv[:, (num_heads + num_kv_heads) * head_size :].view(num_tokens, num_kv_heads, head_size)
    if not num_tokens:
        return query, key, value
    half = cos.shape[-1] // 2
    block_half = launch.power_of_two(half)
    adds_up = norms is not None and target is not None and target.invariant
    apart = num_tokens <= _FEW_TOKENS or (adds_up and head_size > 2 * half)
    parts = num_kv_heads if apart else _num_parts(num_heads, num_kv_heads, head_size)
    block_h = launch.power_of_two(num_heads // parts)
    block_hkv = launch.power_of_two(num_kv_heads // parts)
    if adds_up:
        block_h = max(block_h, _WARP_ELEMENTS // block_half)
    num_warps = max(1, min(16, block_h * block_half // 512))
    if adds_up:
        block_hkv = max(block_hkv, _WARP_ELEMENTS * num_warps // block_half)
    cache_strides = (0, 0, 0) if target is None else target.key_cache.stride()[:3]
    cache_dtype = qkv.dtype if target is None else target.key_cache.dtype
    (q_weight, q_eps), (k_weight, k_eps) = norms if norms is not None else ((qkv, 0.0), (qkv, 0.0))
    launch.on(_attention_inputs, (num_tokens, parts))(
        query, query if key is None else key,
        query if target is None else target.key_cache, query if target is None else target.value_cache,
        qkv, cos, sin, cos if target is None else target.slot_mapping, q_weight, k_weight,
        qkv.stride(0), cos.stride(0), sin.stride(0), *cache_strides, q_eps, k_eps,
        None if target is None else target.key_scale, None if target is None else target.value_scale,
        torch.finfo(cache_dtype).max,
        H=num_heads, HKV=num_kv_heads, D=head_size, HALF=half, PARTS=parts,
        BLOCK_H=block_h, BLOCK_HKV=block_hkv,
        BLOCK_D=launch.power_of_two(head_size), BLOCK_HALF=block_half,
        BLOCK_REST=launch.power_of_two(max(1, head_size - 2 * half)),
        BLOCK_SIZE=1 if target is None else target.key_cache.shape[1],
        NORM=norms is not None, NORM_ONCE=q_weight.dtype == torch.float32 and qkv.dtype != torch.float32,
        ROPE_ONCE=cos.dtype != qkv.dtype, WRITE=target is not None, SMALL=cache_dtype.itemsize == 1,
        PDL=launch.dependent(), maxnreg=_REGISTERS, **_ROUNDS_EACH, **launch.options(num_warps),
    )  # fmt: skip
    return query, key, value


def _num_parts(num_heads: int, num_kv_heads: int, head_size: int) -> int:
    """The fewest parts of equally many KV heads whose queries are not more than a program should hold."""
    dividers = (parts for parts in range(1, num_kv_heads + 1) if num_kv_heads % parts == 0)
    return next((parts for parts in dividers if num_heads // parts * head_size <= _ELEMENTS), num_kv_heads)


@triton.jit
def _rotate(
    x, cos, sin, token_stride, head_stride, cos_stride, sin_stride,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS: tl.constexpr, ROPE_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < H) & (cols < HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = x + token * token_stride + heads * head_stride + cols
    # A thread has both of the elements that are turned into each other, so it may overwrite them.
    first = tl.load(places, mask, 0.0)
    second = tl.load(places + HALF, mask, 0.0)
    cos0, cos1 = _table(cos + token * cos_stride, HALF, BLOCK_HALF)
    sin0, sin1 = _table(sin + token * sin_stride, HALF, BLOCK_HALF)
    tl.store(places, _turned(first, second, cos0, -sin0, not ROPE_ONCE), mask)
    tl.store(places + HALF, _turned(second, first, cos1, sin1, not ROPE_ONCE), mask)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As reference.rotate_: [T, H, D] of any strides but the last, in place; cos and sin [T, n]."""
    num_tokens, num_heads, _ = x.shape
    if not num_tokens:
        return
    heads = min(_HEADS, launch.power_of_two(num_heads))
    half = cos.shape[-1] // 2
    launch.on(_rotate, (num_tokens, triton.cdiv(num_heads, heads)))(
        x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0),
        H=num_heads, HALF=half, BLOCK_HALF=launch.power_of_two(half), HEADS=heads, ROPE_ONCE=cos.dtype != x.dtype,
        PDL=launch.dependent(), **_ROUNDS_EACH, **launch.options(),
    )  # fmt: skip
