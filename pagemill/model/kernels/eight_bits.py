"""`EightBits`: weights of 8 bits, floats in blocks of inputs or integers with a scale per output, and products with
them: by Triton on GPUs, else plain torch.

Arguments are not checked. Few rows are multiplied as they are, with the weight read in 8 bits; of more, the rows are
quantized too, for each token: to floats with a factor for every 128 inputs, or to integers with one factor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.fp8 import FP8, LARGEST, SMALLEST_FACTOR
from pagemill.model.kernels.reference import gated, rms_norm

BLOCK = 128
"""Inputs, and outputs, of a block of floats."""
LARGEST_INTEGER = 127.0
"""Of a quantized row: both ends are as far from 0."""


@dataclass(frozen=True, slots=True)
class EightBits:
    """weight[o, i] = values[o, i] * scales[i // group, o // rows]."""

    values: Tensor
    """[N, K] float8_e4m3fn or int8, in one piece."""
    scales: Tensor
    """[groups, ceil(N / rows)] float32, of 128 outputs each with the groups of a block of outputs side by side, as
    libraries want them."""
    group: int
    """Inputs that share a scale: 128 where values are floats, all K where they are integers."""
    rows: int
    """Outputs that share a scale: 1 or 128."""

    @property
    def num_outputs(self) -> int:
        """N."""
        return len(self.values)


def blocks_of_floats(values: Tensor, scales: Tensor) -> EightBits:
    """values [N, K] float8_e4m3fn; scales [N, ceil(K / 128)], kept once for each 128 outputs that share theirs."""
    firsts = scales[::BLOCK].float().contiguous()
    shared = torch.equal(firsts.repeat_interleave(BLOCK, 0)[: len(scales)], scales.float())
    kept = firsts.T if shared else scales.float().T.contiguous()
    return EightBits(values.contiguous(), kept, BLOCK, BLOCK if shared else 1)


def integers(values: Tensor, scales: Tensor) -> EightBits:
    """values [N, K] int8; scales [N]."""
    return EightBits(values.contiguous(), scales.float().reshape(1, -1).contiguous(), values.shape[1], 1)


def linear(x: Tensor, weight: EightBits, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
    """[T, K] times [N, K] -> [T, N] in x's type; with a gate (silu, gelu_tanh) of the first half, [T, N / 2]."""
    kernels = triton_kernels("eight_bits") if x.is_cuda else None
    if kernels is None:
        return reference_linear(x, weight, bias, gate)
    result: Tensor = kernels.linear(x, weight, bias, gate)
    return result


def quantizes(x: Tensor, weight: EightBits) -> bool:
    """Whether rows like x are quantized, in a kernel that a gated activation may be part of."""
    kernels = triton_kernels("eight_bits") if x.is_cuda else None
    return kernels is not None and bool(kernels.quantizes(x, weight))


def norm_linear(
    x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], weight: EightBits, bias: Tensor | None = None
) -> Tensor:
    """`linear` of an RMSNorm (weight and eps) of x + residual, for rows that `quantizes` says yes to: [T, K] -> [T, N].
    The sum takes the residual's place."""
    kernels = triton_kernels("eight_bits") if x.is_cuda else None
    if kernels is None:
        return reference_linear(rms_norm(x, *norm, residual), weight, bias)
    result: Tensor = kernels.norm_linear(x, residual, norm, weight, bias)
    return result


def gated_linear(x: Tensor, gate: str, weight: EightBits, bias: Tensor | None = None) -> Tensor:
    """`linear` of act(first half of x) * second half: [T, 2 * K] -> [T, N]."""
    kernels = triton_kernels("eight_bits") if x.is_cuda else None
    if kernels is None:
        return reference_linear(gated(x, gate == "gelu_tanh"), weight, bias)
    result: Tensor = kernels.gated_linear(x, gate, weight, bias)
    return result


def floats(weight: EightBits, dtype: torch.dtype) -> Tensor:
    """The weight [N, K], in plain torch."""
    num_rows, size = weight.values.shape
    scales = weight.scales.repeat_interleave(weight.rows, 1)[:, :num_rows]
    scales = scales.repeat_interleave(weight.group, 0)[:size]
    result: Tensor = (weight.values.float() * scales.T).to(dtype)
    return result


def reference_linear(x: Tensor, weight: EightBits, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
    """`linear` in plain torch, in float32; rows are never quantized."""
    result = functional.linear(x.float(), floats(weight, torch.float32))
    if bias is not None:
        result += bias.float()
    return (result if gate is None else gated(result, gate == "gelu_tanh")).to(x.dtype)


def reference_quantize(rows: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[M, K] -> 8-bit numbers [M, K] and factors [ceil(K / group), M] float32; the largest of a group becomes 448 where
    `dtype` is float8_e4m3fn, and 127 where it is int8."""
    num_rows, size = rows.shape
    limit = LARGEST if dtype == FP8 else LARGEST_INTEGER
    groups = functional.pad(rows.float(), (0, -size % group)).view(num_rows, -1, group)
    factors = (groups.abs().amax(-1) / limit).clamp(min=SMALLEST_FACTOR)
    scaled = (groups * (1.0 / factors).unsqueeze(-1)).clamp(-limit, limit)
    numbers = scaled.to(FP8) if dtype == FP8 else scaled.round().to(dtype)
    return numbers.view(num_rows, -1)[:, :size], factors.T
