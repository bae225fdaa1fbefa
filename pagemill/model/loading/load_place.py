"""`LoadPlace`: where weights are loaded to, and what was asked of their source. Knows no format."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from pagemill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadPlace:
    """One rank of those that hold a model together."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    """Over tensor-parallel ranks and pipeline stages."""
    world_size: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    """--model-loader-extra-config."""

    leaves_in_files: bool = False
    """Whether a source may yield `FileTensor`s: they are read when they are sent to the device."""

    def check_options(self, load_format: str, known: Collection[str] = ()) -> None:
        """Raise ConfigError for an option that a format has not."""
        for name in self.options:
            if name not in known:
                allowed = f"known: {', '.join(sorted(known))}" if known else "it has none"
                raise ConfigError(f"model_loader_extra_config has {name!r}, no option of {load_format}; {allowed}")


ALONE = LoadPlace()
"""The only rank, on the CPU."""
