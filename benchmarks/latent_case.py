"""Random batches over a cache of latent vectors, what attention over them is by definition, and a run of a backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import AttentionBackend, BatchLens, CommonAttentionMetadata
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.mla import AbsorbedLinear
from pagemill.model.quantization.interface import Uniform
from pagemill.model.quantization.unquantized import Unquantized

BLOCK = 16


@dataclass(frozen=True)
class LatentShape:
    """Of one layer: heads, and elements of the parts of a query or key, of a value and of a latent vector."""

    heads: int
    turned: int
    plain: int
    value: int
    latent: int

    @property
    def spec(self) -> AttentionLayerSpec:
        """As the layer declares it."""
        size = self.turned + self.latent
        scale = (self.turned + self.plain) ** -0.5
        sizes = (self.plain, self.value)
        return AttentionLayerSpec(self.heads, 1, size, scale, latent_size=self.latent, expanded_sizes=sizes)


def weights_of(rows: Tensor, shape: LatentShape) -> AbsorbedLinear:
    """The layer with a weight [H * (plain + value), latent]."""
    ctx = LayerContext(rows.dtype, Uniform(Unquantized()), lambda spec, name: None)  # type: ignore[arg-type, return-value]
    layer = AbsorbedLinear(shape.latent, shape.heads, (shape.plain, shape.value), ctx=ctx)
    layer.load("weight", 0, rows)
    return layer


class LatentCase:
    """`requests`: (new tokens, all tokens). Blocks are shuffled, and what nobody has written is NaN."""

    def __init__(
        self, shape: LatentShape, requests: Sequence[tuple[int, int]], dtype: torch.dtype, device: str = "cpu",
        padding: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.requests = requests
        generator = torch.Generator(device).manual_seed(seed)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=device).to(dtype)

        counts = [count for count, _ in requests]
        size = shape.turned + shape.latent
        num_tokens = sum(counts) + padding
        self.query = random(num_tokens, shape.heads, shape.turned + shape.plain)
        self.weights = weights_of(0.3 * random(shape.heads * (shape.plain + shape.value), shape.latent), shape)
        self.rows = torch.cat([self.weights.key, self.weights.value.transpose(1, 2)], 1)
        self.kept = random(num_tokens, 1, size) * shape.latent**-0.25
        num_blocks = 1 + sum(-(-length // BLOCK) for _, length in requests)
        self.cache = torch.full((num_blocks, BLOCK, size), torch.nan, dtype=dtype, device=device)
        self.cache[0] = 0
        order = (torch.randperm(num_blocks - 1) + 1).tolist()
        width = max(-(-length // BLOCK) for _, length in requests)
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        slots: list[int] = []
        self.entries: list[Tensor] = []
        starts = [0, *accumulate(counts)]
        for row, (count, length) in enumerate(requests):
            blocks = [order.pop() for _ in range(-(-length // BLOCK))]
            table[row, : len(blocks)] = torch.tensor(blocks)
            places = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)]
            old = random(length - count, size) * shape.latent**-0.25
            self.cache.view(-1, size)[torch.tensor(places[: length - count], dtype=torch.long, device=device)] = old
            self.entries.append(torch.cat([old, self.kept[starts[row] : starts[row + 1], 0]]))
            slots += places[length - count :]
        lens = [length for _, length in requests]
        self.lens = BatchLens(np.array(starts, np.int32), np.array(lens, np.int32))
        self.common = CommonAttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slot_mapping=torch.tensor(slots + [-1] * padding, device=device),
            num_requests=len(requests),
            num_tokens=num_tokens,
            max_query_len=max(counts),
            max_seq_len=max(lens),
            block_size=BLOCK,
            batch_lens=self.lens,
        )

    def run(self, backend: type[AttentionBackend], builder: Any = None) -> Tensor:
        """[T, H * value]."""
        spec = self.shape.spec
        builder = builder or backend.metadata_builder(spec, self.query.device)
        metadata = builder.build(self.common)
        return backend.impl(spec).attend_latents(self.query, self.kept, self.cache.clone(), metadata, self.weights)

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """[T without padding, H * value], with keys and values of their own for each head."""
        shape = self.shape
        found = []
        for (count, length), entries, start in zip(self.requests, self.entries, self.lens.query_start, strict=False):
            query = self.query[start : start + count].to(dtype)
            both = torch.einsum("sl,hvl->shv", entries[:, shape.turned :].to(dtype), self.rows.to(dtype))
            scores = torch.einsum("qhd,shd->hqs", query[..., shape.turned :], both[..., : shape.plain])
            scores += torch.einsum("qhd,sd->hqs", query[..., : shape.turned], entries[:, : shape.turned].to(dtype))
            positions = torch.arange(length, device=query.device)
            hidden = positions > positions[length - count :, None]
            weights = (scores * shape.spec.scale).masked_fill(hidden, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqs,shv->qhv", weights, both[..., shape.plain :]).flatten(1))
        return torch.cat(found)
