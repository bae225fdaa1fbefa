"""`EightBitsWeight`: a linear layer's weight of 8-bit floats in blocks, or of integers of 8 bits, on a GPU. Knows no
file format."""

import torch
from torch import Tensor

from pagemill.model.kernels import eight_bits
from pagemill.model.quantization.interface import LinearWeight


class EightBitsWeight(LinearWeight):
    """[N, K], the gated activation included."""

    def __init__(self, weight: eight_bits.EightBits, gate: str | None) -> None:
        self.weight = weight
        self.gate = gate

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            from pagemill.model.kernels import eight_bits_op  # deferred: registering takes time, only compilers ask

            return eight_bits_op.traced_linear(x, self.weight, bias, self.gate)
        # Of rows that are quantized, the next layer's are too: its gated_apply writes them in 8 bits.
        gate = None if self.gate is None or eight_bits.quantizes(x, self.weight) else self.gate
        return eight_bits.linear(x, self.weight, bias, gate)

    def norm_apply(
        self, x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or not eight_bits.quantizes(x, self.weight):
            return super().norm_apply(x, residual, norm, bias)
        result = eight_bits.norm_linear(x, residual, norm, self.weight, bias)
        return result, x if residual is None else residual

    def gated_apply(self, x: Tensor, gate: str, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            return super().gated_apply(x, gate, bias)
        return eight_bits.gated_linear(x, gate, self.weight, bias)
