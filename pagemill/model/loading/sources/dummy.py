"""Random weights without files, for measuring: small normal numbers, and any integers, the same for the same seed and
name, so that ranks which need different tensors agree about them. What there is to make, the model says."""

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pagemill.config.facts import ModelFacts
from pagemill.model.loading.load_place import ALONE, LoadPlace
from pagemill.model.loading.load_weights import Selection
from pagemill.model.loading.stored import StoredTensor

_SCALE = 0.02


def iterate(
    facts: ModelFacts, dtype: torch.dtype, seed: int, select: Selection, place: LoadPlace = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """(name, selected part) of every tensor that the model needs, made on the device. Devices of different kinds make
    different numbers. Raises ConfigError for any option."""
    place.check_options("dummy")
    device = place.device
    generator = torch.Generator(device)
    for name, stored in select.tensors():
        part = select(name, stored.shape)
        if part is None:
            continue
        if name.endswith("norm.weight"):
            yield name, part.of(torch.ones(stored.shape, dtype=dtype, device=device))
        else:
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor = _random(stored, dtype, generator)
            # A view would keep the whole tensor in memory.
            yield name, tensor if part.covers(stored.shape) else part.of(tensor).clone()


def _random(stored: StoredTensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Floats, in the model's type where the tensor may be of it; integers of any value that it may have."""
    kind = stored.dtypes[0]
    if isinstance(stored.usual, bytes):
        return torch.tensor(list(stored.usual), dtype=kind, device=generator.device)
    device = generator.device
    if kind.is_floating_point:
        made = dtype if dtype in stored.dtypes else torch.float32
        floats = torch.empty(stored.shape, dtype=made, device=device).normal_(0, _SCALE, generator=generator)
        return floats.to(dtype if dtype in stored.dtypes else kind)
    limits = torch.iinfo(kind)
    values = stored.usual or stored.values or range(limits.min, limits.max)
    return torch.randint(values.start, values.stop, stored.shape, dtype=kind, device=device, generator=generator)
