"""`KVTarget`: where a step's keys and values go in one layer's cache. Knows no backend and no model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVTarget:
    """The cache as [num_blocks, block_size, Hkv, D], of any strides but the last, which is 1."""

    key_cache: Tensor
    value_cache: Tensor
    """As key_cache, with its strides."""
    slot_mapping: Tensor
    """[T] block id * block_size + offset; below 0: the token is padding, and nothing is written."""
    key_scale: Tensor | None = None
    """[1] float32: a cache of 1-byte floats holds key / key_scale, as far as it reaches. None: 1."""
    value_scale: Tensor | None = None
    invariant: bool = False
    """Whether a token must have the same bits whatever is computed beside it."""
