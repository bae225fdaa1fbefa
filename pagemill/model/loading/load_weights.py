"""`load_weights`: stream tensors into the layers of a model, and check that every one arrived exactly once, in the
shape and type that its layer declares. Knows layers only as `LoadableLayer`s.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.loading.file_tensor import FileTensor
from pagemill.model.loading.float_weights import FloatWeights
from pagemill.model.loading.part import Part, Select, whole
from pagemill.model.loading.progress import LoadProgress
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import LayerTensor, LoadableLayer, StoredTensor
from pagemill.model.loading.uploads import Uploads
from pagemill.model.loading.weight_map import Target, WeightMap
from pagemill.utils.text import shown, shown_name

_SHOWN = 5
CPU = torch.device("cpu")


class LoadableModel(Protocol):
    """What a model offers to be loaded."""

    @property
    def weights(self) -> WeightMap:
        """Where each checkpoint tensor goes."""

    def loadable(self) -> Mapping[str, LoadableLayer]:
        """Checkpoint layer -> the layer here that takes its tensors."""

    def elsewhere(self, layer: str) -> bool:
        """Whether a checkpoint layer that is not loadable here is another rank's, or not needed."""

    def take_kv_scale(self, layer: str, which: str, scale: float) -> None:
        """What an attention layer's keys (`which` is k) or values (v) are divided by in a cache of 8-bit floats. Raises
        ModelError for a layer that has none."""

    def finish_loading(self) -> None:
        """Called once, after the last tensor."""


_KV_SCALE = re.compile(
    r"(?P<layer>.*\blayers\.\d+\.self_attn)"
    r"(?:(?:\.[a-z_]+)?\.(?P<which>kv|[kvq]|prob)_scale|\.(?P<output>[kv])_proj\.output_scale)"
)
"""Of keys (k), values (v) or both, for caches; and of what is not held in 8 bits here (q, prob)."""


