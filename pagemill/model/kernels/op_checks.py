"""What the operations of torch_ops.py accept: shapes, types, and numbers that native code would follow anywhere.

Knows no kernel. Everything here raises ValueError, with the name of the argument, what it is and what is expected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.kernels.linear_reference import FORMAT_NAMES, panel_bytes
from pagemill.model.kernels.pack_linear import NO_GATE

OUT_DTYPES = (torch.bfloat16, torch.float32)


def check(fits: bool, problem: str) -> None:
    """ValueError with the problem, unless it fits."""
    if not fits:
        raise ValueError(problem)


def form(x: Tensor) -> str:
    """Type and shape, for messages."""
    return f"{str(x.dtype)[6:]} {list(x.shape)}"


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """x [T, N] or [T, H, N], weight [N], residual as x."""
    check(x.dim() in (2, 3), f"x is {form(x)}, expected [T, N] or [T, H, N]")
    check(weight.shape == x.shape[-1:], f"weight is {form(weight)}, expected [{x.shape[-1]}]")
    check(weight.dtype in (x.dtype, torch.float32), f"weight is {form(weight)}, expected {x.dtype} or torch.float32")
    if residual is not None:
        check(residual.shape == x.shape and residual.dtype == x.dtype, f"residual is {form(residual)}, x is {form(x)}")


def check_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x [T, H, D]; cos and sin [T, n]."""
    check(x.dim() == 3, f"x is {form(x)}, expected [T, H, D]")
    fits = cos.dim() == 2 and cos.shape[0] == x.shape[0] and cos.shape[1] <= x.shape[2] and cos.shape[1] % 2 == 0
    check(fits, f"cos is {form(cos)}, expected [{x.shape[0]}, an even number up to {x.shape[2]}]")
    check(cos.dtype in (x.dtype, torch.float32), f"cos is {form(cos)}, expected {x.dtype} or torch.float32")
    check(cos.shape == sin.shape and cos.dtype == sin.dtype, f"cos is {form(cos)}, sin is {form(sin)}")


def gated_shape(x: Tensor, activation: str) -> tuple[int, int]:
    """[T, I] of x [T, 2 * I]."""
    check(activation in ("silu", "gelu_tanh"), f"activation is {activation!r}, expected silu or gelu_tanh")
    check(x.dim() == 2 and x.shape[1] % 2 == 0, f"x is {form(x)}, expected [T, 2 * I]")
    return x.shape[0], x.shape[1] // 2


def check_logits(logits: Tensor) -> None:
    """[L, V] with at least one column."""
    check(logits.dim() == 2 and logits.shape[1] > 0, f"logits are {form(logits)}, expected [L, V] with V > 0")


