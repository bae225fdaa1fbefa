"""What layers keep per token, and the plan for where they keep it. The model declares, the engine plans."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pagemill.utils.math import ceil_div

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """What one layer keeps. Layers with equal specs may share a group."""

    block_size: int
    """Tokens per block."""

    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""

    @abstractmethod
    def max_blocks(self, max_len: int) -> int:
        """Most blocks that one request of max_len tokens holds at once (prefill chunks aside)."""


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token."""

    num_kv_heads: int
    head_size: int
    dtype: str
    """Name of a torch dtype, such as bfloat16."""

    def page_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def max_blocks(self, max_len: int) -> int:
        return ceil_div(max_len, self.block_size)


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last `window` tokens, the current one included."""

    window: int

    def max_blocks(self, max_len: int) -> int:
        """The window may begin anywhere in a block, so one block more than it fills."""
        return min(ceil_div(max_len, self.block_size), ceil_div(self.window - 1, self.block_size) + 1)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table: a block id means the same block for all of them."""

    layers: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """Result of planning. Block 0 is the null block: never allocated, stands for tokens out of window.

    All groups have the same page size. With n groups of at most m layers, m tensors of
    num_blocks x page_bytes are allocated, and the i-th layers of all groups share the i-th tensor.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
