"""What a folder in Hugging Face format says: config.json, generation_config.json, which weights are there.
Knows nothing about how a model is computed; never runs or imports code from the folder (auto_map is ignored)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.config_fields import shown
from pagemill.artifacts.json_file import read_json_object, read_optional_json_object
from pagemill.artifacts.weight_index import INDEX, SINGLE, names_of_weight_files
from pagemill.errors import ModelError

_DTYPES: Final = ("float32", "bfloat16", "float16")
_DEFAULT_THETA: Final = 10_000.0
_QUANTIZATION: Final = ("quantization_config", "compression_config")
"""What the settings are called, by newer files and by older ones of compressed-tensors."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_UNUSED: Final[dict[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "length_penalty": (1,),
    "max_new_tokens": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "typical_p": (1,),
}
"""What a generation_config.json may recommend that has no effect here -> values, besides null, that ask for nothing."""


@dataclass(frozen=True)
class HfFolder:
    """The facts of one folder."""

    architecture: str
    config: dict[str, Any]
    """config.json as it is."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float | int]
    unused_generation_defaults: dict[str, Any]


def read_folder(folder: Path) -> HfFolder:
    """Read config.json and generation_config.json. Raises ModelError when one is missing, damaged or incomplete."""
    config = read_json_object(folder / "config.json")
    generation = read_optional_json_object(folder / "generation_config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f"{folder / 'config.json'} names no architecture")
    eos = _token_ids(folder, generation.get("eos_token_id"))
    return HfFolder(
        architecture=architectures[0],
        config=config,
        dtype=_dtype(config),
        eos_token_ids=eos or _token_ids(folder, config.get("eos_token_id")),
        generation_defaults=_sampling(folder, generation),
        unused_generation_defaults={
            name: generation[name]
            for name, neutral in _UNUSED.items()
            if generation.get(name) is not None and generation[name] not in neutral
        },
    )


def require_safetensors(folder: Path) -> None:
    """Raise ModelError unless the folder has model.safetensors or an index whose shards are all there."""
    if (folder / SINGLE).exists():
        return
    if not (folder / INDEX).exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelError(f"{folder} has weights as pickles only (.bin, .pt), which are never loaded; "
                             "safetensors are needed")  # fmt: skip
        raise ModelError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    missing = [name for name in names_of_weight_files(folder) if not (folder / name).exists()]
    if missing:
        raise ModelError(f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))


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


def with_classic_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A copy in which rope_theta, rope_scaling and rope_local_base_freq are there even if the file has only the newer
    `rope_parameters`, flat or one per layer type."""
    flat, parameters = dict(config), config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return flat
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention")
    if isinstance(full, dict):
        flat.setdefault("rope_theta", full.get("rope_theta", _DEFAULT_THETA))
        scaling = {key: value for key, value in full.items() if key != "rope_theta"}
        plain = scaling.get("rope_type", "default") == "default"
        flat.setdefault("rope_scaling", None if plain else scaling)
    if isinstance(local, dict) and "rope_theta" in local:
        flat.setdefault("rope_local_base_freq", local["rope_theta"])
    return flat


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "bfloat16"


def _token_ids(folder: Path, value: Any) -> tuple[int, ...]:
    """Hugging Face writes one id, a list, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ModelError(f"{folder}: eos_token_id={shown(value)} is not a token id or a list of them")
    return tuple(ids)


def _sampling(folder: Path, generation: dict[str, Any]) -> dict[str, float | int]:
    found = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{folder / 'generation_config.json'}: {name}={shown(value)} is not a number")
    return found
