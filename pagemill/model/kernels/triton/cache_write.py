"""Keys and values into their slots of the paged cache, as they are or as FP8.

Knows neither rotary embeddings nor norms: a kernel that fuses these with the write replaces this one.
"""

import triton
import triton.language as tl

from pagemill.model.kernels.triton.attention import begin_kernel
from pagemill.model.kernels.triton.limits import within


@triton.jit
def write_cache(
    key, value, keys, values, slot_mapping, key_scale, value_scale,
    key_stride, value_stride, stride_block, stride_token, stride_head, largest,
    HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program per token. key, value [T, Hkv, D] with dense heads; keys, values: halves of the cache [N, PAGE, Hkv, D];
    slot_mapping [T], negative for a token that has no place. `largest`: the cache type's, for saturation."""
    begin_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    lanes = tl.arange(0, BLOCK)
    mask = lanes < HEADS * HEAD
    place = (slot // PAGE) * stride_block + (slot % PAGE) * stride_token + lanes // HEAD * stride_head + lanes % HEAD
    new_key = tl.load(key + token * key_stride + lanes, mask, other=0.0)
    new_value = tl.load(value + token * value_stride + lanes, mask, other=0.0)
    if SCALED:
        new_key = within(new_key.to(tl.float32) / tl.load(key_scale), largest)
        new_value = within(new_value.to(tl.float32) / tl.load(value_scale), largest)
    tl.store(keys + place, new_key.to(keys.dtype.element_ty), mask)
    tl.store(values + place, new_value.to(values.dtype.element_ty), mask)
