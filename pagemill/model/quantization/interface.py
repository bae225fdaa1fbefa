"""`QuantMethod`: holds the weight of one kind of linear layer. Knows no model."""

from abc import ABC, abstractmethod

from torch import Tensor


class LinearWeight(ABC):
    """The weight of one linear layer, in whatever form its method computes fastest."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] -> [T, out]."""


class QuantMethod(ABC):
    """Turns a loaded weight into its computing form."""

    @abstractmethod
    def prepare(self, weight: Tensor) -> LinearWeight:
        """[out, in] in the model's type -> the computing form. The given tensor may be freed afterwards."""
