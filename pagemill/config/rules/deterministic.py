"""Rules of `deterministic`: what it covers. Everything else is refused by name, instead of being less than promised."""

from typing import Final

from pagemill.config.compilation import NO_COMPILER
from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import DeviceFacts
from pagemill.errors import ConfigError

_DTYPES: Final = {"cuda": ("bfloat16", "float16"), "cpu": ("bfloat16",)}
_COMPUTE: Final = (9, 0)
"""Compute capability from which on the kernels run."""
_MOST_RANKS: Final = 2
"""Of a sum: a collective operation may add more of them in another order for a tensor of another size."""


def check_deterministic(config: EngineConfig, device: DeviceFacts) -> None:
    """Raises ConfigError that names the settings, or what the model has, that are not covered."""
    if not config.model.deterministic:
        return
    reasons = [*_of_model(config, device), *_of_engine(config), *_of_device(config, device)]
    if reasons:
        raise ConfigError(
            f"deterministic=True is not possible here: {'; '.join(reasons)}. Change that, or leave out --deterministic"
        )


def _of_model(config: EngineConfig, device: DeviceFacts) -> list[str]:
    model = config.model
    facts = config.facts
    dtypes = _DTYPES.get(device.kind, ())
    found = {
        f"dtype={model.dtype} on a {device.kind} (allowed: {', '.join(dtypes) or 'none'})": model.dtype not in dtypes,
        "runner=pooling": model.pools,
        f"{facts.name} is computed by {facts.implementation}, whose kernels are its own": (
            facts.implementation != "native"
        ),
        f"quantization={model.quantization}": model.quantization not in (None, "none"),
        "a quantized checkpoint": facts.quant_method is not None or facts.weights_format == "gguf",
        "speculation with a model of its own": config.speculation.speculative_config.method == "draft_model",
    }
    return [reason for reason, applies in found.items() if applies]


def _of_engine(config: EngineConfig) -> list[str]:
    parallel = config.parallel
    found = {
        f"tensor_parallel_size={parallel.tensor_parallel_size} (allowed: 1, and 2, whose sums have one order)": (
            parallel.tensor_parallel_size > _MOST_RANKS
        ),
        f"pipeline_parallel_size={parallel.pipeline_parallel_size} (allowed: 1)": parallel.pipeline_parallel_size > 1,
        "disable_cascade_attn=False": not config.model.disable_cascade_attn,
        "torch.compile (compilation_config.mode, or optimization_level=3)": (
            config.graphs.compilation_config.mode != NO_COMPILER
        ),
    }
    return [reason for reason, applies in found.items() if applies]


def _of_device(config: EngineConfig, device: DeviceFacts) -> list[str]:
    kv_dtype = config.cache.kv_cache_dtype
    on_gpu = device.kind == "cuda"
    found = {
        f"kv_cache_dtype={kv_dtype}": kv_dtype not in ("auto", config.model.dtype),
        "a GPU of compute capability below 9.0": on_gpu and (device.capability or (0, 0)) < _COMPUTE,
        "this CPU has no native kernels of ours (AVX2), or PAGEMILL_NATIVE_KERNELS is 0": (
            not on_gpu and device.quantized_dtype is None
        ),
    }
    return [reason for reason, applies in found.items() if applies]
