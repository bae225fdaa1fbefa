"""Linear layers with weights of 8-bit floats (e4m3): quantizing, and multiplying; by Triton on GPUs, else plain torch.

Arguments are not checked. A weight has a factor per output. Inputs are quantized too, with a factor per token, where
there are so many tokens that the tensor cores' 8-bit product is faster; for few, the weight is read in 8 bits and
multiplied with the inputs as they are. What makes inputs that are quantized, a norm or a gated activation, writes them
in 8 bits at once (`norm_linear`, `gated_linear`), with the same bits.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.reference import gated

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of FP8."""
SMALLEST_FACTOR = 1e-12
"""Of a row of zeros; keeps the inverse finite."""


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] -> 8-bit floats [M, K] and factors [M] float32: row = factor * floats, the largest of a row being 448."""
    kernels = triton_kernels("fp8") if rows.is_cuda else None
    if kernels is None or rows.shape[1] > kernels.MAX_COLUMNS:
        return reference_quantize(rows)
    result: tuple[Tensor, Tensor] = kernels.quantize(rows)
    return result


def linear(x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
    """[T, K] times 8-bit floats [N, K] with factors [N] -> [T, N] in x's type; with a gate (silu, gelu_tanh) of the
    first half, [T, N / 2]."""
    kernels = triton_kernels("fp8") if x.is_cuda else None
    if kernels is None:
        return reference_linear(x, weight, factors, bias, gate)
    result: Tensor = kernels.linear(x, weight, factors, bias, gate)
    return result


def quantizes(x: Tensor, weight: Tensor) -> bool:
    """Whether rows like x are quantized for a weight [N, K], in a kernel that what comes before them may be part of."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    kernels = triton_kernels("fp8")
    return kernels is not None and bool(kernels.quantizes(len(x), x.dtype, weight))


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    factors: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear` of the RMSNorm (weight and eps) of [T, K] x, or of x + residual, which takes the residual's place. Only
    where x is quantized."""
    result: Tensor = _quantizing_kernels().norm_linear(x, residual, norm, weight, factors, bias)
    return result


def gated_linear(x: Tensor, gate: str, weight: Tensor, factors: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of act(first half of x) * second half, x [T, 2 * K]. Only where x is quantized."""
    result: Tensor = _quantizing_kernels().gated_linear(x, gate, weight, factors, bias)
    return result


def _quantizing_kernels() -> ModuleType:
    kernels = triton_kernels("fp8")
    if kernels is None:
        raise RuntimeError("callers ask `quantizes` first, which says no where there is no Triton")
    return kernels


def reference_quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` in plain torch."""
    wide = rows.float()
    factors = (wide.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_FACTOR)
    floats = (wide * (1.0 / factors).unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return floats.to(FP8), factors


def reference_linear(
    x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None = None, gate: str | None = None
) -> Tensor:
    """`linear` in plain torch; inputs are quantized whatever their number."""
    floats, token_factors = reference_quantize(x)
    result = functional.linear(floats.float(), weight.float()) * token_factors.unsqueeze(1) * factors
    if bias is not None:
        result += bias.float()
    return (result if gate is None else gated(result, gate == "gelu_tanh")).to(x.dtype)
