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
        "int4": f"{_METHODS}.int4:make",
        "int4_g64": f"{_METHODS}.int4:make_64",
        "int4_g128": f"{_METHODS}.int4:make_128",
        "fp8": f"{_METHODS}.fp8:make",
        "fp8_per_block": f"{_METHODS}.fp8_blocks:make",
    },
)
"""What a checkpoint of floats, or a GGUF file, is made into at load."""

QUANTIZED_CHECKPOINTS: Registry[Any] = Registry(
    "quantization method",
    {
        "auto-round": f"{_METHODS}.auto_round:make",
        "awq": f"{_METHODS}.awq:make",
        "bitsandbytes": f"{_METHODS}.bitsandbytes:make",
        "compressed-tensors": f"{_METHODS}.compressed_tensors:make",
        "fp8": f"{_METHODS}.fp8_checkpoint:make",
        "gptq": f"{_METHODS}.gptq:make",
        "modelopt": f"{_METHODS}.modelopt:make",
        "mxfp4": f"{_METHODS}.mxfp4:make",
        "quark": f"{_METHODS}.quark:make",
        "torchao": f"{_METHODS}.torchao:make",
    },
)
"""`quant_method` in the quantization_config of a config.json: what a checkpoint is stored in."""


SAME_AS = {
    "auto_awq": ("awq",),
    "auto_gptq": ("gptq",),
    "awq_marlin": ("awq",),
    "fp8_per_channel": ("fp8",),
    "fp8_per_tensor": ("fp8",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "gptq_marlin": ("gptq",),
    "inc": ("auto-round",),
    "modelopt_fp4": ("modelopt",),
    "moe_wna16": ("gptq", "awq"),
}
"""What vLLM calls some of these, mostly by the kernels that it has for them -> the names here, of which a checkpoint
has one. One scale for all of a weight becomes one for each output, which is more exact."""


def check_quantization(name: str) -> None:
    """Raise ConfigError that lists the known names, if `--quantization` can be none of this name."""
    known = sorted({*QUANTIZATION, *QUANTIZED_CHECKPOINTS})
    if name not in SAME_AS and name not in known:
        raise ConfigError(f"quantization={name!r} is not one of {', '.join(known)}")
