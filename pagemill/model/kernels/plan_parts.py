"""Norms and attention layers as plans are told of them (layer_plan.py). Data only; everything is bfloat16 on a CPU, but
a cache may be int8."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.mirrors import Layer
from pagemill.model.kernels.native_heads import NativeHeads


@dataclass(frozen=True)
class NormWeight:
    """An RMS norm, or a LayerNorm: its weight, epsilon and bias."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    """Of a LayerNorm, which may have none."""
    centers: bool = False
    """Whether it is a LayerNorm."""


@dataclass(frozen=True)
class AttentionParts:
    """What an attention layer brings along. The cache is [2, num_blocks, Hkv, block_size, D], D + 4 of int8; None: keys
    and values go to memory of the plan, good for a step."""

    name: str
    """Under which its batch is found."""
    layer: Layer
    cache: Tensor | None
    rope: tuple[Tensor, Tensor] | None
    """cos and sin, each [positions, n], n <= D, of the type of the model or float32; None where nothing is turned."""
    norms: tuple[NormWeight | None, NormWeight | None, NormWeight | None] = (None, None, None)
    """Of query, key and value, all of one kind and epsilon, and of weights of one type. A LayerNorm has float32 weights
    for each head, or the same of bfloat16, and biases, for all."""
    key_is_value: bool = False
    """Whether values are keys, before their norm; there is room for them behind the keys."""
    whole_norms: bool = False
    """Whether norms are over all heads together, with a weight for each element."""
    shared: bool = False
    """Whether there are queries only, and the cache is another layer's."""
    norms_last: bool = False
    """Whether norms come after rotary embedding."""
    growth: tuple[Tensor, int] | None = None
    """[n] float32, and a number s: queries at a position are multiplied by the element at (position + 1) // s at
    last."""


@dataclass(frozen=True)
class LatentParts:
    """What an attention layer over latent vectors brings along. The cache is [num_blocks, block_size, rotary +
    latent]."""

    name: str
    """Under which its batch is found."""
    layer: Layer
    cache: Tensor
    rope: tuple[Tensor, Tensor]
    """As `AttentionParts` has them: n is the size of a rotary part."""
    norm: NormWeight
    """Of latent vectors. An RMS norm."""
    absorb: NativeHeads
    """The plain parts of queries -> latent vectors."""
    expand: NativeHeads
    """Latent vectors -> values."""


def keys_as_values(cache: Tensor) -> Tensor:
    """A cache of latent vectors [num_blocks, block_size, D] as native code takes it, whose keys are values too: [2,
    num_blocks, 1, block_size, D], the same memory twice."""
    return cache.unsqueeze(1).expand(2, -1, 1, -1, -1)


def weight_for_heads(norm: NormWeight) -> Tensor:
    """The weight as native code takes it for queries, keys or values: of a LayerNorm for all heads alike, with its
    biases behind it."""
    if not norm.centers or norm.weight.dtype == torch.float32:
        return norm.weight
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    return torch.cat([norm.weight, bias])
