"""`load_weights`: stream tensors into the layers of a model, and check that every one arrived exactly once.

Knows layers only by what they offer: `expected()`, `shards` and `load(kind, shard, tensor)`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.loading.weight_map import Target, WeightMap

_SHOWN = 5


class LoadableModel(Protocol):
    """What a model offers to be loaded."""

    tied: bool
    """The output head takes the embedding's weight, and the checkpoint's own is ignored."""

    @property
    def weights(self) -> WeightMap:
        """Where each checkpoint tensor goes."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module by name, as torch has it."""

    def finish_loading(self) -> None:
        """Called once, after the last tensor."""


def load_weights(model: LoadableModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Hand every (name, tensor) to its layer. Raises ModelError that names missing and unexpected tensors."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "expected")}
    wanted = _expected(model, layers)
    seen: set[Target] = set()
    unexpected = []
    for name, tensor in tensors:
        target = model.weights.target(name)
        if target is None or (model.tied and target.layer == "lm_head"):
            continue
        if target not in wanted or target in seen:
            unexpected.append(name)
            continue
        _load(layers[target.layer], target, name, tensor)
        seen.add(target)
    if unexpected:
        raise ModelError(f"the checkpoint has tensors that the architecture does not use: {_some(unexpected)}")
    missing = sorted(model.weights.source_name(target) for target in wanted - seen)
    if missing:
        raise ModelError(f"the checkpoint lacks tensors of the architecture: {_some(missing)}")
    model.finish_loading()


def _load(layer: Any, target: Target, name: str, tensor: Tensor) -> None:
    try:
        layer.load(target.kind, target.shard, tensor)
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from error


def _expected(model: LoadableModel, layers: dict[str, nn.Module]) -> set[Target]:
    wanted = set()
    for name, layer in layers.items():
        if model.tied and name == "lm_head":
            continue
        kinds: Any = layer.expected()  # type: ignore[operator]
        shards: Any = layer.shards
        wanted |= {Target(name, kind, shard) for kind in kinds for shard in range(len(shards))}
    return wanted


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