def check_draws(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> None:
    """Float32 logits and one value of each setting per row."""
    check_logits(logits)
    check(logits.dtype == torch.float32, f"logits are {form(logits)}, expected float32")
    floats = {"temperature": temperature, "min_p": min_p, "top_p": top_p}
    kinds = {torch.float32: floats, torch.int32: {"top_k": top_k}, torch.float64: {"uniforms": uniforms}}
    for dtype, group in kinds.items():
        for name, values in group.items():
            fits = values.shape == logits.shape[:1] and values.dtype == dtype
            check(fits, f"{name} is {form(values)}, expected {str(dtype)[6:]} [{logits.shape[0]}]")


def check_panels(weight: Tensor, format_name: str, sizes: tuple[int, int], gate: int = NO_GATE) -> None:
    """As many bytes as (N, K) have in this format."""
    known = sorted(FORMAT_NAMES.values())
    check(format_name in known, f"format is {format_name!r}, expected one of {', '.join(known)}")
    check(min(sizes) > 0, f"num_outputs and num_inputs are {sizes}, expected above 0")
    check(gate == NO_GATE or sizes[0] % 2 == 0, f"num_outputs is {sizes[0]}, expected an even number with a gate")
    check(format_name != "BF16" or sizes[1] % 2 == 0, f"num_inputs is {sizes[1]}, expected an even number for BF16")
    expected = panel_bytes(format_name, sizes, gate)
    found = weight.numel() * weight.element_size()
    what = f"expected contiguous panels of {expected} bytes: {sizes[0]} x {sizes[1]} in {format_name}"
    check(found == expected and weight.is_contiguous(), f"weight is {form(weight)}, {what}")


def check_linear_input(x: Tensor, bias: Tensor | None, sizes: tuple[int, int], out_dtype: torch.dtype) -> None:
    """x [M, K] bfloat16, bias [N] float32."""
    check(x.dim() == 2 and x.dtype == torch.bfloat16, f"x is {form(x)}, expected bfloat16 [M, {sizes[1]}]")
    check(x.shape[1] == sizes[1], f"x is {form(x)}, expected bfloat16 [M, {sizes[1]}]")
    check(out_dtype in OUT_DTYPES, f"out_dtype is {out_dtype}, expected torch.bfloat16 or torch.float32")
    if bias is not None:
        fits = bias.shape == sizes[:1] and bias.dtype == torch.float32
        check(fits, f"bias is {form(bias)}, expected float32 [{sizes[0]}]")


def check_attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, step: Sequence[Tensor]
) -> None:
    """Shapes and types; `step` is query_start, seq_lens, block_table and slot_mapping."""
    check(query.dim() == 3, f"query is {form(query)}, expected [T, H, D]")
    num_tokens, num_heads, head_size = query.shape
    int8 = kv_cache.dtype == torch.int8
    row = head_size + 4 if int8 else head_size
    fits = kv_cache.dim() == 5 and kv_cache.shape[0] == 2 and kv_cache.shape[4] == row
    check(fits and (int8 or kv_cache.dtype == query.dtype), f"kv_cache is {form(kv_cache)}, query is {form(query)}")
    num_kv_heads, block_size = kv_cache.shape[2:4]
    packs = block_size % 16 == 0 and head_size % 16 == 0 and head_size <= 1024
    check(packs or not int8, f"kv_cache is {form(kv_cache)}, expected blocks and heads of multiples of 16, up to 1024")
    check(num_heads % num_kv_heads == 0, f"query has {num_heads} heads, the cache {num_kv_heads}")
    blocks_fit = kv_cache.stride()[2:] == (block_size * row, row, 1)
    check(blocks_fit, f"kv_cache has strides {kv_cache.stride()}, expected blocks that are contiguous")
    check((key is None) == (value is None), "key and value: expected both or none")
    for name, given in (("key", key), ("value", value)):
        if given is not None:
            fits = given.shape == (num_tokens, num_kv_heads, head_size) and given.dtype == query.dtype
            check(fits, f"{name} is {form(given)}, query is {form(query)}, kv_cache is {form(kv_cache)}")
    check(len(step) == 4, f"step has {len(step)} tensors, expected 4")
    query_start, seq_lens, block_table, slots = step
    num_requests = seq_lens.shape[0] if seq_lens.dim() else 0
    wanted = {
        "query_start": (query_start, (num_requests + 1,), torch.int32),
        "seq_lens": (seq_lens, (num_requests,), torch.int32),
        "block_table": (block_table, (num_requests, block_table.shape[-1]), torch.int32),
        "slot_mapping": (slots, (num_tokens,), torch.int64),
    }
    for name, (given, shape, dtype) in wanted.items():
        fits = tuple(given.shape) == shape and given.dtype == dtype
        check(fits, f"{name} is {form(given)}, expected {str(dtype)[6:]} {list(shape)}")


def check_step(step: Sequence[Tensor], num_tokens: int, num_blocks: int, block_size: int, writes: bool) -> None:
    """The numbers in `step`: requests one after the other, blocks and slots that there are."""
    query_start, seq_lens, block_table, slots = step
    counts = query_start.diff()
    whole = int(query_start[0]) == 0 and int(query_start[-1]) == num_tokens and bool((counts > 0).all())
    check(whole, f"query_start is {query_start.tolist()}, expected to rise from 0 to {num_tokens}")
    fits = bool((seq_lens >= counts).all()) and int(seq_lens.max()) <= block_table.shape[1] * block_size
    check(fits, f"seq_lens {seq_lens.tolist()}: expected the step's tokens or more, up to what block_table holds")
    used = torch.arange(block_table.shape[1]) * block_size < seq_lens.unsqueeze(1)
    there = (block_table >= 0) & (block_table < num_blocks)
    check(bool((there | ~used).all()), f"block_table: expected ids below {num_blocks} where there are tokens")
    if writes:
        inside = bool(((slots >= 0) & (slots < num_blocks * block_size)).all())
        check(inside, f"slot_mapping: expected slots in [0, {num_blocks * block_size})")
