"""What the kernels are fuzzed with: shapes of real models, random weights in every format, and how far sums may be off.

Knows tensors in float64; nothing about kernels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-24
"""Rounding of one float32 operation, relative."""
BF16_UNIT = 2.0**-8
"""The same of a rounding to bfloat16."""
CERTAINTY = 8.0
"""Roundings of either sign add up like a random walk: n of them beyond CERTAINTY * sqrt(n) units have a probability
below 2 * exp(-CERTAINTY^2 / 2) = 3e-14 (Higham and Mary, "A new approach to probabilistic rounding error analysis",
2019)."""


@dataclass(frozen=True)
class Shapes:
    """Widths of a model."""

    name: str
    hidden: int
    inner: int
    heads: tuple[int, int, int]
    """Of queries, of keys, elements of each."""
    vocab: int
    gate: str
    window: int | None = None

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's linear layers, and a slice of the head with an incomplete panel."""
        query, keys, size = self.heads
        return {
            "qkv": ((query + 2 * keys) * size, self.hidden),
            "o": (self.hidden, query * size),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (1003, self.hidden),
        }


MODELS = (
    Shapes("SmolLM2-135M", 576, 1536, (9, 3, 64), 49_152, "silu"),
    Shapes("Gemma-3-270M", 640, 2048, (4, 1, 256), 262_144, "gelu_tanh", 512),
    Shapes("Llama-3.2-1B", 2048, 8192, (32, 8, 64), 128_256, "silu"),
)


def generator(*seeds: int) -> torch.Generator:
    """A generator for this combination of numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))


def activations(rows: int, cols: int, g: torch.Generator) -> Tensor:
    """[rows, cols] bfloat16 as models have them: near normal, rows of different magnitude, a few large columns."""
    x = torch.randn(rows, cols, generator=g) * torch.exp(torch.randn(rows, 1, generator=g))
    x[:, torch.randint(cols, (3,), generator=g)] *= 20
    return x.bfloat16()


def sum_error(terms: Tensor, count: int) -> Tensor:
    """How far a float32 sum of `count` products may be off, whose absolute values add up to `terms`."""
    return CERTAINTY * count**0.5 * UNIT * terms + 1e-30


def step_error(x: Tensor, weight: Tensor) -> Tensor:
    """How far [M, K] times [N, K] may be off when x becomes integers of 8 bits in blocks of 32, in float64.

    A rounded input is off by at most half a step s of its block, in either direction, so by Hoeffding's inequality the
    sum of the errors times the weights stays below CERTAINTY / 2 * sqrt(sum of (s * w)^2). The step is at most
    2^(1/8) / 127 of the block's largest.
    """
    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    steps = blocks.abs().amax(-1) * 2**0.125 / 127
    squares = torch.nn.functional.pad(weight.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).square().sum(-1)
    return CERTAINTY / 2 * (steps.square() @ squares.T).sqrt()


def blocks_of_bytes(kind_bytes: int, scale_at: tuple[int, ...], rows: int, num_blocks: int, seed: int) -> np.ndarray:
    """[rows, num_blocks * kind_bytes] random bytes, with 16-bit float scales of small size at these places."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, num_blocks, kind_bytes), dtype=np.uint8)
    for at in scale_at:
        scales = rng.uniform(0.001, 0.02, (rows, num_blocks, 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)
