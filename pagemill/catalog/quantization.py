"""Quantization: name -> function (`QuantRequest`) -> `Quantization`, for checkpoints and for `--quantization`."""

from typing import Any

from pagemill.catalog.registry import Registry
from pagemill.errors import ConfigError

_METHODS = "pagemill.model.quantization"

QUANTIZATION: Registry[Any] = Registry(
    "quantization",
    {
        "none": f"{_METHODS}.unquantized:make",
        "int8": f"{_METHODS}.integers:make",
        "fp8": f"{_METHODS}.fp8:make",
    },
)
"""What a checkpoint of floats, or a GGUF file, is made into at load."""

QUANTIZED_CHECKPOINTS: Registry[Any] = Registry(
    "quantization method",
    {"compressed-tensors": f"{_METHODS}.compressed_tensors:make"},
)
"""`quant_method` in the quantization_config of a config.json: what a checkpoint is stored in."""


def check_quantization(name: str) -> None:
    """Raise ConfigError that lists the known names, if `--quantization` can be none of this name."""
    known = sorted({*QUANTIZATION, *QUANTIZED_CHECKPOINTS})
    if name not in known:
        raise ConfigError(f"quantization={name!r} is not one of {', '.join(known)}")
