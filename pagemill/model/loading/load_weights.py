"""`load_weights`: stream tensors into the layers of a model, and check that every one arrived exactly once.

Knows layers only by what they offer: `expected()`, `shards`, `part(kind, shard, shape)` and
`load(kind, shard, tensor)`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.part import Part, Select
from pagemill.model.loading.weight_map import Target, WeightMap

_SHOWN = 5
CPU = torch.device("cpu")

Source = Callable[[Select], Iterable[tuple[str, Tensor | BlockTensor]]]
"""Reads what is selected: (checkpoint name, the selected part)."""


class LoadableModel(Protocol):
    """What a model offers to be loaded."""

    @property
    def weights(self) -> WeightMap:
        """Where each checkpoint tensor goes."""

    def loadable(self) -> Mapping[str, nn.Module]:
        """Checkpoint layer -> the layer here that takes its tensors."""

    def elsewhere(self, layer: str) -> bool:
        """Whether a checkpoint layer that is not loadable here is another rank's, or not needed."""

    def finish_loading(self) -> None:
        """Called once, after the last tensor."""


def load_weights(model: LoadableModel, source: Source, device: torch.device = CPU) -> None:
    """Hand this rank's part of every tensor to its layer, on `device`; nothing else is read. Raises ModelError that
    names missing and unexpected tensors, and those of a wrong shape."""
    loading = _Loading(model)
    for name, tensor in source(loading.select):
        loading.load(name, tensor.to(device) if isinstance(tensor, Tensor) else tensor)
    loading.finish()


class _Loading:
    """The targets of one model, and which of them have been met."""

    def __init__(self, model: LoadableModel) -> None:
        self._model = model
        layers: Mapping[str, Any] = model.loadable()
        self._layers = layers
        self._wanted = {
            Target(name, kind, shard)
            for name, layer in layers.items()
            for kind in layer.expected()
            for shard in range(len(layer.shards))
        }
        self._targets: dict[str, Target] = {}
        """Of the tensors that were selected."""
        self._seen: set[Target] = set()
        self._unexpected: list[str] = []

    def select(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """The part of a tensor that belongs here; None for one that does not."""
        target = self._model.weights.target(name)
        if target is None or (target.layer not in self._layers and self._model.elsewhere(target.layer)):
            return None
        if target not in self._wanted or target in self._seen:
            self._unexpected.append(name)
            return None
        self._seen.add(target)
        self._targets[name] = target
        part: Part | None = _named(name, self._layers[target.layer].part, target.kind, target.shard, shape)
        return part

    def load(self, name: str, tensor: Tensor | BlockTensor) -> None:
        """A selected part, in the checkpoint's or the model's type."""
        target = self._targets[name]
        _named(name, self._layers[target.layer].load, target.kind, target.shard, tensor)

    def finish(self) -> None:
        if self._unexpected:
            raise ModelError(
                f"the checkpoint has tensors that the architecture does not use: {_some(self._unexpected)}"
            )
        missing = sorted(self._model.weights.source_name(target) for target in self._wanted - self._seen)
        if missing:
            raise ModelError(f"the checkpoint lacks tensors of the architecture: {_some(missing)}")
        self._model.finish_loading()


def _named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from error


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
