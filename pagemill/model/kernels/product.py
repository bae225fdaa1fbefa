"""`Product`: what a linear layer gives, not computed yet. Knows no kernel."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Product:
    """x times the weight, left to the norm that takes it: its kernel, or that of the linear layer, does both."""

    x: Tensor
    """[T, K]."""
    weight: Tensor
    """[N, K]."""
