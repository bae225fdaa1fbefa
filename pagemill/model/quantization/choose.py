"""`choose`: the method of a `--quantization`. Knows methods by name only."""

import torch

from pagemill.model.quantization import integers
from pagemill.model.quantization.fp8 import make_fp8
from pagemill.model.quantization.interface import QuantMethod


def choose(wanted: str | None, dtype: torch.dtype, device: str) -> QuantMethod:
    """None: as the file says. Raises ConfigError where it cannot run."""
    return make_fp8(device) if wanted == "fp8" else integers.choose(wanted, dtype, device)
