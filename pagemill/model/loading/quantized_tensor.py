"""`QuantizedTensor`: a weight that is not held as floats, in whatever form, and what is done with weights of any form.

Knows neither files nor layers, and no form.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class QuantizedTensor(ABC):
    """A weight [out, in]."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Rows, which are outputs."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in): numbers of outputs and of inputs."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that holds the weight's tensors."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in dtype."""

    @abstractmethod
    def with_rows(self, arrange: Callable[[Tensor], Tensor]) -> "QuantizedTensor":
        """The weight with its rows as `arrange` leaves them, which may order and repeat them, and add zeros."""

    @abstractmethod
    def above(self, others: "Sequence[QuantizedTensor]") -> "QuantizedTensor | None":
        """One weight of this and others, one under the other; None where they do not go together."""


def floats(weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The weight as floats, dequantized to dtype where it is quantized."""
    return weight.dequantized(dtype) if isinstance(weight, QuantizedTensor) else weight


def with_rows(weight: Tensor | QuantizedTensor, arrange: Callable[[Tensor], Tensor]) -> Tensor | QuantizedTensor:
    """The weight with its rows as `arrange` leaves them, which may order and repeat them, and add zeros."""
    return weight.with_rows(arrange) if isinstance(weight, QuantizedTensor) else arrange(weight)


def stacked(parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype) -> Tensor | QuantizedTensor:
    """One weight of several, one under the other: floats, in dtype, where they do not go together otherwise."""
    first = parts[0]
    if len(parts) == 1:
        return first if isinstance(first, QuantizedTensor) else first.contiguous()
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(quantized) == len(parts):
        together = quantized[0].above(quantized[1:])
        if together is not None:
            return together
    return torch.cat([floats(part, dtype) for part in parts])
