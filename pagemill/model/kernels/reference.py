"""What the kernels compute, in plain torch: the definition that they are tested against, and the way without them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.kv_target import KVTarget

SMALLEST_ROW = 1e-30
"""A row of keys or values whose largest element is less is kept as zeros."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32. `residual` becomes x + residual first.

    A float32 weight beside another type of x is multiplied before rounding (Gemma), else after.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * weight).to(x.dtype)
    return wide.to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. `residual` becomes x + residual
    first."""
    if residual is not None:
        x = residual.add_(x)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def activated(x: Tensor, activation: str) -> Tensor:
    """act of each element: silu, gelu, gelu_tanh, relu or relu2."""
    if activation == "relu2":
        return functional.relu(x).square_()
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    result: Tensor = getattr(functional, activation)(x)
    return result


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place, halves as pairs; cos and sin [T, n], n <= D: elements beyond stay."""
    x = x[..., : cos.shape[-1]]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    x.copy_(x * cos.unsqueeze(1) + turned)


def gated(x: Tensor, gelu: bool) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half; gelu in its tanh form, else SiLU."""
    gate, up = x.chunk(2, dim=-1)
    activated = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    return activated.mul_(up)


def sum_rows_(sums: Tensor, x: Tensor, starts: Tensor, slots: Tensor) -> None:
    """`ops.sum_rows_` in plain torch: add the rows of each request to the row of its slot."""
    owners = slots.repeat_interleave(starts.diff())
    chosen = (owners >= 0).nonzero().squeeze(1)
    if len(chosen) < len(x):
        owners = owners[chosen]
        x = x.index_select(0, chosen.to(x.device))
    sums.index_add_(0, owners.to(x.device), x.float())


def argmax(logits: Tensor) -> Tensor:
    """[L, V] -> [L] int64: the first index of the largest; -1 for a row that is no distribution."""
    return token_or_none(logits, logits.argmax(-1))


def token_or_none(logits: Tensor, tokens: Tensor) -> Tensor:
    """[L, V], [L] -> [L]: the tokens; -1 where a row has a NaN or its largest is infinite, so that it is no
    distribution that a token could be chosen by."""
    return tokens.masked_fill(~logits.amax(-1).isfinite(), -1)


def mask_(logits: Tensor, words: Tensor) -> None:
    """[L, V] in place, by [L, ceil(V / 32)] int32: minus infinity where the bit of a token is 0, which is bit t % 32 of
    word t // 32."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    refused = ((words.unsqueeze(-1) >> places) & 1 == 0).flatten(1)
    logits.masked_fill_(refused[:, : logits.shape[1]], -torch.inf)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, K] times [N, K] -> [T, N] in `out_dtype` (x's type); with a gate (silu, gelu_tanh) of the first half,
    [T, N / 2]."""
    result = functional.linear(x, weight, bias)
    if gate is not None:
        result = gated(result, gate == "gelu_tanh")
    return result if out_dtype is None else result.to(out_dtype)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(linear(norm(x + residual)), x + residual); `norm` is weight and eps. The sum may take the residual's place."""
    normed = rms_norm(x, *norm, residual)
    return linear(normed, weight, bias, gate), x if residual is None else residual


def linear_norm(x: Tensor, before: Tensor, norm: tuple[Tensor, float], residual: Tensor | None = None) -> Tensor:
    """norm(x times `before` + residual); the sum takes the residual's place."""
    return rms_norm(linear(x, before), *norm, residual)


def linear_norm_linear(
    x: Tensor,
    before: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` of x times `before`."""
    return norm_linear(linear(x, before), residual, norm, weight, bias, gate)


def gather_pair(first: Tensor, second: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(first[indices], second[indices]) of two tables [P, N]; indices [T] int64."""
    return first[indices], second[indices]


def write_kv(key: Tensor, value: Tensor, target: KVTarget) -> None:
    """Write [T, Hkv, D] to the slots of the cache; tokens with a negative slot are not written."""
    wanted = target.slot_mapping >= 0
    slots = target.slot_mapping[wanted]
    block_size = target.key_cache.shape[1]
    halves = (target.key_cache, key, target.key_scale), (target.value_cache, value, target.value_scale)
    for cache, tokens, scale in halves:
        rows = tokens[wanted]
        if cache.dtype.itemsize == 1:
            largest = torch.finfo(cache.dtype).max
            rows = (rows.float() / (1.0 if scale is None else scale)).clamp(-largest, largest)
        cache[slots // block_size, slots % block_size] = rows.to(cache.dtype)


def quantized_rows(x: Tensor) -> Tensor:
    """[..., D] -> [..., D + 4] int8: integers of -127..127 and the four bytes of a row's float32 scale, its largest
    element / 127. The scale of a row with a NaN or an infinity is NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    finite = wide.isfinite().all(-1, keepdim=True)
    zero = largest < SMALLEST_ROW
    scales = torch.where(finite, largest / 127, torch.nan).masked_fill(finite & zero, 0)
    inverses = torch.full_like(largest, 127) / largest  # 127 / largest is rounded twice
    quants = torch.where(finite & ~zero, wide * inverses, 0).round()
    return torch.cat([quants.to(torch.int8), scales.view(torch.int8)], -1)


def dequantized_rows(rows: Tensor) -> Tensor:
    """[..., D + 4] int8 of `quantized_rows` -> [..., D] float32."""
    return rows[..., :-4].float() * rows[..., -4:].contiguous().view(torch.float32)


def packed_cache(rows: Tensor) -> Tensor:
    """[2, num_blocks, Hkv, block_size, D] in rows -> the same shape as the kernels lay it out (cpu/segment.h): what a
    head has in a block is float32 keys [D, block_size] or bfloat16 keys [D / 2, block_size, 2] and values
    [block_size / 2, D, 2]; rows where block_size or D is no multiple of 16. Of int8, keys [D / 4, block_size, 4] and
    values [block_size / 4, D, 4], and behind either the scales."""
    if not _packs(rows):
        return rows.clone()
    keys, values = rows
    if rows.dtype == torch.int8:
        (keys, values), scales = rows[..., :-4], rows[..., -4:].flatten(3)
        fours = keys.unflatten(-1, (-1, 4)).transpose(2, 3), values.unflatten(2, (-1, 4)).mT
        return torch.cat([torch.stack([half.flatten(2) for half in fours]), scales], -1).view(rows.shape)
    if rows.element_size() == 4:
        return torch.stack([keys.mT.reshape(keys.shape), values])
    paired = keys.unflatten(-1, (-1, 2)).transpose(2, 3), values.unflatten(2, (-1, 2)).mT
    return torch.stack([half.reshape(keys.shape) for half in paired])


def unpacked_cache(cache: Tensor) -> Tensor:
    """What `packed_cache` makes, back in rows."""
    if not _packs(cache):
        return cache.clone()
    keys, values = cache
    blocks, heads, block_size, head_size = keys.shape
    if cache.dtype == torch.int8:
        head_size -= 4
        flat = cache.flatten(3)
        count = block_size * head_size
        quants = flat[..., :count]
        scales = flat[..., count:]
        keys = quants[0].reshape(blocks, heads, head_size // 4, block_size, 4).transpose(2, 3).flatten(3)
        values = quants[1].reshape(blocks, heads, block_size // 4, head_size, 4).mT.flatten(2, 3)
        return torch.cat([torch.stack([keys, values]), scales.reshape(*cache.shape[:4], 4)], -1)
    if cache.element_size() == 4:
        return torch.stack([keys.reshape(blocks, heads, head_size, block_size).mT, values])
    keys = keys.reshape(blocks, heads, head_size // 2, block_size, 2).transpose(2, 3)
    values = values.reshape(blocks, heads, block_size // 2, head_size, 2).mT
    return torch.stack([half.reshape(blocks, heads, block_size, head_size) for half in (keys, values)])


def _packs(cache: Tensor) -> bool:
    head_size = cache.shape[4] - (4 if cache.dtype == torch.int8 else 0)
    return cache.shape[3] % 16 == 0 and head_size % 16 == 0


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
    of_heads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """[T, H, D] -> [T, H, D] float32, one request after the other; kv_cache [2, num_blocks, Hkv, block_size, D], of
    int8 D + 4, in rows.

    query_start [R + 1], seq_lens [R], block_table [R, most blocks]. Only tokens that are seen are gathered.
    `of_heads`, [H] each: sinks, logits that take a share of the softmax, and slopes, what scores gain for each position
    that a key is further on.
    """
    sinks, slopes = of_heads
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    outputs = []
    for r, length in enumerate(seq_lens.tolist()):
        queries = query[int(query_start[r]) : int(query_start[r + 1])].float()
        positions = torch.arange(length - len(queries), length).unsqueeze(1)
        first = 0 if window is None else max(0, length - len(queries) - window + 1)
        if chunk_size is not None:
            first = max(first, (length - len(queries)) // chunk_size * chunk_size)
        tokens = torch.arange(first, length)
        rows = kv_cache[:, block_table[r, tokens // block_size].long(), :, tokens % block_size]
        rows = dequantized_rows(rows) if rows.dtype == torch.int8 else rows.float()
        keys, values = rows.repeat_interleave(query.shape[1] // num_kv_heads, dim=2).unbind(1)
        scores = torch.einsum("thd,shd->hts", queries, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if slopes is not None:
            scores = scores + slopes.view(-1, 1, 1) * (tokens - positions)
        hidden = (tokens > positions) | (tokens <= positions - (window or length))
        hidden |= tokens < positions // (chunk_size or length) * (chunk_size or length)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(queries), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        outputs.append(torch.einsum("hts,shd->thd", weights, values))
    return torch.cat(outputs)


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> Tensor:
    """[L, V] and one value per row -> [L] int32: temperature, min-p, the top_k most likely tokens (0: all), of these
    the smallest set that reaches top_p, then the token at which the cumulative probability passes the uniform number.
    Tokens as likely as the last one that is kept are kept with it. -1 for a row that is no distribution."""
    scaled = logits / temperature.unsqueeze(1)
    scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + min_p.log().unsqueeze(1), -torch.inf)
    vocab_size = logits.shape[1]
    ranked = scaled.double().sort(-1, descending=True).values
    limits = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(1)
    kept = ranked.masked_fill(torch.arange(vocab_size) >= limits, -torch.inf)
    probs = kept.softmax(-1)
    before = probs.cumsum(-1) - probs
    count = ((before < top_p.double().unsqueeze(1)) & (probs > 0)).sum(-1, keepdim=True).clamp(min=1)
    least = kept.gather(1, count - 1)
    cumulative = scaled.double().masked_fill(scaled.double() < least, -torch.inf).softmax(-1).cumsum(-1)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return token_or_none(logits, tokens.clamp(max=vocab_size - 1)).to(torch.int32)


def choose(
    logits: Tensor, greedy: Tensor, settings: Sequence[Tensor], uniforms: Tensor, words: Tensor, rows: Tensor
) -> Tensor:
    """[L, V] -> [L] int32: what `mask_` leaves by words[rows[i]] of row i, by nothing where that is negative; of this
    the `argmax` where `greedy` [L], else what `sample` draws. `settings`: temperature, min_p, top_k, top_p."""
    left, masked = logits.clone(), rows >= 0
    allowed = left[masked]
    mask_(allowed, words[rows[masked].long()])
    left[masked] = allowed
    temperature, min_p, top_k, top_p = settings
    drawn = sample(left, temperature, min_p, top_k, top_p, uniforms)
    return torch.where(greedy, argmax(left), drawn).to(torch.int32)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] bfloat16 -> integers [M, B, 32] and scales [M, B, 1], float32; inputs beyond K are zeros.

    The scale of a block of 32 inputs is the least power of 2^(1/4) that brings its largest to 127.49 or below.
    """
    wide = functional.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    bits = wide.abs().amax(-1, keepdim=True).view(torch.int32)
    steps = 2.0 ** (torch.arange(5, dtype=torch.float64) / 4)
    quarters = ((bits >> 16 & 127) + 128 > steps[:4] * 127.49).sum(-1, keepdim=True)
    powers = (bits >> 23).clamp(70, 227) - 134 + quarters // 4
    scales = torch.ldexp(steps.float()[quarters % 4], powers)
    inverses = torch.ldexp((1 / steps).float()[quarters % 4], -powers)
    return (wide * inverses).clamp(-127, 127).round(), scales


def quantized_linear(
    x: Tensor, integers: Tensor, scales: Tensor, minima: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    """[M, K] bfloat16 -> [M, N] float32, inputs as 8-bit integers; `wide`: and what that leaves of them as such, too.
    The weight: integers [N, B, 32], with scales and minima [N, B], all float32."""
    quants, factors = quantize_rows(x)
    if wide:
        rest = (x.float() - (quants * factors).flatten(1)[:, : x.shape[1]]).bfloat16()
        parts = (quantized_linear(part, integers, scales, minima) for part in (x, torch.where(x.isfinite(), rest, x)))
        return sum(parts, torch.zeros(()))
    sums = torch.einsum("mbi,nbi->mnb", quants, integers) * factors.transpose(1, 2)
    result = (sums.double() * scales).sum(-1)
    if minima is not None:
        result += (quants.sum(-1, keepdim=True) * factors).squeeze(-1).double() @ minima.double().T
    return torch.where(x.isfinite().all(-1, keepdim=True), result, torch.nan).float()
