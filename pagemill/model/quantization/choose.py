"""`choose`: the quantization of a model, from what its checkpoint says and `--quantization`. Knows methods by name."""

from collections.abc import Mapping
from typing import Any

import torch

from pagemill.catalog.quantization import QUANTIZATION, QUANTIZED_CHECKPOINTS, SAME_AS
from pagemill.errors import ConfigError
from pagemill.model.quantization import integers
from pagemill.model.quantization.interface import Quantization, QuantRequest, Uniform
from pagemill.model.quantization.invariant import InvariantFloats

NONE = "none"
INT8 = "int8"


def choose(
    wanted: str | None, config: Mapping[str, Any], dtype: torch.dtype, device: str, deterministic: bool = False
) -> Quantization:
    """`config` is the checkpoint's quantization_config, empty where it has none. `wanted` None: as in the checkpoint.
    `deterministic`: a row of a product has the same bits in any batch, as native kernels of CPUs compute anyway. Raises
    ConfigError where a method cannot run, or is not the checkpoint's, ModelError for a damaged `config`."""
    if deterministic and device.startswith("cuda"):
        return Uniform(InvariantFloats())
    stored = config.get("quant_method")
    if wanted in SAME_AS:
        names = SAME_AS[wanted]
        wanted = stored if stored in names else names[0]
    rest_in_8_bits = wanted == INT8
    request = QuantRequest(dtype, device, config, dequantize=wanted == NONE, quantize_floats=rest_in_8_bits)
    if stored is not None:
        if rest_in_8_bits:
            integers.require_for_floats(request)
        elif wanted not in (None, NONE, stored):
            raise ConfigError(
                f"quantization={wanted} does not fit a checkpoint whose quant_method is {stored}; use "
                f"--quantization {NONE} to dequantize it, {INT8} to make 8-bit integers of what it stores as floats, "
                "or leave out --quantization"
            )
        read: Quantization = QUANTIZED_CHECKPOINTS.resolve(stored)(request)
        return read
    if wanted in QUANTIZED_CHECKPOINTS and wanted not in QUANTIZATION:
        raise ConfigError(f"quantization={wanted}: the checkpoint is not quantized; leave out --quantization")
    if wanted is None:
        return Uniform(integers.as_stored(request))
    made: Quantization = QUANTIZATION.resolve(wanted)(request)
    return made
