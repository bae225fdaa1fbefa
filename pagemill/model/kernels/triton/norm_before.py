"""`NormBefore`: the norm that a linear kernel applies to its input. Knows no kernel."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormBefore:
    """An RMSNorm of x, or of x + residual."""

    weight: Tensor
    """[K]."""
    eps: float
    residual: Tensor | None
    """[1, K]; read by every program, so it stays as it is."""
    summed: Tensor
    """[1, K] x + residual, rounded: what takes the residual's place. Written by the kernel."""