class Selection:
    """Which tensors of a checkpoint go where in one model, and which of them have been met."""

    def __init__(self, model: LoadableModel) -> None:
        self._model = model
        self._layers = model.loadable()
        self._wanted = {
            Target(name, tensor.stored.kind, tensor.shard): tensor
            for name, layer in self._layers.items()
            for tensor in layer.checkpoint_tensors()
        }
        self._floats = FloatWeights(self._wanted)
        self._other_names = {
            Target(target.layer, kind, target.shard): target
            for target, tensor in self._wanted.items()
            for kind in tensor.stored.other_kinds
        }
        self._selected: dict[str, tuple[Target, LayerTensor]] = {}
        """Where a tensor goes, and what it is taken for."""
        self._seen: set[Target] = set()
        self._kv_scales: dict[str, tuple[str, str]] = {}
        """Checkpoint name -> (attention layer; k, v or kv), of scales for a cache of 8-bit floats."""
        self._unexpected: list[str] = []

    def __call__(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """The part of a tensor that is read; None for one that is not. Raises ModelError for a wrong shape."""
        scale = _KV_SCALE.fullmatch(name)
        if scale is not None:
            layer = scale["layer"].removeprefix(self._model.weights.strip_prefix)
            return self._kv_scale(name, layer, scale["which"] or scale["output"], shape)
        target = self._model.weights.target(name)
        if target is not None:
            target = self._other_names.get(target, target)
        if target is None or (target.layer not in self._layers and self._model.elsewhere(target.layer)):
            return None
        wanted = self._floats.meant(target, tuple(shape))
        if wanted is None:
            self._unexpected.append(name)
            return None
        if target in self._seen:
            raise ModelError(f"the checkpoint has tensor {shown_name(name)} twice, in two files or under two names")
        stored = wanted.stored
        if not stored.takes(tuple(shape)):
            wanted_shape = stored.shape if stored.max_length is None else f"(up to {stored.max_length},)"
            raise ModelError(f"tensor {shown_name(name)} has shape {shown(tuple(shape))}, expected {wanted_shape}")
        self._seen.add(target)
        self._selected[name] = target, wanted
        if (stored.unused and not stored.zeros) or wanted.part is None:
            return None
        return wanted.part if stored.max_length is None else whole(name, shape)

    def _kv_scale(self, name: str, layer: str, which: str, shape: tuple[int, ...]) -> Part | None:
        if self._model.elsewhere(layer) or not set(which) <= {"k", "v"}:
            return None
        if math.prod(shape) != 1:
            raise ModelError(
                f"tensor {shown_name(name)} has shape {shown(tuple(shape))}: one scale of a layer's KV cache is "
                "supported"
            )
        self._kv_scales[name] = layer, which
        return Part(0, 0, 1)

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """The checkpoint's name of every tensor that the model needs, this rank's or not, and what it holds."""
        for target, wanted in self._wanted.items():
            if not wanted.stored.unused:
                yield self._model.weights.source_name(target), wanted.stored

    def check(self, name: str, tensor: Tensor | QuantizedTensor) -> None:
        """See what was read of a selected tensor. Raises ModelError for a wrong type, or impossible values."""
        if isinstance(tensor, Tensor) and name not in self._kv_scales:
            target, wanted = self._selected[name]
            _check_values(name, self._floats.known(target, tensor.dtype, wanted), tensor)

    def load(self, name: str, tensor: Tensor | QuantizedTensor) -> None:
        """Hand over what was read of a selected tensor, in the checkpoint's or the model's type. Raises ModelError for
        another type, or impossible values."""
        if name in self._kv_scales:
            layer, letters = self._kv_scales[name]
            for which in letters:
                self._model.take_kv_scale(layer, which, _positive(name, tensor))
            return
        self.check(name, tensor)
        target, wanted = self._selected[name]
        if isinstance(tensor, Tensor) and wanted.stored.zeros:
            return
        try:
            self._layers[target.layer].load(target.kind, target.shard, tensor)
        except ModelError as error:
            raise ModelError(f"tensor {shown_name(name)}: {error}") from error

    def size(self) -> int:
        """Values in all that this rank loads."""
        return sum(_part_size(tensor) for tensor in self._wanted.values() if not tensor.stored.unused)

    def size_of(self, name: str) -> int:
        """Values in what was selected of a tensor."""
        return _part_size(self._selected[name][1]) if name in self._selected else 0

    def finish(self) -> None:
        """Raises ModelError for tensors that are missing, and those that nobody knows."""
        self.check_complete()
        self._model.finish_loading()

    def check_complete(self) -> None:
        """Raises ModelError for tensors that are missing, and those that nobody knows."""
        if self._unexpected:
            raise ModelError(
                f"the checkpoint has tensors that the architecture does not use: {_some(self._unexpected)}"
            )
        spared, doubled = self._floats.outcome(self._seen)
        if doubled:
            names = [self._model.weights.source_name(target) for target in doubled]
            raise ModelError(f"the checkpoint has weights both as floats and quantized: {_some(names)}")
        needed = {target for target, wanted in self._wanted.items() if not wanted.stored.unused}
        missing = sorted(self._model.weights.source_name(target) for target in needed - self._seen - spared)
        if missing:
            raise ModelError(f"the checkpoint lacks tensors of the architecture: {_some(missing)}")


Source = Callable[[Select], Iterable[tuple[str, Tensor | FileTensor | QuantizedTensor]]]
"""Reads what is selected: (checkpoint name, the selected part)."""


def load_weights(
    model: LoadableModel,
    source: Source,
    device: torch.device = CPU,
    *,
    uploads: Uploads | None = None,
    shows_progress: bool = False,
) -> None:
    """Hand this rank's part of every tensor to its layer, on `device`, by way of `uploads` to there, if there are any;
    nothing else is read. Raises ModelError that names missing and unexpected tensors, and those of a wrong shape or
    type."""
    selection = Selection(model)
    progress = LoadProgress(selection.size(), shown=shows_progress)
    try:
        tensors = source(selection)
        for name, tensor in _moved(tensors, device) if uploads is None else uploads.arriving(tensors):
            selection.load(name, tensor)
            progress.add(selection.size_of(name))
        selection.finish()
    finally:
        progress.close()


def _moved(
    tensors: Iterable[tuple[str, Tensor | FileTensor | QuantizedTensor]], device: torch.device
) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    for name, tensor in tensors:
        read = tensor.read() if isinstance(tensor, FileTensor) else tensor
        yield name, read.to(device) if isinstance(read, Tensor) else read


def _part_size(tensor: LayerTensor) -> int:
    """Values in what a rank reads of a tensor."""
    if tensor.part is None:
        return 0
    shape = tensor.stored.shape
    if not shape:
        return 1
    return math.prod(shape) // max(shape[tensor.part.dim], 1) * (tensor.part.stop - tensor.part.start)


def _positive(name: str, tensor: Tensor | QuantizedTensor) -> float:
    scale = float(tensor) if isinstance(tensor, Tensor) else math.nan
    if not 0 < scale < math.inf:
        raise ModelError(f"tensor {shown_name(name)} is {scale}: a scale is a finite number above 0")
    return scale


def _check_values(name: str, wanted: LayerTensor, tensor: Tensor) -> None:
    stored = wanted.stored
    if tensor.dtype not in stored.dtypes:
        allowed = " or ".join(str(dtype)[6:] for dtype in stored.dtypes)
        raise ModelError(f"tensor {shown_name(name)} is of type {str(tensor.dtype)[6:]}, expected {allowed}")
    if stored.zeros and bool(tensor.any()):
        raise ModelError(f"tensor {shown_name(name)} is not zero: the architecture has none")
    allowed_values = stored.values
    if allowed_values is not None and len(tensor):
        low = int(tensor.min())
        high = int(tensor.max())
        if low < allowed_values.start or high >= allowed_values.stop:
            raise ModelError(
                f"tensor {shown_name(name)} has values from {low} to {high}, not within {allowed_values.start} to "
                f"{allowed_values.stop - 1}"
            )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(shown_name, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
