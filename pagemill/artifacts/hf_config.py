"""What a folder in Hugging Face format says: config.json, generation_config.json, which weights are there.
Knows nothing about how a model is computed; never runs or imports code from the folder (auto_map is ignored)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.generation_config import GenerationConfig, read_generation_config, token_ids
from pagemill.artifacts.json_file import read_json_object
from pagemill.artifacts.weight_index import INDEX, MEDUSA, SINGLE, names_of_weight_files
from pagemill.errors import ModelError

_DTYPES: Final = ("float32", "bfloat16", "float16")
_MISSING: Final = object()
_QUANTIZATION: Final = ("quantization_config", "compression_config")
"""What the settings are called, by newer files and by older ones of compressed-tensors."""
MODELOPT: Final = "hf_quant_config.json"
OLD_FILES: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ wrote their settings before config.json had them -> quant_method."""


@dataclass(frozen=True)
class HfFolder:
    """The facts of one folder."""

    architecture: str
    config: dict[str, Any]
    """config.json as it is."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation: GenerationConfig
    """What generation_config.json recommends."""


def read_folder(folder: Path) -> HfFolder:
    """Read config.json and generation_config.json. Raises ModelError when one is missing, damaged or incomplete."""
    config = with_quantization_file(folder, read_json_object(folder / "config.json"))
    generation = read_generation_config(folder)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f"{folder / 'config.json'} names no architecture")
    return HfFolder(
        architecture=architectures[0],
        config=config,
        dtype=_dtype(config),
        eos_token_ids=generation.eos_token_ids or token_ids(str(folder), config.get("eos_token_id")),
        generation=generation,
    )


def require_safetensors(folder: Path) -> None:
    """Raise ModelError unless the folder has model.safetensors or an index whose shards are all there."""
    if (folder / SINGLE).exists() or (folder / MEDUSA).exists():
        return
    if not (folder / INDEX).exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelError(f"{folder} has weights as pickles only (.bin, .pt), which are never loaded; "
                             "safetensors are needed")  # fmt: skip
        if any(folder.glob("model-rank-*.safetensors")):
            raise ModelError(f"{folder} has the weights of single ranks: use --load-format sharded_state")
        raise ModelError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    missing = [name for name in names_of_weight_files(folder) if not (folder / name).exists()]
    if missing:
        raise ModelError(f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))


def with_quantization_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json, and in it what a file of its own says of how the weights are quantized. Raises ModelError for a
    damaged one."""
    if any(config.get(key) for key in _QUANTIZATION):
        return config
    for name, method in OLD_FILES.items():
        if (folder / name).is_file():
            return config | {_QUANTIZATION[0]: {"quant_method": method} | read_json_object(folder / name)}
    if not (folder / MODELOPT).is_file():
        return config
    found = read_json_object(folder / MODELOPT).get("quantization")
    if not isinstance(found, dict):
        raise ModelError(f"{folder / MODELOPT} has no object `quantization`")
    return config | {_QUANTIZATION[0]: found | {"quant_method": "modelopt"}}


def quantization_config(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of how the weights are quantized, `quant_method` always in it; empty where it says nothing.
    Raises ModelError for something that is not an object with a name."""
    key = next((key for key in _QUANTIZATION if config.get(key)), None)
    if key is None:
        return {}
    found = config[key]
    method = found.get("quant_method") if isinstance(found, dict) else None
    if not isinstance(method, str):
        raise ModelError(f"{key}={str(found)[:80]!r} in config.json is not an object with a quant_method")
    return dict(found)


def laid_over(config: dict[str, Any], overrides: Mapping[str, object]) -> dict[str, Any]:
    """config.json with other values. Those that have the classic names of rotary settings count in a file that has only
    the newer `rope_parameters` too."""
    merged = config | dict(overrides)
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_parameters" in overrides:
        return merged
    per_kind = isinstance(parameters.get("full_attention"), dict)
    full = dict(parameters["full_attention"] if per_kind else parameters)
    scaling = overrides.get("rope_scaling", _MISSING)
    if scaling is None or isinstance(scaling, dict):
        theta = {"rope_theta": full["rope_theta"]} if "rope_theta" in full else {}
        full = theta | (scaling or {"rope_type": "default"})
    if "rope_theta" in overrides:
        full["rope_theta"] = overrides["rope_theta"]
    changed = parameters | {"full_attention": full} if per_kind else full
    local = parameters.get("sliding_attention")
    if isinstance(local, dict) and "rope_local_base_freq" in overrides:
        changed["sliding_attention"] = local | {"rope_theta": overrides["rope_local_base_freq"]}
    return merged | {"rope_parameters": changed}


def with_classic_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A copy in which rope_theta, rope_scaling and rope_local_base_freq are there if the file has only the newer
    `rope_parameters`, flat or one per layer type."""
    flat = dict(config)
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return flat
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention")
    if isinstance(full, dict):
        if "rope_theta" in full:
            flat.setdefault("rope_theta", full["rope_theta"])
        scaling = {key: value for key, value in full.items() if key != "rope_theta"}
        plain = scaling.get("rope_type", "default") == "default"
        flat.setdefault("rope_scaling", None if plain else scaling)
    if isinstance(local, dict) and "rope_theta" in local:
        flat.setdefault("rope_local_base_freq", local["rope_theta"])
    return flat


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "bfloat16"
