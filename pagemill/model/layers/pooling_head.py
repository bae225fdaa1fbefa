"""Pooling heads: from hidden states of a prompt, pooled or each by itself, to what a model says of it: logits of its
classes. Knows no prompts and no pooling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pagemill.model.kernels import ops
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import HeadLinear, Linear
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.loading.weight_map import WeightMap


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A linear layer of a head, by its name in the checkpoint."""

    name: str
    out_size: int
    bias: bool = True
    activation: str | None = None
    """tanh, or as `ops.activated` calls it."""
    norm: str | None = None
    """Name of a LayerNorm after the activation."""
    norm_eps: float = 1e-5
    norm_bias: bool = False
    inside: bool = False
    """Whether it is in the model that has the layers, whose names in a checkpoint may have a prefix."""


class PoolingHead(nn.Module):
    """[N, E] -> [N, num_outputs] float32; the same on every rank."""

    def __init__(self, in_size: int, layers: Sequence[HeadLayer], *, ctx: LayerContext) -> None:
        super().__init__()
        self.num_outputs = layers[-1].out_size
        self._dtype = ctx.dtype
        self._layers = tuple(layers)
        self.parts: dict[str, Linear | LayerNorm] = {}
        """By their names in the checkpoint."""
        last, _, _ = layers[-1].name.partition(".")
        for layer in layers:
            kind = HeadLinear if layer.name.partition(".")[0] == last else Linear
            where = (ctx if layer.inside else replace(ctx, names=WeightMap())).child(layer.name)
            self.parts[layer.name] = kind(in_size, (layer.out_size,), bias=layer.bias, ctx=where)
            if layer.norm is not None:
                self.parts[layer.norm] = LayerNorm(
                    layer.out_size, layer.norm_eps, ctx=ctx.child(layer.norm), bias=layer.norm_bias
                )
            in_size = layer.out_size

    def forward(self, rows: Tensor) -> Tensor:
        x = rows.to(self._dtype)
        for layer in self._layers:
            x = self.parts[layer.name](x)
            if layer.activation == "tanh":
                x = torch.tanh(x)
            elif layer.activation is not None:
                x = ops.activated(x.contiguous(), layer.activation)
            if layer.norm is not None:
                x = self.parts[layer.norm](x)
        return x.float()


class TokenChoiceHead(nn.Module):
    """[N, E] -> logits of some tokens [N, num_outputs]; of two, where asked for, the second's minus the first's [N, 1],
    whose sigmoid is the softmax of the two."""

    def __init__(
        self, compute_logits: Callable[[Tensor], Tensor], token_ids: Sequence[int], dtype: torch.dtype, difference: bool
    ) -> None:
        super().__init__()
        self.num_outputs = 1 if difference else len(token_ids)
        self.parts: dict[str, Linear | LayerNorm] = {}
        self._compute_logits = compute_logits
        self._token_ids = list(token_ids)
        self._dtype = dtype
        self._difference = difference

    def forward(self, rows: Tensor) -> Tensor:
        logits = self._compute_logits(rows.to(self._dtype))[:, self._token_ids]
        return logits[:, 1:] - logits[:, :1] if self._difference else logits
