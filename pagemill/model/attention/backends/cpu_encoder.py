"""CPU_ENCODER: attention of encoders by the native kernels, over the tokens of one step. Nothing is kept.

Keys and values go to memory of the step, in blocks as those of a cache, one request's after another's. So requests of
any lengths attend in one call, and cost their own tokens.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends.cpu import CpuBackend, CpuBuilder, CpuImpl, CpuMetadata
from pagemill.model.attention.capability import ENCODER, ENCODER_ONLY, AttentionLayerSpec, Capability
from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.kernels import native
from pagemill.model.kernels.mirrors import Layer

BLOCK_SIZE = 32
"""Tokens of a block of a step's keys and values."""
EVERYTHING = 1 << 40
"""Keys behind a token's own: all of them."""


@dataclass(frozen=True, slots=True)
class EncoderMetadata(CpuMetadata):
    """The step as the kernels take it, with blocks of its own."""

    num_blocks: int


class EncoderBuilder(CpuBuilder):
    """Gives each request the blocks behind those of the one before it."""

    def build(self, common: CommonAttentionMetadata) -> EncoderMetadata:
        starts = common.query_start.numpy()
        counts = np.diff(starts)
        needed = -(-counts // BLOCK_SIZE)
        first = np.cumsum(needed) - needed
        most = max(int(needed.max(initial=0)), 1)
        table = first[:, None] + np.arange(most)
        places = np.arange(common.num_tokens) - np.repeat(starts[:-1], counts)
        slots = np.repeat(first, counts) * BLOCK_SIZE + places
        own = dataclasses.replace(
            common,
            block_table=torch.from_numpy(table.astype(np.int32)),
            slot_mapping=torch.from_numpy(slots.astype(np.int64)),
            block_size=BLOCK_SIZE,
        )
        planned = CpuBuilder.build(self, own)
        return EncoderMetadata(planned.common, planned.batch, planned.address, int(needed.sum()))


class EncoderImpl(CpuImpl):
    """One native call per layer."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        if spec.window is not None:
            self._layer.window = spec.window + 1
        self._layer.ahead = EVERYTHING if spec.window is None else spec.window

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: CpuMetadata
    ) -> Tensor:
        if key is None or value is None or not isinstance(metadata, EncoderMetadata):
            raise RuntimeError("an encoder's layer keeps nothing that another could have written")
        memory = step_memory(metadata.num_blocks, self._layer, query.dtype)
        return native.attention(query, key, value, memory, metadata.address, self._address)


def step_memory(num_blocks: int, layer: Layer, dtype: torch.dtype) -> Tensor:
    """[2, num_blocks, Hkv, BLOCK_SIZE, D] of any values."""
    return torch.empty(2, num_blocks, layer.num_kv_heads, BLOCK_SIZE, layer.head_size, dtype=dtype)


class CpuEncoderBackend(CpuBackend):
    """Native kernels on a CPU, of encoders only."""

    name = "CPU_ENCODER"
    capability = Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        sliding_window=True,
        attention_types=frozenset({ENCODER, ENCODER_ONLY}),
    )
    metadata_builder = EncoderBuilder
    impl = EncoderImpl

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Nothing is kept: the bytes that count the blocks."""
        return (num_blocks,)
