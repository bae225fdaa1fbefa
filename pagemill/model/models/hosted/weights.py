"""How the parameters of a model of transformers take the tensors of a checkpoint, and how the buffers that are in none
are made."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.loading.part import whole
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.models.hosted.linear import HostedLinear
from pagemill.model.models.hosted.names import HostedNames
from pagemill.utils.text import shown_name


class Holder:
    """Puts tensors into the modules of a model."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model
        self._dtype = dtype
        always = list(model._keep_in_fp32_modules_strict or ())
        narrow = list(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else []
        self._wide = [re.compile(rf"(^|\.){re.escape(word)}($|\.)") for word in always + narrow]

    def put(self, name: str, tensor: Tensor) -> None:
        """A parameter, or a buffer that is in checkpoints. Raises ModelError for a wrong shape."""
        path, _, kind = name.rpartition(".")
        module = self.model.get_submodule(path)
        if isinstance(module, HostedLinear):
            for wanted in module.inner.checkpoint_tensors():
                if wanted.stored.kind == kind:
                    _check_shape(name, tensor, wanted.stored.shape)
                    module.inner.load(kind, 0, tensor)
                    return
            raise ModelError(f"tensor {shown_name(name)} has no place in its layer")
        old = getattr(module, kind)
        _check_shape(name, tensor, tuple(old.shape))
        if kind in module._parameters:
            wide = any(pattern.search(name) for pattern in self._wide)
            new = nn.Parameter(tensor.to(torch.float32 if wide else self._dtype), requires_grad=False)
            module._parameters[kind] = new
        else:
            new = tensor.to(old.dtype)  # type: ignore[assignment]
            module._buffers[kind] = new
        new._is_hf_initialized = True  # type: ignore[attr-defined]


class Parameters:
    """Those of one module that are in a checkpoint as they are: a layer that takes tensors."""

    def __init__(self, name: str, holder: Holder) -> None:
        self._name = name
        self._holder = holder
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, kind: str, shape: tuple[int, ...]) -> None:
        """One more."""
        self._shapes[kind] = shape

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """All of them, on every rank."""
        for kind, shape in self._shapes.items():
            yield LayerTensor.whole(kind, shape)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take one."""
        if not isinstance(tensor, Tensor):
            raise ModelError("blocks of a quantized tensor have no place in a model of transformers")
        self._holder.put(f"{self._name}.{kind}" if self._name else kind, tensor)


class Converted:
    """Parameters that are made of other tensors: a layer that takes those, and converts them when the last is here."""

    def __init__(self, key: str, names: HostedNames, holder: Holder) -> None:
        self._key = key
        self._names = names
        self._holder = holder
        self._arrived: dict[int, Tensor] = {}

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """What the conversion starts from."""
        for index, source in enumerate(self._names.converted[self._key]):
            yield LayerTensor(StoredTensor("part", source.shape), index, whole("part", source.shape))

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take one of them."""
        if not isinstance(tensor, Tensor):
            raise ModelError("blocks of a quantized tensor cannot be converted")
        self._arrived[shard] = tensor
        if len(self._arrived) < len(self._names.converted[self._key]):
            return
        tensors = [self._arrived.pop(index) for index in sorted(self._arrived)]
        for name, made in self._names.convert(self._key, tensors, self._holder.model).items():
            self._holder.put(name, made)


def make_buffers(model: Any, aliases: Mapping[str, str], device: torch.device) -> None:
    """Tie what is tied, and make the buffers that are in no checkpoint, as transformers does after loading. Raises
    ModelError for a parameter that has no weights."""
    for name, other in aliases.items():
        path, _, kind = name.rpartition(".")
        from_path, _, from_kind = other.rpartition(".")
        tied = model.get_submodule(from_path)._parameters[from_kind]
        model.get_submodule(path)._parameters[kind] = tied
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(f"nothing in a checkpoint gives {left[0]} its values")
    with torch.device(device):
        model.initialize_weights()


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"tensor {shown_name(name)} has shape {tuple(tensor.shape)} once it is converted, expected {shape}"
        )
