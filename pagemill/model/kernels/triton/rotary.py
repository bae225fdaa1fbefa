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

_FEW_TOKENS = 64
"""Up to here every head is a program of its own."""
_HEADS = 8

HeadNorm = tuple[Tensor, float]
"""Weight [D] and eps of a norm on every head."""


@triton.jit
def _head_norm(x, partner, weight, cols, partner_cols, mask, eps, D, ROUND_ONCE: tl.constexpr, dtype: tl.constexpr):
    """Norm of the rows of x [heads, D], applied to x and to the same elements in the order of `partner`."""
    inverse = tl.math.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x, partner = x * inverse, partner * inverse
    if not ROUND_ONCE:
        x, partner = x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)
    x *= tl.load(weight + cols, mask, 0.0).to(tl.float32)[None, :]
    partner *= tl.load(weight + partner_cols, mask, 0.0).to(tl.float32)[None, :]
    return x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)


@triton.jit
def _turn(x, partner, cos, sin, cols, n, ROUND: tl.constexpr, dtype: tl.constexpr):
    """Rotary embedding of x [heads, D] by one token's cos and sin [n]; elements beyond n stay."""
    turned = cols < n
    c = tl.load(cos + cols, turned, 1.0).to(tl.float32)
    s = tl.load(sin + cols, turned, 0.0).to(tl.float32)
    first = x * c[None, :]
    second = tl.where(cols < n // 2, -s, s)[None, :] * partner
    if ROUND:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return (first + second).to(dtype)


@triton.jit
def _partner(cols, n):
    """The element with which each is turned, the one half of n away; itself beyond n."""
    half = n // 2
    return tl.where(cols < half, cols + half, tl.where(cols < n, cols - half, cols))


@triton.jit
def _to_cache(cache, tile, slot, heads, cols, mask, scale, block_stride, slot_stride, head_stride, largest,
              BLOCK_SIZE: tl.constexpr, SMALL: tl.constexpr):  # fmt: skip
    """Write [heads, D] of one token to its slot; a SMALL type holds it divided by `scale`."""
    if SMALL:
        wide = tile.to(tl.float32)
        if scale is not None:
            wide = wide / tl.load(scale)
        tile = tl.minimum(tl.maximum(wide, -largest), largest)
    place = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    places = place + heads[:, None] * head_stride + cols[None, :]
    tl.store(places, tile.to(cache.dtype.element_ty), mask & (slot >= 0))


@triton.jit
def _attention_inputs(
    query, key, key_cache, value_cache, qkv, cos, sin, slots, q_weight, k_weight,
    qkv_stride, cos_stride, sin_stride, block_stride, slot_stride, head_stride, q_eps, k_eps, k_scale, v_scale, largest,
    n,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, NORM_ONCE: tl.constexpr, ROPE_ONCE: tl.constexpr,
    WRITE: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, block = tl.program_id(0), tl.program_id(1)
    q_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    k_blocks: tl.constexpr = (HKV + HEADS - 1) // HEADS
    cols = tl.arange(0, BLOCK_D)
    partner_cols = _partner(cols, n)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = qkv + token.to(tl.int64) * qkv_stride
    if block < q_blocks + k_blocks:
        is_query = block < q_blocks
        heads = tl.where(is_query, block, block - q_blocks) * HEADS + tl.arange(0, HEADS)
        mask = (heads < tl.where(is_query, H, HKV))[:, None] & (cols < D)[None, :]
        source = row + tl.where(is_query, 0, H * D) + heads[:, None] * D
        x = tl.load(source + cols[None, :], mask, 0.0).to(tl.float32)
        partner = tl.load(source + partner_cols[None, :], mask, 0.0).to(tl.float32)
        if NORM:
            weight = q_weight if is_query else k_weight
            eps = tl.where(is_query, q_eps, k_eps)
            x, partner = _head_norm(x, partner, weight, cols, partner_cols, cols < D, eps, D, NORM_ONCE, dtype)
        c, s = cos + token.to(tl.int64) * cos_stride, sin + token.to(tl.int64) * sin_stride
        result = _turn(x, partner, c, s, cols, n, not ROPE_ONCE, dtype)
        if is_query:
            place = query + token.to(tl.int64) * (H * D) + heads[:, None] * D + cols[None, :]
            tl.store(place, result, mask)
        elif WRITE:
            slot = tl.load(slots + token).to(tl.int64)
            _to_cache(
                key_cache, result, slot, heads, cols, mask, k_scale, block_stride, slot_stride, head_stride, largest,
                BLOCK_SIZE, SMALL,
            )  # fmt: skip
        else:
            place = key + token.to(tl.int64) * (HKV * D) + heads[:, None] * D + cols[None, :]
            tl.store(place, result, mask)
    else:
        heads = (block - q_blocks - k_blocks) * HEADS + tl.arange(0, HEADS)
        mask = (heads < HKV)[:, None] & (cols < D)[None, :]
        value = tl.load(row + (H + HKV) * D + heads[:, None] * D + cols[None, :], mask, 0.0)
        slot = tl.load(slots + token).to(tl.int64)
        _to_cache(
            value_cache, value, slot, heads, cols, mask, v_scale, block_stride, slot_stride, head_stride, largest,
            BLOCK_SIZE, SMALL,
        )  # fmt: skip


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
    heads = 1 if num_tokens <= _FEW_TOKENS else _HEADS
    kv_blocks = triton.cdiv(num_kv_heads, heads)
    blocks = triton.cdiv(num_heads, heads) + kv_blocks * (1 if target is None else 2)
    cache_strides = (0, 0, 0) if target is None else target.key_cache.stride()[:3]
    cache_dtype = qkv.dtype if target is None else target.key_cache.dtype
    (q_weight, q_eps), (k_weight, k_eps) = norms if norms is not None else ((qkv, 0.0), (qkv, 0.0))
    _attention_inputs[(num_tokens, blocks)](
        query, query if key is None else key,
        query if target is None else target.key_cache, query if target is None else target.value_cache,
        qkv, cos, sin, cos if target is None else target.slot_mapping, q_weight, k_weight,
        qkv.stride(0), cos.stride(0), sin.stride(0), *cache_strides, q_eps, k_eps,
        None if target is None else target.key_scale, None if target is None else target.value_scale,
        torch.finfo(cache_dtype).max, cos.shape[-1],
        H=num_heads, HKV=num_kv_heads, D=head_size, BLOCK_D=launch.power_of_two(head_size), HEADS=heads,
        BLOCK_SIZE=1 if target is None else target.key_cache.shape[1],
        NORM=norms is not None, NORM_ONCE=q_weight.dtype == torch.float32 and qkv.dtype != torch.float32,
        ROPE_ONCE=cos.dtype != qkv.dtype, WRITE=target is not None, SMALL=cache_dtype.itemsize == 1,
        PDL=launch.dependent(), **launch.options(1 if heads == 1 else 4),
    )  # fmt: skip
    return query, key, value


@triton.jit
def _rotate(
    x, cos, sin, token_stride, head_stride, cos_stride, sin_stride, n,
    H: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, ROPE_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK_D)
    mask = (heads < H)[:, None] & (cols < n)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = x + token * token_stride + heads[:, None] * head_stride
    tile = tl.load(source + cols[None, :], mask, 0.0).to(tl.float32)
    partner = tl.load(source + _partner(cols, n)[None, :], mask, 0.0).to(tl.float32)
    # Threads read each other's elements: all must have them before any is overwritten.
    tl.debug_barrier()
    dtype: tl.constexpr = x.dtype.element_ty
    c, s = cos + token * cos_stride, sin + token * sin_stride
    tl.store(source + cols[None, :], _turn(tile, partner, c, s, cols, n, not ROPE_ONCE, dtype), mask)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As reference.rotate_: [T, H, D] of any strides but the last, in place; cos and sin [T, n]."""
    num_tokens, num_heads, _ = x.shape
    if not num_tokens:
        return
    heads = min(_HEADS, launch.power_of_two(num_heads))
    size = cos.shape[-1]
    _rotate[(num_tokens, triton.cdiv(num_heads, heads))](
        x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), size,
        H=num_heads, BLOCK_D=launch.power_of_two(size), HEADS=heads, ROPE_ONCE=cos.dtype != x.dtype,
        PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip
