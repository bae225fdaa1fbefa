"""Token embedding, and the output head that may share its weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext


class Embedding(nn.Module):
    """[T] token ids -> [T, E]."""

    shards = (0,)

    def __init__(self, num_embeddings: int, size: int, *, ctx: LayerContext, scale: float | None = None) -> None:
        super().__init__()
        self.name = ctx.name
        self.shape = (num_embeddings, size)
        self.dtype = ctx.dtype
        self.scale = None if scale is None else torch.tensor(scale, dtype=ctx.dtype)
        self.weight: Tensor | None = None

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        if kind != "weight" or tuple(tensor.shape) != self.shape:
            raise ModelError(f"{self.name}.{kind} has shape {tuple(tensor.shape)}, expected {self.shape}")
        self.weight = tensor.to(self.dtype)

    def expected(self) -> tuple[str, ...]:
        """Kinds of tensors that the layer has."""
        return ("weight",)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = functional.embedding(token_ids, self.weight)  # type: ignore[arg-type]
        return rows if self.scale is None else rows * self.scale
