"""`LayerContext`: what a layer is told about its surroundings - type, place, and who chooses its parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pagemill.model.attention.interface import AttentionBackend, AttentionLayerSpec
from pagemill.model.quantization.interface import QuantMethod

AttentionChooser = Callable[[AttentionLayerSpec], type[AttentionBackend]]


@dataclass(frozen=True)
class LayerContext:
    """Handed down through the constructors of a model."""

    dtype: torch.dtype
    quant: QuantMethod
    attention: AttentionChooser
    name: str = ""

    def child(self, name: str) -> "LayerContext":
        """The same surroundings, one name deeper."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)
