"""Attention over latent vectors in the paged cache: all heads of a token read one entry of each token before it, as key
and as value. Knows nothing about steps; one program per token, block of heads and part of the keys.

Online softmax after Dao, FlashAttention-2 (2023); the split over keys after Dao et al., Flash-Decoding (2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _write(cache, key, slot_mapping, key_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, BLOCK)
    if slot >= 0:
        values = tl.load(key + token * key_stride + columns, columns < SIZE, 0.0)
        tl.store(cache + slot * SIZE + columns, values.to(cache.dtype.element_ty), columns < SIZE)


@triton.jit
def _attend(
    out, partial_lse, query, cache, block_table, requests, num_seen, scale, table_stride, query_stride,
    H: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With one split `out` is the result [T, H, LATENT]; with more, results of the splits [T, SPLITS, H, LATENT] and
    their sums of powers, as logarithms to base 2, [T, SPLITS, H]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    SIZE: tl.constexpr = ROPE + LATENT
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    turned, latent, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    real = heads < H
    seen = tl.load(num_seen + token)
    row = block_table + tl.load(requests + token).to(tl.int64) * table_stride
    share = tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, seen)

    places = query + token * query_stride + heads[:, None] * SIZE
    q_turned = tl.load(places + turned[None, :], real[:, None] & (turned < ROPE)[None, :], 0.0)
    q_latent = tl.load(places + ROPE + latent[None, :], real[:, None] & (latent < LATENT)[None, :], 0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        positions = start + columns
        live = positions < end
        page = tl.load(row + positions // PAGE, live, 0).to(tl.int64)
        entries = cache + (page * PAGE + positions % PAGE)[:, None] * SIZE
        k_turned = tl.load(entries + turned[None, :], live[:, None] & (turned < ROPE)[None, :], 0.0)
        k_latent = tl.load(entries + ROPE + latent[None, :], live[:, None] & (latent < LATENT)[None, :], 0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(k_turned), scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores * (scale * LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        powers = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(powers, 1)
        acc = tl.dot(powers.to(k_latent.dtype), k_latent, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    # Of no keys the result is zeros: rows of the padding, and parts beyond a short sequence.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = (token * SPLITS + split) * H + heads
    mask = real[:, None] & (latent < LATENT)[None, :]
    tl.store(out + target[:, None] * LATENT + latent[None, :], acc.to(out.dtype.element_ty), mask)
    if SPLITS > 1:
        lse = tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + target, lse, real)


@triton.jit
def _merge(
    out, parts, partial_lse, H: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits, latent = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_L)
    rows = (token * SPLITS + splits) * H + head
    lse = tl.load(partial_lse + rows, splits < SPLITS, float("-inf"))
    largest = tl.max(lse, 0)
    weights = tl.where(lse > float("-inf"), tl.exp2(lse - tl.where(largest > float("-inf"), largest, 0.0)), 0.0)
    total = tl.sum(weights, 0)
    mask = (splits < SPLITS)[:, None] & (latent < LATENT)[None, :]
    values = tl.load(parts + rows[:, None] * LATENT + latent[None, :], mask, 0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (token * H + head) * LATENT + latent, result.to(out.dtype.element_ty), latent < LATENT)


def write_latents(key: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """key [T, D] -> cache [num_blocks, block_size, D], contiguous, at the slots of slot_mapping [T]; negative ones are
    skipped."""
    size = key.shape[1]
    if len(key):
        launch.on(_write, (len(key),))(
            cache, key, slot_mapping, key.stride(0), SIZE=size, BLOCK=launch.power_of_two(size),
            PDL=launch.dependent(), **launch.options(),
        )  # fmt: skip


def attend_latents(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    num_seen: Tensor,
    scale: float,
    latent_size: int,
    num_splits: int,
) -> Tensor:
    """query [T, H, D], contiguous; cache [num_blocks, block_size, D], of which the last latent_size elements are the
    value -> [T, H, latent_size]. Of each token: its request [T], a row of block_table, and the number of the request's
    tokens that it sees [T], both int32."""
    num_tokens, num_heads, size = query.shape
    out = torch.empty(num_tokens, num_heads, latent_size, dtype=query.dtype, device=query.device)
    if not num_tokens:
        return out
    shape = (num_tokens, num_splits, num_heads)
    split = num_splits > 1
    parts = torch.empty(*shape, latent_size, dtype=torch.float32, device=query.device) if split else out
    lse = torch.empty(shape, dtype=torch.float32, device=query.device) if split else out
    rope_size = size - latent_size
    block_l = launch.power_of_two(latent_size)
    block_h = min(64, max(16, launch.power_of_two(num_heads)))
    launch.on(_attend, (num_tokens, triton.cdiv(num_heads, block_h), num_splits))(
        parts, lse, query, cache, block_table, requests, num_seen, scale, block_table.stride(0), query.stride(0),
        H=num_heads, ROPE=rope_size, LATENT=latent_size, BLOCK_R=max(16, launch.power_of_two(rope_size)),
        BLOCK_L=max(16, block_l), BLOCK_H=block_h, BLOCK_N=32 if block_h < 64 else 16, PAGE=cache.shape[1],
        SPLITS=num_splits, PDL=launch.dependent(), num_stages=2, **launch.options(8 if block_h >= 64 else 4),
    )  # fmt: skip
    if split:
        launch.on(_merge, (num_tokens, num_heads))(
            out, parts, lse, H=num_heads, LATENT=latent_size, BLOCK_L=block_l, SPLITS=num_splits,
            BLOCK_S=launch.power_of_two(num_splits), PDL=launch.dependent(), **launch.options(),
        )  # fmt: skip
    return out
